"""A federation in plain numbers: what each tier trains and why it fits, and how the data is
divided."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nestling.devices.fit import need
from nestling.experiment import Experiment
from nestling.models import MODELS
from nestling.runs.federation import Federation
from nestling.views.cutting import cutting
from nestling.world import Plan, World, ratio_cost

PICTURED_CLIENTS = 100


def describe(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """The content of `federation.json`."""
    world = federation.world
    return {
        "method": {"name": experiment.method.name, "title": federation.method.as_set.title},
        "model": {
            "name": experiment.model.name,
            "params": ratio_cost(world.main, 1.0).params,
            "norm": norm_of(experiment),
            "shape": list(world.main.shape),
            "outputs": world.classes,
            "cut": asdict(cutting(world.main)),
        },
        "task": told_task(world),
        "data": dict(federation.reading),
        "tiers": [_tier(experiment, federation, plan) for plan in world.plans.values()],
        "split": _split(experiment, world),
    }


def told_task(world: World) -> dict[str, Any]:
    """What is learned, the word for what ranks models, and what outputs are called."""
    task = world.task
    return {"name": task.name, "score": task.score, "labels": list(world.class_names)}


def norm_of(experiment: Experiment) -> str | None:
    """The normalisation of the main network (None: of a network of the user's own, which may have
    any)."""
    known = MODELS.get(experiment.model.name)
    return experiment.model.options.get("norm") or (
        known.norm if known and experiment.own_model is None else None
    )


def _tier(experiment: Experiment, federation: Federation, plan: Plan) -> dict[str, Any]:
    """A tier: what its devices are, and what the method has them train when nothing else uses their
    memory."""
    world, profile = federation.world, plan.profile
    piece = federation.method.piece(world.device(world.fleet.member(plan.tier.name, 0)), 0)
    planned, cost, known = piece is plan.piece, world.cost(piece), bool(plan.tier.device)
    found = plan.fit if planned else None
    return {
        "name": plan.tier.name,
        "device": plan.tier.device or None,
        "board": plan.tier.board or None,
        "title": profile.title if known else plan.tier.name,
        "kind": profile.kind if known else None,
        "core": profile.core if known else None,
        "count": world.fleet.count_of(plan.tier),
        "model": plan.tier.model or experiment.model.name,
        "ratio": plan.ratio if planned else None,
        "params": cost.params,
        "zeros": federation.method.zeros(piece),
        "macs": cost.macs,
        "need": asdict(need(profile, cost, plan.budget)) if plan.fit else None,
        "limits": dict(plan.fit.limits) if plan.fit else None,
        "binding": found.binding if found else None,
        "reasons": list(found.reasons) if found else [],
        "sources": {name: figure.source for name, figure in profile.figures().items()}
        if known
        else {},
    }


def _split(experiment: Experiment, world: World) -> dict[str, Any]:
    split, shown = world.split, min(len(world.fleet), PICTURED_CLIENTS)
    clients = [
        {"id": c, "tier": world.fleet.tier_of(c).name, "counts": split.counts(c).tolist()}
        for c in range(shown)
    ]
    return {
        "kind": experiment.split.kind,
        "alpha": experiment.split.alpha,
        "kinds": list(world.kind_names),
        "clients": clients,
        "clients_total": len(world.fleet),
        "public": 0 if world.public is None else len(world.public),
    }
