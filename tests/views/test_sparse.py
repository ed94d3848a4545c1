"""Masks and channels by magnitude, and sparse states on their way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nestling.message import Message
from nestling.models import build
from nestling.training.objectives import Batch, Net, supervised
from nestling.training.optimisers import Buffers, Optim
from nestling.training.phase import Phase
from nestling.training.rules import masked_gradients
from nestling.training.trainer import train_step
from nestling.views import Contribution, Reference, View, masked, merge, prefix
from nestling.views.sparse import (
    channel_norms,
    flagged,
    inside_of,
    like_survivors,
    lowest_off,
    masks_of,
    overwritten,
    prunable,
    prune_lowest,
    restored,
    strongest,
    survivors,
    widened,
)


def reference(norm: str = "group", name: str = "tinycnn") -> Reference:
    torch.manual_seed(0)
    return Reference(
        "main",
        build(name, shape=(1, 12, 12), classes=4, channels=(8, 12, 16), norm=norm),
        (1, 12, 12),
    )


def pruned(view: View, found: Reference, share: float = 0.3) -> View:
    return masked(view, prune_lowest(view, view.extract(found.initial), prunable(found), share))


def test_masks_are_for_weights_never_for_biases_or_norms() -> None:
    found = reference("tracked")
    names = prunable(found)
    assert names == (
        "stages.0.conv.weight",
        "stages.1.conv.weight",
        "stages.2.conv.weight",
        "head.weight",
    )


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_what_survives_comes_back_and_costs_only_itself(ratio: float) -> None:
    found = reference()
    view = pruned(prefix(found.axes, ratio) if ratio < 1 else found.full, found)
    state = view.extract(found.initial)
    sent = survivors(view, state)
    assert (
        Message({"weights": sent}).nbytes
        == 4 * view.numel()
        < 4 * sum(t.numel() for t in state.values())
    )
    back = restored(view, sent)
    assert all(torch.equal(back[name], state[name]) for name in state)
    like = like_survivors(view, found.initial)
    assert all(
        like[name].shape == sent[name].shape and like[name].dtype == sent[name].dtype
        for name in sent
    )


def test_view_laws_hold_under_masks() -> None:
    """Scatter after extract is the identity on owned entries; the mean of equal parts is the part
    itself."""
    found = reference()
    view = pruned(prefix(found.axes, 0.5), found)
    local = view.extract(found.initial)
    assert all(
        torch.equal(t, found.initial[name])
        for name, t in view.scatter(found.initial, local).items()
    )
    merged = merge(found.initial, [Contribution(view, local, 1.0)] * 3)
    assert all(torch.equal(t, found.initial[name]) for name, t in merged.items())


def test_parties_with_other_masks_of_one_view_are_merged_entry_by_entry() -> None:
    """Also where what is masked off holds nothing that can be added up."""
    found = reference()
    half = prefix(found.axes, 0.5)
    views = [pruned(half, found, 0.3), pruned(half, found, 0.6), found.full]
    states = [
        {name: torch.full_like(t, k + 1.0) for name, t in view.extract(found.initial).items()}
        for k, view in enumerate(views)
    ]
    for view, state in zip(views[:2], states[:2], strict=True):
        for name, mask in masks_of(view).items():
            state[name][~mask] = torch.nan
    merged = merge(
        found.initial,
        [Contribution(v, s, k + 1) for k, (v, s) in enumerate(zip(views, states, strict=True))],
    )
    for name in prunable(found):
        held = [torch.zeros(found.axes.shapes[name], dtype=torch.bool) for _ in views]
        for flags, view in zip(held, views, strict=True):
            flags[tuple(slice(0, n) for n in view.shape(name))] = (
                torch.tensor(True) if view.mask(name) is None else view.mask(name)
            )
        total = sum(flags * (k + 1.0) ** 2 for k, flags in enumerate(held))
        weight = sum(flags * (k + 1.0) for k, flags in enumerate(held))
        assert torch.allclose(merged[name], total / weight)


def test_the_same_masks_make_the_same_view_and_others_another() -> None:
    found = reference()
    half = prefix(found.axes, 0.5)
    view = pruned(half, found)
    got = flagged(half, masks_of(view))
    assert flagged(half, masks_of(view)) is got
    assert all(torch.equal(got.mask(name), mask) for name, mask in masks_of(view).items())
    other = flagged(half, masks_of(pruned(half, found, 0.6)))
    assert other is not got and other.numel() < got.numel()


def test_the_smallest_share_of_what_is_kept_goes_layer_by_layer() -> None:
    found = reference()
    once = prune_lowest(found.full, found.initial, prunable(found), 0.2)
    for name, mask in once.items():
        size, gone = mask.numel(), found.initial[name].abs()[~mask]
        assert (
            int((~mask).sum()) == math.floor(0.2 * size)
            and gone.max() <= found.initial[name].abs()[mask].min()
        )
    view = masked(found.full, once)
    twice = prune_lowest(view, view.extract(found.initial), prunable(found), 0.2)
    for name, mask in twice.items():
        alive = int(once[name].sum())
        assert int(mask.sum()) == alive - math.floor(0.2 * alive) and bool(
            (mask <= once[name]).all()
        )


def test_equal_weights_go_first_come_and_masked_ones_not_twice() -> None:
    weight, mask = (
        torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0]),
        torch.tensor([False, True, True, True, True]),
    )
    assert lowest_off(weight, mask, 0.5).tolist() == [False, False, False, True, True]
    assert lowest_off(weight, None, 0.0).all()


def test_entries_outside_the_view_keep_their_flag() -> None:
    found = reference()
    half = prefix(found.axes, 0.5)
    masks = prune_lowest(half, half.extract(found.initial), prunable(found), 0.5)
    for name, mask in masks.items():
        outside = torch.ones_like(mask)
        outside = widened(half, name, torch.zeros(half.shape(name), dtype=torch.bool))
        assert bool(mask[outside].all()) and int((~mask).sum()) == math.prod(half.shape(name)) // 2


@pytest.mark.parametrize(
    "optim",
    [
        Optim("sgd", 0.1, momentum=0.9, weight_decay=0.01),
        Optim("sgd", 0.1, momentum=0.9, weight_decay=0.01, clip=0.5),
        Optim("adam", 0.01, weight_decay=0.01),
    ],
)
def test_pruned_weights_stay_exactly_zero_through_momentum_and_decay(optim: Optim) -> None:
    found = reference()
    view = pruned(found.full, found)
    module = found.network(view, view.extract(found.initial)).train()
    phase = Phase(
        optim=optim, given={n: m.float() for n, m in masks_of(view).items()}, rule=masked_gradients
    )
    net, buffers = Net(module, dict(module.named_parameters())), Buffers()
    for _ in range(5):
        batch = Batch(torch.randn(6, 1, 12, 12), torch.randint(0, 4, (6,)), torch.arange(6))
        train_step(net, phase, batch, buffers)
    for name, mask in masks_of(view).items():
        after = module.state_dict()[name]
        assert (after[~mask] == 0).all() and not torch.equal(after[mask], found.initial[name][mask])
    # Without the rule they move at once, which is what the rule is for.
    train_step(
        net,
        Phase(optim=optim),
        Batch(torch.randn(6, 1, 12, 12), torch.randint(0, 4, (6,)), torch.arange(6)),
        Buffers(),
    )
    assert any(
        (module.state_dict()[name][~mask] != 0).any() for name, mask in masks_of(view).items()
    )
    assert supervised is phase.objective


@pytest.mark.parametrize(("norm", "grain"), [("group", 4), ("tracked", 1)])
def test_the_strongest_channels_stay_in_whole_groups(norm: str, grain: int) -> None:
    found = reference(norm)
    norms = channel_norms(found.full, found.initial)
    weight = found.initial["stages.1.conv.weight"]
    start = found.axes.offsets[found.axes.number("stages.1.conv")]
    assert np.allclose(norms[start : start + 12], weight.abs().double().sum((1, 2, 3)).numpy())
    view = strongest(found.full, norms, [n * 0.5 for n in found.axes.sizes])
    assert [len(view.indices(a)) for a in range(3)] == [4, 8 if grain == 4 else 6, 8]
    for axis in range(3):
        own = (
            norms[found.axes.offsets[axis] : found.axes.offsets[axis + 1]].reshape(-1, grain).sum(1)
        )
        kept = sorted(set((view.indices(axis) // grain).tolist()))
        assert kept == sorted(np.argsort(-own)[: len(kept)].tolist())


def test_dropped_channels_are_as_if_zero() -> None:
    """The dependency closure: the smaller network says what the large one says with those channels'
    outputs at zero."""
    found = reference()
    view = strongest(
        found.full, channel_norms(found.full, found.initial), [n * 0.5 for n in found.axes.sizes]
    )
    x = torch.randn(3, 1, 12, 12)
    with torch.no_grad():
        small = found.network(view, view.extract(found.initial)).eval()(x)
        state = {name: t.clone() for name, t in found.initial.items()}
        for axis, name in enumerate(["stages.0", "stages.1", "stages.2"]):
            out = np.setdiff1d(np.arange(found.axes.sizes[axis]), view.indices(axis))
            for part in ("norm.weight", "norm.bias"):
                state[f"{name}.{part}"][out] = 0.0
        large = found.network(found.full, state).eval()(x)
    assert torch.allclose(small, large, atol=1e-5)


def test_a_common_part_is_overwritten_and_the_rest_is_left_alone() -> None:
    found = reference("tracked")
    outer, part = prefix(found.axes, 0.75), prefix(found.axes, 0.5)
    mine = {
        name: torch.full(outer.shape(name), 7.0)
        for name in outer.names
        if found.initial[name].is_floating_point()
    }
    counter = {name: found.initial[name].clone() + 3 for name in outer.names if name not in mine}
    changed = overwritten(outer, {**mine, **counter}, part, found.initial)
    got = inside_of(part, outer, changed)
    assert all(torch.equal(got[name], part.extract(found.initial)[name]) for name in part.names)
    for name in mine:
        same = int((changed[name] == 7.0).sum())
        assert same == math.prod(outer.shape(name)) - math.prod(part.shape(name))
