"""The floor of methods whose clients keep their networks is training alone: with its terms off a
method ends there bit for bit, and what its defaults are is part of what its page claims."""

from __future__ import annotations

import pytest
import torch

import nestling
from nestling import FleetConfig, Tier
from nestling.methods import Method
from nestling.methods.baselines.local import Local
from nestling.methods.distill.draftfed import DraftFed
from nestling.methods.distill.fedhkd import FedHKD
from nestling.methods.personal import own_weights
from nestling.methods.representation.fedcma import FedCMA
from nestling.methods.representation.fedproto import FedProto
from nestling.methods.sparse.lotteryfl import LotteryFL
from nestling.methods.sparse.prunefl import PruneFL
from tests.small import small

OFF = {
    "FedProto": lambda: FedProto(lam=0.0, predict="head"),
    "FedHKD": lambda: FedHKD(lam=0.0, gamma=0.0),
    "Fed-CMA": lambda: FedCMA(lam=0.0, lam_c=0.0),
}


@pytest.mark.parametrize("hidden", [16, 24])
@pytest.mark.parametrize("name", OFF)
def test_without_its_terms_it_is_training_alone_on_the_same_networks(
    name: str, hidden: int
) -> None:
    """Whether networks agree in the number of their features or are pooled to it."""
    deep = Tier(name="deep", model="mlp", model_options={"hidden": [24, 16]}, count=2)
    tiers = (deep, Tier(name="flat", model="mlp", model_options={"hidden": [hidden]}, count=2))

    def played(method: Method) -> nestling.Result:
        return nestling.run(small(method, fleet=FleetConfig(tiers=tiers), participants=4))

    ours = played(OFF[name]()).federation
    floor = played(Local(size=0 if hidden == 16 else 16)).federation
    networks = {piece.reference.name for piece in ours.method.pieces.values()}
    assert networks == ({"deep", "flat"} if hidden == 16 else {"deep", "flat (tailored)"})
    for client in range(4):
        a, b = (own_weights(f.world.store.get(client)) for f in (ours, floor))
        assert a and a.keys() == b.keys()
        assert all(torch.equal(t, b[key]) for key, t in a.items())


def test_defaults_that_a_page_speaks_of() -> None:
    assert PruneFL().every == 0.05  # a twentieth of a stage, however long the run
    assert LotteryFL().recover == 10  # epochs after a rewind
    assert DraftFed().order == "draft-local"
    assert FedCMA().bound == "none"  # small networks hardly learn through the published sigmoid
