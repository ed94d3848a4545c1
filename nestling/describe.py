"""A federation in plain numbers: what each tier trains and why it fits, and how the data is divided."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nestling.experiment import Experiment
from nestling.rounds import Federation
from nestling.world import Plan, World, ratio_cost

PICTURED_CLIENTS = 100


def describe(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """The content of `federation.json`."""
    world = federation.world
    return {
        "model": {
            "name": experiment.model.name,
            "params": ratio_cost(world.main, 1.0).params,
            "norm": experiment.model.options.get("norm"),
            "shape": list(world.main.shape),
            "classes": world.classes,
        },
        "tiers": [_tier(experiment, world, plan) for plan in world.plans.values()],
        "split": _split(experiment, world),
    }


def _tier(experiment: Experiment, world: World, plan: Plan) -> dict[str, Any]:
    profile, found = plan.profile, plan.fit
    known = bool(plan.tier.device)
    return {
        "name": plan.tier.name,
        "device": plan.tier.device or None,
        "title": profile.title if known else plan.tier.name,
        "kind": profile.kind if known else None,
        "core": profile.core if known else None,
        "count": world.fleet.count_of(plan.tier),
        "model": plan.tier.model or experiment.model.name,
        "ratio": plan.ratio,
        "params": plan.cost.params,
        "macs": plan.cost.macs,
        "need": asdict(found.need) if found and found.need else None,
        "limits": dict(found.limits) if found else None,
        "binding": found.binding if found else None,
        "reasons": list(found.reasons) if found else [],
        "sources": {name: figure.source for name, figure in profile.figures().items()} if known else {},
    }


def _split(experiment: Experiment, world: World) -> dict[str, Any]:
    split, shown = world.split, min(len(world.fleet), PICTURED_CLIENTS)
    clients = [{"id": c, "tier": world.fleet.tier_of(c).name, "counts": split.counts(c).tolist()} for c in range(shown)]
    return {
        "kind": experiment.split.kind,
        "alpha": experiment.split.alpha,
        "class_names": list(world.class_names),
        "clients": clients,
        "clients_total": len(world.fleet),
        "public": 0 if world.public is None else len(world.public),
    }
