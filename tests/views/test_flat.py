"""States in one piece of memory read and behave like any other state."""

from __future__ import annotations

import pickle

import torch

from nestling.views import Contribution, Reference, merge, prefix
from nestling.views.flat import Packed, Row, Stack, layout_of, only, pack
from tests.views.networks import NETWORKS, SHAPE

STATE = {
    "a": torch.arange(6.0).reshape(2, 3),
    "n": torch.tensor(3),
    "b": torch.tensor(2.5),
    "c": torch.zeros(0, 4),
}


def test_packing_keeps_every_tensor() -> None:
    packed = pack(STATE)
    assert packed.flat is not None and packed.flat.numel() == 7
    assert packed.keys() == STATE.keys()
    assert all(torch.equal(packed[n], t) and packed[n].dtype == t.dtype for n, t in STATE.items())
    assert pack(packed) is packed


def test_packing_copies() -> None:
    state = {"a": torch.ones(3)}
    packed = pack(state)
    state["a"].zero_()
    assert packed["a"].sum() == 3


def test_a_replaced_entry_makes_it_an_ordinary_state() -> None:
    packed = pack(STATE)
    other = packed.copy()
    other["a"] = torch.zeros(2, 3)
    assert other.flat is None and packed.flat is not None
    assert packed["a"].sum() == 15
    assert type(pickle.loads(pickle.dumps(packed))) is dict


def test_equal_states_have_one_layout() -> None:
    assert layout_of(pack(STATE)) is layout_of({n: t.clone() for n, t in STATE.items()})


def test_rows_of_a_stack_are_states() -> None:
    layout = layout_of(STATE)
    stack = Stack(
        layout, torch.stack([pack(STATE).flat, pack(STATE).flat * 2]), {"n": torch.tensor([3, 4])}
    )  # type: ignore[list-item]
    first, second = stack.rows()
    assert {n: t.tolist() for n, t in first.items()} == {n: t.tolist() for n, t in STATE.items()}
    assert second["a"].sum() == 30 and second["n"] == 4 and len(second) == 4
    assert second.nbytes == 7 * 4 + 8
    assert only(second, list(STATE)) is second
    assert list(only(second, ["a"])) == ["a"]


def test_a_row_that_is_not_finite_is_noticed() -> None:
    flat = torch.ones(4, 5)
    flat[1, 2], flat[2, 0], flat[3, :2] = float("nan"), float("inf"), torch.tensor([3e38, -3e38])
    assert Stack(layout_of({"a": torch.ones(5)}), flat, {}).finite == [True, False, False, False]


def test_a_view_of_a_packed_state_is_the_view_of_the_state() -> None:
    for make in NETWORKS.values():
        reference = Reference("main", make(), SHAPE)
        for ratio in (0.5, 1.0):
            view = prefix(reference.axes, ratio)
            plain = {n: t.clone() for n, t in reference.initial.items()}
            fast, slow = view.extract(reference.initial), view.extract(plain)
            assert isinstance(fast, Packed) and not isinstance(slow, Packed)
            assert fast.keys() == slow.keys() and all(torch.equal(fast[n], slow[n]) for n in slow)


def _as_row(state: dict[str, torch.Tensor]) -> Row:
    layout = layout_of(state)
    return Row(Stack(layout, pack(state).flat[None], {n: state[n][None] for n in layout.others}), 0)  # type: ignore[index]


def test_the_merge_of_packed_rows_and_plain_states_is_one() -> None:
    """Flat sums by view against a mean worked out entry by entry."""
    make = next(iter(NETWORKS.values()))
    reference = Reference("main", make(), SHAPE)
    views = [prefix(reference.axes, r) for r in (1.0, 0.5, 0.5, 0.25)]
    torch.manual_seed(0)
    states = [
        {
            n: torch.randn_like(t) if t.is_floating_point() else t
            for n, t in v.extract(reference.initial).items()
        }
        for v in views
    ]
    weights = [3.0, 1.0, 2.0, 5.0]
    kinds = (lambda s: s, pack, _as_row)
    merged = [
        merge(
            reference.initial,
            [Contribution(v, kind(s), w) for v, s, w in zip(views, states, weights, strict=True)],
        )
        for kind in kinds
    ]
    for name, old in reference.initial.items():
        if not old.is_floating_point():
            continue
        total, count = (
            torch.zeros(old.shape, dtype=torch.float64),
            torch.zeros(old.shape, dtype=torch.float64),
        )
        for v, s, w in zip(views, states, weights, strict=True):
            whole = v.scatter({n: torch.zeros_like(t) for n, t in reference.initial.items()}, s)[
                name
            ].double()
            held = v.scatter(
                {n: torch.zeros_like(t) for n, t in reference.initial.items()},
                {n: torch.ones_like(t) for n, t in s.items()},
            )[name].double()
            total, count = total + w * whole, count + w * held
        expected = torch.where(count > 0, total / count, old.double()).float()
        for found in merged:
            torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-7)
