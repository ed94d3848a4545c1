"""Networks of factors: the same function, the same weights back, and a decay that sees the product
only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestling.models import build
from nestling.models.factorised import (
    FORMS,
    factorable,
    factorise,
    frobenius_decay,
    full_rank,
    recompose,
    singular_values,
    split,
    to_dense,
    to_factors,
)

LAYERS: dict[str, Any] = {
    "plain": lambda: nn.Conv2d(6, 10, 3, padding=1),
    "strided": lambda: nn.Conv2d(6, 10, 3, stride=2, padding=1, bias=False),
    "uneven": lambda: nn.Conv2d(6, 10, (5, 3), stride=(1, 2), padding=(0, 1), dilation=(1, 2)),
    "wide": lambda: nn.Conv2d(3, 20, 5, padding=2),
    "pointwise": lambda: nn.Conv2d(6, 10, 1),
}


class Holder(nn.Module):
    """A network of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_at_full_rank_two_layers_compute_what_one_does(kind: str, form: str) -> None:
    net = Holder(LAYERS[kind]())
    shape = net.layer.weight.shape
    pair = factorise(net, {"layer": full_rank(shape, form)}, form)
    x = torch.randn(2, shape[1], 12, 13)
    assert torch.allclose(pair(x), net(x), atol=1e-5) and isinstance(pair.layer, nn.Sequential)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "make", [lambda: nn.Conv1d(4, 6, 5, stride=2, padding=2), lambda: nn.Linear(9, 6)]
)
def test_sequences_and_linear_layers_too(make: Any, form: str) -> None:
    net = Holder(make())
    rank = full_rank(net.layer.weight.shape, form)
    x = torch.randn(3, 4, 9)
    assert torch.allclose(factorise(net, {"layer": rank}, form)(x), net(x), atol=1e-5)


def test_the_matrices_have_the_published_shapes() -> None:
    u, v = split(torch.randn(10, 6, 3, 3), "separable", 4)
    assert (
        u.shape == (10, 4, 3, 1)
        and v.shape == (4, 6, 1, 3)
        and u.numel() + v.numel() == 4 * (10 * 3 + 6 * 3)
    )
    u, v = split(torch.randn(10, 6, 3, 3), "columns", 4)
    assert (
        u.shape == (10, 4, 1, 1)
        and v.shape == (4, 6, 3, 3)
        and u.numel() + v.numel() == 4 * (10 + 6 * 9)
    )
    assert full_rank((10, 6, 3, 3), "separable") == 18 and full_rank((10, 6, 3, 3), "columns") == 10


@pytest.mark.parametrize("form", FORMS)
def test_the_first_components_are_the_best_approximation(form: str) -> None:
    weight = torch.randn(10, 6, 3, 3, dtype=torch.float64)
    matrix = (
        weight.permute(0, 2, 1, 3).reshape(30, 18)
        if form == "separable"
        else weight.reshape(10, 54)
    )
    values = torch.linalg.svdvals(matrix)
    u, v = split(weight, form, 4)
    assert torch.allclose((recompose(u, v) - weight).norm(), values[4:].norm()) and torch.allclose(
        singular_values(u), values[:4]
    )
    assert torch.allclose(recompose(*split(weight, form)), weight)


@pytest.mark.parametrize("form", FORMS)
def test_signs_do_not_depend_on_chance(form: str) -> None:
    """The factors of a product are those it was made of, up to rounding: no pair of vectors is
    turned over."""
    u, v = split(torch.randn(8, 5, 3, 3, dtype=torch.float64), form, 5)
    again = split(recompose(u, v), form, 5)
    assert torch.allclose(again[0], u) and torch.allclose(again[1], v)


def test_states_go_to_factors_and_back() -> None:
    net = build("resnet8", shape=(3, 16, 16), classes=4)
    shapes = factorable(net)
    ranks = {layer: full_rank(shape, "separable") for layer, shape in shapes.items()}
    pair, state = factorise(net, ranks, "separable"), net.state_dict()
    assert set(to_factors(state, ranks, "separable")) == set(pair.state_dict())
    back = to_dense(pair.state_dict(), ranks)
    assert set(back) == set(state) and all(
        torch.allclose(back[name], state[name], atol=1e-6) for name in state
    )


def test_first_convolutions_shortcuts_and_the_head_stay_whole() -> None:
    net = build("resnet8", shape=(3, 16, 16), classes=4)
    convolutions = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d)]
    small = [n for n in convolutions if net.get_submodule(n).kernel_size == (1, 1)]
    chosen = list(factorable(net, dense=2))
    assert (
        chosen == [n for n in convolutions[2:] if n not in small] and small and "head" not in chosen
    )
    assert set(small) <= set(factorable(net, dense=2, pointwise=True))
    assert list(
        factorable(build("mlp", shape=(20,), classes=3, hidden=(8, 8)), dense=0, linear=True)
    ) == [
        "stages.0.linear",
        "stages.1.linear",
    ]
    depthwise = build("dscnn", shape=(1, 20, 20), classes=3)
    assert not factorable(depthwise) and factorable(depthwise, pointwise=True)


@pytest.mark.parametrize("form", FORMS)
def test_the_decay_is_that_of_the_product(form: str) -> None:
    """λ·u·v·vᵀ and λ·uᵀ·u·v, which is what autograd finds for λ/2·‖w‖² of the recomposed weight."""
    u, v = (
        t.requires_grad_() for t in split(torch.randn(7, 5, 3, 3, dtype=torch.float64), form, 3)
    )
    params = {"a.u.weight": u, "a.v.weight": v, "b": torch.ones(2)}
    grads = {name: torch.zeros_like(t) for name, t in params.items()}
    found = frobenius_decay(params, grads, {}, layers=("a",), weight=0.3, plain=0.5)
    want = torch.autograd.grad(0.15 * recompose(u, v).square().sum(), [u, v])
    assert torch.allclose(found["a.u.weight"], want[0]) and torch.allclose(
        found["a.v.weight"], want[1]
    )
    assert torch.equal(found["b"], torch.full((2,), 0.5))
