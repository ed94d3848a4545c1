"""Small federations of unlike networks for the methods that talk about public inputs, and what all
of them must stand."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nestling
from nestling import EngineConfig, Evaluation, Experiment, FleetConfig, SplitConfig, Tier, Train
from nestling.methods.public import drawn
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.training.client import Client, Errand, client_of
from tests.methods.mixed import SPLIT, unlike
from tests.small import small

TIERS = (
    Tier(name="mlp", model="mlp", model_options={"hidden": [16]}, count=2),
    Tier(name="narrow", ratio=0.5, count=1),
    Tier(name="cnn", ratio=1.0, count=2),
)
CLASSES = 10


def few(method: Any, **changes: Any) -> Experiment:
    """Five clients with three networks, one of them a part of another; all take part, 100 public
    rows."""
    settings: dict[str, Any] = {
        "fleet": FleetConfig(tiers=TIERS),
        "participants": 5,
        "split": SplitConfig(kind="dirichlet", alpha=1.0, size=40, public=0.01),
    }
    return small(method, **{**settings, **changes})


FEW_ROWS: dict[str, Any] = {
    "rounds": 4,
    "split": replace(SPLIT, alpha=1.0, size=40, public=0.02),
    "train": Train(epochs=5, batch=10, lr=0.03),
    "evaluate": Evaluation(every=4, clients=9),
}
"""Three unlike networks, 40 rows a client and enough epochs to have learned them: the case that
FedMD is made for."""


def reached(method: Any) -> list[float]:
    """Personal accuracies of three seeds with few rows a client."""
    return unlike(method, **FEW_ROWS)


@lru_cache(maxsize=1)
def reached_alone() -> list[float]:
    """The same clients when nothing travels."""
    return reached("local")


def federation_of(method: Any, **changes: Any) -> Federation:
    return assemble(few(method, **changes))[1]


def client_at(federation: Federation, number: int, round: int = 1) -> tuple[Client, Any]:
    """A client with the message of a round, before it has done anything."""
    world, method = federation.world, federation.method
    device = world.device(number)
    piece = method.piece(device, round)
    sent = method.send(device, piece, round)
    errand = Errand(
        number, round, piece.reference.name, piece.spec(), sent, world.store.get(number)
    )
    return client_of(errand, site_of(federation)), sent


def inputs_of(federation: Federation, number: int) -> Tensor:
    """The public inputs that a number of a message stands for."""
    public, method = federation.world.public, federation.method
    assert public is not None
    return public[drawn(number, method.align, len(public), public.device)]


def goes_on_where_it_stood(method: Any, folder: Path) -> None:
    """Stopped after two rounds and gone on to four, against four in one go; three of five clients a
    round, of which some vanish."""
    changes: dict[str, Any] = {
        "participants": 3,
        "fleet": FleetConfig(tiers=tuple(replace(t, dropout=0.2) for t in TIERS)),
    }
    nestling.run(few(method, rounds=2, **changes), out=folder / "parts")
    parts = nestling.resume(folder / "parts", overrides=("rounds=4",)).federation
    whole = nestling.run(few(method, rounds=4, **changes), out=folder / "whole").federation
    assert parts.totals == whole.totals
    same_models(parts, whole, 0.0)
    for name, state in whole.method.state().items():
        ours = parts.method.state()[name]
        assert ours.keys() == state.keys() and all(
            torch.equal(ours[key], t) for key, t in state.items()
        )


def same_in_a_cohort(method: Any) -> None:
    """Clients trained as a stack give what they give one by one."""
    one, other = (
        nestling.run(few(method, engine=EngineConfig(kind, workers=1))).federation
        for kind in ("inline", "cohort")
    )
    same_models(one, other, 1e-4)


def same_models(one: Federation, other: Federation, tolerance: float) -> None:
    for client in range(one.world.fleet.size):
        a, b = (f.method.model_for(f.world.device(client)).state for f in (one, other))
        apart = (
            sum(float((a[name].double() - b[name].double()).square().sum()) for name in b) ** 0.5
        )
        assert apart <= tolerance * sum(float(t.double().square().sum()) for t in b.values()) ** 0.5
