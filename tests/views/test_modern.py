"""Attention, recurrent layers and tied weights: every view is the wide network with the other
channels zeroed."""

from __future__ import annotations

import copy
import pickle
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from nestling.errors import InputError
from nestling.models import state_entries
from nestling.models.tied import name_once, tied_names
from nestling.seeds import torch_seeded
from nestling.views import (
    Axes,
    Contribution,
    Reference,
    View,
    by_index,
    full,
    keep_private,
    merge,
    prefix,
    sub_module,
    trace,
    without,
)
from tests.views.modern import (
    CLASSES,
    INPUTS,
    MODERN,
    STEPS,
    FusedAttention,
    OwnHeads,
    Recurrent,
    TiedLayers,
    TiedWords,
    Transformer,
    inputs,
    shape_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")


def made(name: str, seed: int = 0) -> nn.Module:
    """A network with norms that are different from their defaults."""
    with torch_seeded(seed, "test network", name):
        net = name_once(MODERN[name]())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) / 5)
    return net.eval()


@cache
def reference(name: str) -> Reference:
    return Reference(name, made(name), shape_of(name))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, View]:
    """A network, and a view with any non-empty set of channels on every axis."""
    name = draw(st.sampled_from(list(MODERN)))
    axes = reference(name).axes
    chosen = {
        axis: draw(st.sets(st.integers(0, size - 1), min_size=1))
        for axis, size in zip(axes.names, axes.sizes, strict=True)
    }
    return name, by_index(axes, chosen)


def zeroed(net: nn.Module, view: View) -> nn.Module:
    """The wide network with zeros for all that is not in the view. Norms over the embedding
    are taken over the channels that are in it, as in a network of that width."""
    wide = copy.deepcopy(net)
    state = {name: torch.zeros_like(t) for name, t in net.state_dict().items()}
    wide.load_state_dict(view.scatter(state, view.extract(net.state_dict())))
    for name, layer in wide.named_modules():
        if isinstance(layer, nn.LayerNorm):
            kept = torch.zeros(len(layer.weight), dtype=torch.bool)
            kept[view.where(f"{name}.weight")[0]] = True
            layer.forward = partial(_norm_of_some, layer, kept)  # type: ignore[method-assign]
    return wide


def _norm_of_some(layer: nn.LayerNorm, kept: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    some = F.layer_norm(
        x[..., kept], (int(kept.sum()),), layer.weight[kept], layer.bias[kept], layer.eps
    )
    out[..., kept] = some
    return out


@settings(max_examples=150, deadline=None)
@given(cuts(), st.integers(0, 1000))
def test_a_view_is_the_wide_network_with_other_channels_zeroed(
    drawn: tuple[str, View], seed: int
) -> None:
    name, view = drawn
    net = made(name)
    torch.manual_seed(seed)
    x = inputs(name)
    small = sub_module(net, view)
    assert torch.allclose(small(x), zeroed(net, view)(x), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(cuts(), st.integers(0, 1000))
def test_in_a_stack_of_clients_too(drawn: tuple[str, View], seed: int) -> None:
    name, view = drawn
    nets = [made(name, seed), made(name, seed + 1)]
    states = [view.extract(net.state_dict()) for net in nets]
    small = reference(name).network(view)
    stack = {key: torch.stack([state[key] for state in states]) for key in states[0]}
    x = inputs(name)

    def loss(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out: Tensor = functional_call(small, state, (x,))
        return out.sum(), out

    # As clients are trained together: a gradient each.
    _, outs = vmap(grad(loss, has_aux=True))(stack)
    for out, net in zip(outs, nets, strict=True):
        assert torch.allclose(out, zeroed(net, view)(x), atol=1e-5)


@pytest.mark.parametrize("name", MODERN)
def test_nearly_every_parameter_can_be_cut_and_nothing_is_noted(name: str) -> None:
    known = reference(name)
    assert known.axes.share(known.parameters) > 0.95
    assert known.axes.notes == ()
    half = known.network(prefix(known.axes, 0.5))
    assert state_entries(half) < 0.6 * state_entries(known.module)


@pytest.mark.parametrize("name", MODERN)
def test_a_cut_network_can_be_copied_pickled_and_cut_again(name: str) -> None:
    net = made(name)
    half = sub_module(net, prefix(trace(net, shape_of(name)), 0.7)).eval()
    x = inputs(name)
    for again in (copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        assert torch.equal(again(x), half(x))
        assert again.state_dict().keys() == half.state_dict().keys()
    smaller = sub_module(half, prefix(trace(half, shape_of(name)), 0.5)).eval()
    assert smaller(x).shape == half(x).shape


def sizes(axes: Axes) -> dict[str, int]:
    return dict(zip(axes.names, axes.sizes, strict=True))


def test_heads_with_a_size_of_their_own_are_an_axis_a_layer() -> None:
    axes = trace(Transformer(OwnHeads(12, 3, 5), OwnHeads(12, 2, 4)), (STEPS, INPUTS))
    assert sizes(axes) == {
        "embed": 12,
        "blocks.0.attention.q": 3,
        "blocks.0.mlp.0": 10,
        "blocks.1.attention.q": 2,
        "blocks.1.mlp.0": 10,
    }
    rows = axes.dims["blocks.0.attention.v.weight"][0]
    assert rows is not None and rows.tolist() == [c for c in (12, 13, 14) for _ in range(5)]
    assert set(axes.counts) == {"blocks.0.attention.heads", "blocks.1.attention.heads"}


def test_where_the_width_is_divided_by_heads_they_are_cut_together() -> None:
    axes = trace(Transformer(FusedAttention(12, 3)), (STEPS, INPUTS))
    assert sizes(axes) == {"embed": 3, "blocks.0.mlp.0": 10}
    rows = axes.dims["blocks.0.attention.qkv.weight"][0]
    assert (
        rows is not None
        and rows.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + ([0] * 4 + [1] * 4 + [2] * 4) * 2
    )
    two = by_index(axes, {"embed": [0, 2]})
    small = sub_module(Transformer(FusedAttention(12, 3)), two)
    assert small.blocks[0].attention.heads == 2  # type: ignore[union-attr]


class Tempered(OwnHeads):
    """Has a number that happens to be that of its heads, and computes with it."""

    def __init__(self) -> None:
        super().__init__(12, 3, 5)
        self.temperature = 3

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


def test_a_number_that_only_looks_like_a_count_stays() -> None:
    net = Transformer(Tempered())
    axes = trace(net, (STEPS, INPUTS))
    assert set(axes.counts) == {"blocks.0.attention.heads"} and axes.notes == ()
    small = sub_module(net, by_index(axes, {"blocks.0.attention.q": [1]}))
    assert (small.blocks[0].attention.heads, small.blocks[0].attention.temperature) == (1, 3)  # type: ignore[union-attr]


def test_all_gates_of_a_recurrent_unit_are_one_channel() -> None:
    axes = trace(Recurrent(nn.LSTM(INPUTS, 7, batch_first=True)), (STEPS, INPUTS))
    assert sizes(axes) == {"layer": 7}
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
        rows = axes.dims[f"layer.{name}"][0]
        assert rows is not None and rows.tolist() == list(range(7)) * 4
    read = axes.dims["layer.weight_hh_l0"][1]
    assert read is not None and read.tolist() == list(range(7))


class HardCoded(nn.Module):
    """Takes channels by a number that is written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(INPUTS, 8)
        self.b = nn.Linear(8, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x.mean(1))
        return self.head(self.b(x) + x[:, 2:8])


def test_code_that_cannot_be_cut_is_left_whole_with_its_line() -> None:
    axes = trace(HardCoded(), (STEPS, INPUTS))
    assert axes.dims["b.weight"][0] is None
    assert any("test_modern.py:" in note and "x[:, 2:8]" in note for note in axes.notes)


def test_weights_that_are_computed_for_nothing_do_not_matter() -> None:
    """`nn.MultiheadAttention` averages its weights over heads, which nobody reads here."""
    known = reference("multihead")
    assert sizes(known.axes)["embed"] == 3


# tied weights


def test_a_tied_tensor_has_one_name() -> None:
    net = TiedWords()
    assert tied_names(net) == {"embed.weight": ("head.weight",)}
    known = Reference("words", net, (STEPS,))
    assert "head.weight" not in known.initial and "head.weight" not in known.axes.shapes
    assert "head.weight" not in known.parameters and "head.weight" not in known.full.names
    assert known.full.numel() == sum(p.numel() for p in net.parameters()) == state_entries(net)
    both = {**net.state_dict(), "head.weight": net.embed.weight.detach()}
    net.load_state_dict(both)
    with pytest.raises(RuntimeError, match="Missing key"):
        net.load_state_dict({"head.weight": net.embed.weight.detach()})


@pytest.mark.parametrize("name", ["tied words", "tied layers"])
def test_a_cut_network_stays_tied_and_the_merge_has_one_tensor(name: str) -> None:
    known = reference(name)
    view = prefix(known.axes, 0.5)
    small = sub_module(known.module, view)
    assert tied_names(small) == tied_names(known.module)
    loss = small(inputs(name)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in small.parameters():
            assert parameter.grad is not None
            parameter -= parameter.grad
    assert tied_names(small) == tied_names(known.module)
    trained = {key: t.clone() for key, t in small.state_dict().items()}
    merged = merge(known.initial, [Contribution(view, trained)])
    assert merged.keys() == known.initial.keys()
    after = copy.deepcopy(known.module)
    after.load_state_dict(merged)
    assert tied_names(after) == tied_names(known.module)
    again = view.extract(after.state_dict())
    assert all(torch.equal(again[key], trained[key]) for key in trained)


def test_a_network_that_moved_to_another_device_is_traced_as_one() -> None:
    """Going to the meta device makes two tensors of a tied one."""
    axes = trace(TiedLayers(), (STEPS, INPUTS))
    assert axes.tied["wide.weight"] == ("wide_too.weight",)
    assert {"twice.weight", "twice.bias"} <= axes.tied.keys()
    assert not {"again.weight", "again.bias", "wide_too.weight"} & axes.shapes.keys()


def test_a_tied_tensor_is_private_under_either_name() -> None:
    axes = trace(TiedWords(), (STEPS,))
    view = keep_private(full(axes), ["head"])
    assert "embed.weight" not in view.names and "embed.weight" in view.members


def test_half_of_a_tie_cannot_be_left_out() -> None:
    net = TiedLayers()
    axes = trace(net, (STEPS, INPUTS))
    with pytest.raises(InputError, match="tied to"):
        sub_module(net, without(full(axes), ["wide"]))
    shared = sub_module(net, without(full(axes), ["again"]))
    assert isinstance(shared.again, nn.Identity) and "twice.weight" in shared.state_dict()


def test_a_position_table_that_is_longer_than_the_input_stays_whole() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(INPUTS, 8)
            self.positions = nn.Parameter(torch.randn(1, 20, 8))
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.embed(x) + self.positions[:, : x.shape[1]]).mean(1))

    axes = trace(Long(), (STEPS, INPUTS))
    assert sizes(axes) == {"embed": 8}
    assert axes.dims["positions"][1] is None
    assert np.array_equal(axes.dims["positions"][2], np.arange(8))  # type: ignore[arg-type]
