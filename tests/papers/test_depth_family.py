"""FedIN's family of depths: five stock networks, here five views of one."""

from __future__ import annotations

import pytest
import torch

from nestling.models import build, parameters
from nestling.views import Reference
from nestling.views.depth import columns, depth_views, kept

SHAPE = (3, 32, 32)
FAMILY = {
    (1, 1, 1, 1): 4_910_922,
    (1, 1, 2, 2): 10_812_234,
    (2, 2, 2, 2): 11_181_642,
    (2, 2, 3, 3): 17_082_954,
    (3, 3, 3, 3): 17_452_362,
}
STOCK = ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("main", build("resnet26", shape=SHAPE, classes=10, norm="tracked"), SHAPE)


def test_the_views_are_the_published_family(reference: Reference) -> None:
    views = depth_views(reference)
    blocks = [tuple(kept(view, column) for column in columns(reference)) for view in views]
    assert (
        dict(zip(blocks, [parameters(reference.network(view)) for view in views], strict=True))
        == FAMILY
    )
    assert round(sum(FAMILY.values()) / 5) == 12_288_023


def test_the_views_have_the_stock_networks_tensors(reference: Reference) -> None:
    with torch.device("meta"):
        stock = [
            build(name, shape=SHAPE, classes=10, norm="tracked").state_dict() for name in STOCK
        ]
    for view, state in zip(depth_views(reference), stock, strict=True):
        assert view.shapes == {name: tuple(t.shape) for name, t in state.items()}
