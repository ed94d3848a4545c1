"""Every method on the GPU gives what it gives in this process on the CPU, up to rounding, and the
same bits every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nestling
from nestling import EngineConfig, FleetConfig, SplitConfig, Tier, Train
from nestling.methods import METHODS
from tests.small import small

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3
"""How far states may be apart after three rounds, as a share of their norm: rounding, which
training amplifies."""

LOOSE = {
    "fedin": 1e-2,
    "feddf": 5e-2,
    "shared-distill": 5e-2,
    "fedftg": 1e-2,
    "fedet": 1e-2,
    "fedzkt": 5e-2,
    "scaffold": 1e-2,
}
"""Methods whose server trains for many steps in a round, against a generator even, or that divide
by small numbers (FedIN), which amplifies rounding further; and SCAFFOLD, whose state is gradients
and not weights: where rounding turns one maximum of a pool over, its states are 3e-4 to 3e-3 apart
and else 6e-7."""

TIERS = tuple(
    Tier(name=f"ratio-{ratio}", ratio=ratio, count=count)
    for ratio, count in ((0.25, 24), (0.5, 18), (1.0, 18))
)
UNEVEN: dict[str, Any] = {
    "fleet": FleetConfig(tiers=TIERS),
    "participants": 8,
    "split": SplitConfig(kind="quantity", alpha=2.0, min_size=3),
    "train": Train(epochs=1, batch=16, lr=0.01, momentum=0.5),
    "rounds": 3,
}


def played(method: str, device: str, **changes: Any) -> nestling.Result:
    engine = EngineConfig("inline") if device == "cpu" else EngineConfig("cohort", device="cuda")
    return nestling.run(small(method, **{**UNEVEN, **changes}, engine=engine))


def states(result: nestling.Result) -> dict[str, torch.Tensor]:
    method, store = result.federation.method, result.federation.world.store
    kept = {f"client {c}/{n}": t for c in store.clients() for n, t in store.get(c).items()}
    return {
        **{f"{kind}/{n}": t for kind, part in method.state().items() for n, t in part.items()},
        **kept,
    }


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far two states are apart, as a share of their norm."""
    assert one.keys() == other.keys()
    flat = [
        torch.cat([s[n].double().cpu().reshape(-1) for n in sorted(one)] or [torch.zeros(1)])
        for s in (one, other)
    ]
    return float((flat[0] - flat[1]).norm() / flat[0].norm().clamp(min=1e-12))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_gives_the_same_on_the_gpu(method: str, record_property: Any) -> None:
    gpu = played(method, "cuda")
    assert gpu.summary["engine"]["name"] == "cohort" and gpu.summary["engine"]["device"].startswith(
        "cuda"
    )
    assert not [note for note in gpu.federation.engine.notes if "NOT RECORDED" in note]
    distance = apart(states(played(method, "cpu")), states(gpu))
    record_property("apart", distance)
    assert distance <= LOOSE.get(method, TOLERANCE)
    again = states(played(method, "cuda"))
    assert not [
        name for name, tensor in states(gpu).items() if not torch.equal(tensor, again[name])
    ], "other bits the second time"
