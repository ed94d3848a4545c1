"""No client weighs more than its share of an entry, and where nobody would, no bit changes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

import nestling
from nestling import InputError, Server, SplitConfig
from nestling.trust.weighing import Lowered, fair_cap, fair_caps, merge_within
from nestling.views import Contribution, full, merge, prefix, trace
from tests.methods.test_server import equal_groups
from tests.small import small
from tests.views.networks import SHAPE, Flattening


def test_the_cap_gives_the_heaviest_just_its_share() -> None:
    assert fair_cap([10, 10, 10], 0.5) == math.inf
    assert fair_cap([1000, 10, 10], 0.5) == 20  # 20 of 40
    assert fair_cap([1000, 900, 10, 10, 10], 0.25) == pytest.approx(15)  # 15 of 60, both
    assert fair_cap([1000, 40], 0.5) == 40  # two count alike
    assert fair_cap([1000, 40], 0.1) == 40
    assert fair_cap([1000], 0.1) == math.inf  # who is alone has all of it
    assert fair_cap([], 0.5) == math.inf


def test_no_share_of_anybody_is_above_the_most() -> None:
    draw = random.Random(0)
    for _ in range(300):
        count, most = draw.randint(1, 9), draw.choice([0.1, 0.2, 0.34, 0.5, 0.9])
        weights = [draw.choice([1, 5, 20, 2**20, 2**39]) * draw.random() for _ in range(count)]
        cap = fair_cap(weights, most)
        held = [min(w, cap) for w in weights]
        allowed = max(most, 1 / count)
        assert max(held) / sum(held) <= allowed + 1e-6
        if math.isfinite(cap):  # no lower than need be
            assert max(held) / sum(held) >= allowed - 1e-6


def test_each_entry_has_its_own_holders() -> None:
    caps = fair_caps(torch.tensor([[100.0, 0, 100], [10, 10, 0], [10, 30, 0]]), 0.5)
    assert caps.tolist() == [20, 10, math.inf]


def contributions(rows: list[float]) -> tuple[dict[str, Tensor], list[Contribution]]:
    """Four clients with parts of one network: two with all of it, two with half of the channels."""
    net = Flattening()
    axes, whole = trace(net, SHAPE), {n: t.clone() for n, t in net.state_dict().items()}
    views = [full(axes), full(axes), prefix(axes, 0.5), prefix(axes, 0.5)]
    given = []
    for number, (view, weight) in enumerate(zip(views, rows, strict=True)):
        state = {n: torch.full_like(t, float(number)) for n, t in view.extract(whole).items()}
        given.append(Contribution(view, state, weight))
    return whole, given


def test_the_mean_is_bounded_entry_by_entry() -> None:
    """The first client claims 2**20 rows: of what all four hold it has half, of what two hold as
    much as the other."""
    whole, given = contributions([2**20, 10, 20, 30])
    merged = merge_within(whole, given, 0.5)
    shared = (60 * 0 + 10 * 1 + 20 * 2 + 30 * 3) / 120
    found = {round(float(v), 6) for t in merged.values() for v in t.flatten()}
    assert found == {0.5, round(shared, 6)}
    assert max(float(t.max()) for t in merge(whole, given).values()) < 0.001


def test_where_nobody_has_too_much_no_bit_changes() -> None:
    whole, given = contributions([11, 11, 20, 17])
    bounded, plain = merge_within(whole, given, 0.5), merge(whole, given)
    assert all(torch.equal(bounded[n], plain[n]) for n in plain)


def test_entries_that_do_not_count_are_nobody_s() -> None:
    whole, given = contributions([2**20, 10, 20, 30])
    name = next(n for n, t in whole.items() if t.dim() == 2)
    none = torch.zeros(given[0].view.shapes[name], dtype=torch.bool)
    given[0].present = {name: none}
    given[1].present = {name: none}
    merged = merge_within(whole, given, 0.5)[name]
    shape = given[2].view.shapes[name]
    part = merged[: shape[0], : shape[1]]
    assert torch.equal(part, torch.full_like(part, 2.5))  # two hold it: alike


def test_more_clients_than_one_number_has_bits() -> None:
    whole, (first, *_) = contributions([1, 1, 1, 1])
    flags = {n: torch.ones(s, dtype=torch.bool) for n, s in first.view.shapes.items()}
    given = [
        Contribution(
            first.view,
            {n: torch.full_like(t, float(k == 0)) for n, t in whole.items()},
            1e6 if k == 0 else 1.0,
            flags,  # flags of their own: each is a group of its own
        )
        for k in range(130)
    ]
    merged = merge_within(whole, given, 0.25)
    assert all(torch.allclose(t, torch.tensor(0.25)) for t in merged.values())


UNEQUAL = SplitConfig(kind="quantity", public=0.0)


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedproto", "decoupled", "fedgen"])
def test_a_simulation_is_bounded_where_it_is_asked_for(method: str) -> None:
    free = small(method, rounds=1, participants=4, split=UNEQUAL)
    ends = [
        nestling.run(free.with_changes(server=Server(most_share=most))).federation
        for most in (0.0, 1.0, 0.3)
    ]
    assert len({ends[0].world.split.size(c) for c in range(4)}) > 1
    assert equal_groups(ends[0].method.state(), ends[1].method.state())
    same = equal_groups(ends[0].method.state(), ends[2].method.state())
    assert same == (method == "heterofl")  # whose clients count alike


def test_who_is_brought_down_is_said() -> None:
    rows = nestling.run(small("fedavg", rounds=1, split=UNEQUAL, server=Server(most_share=0.3)))
    (said,) = [row["clipped"] for row in rows.metrics]
    assert all("rows count as" in one["reason"] and "most_share" in one["reason"] for one in said)
    assert "clipped" not in nestling.run(small("fedavg", rounds=1, split=UNEQUAL)).metrics[0]


def test_a_share_is_a_share() -> None:
    with pytest.raises(InputError, match=r"server.most_share: must be in \[0, 1\]"):
        Server(most_share=1.5)


def test_whose_weight_was_brought_down_in_single_entries_is_said_by_name() -> None:
    """Two of four hold the last channels: who has more rows there counts as the other does, though
    it has no more of the round's rows than it may."""
    bounded = Server(most_share=0.5)
    asked = small("shared-average", rounds=1, split=UNEQUAL, participants=4)
    (row,) = nestling.run(asked.with_changes(server=bounded)).metrics
    said = {one["client"]: one["reason"] for one in row["clipped"]}
    assert said and set(said) <= set(row["clients"])
    assert all("its weight was brought down in" in reason for reason in said.values())
    (free,) = nestling.run(asked).metrics
    assert "clipped" not in free


def test_only_what_was_brought_down_is_counted() -> None:
    """40 of 100 rows are no more than half of what all hold, and four times the 10 of the other who
    holds the rest."""
    whole, given = contributions([40, 10, 20, 30])
    for number, one in enumerate(given):
        one.client = number
    lowered: dict[int, Lowered] = {}
    merge_within(whole, given, 0.5, lowered)
    (alone,) = [lowered.pop(0)]
    rest = sum(math.prod(t.shape) for t in whole.values()) - sum(
        math.prod(shape) for shape in given[2].view.shapes.values()
    )
    assert not lowered and alone.entries == rest and alone.least == pytest.approx(0.25)
