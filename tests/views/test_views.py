"""Properties of views and of the one merge, on networks of every tie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models import build
from nestling.seeds import torch_seeded
from nestling.views import (
    Contribution,
    Reference,
    State,
    View,
    by_index,
    from_spec,
    full,
    keep_private,
    masked,
    merge,
    prefix,
    sub_module,
    to_spec,
    trace,
    without,
)
from nestling.views.nested import forward
from tests.views.networks import NETWORKS, SHAPE

AXES = {name: trace(make(), SHAPE) for name, make in NETWORKS.items()}
MERGED = list(NETWORKS)


def network(name: str, seed: int = 0) -> nn.Module:
    """A network with weights, norms and statistics that are all different from their defaults."""
    with torch_seeded(seed, "test network", name):
        net = NETWORKS[name]()
        for key, tensor in net.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(
                    torch.rand_like(tensor) + 0.5 if "var" in key else torch.randn_like(tensor) / 2
                )
    return net.eval()


@st.composite
def views(draw: st.DrawFn, name: str, unit: int = 1) -> View:
    """A view with any non-empty index set on every axis (in blocks of `unit`)."""
    axes = AXES[name]
    chosen = {}
    for axis, size in zip(axes.names, axes.sizes, strict=True):
        blocks = draw(st.sets(st.integers(0, size // unit - 1), min_size=1))
        chosen[axis] = [b * unit + i for b in blocks for i in range(unit)]
    return by_index(axes, chosen)


named_views = st.sampled_from(MERGED).flatmap(lambda n: st.tuples(st.just(n), views(n)))
seeds = st.integers(0, 1000)


def state_of(name: str, seed: int) -> State:
    return {k: v.clone() for k, v in network(name, seed).state_dict().items()}


@settings(max_examples=60, deadline=None)
@given(named_views, seeds)
def test_scatter_after_extract_is_the_identity(drawn: tuple[str, View], seed: int) -> None:
    name, view = drawn
    state = state_of(name, seed)
    back = view.scatter(state, view.extract(state))
    assert all(torch.equal(back[k], state[k]) for k in state)


@settings(max_examples=60, deadline=None)
@given(named_views, seeds)
def test_scatter_writes_owned_entries_and_no_others(drawn: tuple[str, View], seed: int) -> None:
    name, view = drawn
    state = state_of(name, seed)
    local = {k: torch.full_like(v, 7) for k, v in view.extract(state).items()}
    after = view.scatter(state, local)
    assert sum(int((after[k] == 7).sum()) for k in after) == view.numel()
    for k in state:
        untouched = after[k] != 7
        assert torch.equal(after[k][untouched], state[k][untouched])


@settings(max_examples=40, deadline=None)
@given(named_views, seeds, st.lists(st.integers(1, 5000), min_size=1, max_size=4))
def test_merging_identical_clients_returns_them(
    drawn: tuple[str, View], seed: int, weights: list[int]
) -> None:
    name, view = drawn
    local = view.extract(state_of(name, seed))
    merged = merge(state_of(name, seed + 1), [Contribution(view, local, float(w)) for w in weights])
    again = view.extract(merged)
    assert all(torch.equal(again[k], local[k]) for k in local)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MERGED).flatmap(lambda n: st.tuples(st.just(n), views(n), views(n))), seeds)
def test_the_merge_is_the_weighted_mean_of_the_holders(
    drawn: tuple[str, View, View], seed: int
) -> None:
    """Checked entry by entry against NaN-filled full tensors, an independent way to say the
    same."""
    name, a, b = drawn
    old, one, two = state_of(name, seed), state_of(name, seed + 1), state_of(name, seed + 2)
    merged = merge(
        old, [Contribution(a, a.extract(one), 3.0), Contribution(b, b.extract(two), 1.0)]
    )
    holes = {k: torch.full(v.shape, torch.nan, dtype=torch.float64) for k, v in old.items()}
    left, right = (
        view.scatter(holes, {k: v.double() for k, v in view.extract(s).items()})
        for view, s in ((a, one), (b, two))
    )
    for key, tensor in old.items():
        if tensor.is_floating_point():
            both = (3 * left[key] + right[key]) / 4
            expected = torch.where(
                both.isnan(), torch.where(left[key].isnan(), right[key], left[key]), both
            )
            expected = torch.where(expected.isnan(), tensor.double(), expected)
            assert torch.allclose(merged[key].double(), expected, atol=1e-7)


def test_what_nobody_trained_keeps_its_value() -> None:
    old = state_of("Residual", 0)
    small = prefix(AXES["Residual"], 0.25)
    merged = merge(
        old, [Contribution(small, {k: torch.zeros_like(v) for k, v in small.extract(old).items()})]
    )
    zeroed = sum(int((merged[k] == 0).sum()) for k in merged if merged[k].is_floating_point())
    changed = sum(int((merged[k] != old[k]).sum()) for k in merged if merged[k].is_floating_point())
    assert changed <= zeroed <= small.numel()
    assert torch.equal(merge(old, [])["stem.weight"], old["stem.weight"])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([n for n in MERGED if n != "Grouped"]).flatmap(
        lambda n: st.tuples(st.just(n), views(n))
    ),
    seeds,
)
def test_sliced_equals_masked(drawn: tuple[str, View], seed: int) -> None:
    """The sliced module computes what the full module computes when every entry outside the view is
    zero."""
    _assert_sliced_equals_masked(drawn[0], drawn[1], seed)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 2), seeds)
def test_sliced_equals_masked_with_group_norm(a: int, b: int, seed: int) -> None:
    """Holds for prefixes of whole groups, because groups keep their size."""
    view = by_index(AXES["Grouped"], {"a": range(4 * a), "b": range(4 * b)})
    _assert_sliced_equals_masked("Grouped", view, seed)


def _assert_sliced_equals_masked(name: str, view: View, seed: int) -> None:
    net = network(name, seed)
    state = net.state_dict()
    zeros = {k: torch.ones_like(v) if "var" in k else torch.zeros_like(v) for k, v in state.items()}
    wide = network(name, seed)
    wide.load_state_dict(view.scatter(zeros, view.extract(state)))
    with torch_seeded(seed, "input"):
        x = torch.randn(3, *SHAPE)
    with torch.no_grad():
        assert torch.allclose(sub_module(net, view)(x), wide(x), atol=1e-5)


@pytest.mark.parametrize("name", ["resnet8", "mobilenetv2", "densenet121", "dscnn", "preresnet18"])
def test_sliced_equals_masked_on_real_networks(name: str) -> None:
    with torch_seeded(0, name):
        net = build(name, shape=(3, 32, 32), classes=10, norm="tracked", width=0.25).eval()
        x = torch.randn(2, 3, 32, 32)
    view = prefix(trace(net, (3, 32, 32)), 0.5)
    zeros = {
        k: torch.ones_like(v) if "var" in k else torch.zeros_like(v)
        for k, v in net.state_dict().items()
    }
    small = sub_module(net, view)
    masked_state = view.scatter(zeros, view.extract(net.state_dict()))
    net.load_state_dict(masked_state)
    with torch.no_grad():
        assert torch.allclose(small(x), net(x), atol=1e-4, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(named_views)
def test_a_view_survives_its_plain_form(drawn: tuple[str, View]) -> None:
    name, view = drawn
    assert from_spec(AXES[name], to_spec(view)).key() == view.key()


def test_prefixes_are_nested_and_rounded_up() -> None:
    axes = AXES["Residual"]
    quarter, half = prefix(axes, 0.25), prefix(axes, 0.5)
    assert full(axes).contains(half) and half.contains(quarter) and not quarter.contains(half)
    # ⌈0.3·8⌉, ⌈0.3·6⌉, ⌈0.3·12⌉
    assert [len(prefix(axes, 0.3).indices(a)) for a in axes.names] == [3, 2, 4]
    assert (
        len(prefix(axes, {"stem": 0.5}).indices("stem")) == 4
        and len(prefix(axes, {"stem": 0.5}).indices("a")) == 6
    )


def test_depth_views_drop_units() -> None:
    net = build("exitcnn", shape=(1, 28, 28), classes=10)
    axes = trace(net, (1, 28, 28))
    last = len(net.stages) - 1
    shallow = without(full(axes), [f"stages.{last}", f"heads.{last}"])
    small = sub_module(net, shallow)
    assert len(small.stages) == last and not any(
        n.startswith((f"stages.{last}.", f"heads.{last}.")) for n in shallow.names
    )
    x = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert torch.allclose(small.eval()(x), net.eval().all_exits(x)[last - 1])
    old = {k: v.clone() for k, v in net.state_dict().items()}
    merged = merge(
        old, [Contribution(shallow, {k: v + 1 for k, v in shallow.extract(old).items()})]
    )
    assert all(
        torch.equal(merged[k], old[k]) == (k not in shallow.names)
        for k in old
        if old[k].is_floating_point()
    )


def test_a_residual_block_can_be_left_out() -> None:
    net = build("resnet18", shape=(3, 32, 32), classes=10, width=0.125)
    axes = trace(net, (3, 32, 32))
    block = next(
        n.rsplit(".", 2)[0] for n in axes.shapes if ".1." in n and n.startswith("stages.0")
    )
    small = sub_module(net, without(full(axes), [block]))
    assert small(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())


def test_masks_own_single_entries() -> None:
    state = state_of("Flattening", 0)
    keep = torch.rand(state["b.weight"].shape, generator=torch.Generator().manual_seed(0)) > 0.5
    view = masked(full(AXES["Flattening"]), {"b.weight": keep})
    local = view.extract(state)
    assert bool((local["b.weight"][~keep] == 0).all())
    merged = merge(state, [Contribution(view, {k: v + 1 for k, v in local.items()})])
    assert torch.equal(merged["b.weight"][~keep], state["b.weight"][~keep])
    assert torch.allclose(merged["b.weight"][keep], state["b.weight"][keep] + 1)
    whole = full(AXES["Flattening"])
    assert view.numel() == whole.numel() - int((~keep).sum())
    assert view.nbytes() == 4 * view.numel() + -(-keep.numel() // 8)


def test_private_names_do_not_travel_but_stay_in_the_network() -> None:
    view = keep_private(full(AXES["Flattening"]), ["head"])
    assert (
        "head.weight" not in view.extract(state_of("Flattening", 0))
        and "head.weight" in view.members
    )


def test_rows_that_do_not_count_are_left_to_others() -> None:
    """An entry flagged absent may hold anything, even NaN, and changes nothing."""
    old = state_of("Flattening", 0)
    view = full(AXES["Flattening"])
    held = torch.tensor([True, False, True, True, False]).reshape(-1, 1)
    sent = {k: v + 1 for k, v in old.items()}
    sent["head.weight"] = torch.where(held, sent["head.weight"], torch.nan)
    merged = merge(old, [Contribution(view, sent, 1.0, {"head.weight": held.expand(5, 9)})])
    assert torch.equal(merged["head.weight"][~held[:, 0]], old["head.weight"][~held[:, 0]])
    assert torch.allclose(merged["head.weight"][held[:, 0]], old["head.weight"][held[:, 0]] + 1)


def test_gradients_of_a_nested_forward_reach_owned_entries_only() -> None:
    net = network("Residual")
    reference = Reference("main", net, SHAPE)
    view = prefix(reference.axes, 0.5)
    state = {
        k: v.clone().requires_grad_(v.is_floating_point() and "running" not in k)
        for k, v in net.state_dict().items()
    }
    out = forward(reference, view, state, torch.randn(4, *SHAPE))
    out.sum().backward()
    grad = state["b.weight"].grad
    assert grad is not None
    inside = torch.zeros_like(grad, dtype=torch.bool)
    inside[np.ix_(view.indices("stem"), view.indices("a"))] = True
    assert bool((grad[~inside] == 0).all()) and bool((grad[inside] != 0).any())


def test_bad_views_are_refused() -> None:
    axes = AXES["Residual"]
    with pytest.raises(InputError, match="above 0"):
        prefix(axes, 0.0)
    with pytest.raises(InputError, match="no axis"):
        by_index(axes, {"nowhere": [0]})
    with pytest.raises(InputError, match=r"0\.\.7"):
        by_index(axes, {"stem": [8]})
    with pytest.raises(InputError, match="no unit"):
        without(full(axes), ["stages.9"])
    with pytest.raises(InputError, match="must be bool"):
        masked(full(axes), {"b.weight": torch.ones(8, 6, 3, 3)})


def test_a_layer_that_cannot_shrink_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Bilinear(4, 4, 4)
            self.in_features = 4
            self.weight = nn.Parameter(torch.randn(6, 4))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x @ self.weight.t())

    odd = Odd()
    with pytest.raises(InputError, match="Odd cannot be made smaller"):
        sub_module(odd, prefix(trace(odd, (4,)), 0.5))
