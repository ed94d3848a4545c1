"""Looking inside networks: that what is seen is what the layers put out."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn

from nestling.analysis import stage_outputs
from nestling.analysis.stages import taps_of
from nestling.models import build
from nestling.models.taps import find_taps
from nestling.runs.assemble import assemble
from nestling.views.depth import depth_views
from tests.small import small


def test_what_is_seen_is_what_the_network_computes() -> None:
    net = build("tinycnn", shape=(1, 28, 28), classes=10)
    x = torch.rand(7, 1, 28, 28)
    seen = stage_outputs(net, x, batch=3)
    head = net.get_submodule(find_taps(net, (1, 28, 28)).head)
    assert torch.allclose(seen["logits"], net.eval()(x), atol=1e-6)
    assert torch.allclose(head(seen["features"]), seen["logits"], atol=1e-6)
    assert all(len(values) == 7 and values.dim() == 2 for values in seen.values())
    places = [seen[stage] for stage in ("first", "middle", "last")]
    assert not any(a.shape == b.shape and torch.equal(a, b) for a, b in combinations(places, 2))


def test_the_network_is_left_as_it_was() -> None:
    net = build("tinycnn", shape=(1, 28, 28), classes=10).train()
    stage_outputs(net, torch.rand(2, 1, 28, 28), ["logits"])
    assert net.training and not any(
        layer._forward_hooks or layer._forward_pre_hooks for layer in net.modules()
    )


def test_a_shallower_cut_has_its_own_places() -> None:
    """Layers that a cut lacks are not looked for, not even those that the network names as its
    taps."""
    _, federation = assemble(small("depthfl"))
    main = federation.world.main
    shallow = main.network(depth_views(main)[0], None)
    full = main.network(main.full, main.initial)
    assert taps_of(shallow, main.shape).depth < taps_of(full, main.shape).depth
    assert set(stage_outputs(shallow, torch.rand(2, *main.shape))) == {
        "first",
        "middle",
        "last",
        "features",
        "logits",
    }
    shallow.taps = {"convs": [*main.taps.convs, "gone"], "head": "gone"}  # type: ignore[assignment]
    assert taps_of(shallow, main.shape).convs


def test_a_network_may_name_its_places() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = (
                nn.Conv2d(1, 2, 3),
                nn.Conv2d(2, 3, 3),
                nn.Linear(3 * 24 * 24, 10),
            )
            self.taps = {"convs": ["b"], "head": "head"}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.b(self.a(x)).flatten(1))

    seen = stage_outputs(Own(), torch.rand(2, 1, 28, 28))
    assert seen["first"].shape == (2, 3 * 24 * 24) and torch.equal(seen["first"], seen["last"])


@pytest.mark.parametrize("name", ["mlp", "resnet8", "dscnn"])
def test_every_family_can_be_looked_at(name: str) -> None:
    seen = stage_outputs(build(name, shape=(1, 28, 28), classes=10), torch.rand(2, 1, 28, 28))
    assert {"features", "logits"} <= set(seen) and ("first" in seen) == (name != "mlp")
