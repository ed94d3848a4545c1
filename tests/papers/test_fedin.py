"""FedIN's published traffic: what the pairs of features add to a message (the networks' sizes are
in test_depth_family)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import nestling
from nestling import Data, Evaluation, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.models import build
from nestling.views import Reference
from nestling.views.depth import depth_views
from nestling.views.middle import middle_of
from tests.papers.test_depth_family import SHAPE, STOCK
from tests.small import small

FEDIN = "nestling.methods.representation.fedin:FedIN"
PAIRS = 16 * (64 * 8 * 8 + 512)


def test_features_of_the_stock_networks_have_the_published_sizes() -> None:
    reference = Reference("main", build(STOCK[-1], shape=SHAPE, classes=10, norm="tracked"), SHAPE)
    found = [middle_of(reference, view) for view in depth_views(reference)]
    assert {(m.before, m.after) for m in found} == {((64, 8, 8), (512,))}
    for view, middle in zip(depth_views(reference), found, strict=True):
        names = [n for n in view.names if n in reference.parameters]
        assert list(middle.parameters) == [n for n in names if not n.startswith(("stem.", "head."))]


def test_a_batch_of_pairs_is_the_published_overhead() -> None:
    # The table prints 12.28 M without and 12.35 M with it.
    assert PAIRS == 73_728 and round(PAIRS / 1e6, 2) == 0.07


def test_the_overhead_travels_up_and_down(tmp_path: Path) -> None:
    """resnet10, here a part of resnet14, at 32x32 with the stock stem: real messages, against the
    same run without exchange."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (26, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "noise.npz", x=x, y=np.arange(26) % 10, test=np.arange(26) >= 16)
    setting: dict[str, Any] = {
        "data": Data("npz", path=str(tmp_path / "noise.npz")),
        "model": Named("resnet14", {"norm": "tracked"}),
        "fleet": FleetConfig(tiers=(Tier(name="resnet10", ratio=0.5, cut="depth", count=1),)),
        "split": SplitConfig(kind="iid", public=0.0),
        "train": Train(epochs=1, batch=16, lr=0.01, augment="none", drop_last=True),
        "participants": 1,
        "evaluate": Evaluation(every=2, clients=1),
    }
    sent = [
        nestling.run(small(Named(FEDIN, {"exchange": on}), **setting)).metrics
        for on in (False, True)
    ]
    plain, with_pairs = ([(row["bytes_down"], row["bytes_up"]) for row in rows] for rows in sent)
    extra = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(plain, with_pairs, strict=True)]
    # Four bytes a value; before the first round the server has none.
    assert extra == [(0, 4 * PAIRS), (4 * PAIRS, 4 * PAIRS)]
    # Without pairs it is the network: 4 910 922 parameters and the running statistics of its
    # normalisations.
    with torch.device("meta"):
        state = build("resnet10", shape=SHAPE, classes=10, norm="tracked").state_dict()
    assert plain[0] == plain[1] == (sum(t.nbytes for t in state.values()),) * 2
