"""Testing models: global accuracy on the common test set, personal accuracy on each client's own mix of classes.

The two are never mixed. A client's personal accuracy is that of the model it would use, with every class of the test set weighted as
in the client's own data; with `split.holdout` it is measured on the client's own held-out rows instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestling.methods import Method
from nestling.models.norm import calibrate
from nestling.world import Device, Model, World


@dataclass
class Bench:
    """The test data, the clients whose personal accuracy is measured, and the training rows that calibrate static batch norms."""

    x_test: Tensor
    y_test: Tensor
    x: Tensor
    y: Tensor
    batch: int
    calibration: Tensor
    panel: list[int]


def panel(world: World, clients: int) -> list[int]:
    """At most that many clients, spread over the tiers, at least one of each."""
    fleet = world.fleet
    share = max(1, clients // len(world.plans))
    return sorted(fleet.member(name, k) for name in world.plans for k in range(min(share, fleet.count_of(name))))


def evaluate(method: Method, world: World, bench: Bench) -> dict[str, Any]:
    """Accuracies now: global, personal, and both by tier."""
    tested: dict[Any, tuple[Model, Tensor]] = {}
    rows = [_test_client(method, world, bench, world.device(client), tested) for client in bench.panel]
    whole = method.global_model()
    by_tier = {}
    for tier in world.plans:
        own = [r for r in rows if r["tier"] == tier]
        by_tier[tier] = {key: _mean(r[key] for r in own) for key in ("global_accuracy", "personal_accuracy")}
    return {
        "global_accuracy": _accuracy(_known_hits(whole, tested, world, bench), bench.y_test)
        if whole
        else _mean(r["global_accuracy"] for r in rows),
        "personal_accuracy": _mean(r["personal_accuracy"] for r in rows),
        "by_tier": by_tier,
    }


def _known_hits(model: Model, tested: dict[Any, tuple[Model, Tensor]], world: World, bench: Bench) -> Tensor:
    """The model's hits, those of a client's model where that is the very same."""
    known = tested.get((model.reference.name, model.view.key()))
    if known is not None and all(
        torch.equal(known[0].state[name], t) for name, t in model.state.items() if name in known[0].state
    ):
        return known[1]
    return _hits(model, world, bench)


def _test_client(
    method: Method, world: World, bench: Bench, device: Device, tested: dict[Any, tuple[Model, Tensor]]
) -> dict[str, Any]:
    key = device.id if method.info.personal else (device.piece.reference.name, device.piece.view.key())
    model = None
    if key not in tested:
        model = method.model_for(device)
        tested[key] = (model, _hits(model, world, bench))
    hits = tested[key][1]
    held_out = world.split.holdout(device.id)
    if len(held_out):
        module = _ready(model or method.model_for(device), world, bench)
        index = torch.from_numpy(np.asarray(held_out)).to(bench.x.device)
        personal = float((_predict(module, bench.x[index], bench.batch) == bench.y[index]).float().mean())
    else:
        personal = _personal(hits, bench.y_test, world.split.counts(device.id))
    return {"tier": device.tier, "global_accuracy": _accuracy(hits, bench.y_test), "personal_accuracy": personal}


def _hits(model: Model, world: World, bench: Bench) -> Tensor:
    return _predict(_ready(model, world, bench), bench.x_test, bench.batch) == bench.y_test


def _ready(model: Model, world: World, bench: Bench) -> nn.Module:
    module = model.reference.network(model.view, model.state)
    if any(getattr(layer, "kind", "") == "sbn" for layer in module.modules()):
        module = calibrate(module, (bench.x[rows] for rows in bench.calibration.split(bench.batch)))
    return module.eval()


@torch.no_grad()
def _predict(module: nn.Module, x: Tensor, batch: int) -> Tensor:
    return torch.cat([module(part).argmax(-1) for part in x.split(batch)])


def _accuracy(hits: Tensor, y: Tensor) -> float:
    return float(hits.float().mean())


def _personal(hits: Tensor, y: Tensor, counts: np.ndarray) -> float:
    """Accuracy by class, weighted by the client's own classes; classes that the test set lacks are left out."""
    tested = torch.bincount(y, minlength=len(counts)).cpu().numpy()
    right = torch.bincount(y[hits], minlength=len(counts)).cpu().numpy()
    weight = np.where(tested > 0, counts, 0).astype(np.float64)
    if weight.sum() == 0:
        return float(hits.float().mean())
    return float((weight / weight.sum() * right / np.maximum(tested, 1)).sum())


def _mean(values: Iterator[float] | Any) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None
