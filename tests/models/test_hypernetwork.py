"""The graph hyper-network: which layers it sees, that it makes every tensor, and that weights have
the right scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nestling.models import build
from nestling.models.hypernetwork import KINDS, Generated, HyperNetwork, fitted, graph_of

SMALL = {"hidden": 16, "basis": 4, "max_shape": (8, 8, 3), "max_inputs": 64}


def hyper() -> HyperNetwork:
    torch.manual_seed(0)
    return HyperNetwork(5, **SMALL)


def test_the_graph_follows_residual_paths() -> None:
    graph = {
        layer.name: layer for layer in graph_of(build("resnet8", shape=(3, 16, 16), classes=5))
    }
    names = list(graph)
    after = graph["stages.2.0.conv1"]
    assert sorted(names[k] for k in after.reads) == ["stages.1.0.norm2", "stages.1.0.shortcut"]
    assert KINDS[graph["head"].kind] == "head" and graph["stem.conv"].reads == ()
    assert all(max(layer.reads, default=-1) < number for number, layer in enumerate(graph.values()))


def test_what_cannot_be_traced_is_a_chain() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) if x.sum() > 0 else x)

    assert [layer.reads for layer in graph_of(Odd())] == [(), (0,)]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("tinycnn", (1, 20, 20)),
        ("resnet8", (3, 16, 16)),
        ("dscnn", (1, 20, 20)),
        ("mlp", (7,)),
        ("cnn1d", (2, 40)),
    ],
)
def test_every_parameter_is_made_with_the_scale_of_its_fan_in(
    model: str, shape: tuple[int, ...]
) -> None:
    network = build(model, shape=shape, classes=5)
    made = Generated(hyper(), network)
    weights = made.weights()
    assert {n: t.shape for n, t in weights.items()} == {
        n: p.shape for n, p in network.named_parameters()
    }
    for name, weight in weights.items():
        if weight.dim() > 1:
            gain = 1.0 if name.startswith("head") else 2.0
            assert float(weight.detach().square().mean() * weight[0].numel()) == pytest.approx(
                gain, rel=0.01
            )
    x = torch.randn(3, *shape)
    assert made(x).shape == (3, 5) and set(made.state_dict()) == {
        f"generator.{n}" for n in hyper().state_dict()
    }
    made(x).square().sum().backward()
    assert made.generator.kinds.grad is not None and bool(made.generator.kinds.grad.abs().sum() > 0)


def test_layers_of_one_shape_differ_by_where_they_stand() -> None:
    network = build("cnn", shape=(1, 16, 16), classes=5, channels=(8, 8, 8, 8))
    weights = [t for t in Generated(hyper(), network).weights().values() if t.shape == (8, 8, 3, 3)]
    assert len(weights) == 3 and not torch.allclose(weights[0], weights[1], atol=1e-4)


def test_tensors_are_cut_or_tiled() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(fitted(tensor, (1, 2)), tensor[:1, :2])
    assert torch.equal(fitted(tensor, (3, 5)), torch.cat([tensor, tensor[:1]])[:, [0, 1, 2, 0, 1]])


def test_what_is_added_starts_at_nothing_and_moves_the_network() -> None:
    network = build("tinycnn", shape=(1, 20, 20), classes=5)
    plain, tuned = Generated(hyper(), network), Generated(hyper(), network, tuned=True)
    x = torch.randn(2, 1, 20, 20)
    assert torch.equal(plain(x), tuned(x))
    with torch.no_grad():
        tuned.added[0].add_(0.1)
    assert not torch.allclose(plain(x), tuned(x))
