"""Robust merges over views, against loops that look at one entry after another."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nestling.trust.robust import RULES, Robust
from nestling.views import Contribution, State, View, by_index, full, masked, merge, prefix
from tests.views.networks import NETWORKS
from tests.views.test_views import AXES, state_of

NAMES = [name for name in NETWORKS if name != "Grouped"]
Place = tuple[str, tuple[int, ...]]


def replies_of(name: str, seed: int, count: int) -> tuple[State, list[Contribution]]:
    """Weights, and what clients with views drawn at random (some masked, some that count only in
    part) made of them."""
    chance, axes, old = random.Random(seed), AXES[name], state_of(name, seed)
    torch.manual_seed(seed)
    given = []
    for _ in range(count):
        sizes = zip(axes.names, axes.sizes, strict=True)
        view = by_index(axes, {n: chance.sample(range(k), chance.randint(1, k)) for n, k in sizes})
        weight = next(n for n, t in old.items() if t.dim() > 1)
        if chance.random() < 0.3:
            view = masked(view, {weight: torch.rand(old[weight].shape) < 0.5})
        local = {n: t + torch.randn(t.shape) * 0.1 for n, t in view.extract(old).items()}
        local = {n: t.to(old[n].dtype) for n, t in local.items()}
        flags = {weight: torch.rand(local[weight].shape) < 0.7} if chance.random() < 0.3 else {}
        given.append(Contribution(view, local, float(chance.randint(1, 900)), flags))
    return old, given


def held_at(c: Contribution, like: State) -> dict[Place, float]:
    """What a contribution says, entry by entry of the reference."""
    found = {}
    for n in c.view.names:
        ones = torch.ones(c.view.shape(n), dtype=torch.bool)
        flags = ones if n not in c.view.masks else c.view.cut(n, torch.ones_like(like[n])).bool()
        flags = flags & c.present.get(n, ones)
        # Each local entry's place in the reference, by cutting the places themselves.
        plain = View(c.view.axes, c.view.keep)
        places = plain.cut(n, torch.arange(like[n].numel()).reshape(like[n].shape))
        shape = tuple(like[n].shape)
        for at, value, on in zip(
            places.reshape(-1).tolist(),
            c.state[n].reshape(-1).tolist(),
            flags.reshape(-1).tolist(),
            strict=True,
        ):
            if on:
                found[n, unravel(at, shape)] = float(value)
    return found


def unravel(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(shape):
        at, rest = divmod(at, size)
        found.insert(0, rest)
    return tuple(found)


def entries(state: State) -> Iterator[tuple[Place, Tensor]]:
    for n, t in state.items():
        for at in range(t.numel()):
            place = unravel(at, tuple(t.shape))
            yield (n, place), t[place]


def by_loops(
    rule: str, trim: float, old: State, given: Sequence[Contribution]
) -> dict[Place, float]:
    """The rule as one would explain it."""
    said = [held_at(c, old) for c in given]
    before = {place: float(t) for place, t in entries(old)}
    floats = {n for n, t in old.items() if t.is_floating_point()}
    lengths = []
    for own in said:
        steps = [v - before[p] for p, v in own.items() if p[0] in floats]
        lengths.append(math.sqrt(sum(s * s for s in steps) / max(len(steps), 1)))
    limit = statistics.median_low(lengths)
    scale = [min(1.0, limit / r) if r else 1.0 for r in lengths]
    chosen = set(range(len(given)))
    if rule == "krum":
        chosen = krum_by_loops(trim, said, floats)
    elif rule == "aligned":
        chosen = aligned_by_loops(before, said, floats)
    result = {}
    for place, was in before.items():
        holders = [k for k, own in enumerate(said) if place in own]
        values = sorted(said[k][place] for k in holders)
        taken = [k for k in holders if k in chosen]
        if rule in ("clipped", "aligned") or len(holders) < 3:
            new = [was + scale[k] * (said[k][place] - was) for k in taken]
        elif rule == "median":
            new = [statistics.median(values)]
        elif rule == "trimmed":
            b = max(1, math.floor(trim * len(values) + 1e-9))
            new = values[b : len(values) - b]
        else:
            new = [said[k][place] for k in taken]
        result[place] = statistics.fmean(new) if new else was
    return result


def aligned_by_loops(
    before: dict[Place, float], said: Sequence[dict[Place, float]], floats: set[str]
) -> set[int]:
    if len(said) < 3:
        return set(range(len(said)))
    holders = {
        place: [k for k, own in enumerate(said) if place in own]
        for place in before
        if place[0] in floats
    }
    cosines = []
    for own in said:
        mine = [place for place in own if place in holders]
        most = max((len(holders[place]) for place in mine), default=0)
        pairs = [
            (
                own[place] - before[place],
                statistics.median(said[j][place] - before[place] for j in holders[place]),
            )
            for place in mine
            if len(holders[place]) >= max(3, most / 2)
        ]
        lengths = math.sqrt(sum(s * s for s, _ in pairs) * sum(w * w for _, w in pairs))
        cosines.append(sum(s * w for s, w in pairs) / lengths if lengths else 0.0)
    limit = max(0.0, statistics.median_low(cosines) / 3)
    return {k for k, cosine in enumerate(cosines) if cosine > limit} or set(range(len(said)))


def krum_by_loops(trim: float, said: Sequence[dict[Place, float]], floats: set[str]) -> set[int]:
    n, scores = len(said), []
    if n < 3:
        return set(range(n))
    out = min(max(1, math.floor(trim * n + 1e-9)), (n - 1) // 2)
    for i in range(n):
        apart = []
        for j in range(n):
            common = [p for p in said[i].keys() & said[j].keys() if p[0] in floats]
            if i != j and common:
                gaps = sum((said[i][p] - said[j][p]) ** 2 for p in common)
                apart.append(gaps / len(common))
        near = sorted(apart)[: max(1, n - out - 2)]
        scores.append(statistics.fmean(near) if near else math.inf)
    limit = sorted(scores)[n - out - 1] * (1 + 1e-9)
    return {k for k, score in enumerate(scores) if score <= limit}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(8))
def test_every_entry_is_what_a_loop_says(rule: str, seed: int) -> None:
    name = NAMES[seed % len(NAMES)]
    old, given = replies_of(name, seed, count=2 + seed)
    before = {n: t.clone() for n, t in old.items()}
    merged = Robust(rule, 0.3).merge(old, given)
    expected = by_loops(rule, 0.3, old, given)
    assert all(torch.equal(old[n], before[n]) for n in old) and merged.keys() == old.keys()
    for (n, place), value in entries(merged):
        exact = merged[n].is_floating_point()
        wanted = expected[n, place] if exact else round(expected[n, place])
        assert float(value) == pytest.approx(wanted, rel=1e-6, abs=1e-6), (n, place)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_replies_does_not_matter(rule: str, seed: int) -> None:
    old, given = replies_of(NAMES[seed], seed, 7)
    one = Robust(rule).merge(old, given)
    random.Random(seed).shuffle(given)
    other = Robust(rule).merge(old, given)
    assert all(torch.allclose(one[n].double(), other[n].double(), atol=1e-7) for n in one)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
def test_equal_replies_come_back_as_they_are(rule: str, count: int) -> None:
    for view in (full(AXES["Residual"]), prefix(AXES["Residual"], 0.5)):
        local = view.extract(state_of("Residual", 1))
        given = [Contribution(view, local, float(k + 1)) for k in range(count)]
        merged = view.extract(Robust(rule).merge(state_of("Residual", 0), given))
        assert all(torch.equal(merged[n], t) for n, t in local.items())


@pytest.mark.parametrize("rule", RULES)
def test_nobody_answers_and_nothing_moves(rule: str) -> None:
    old = state_of("Residual", 0)
    assert all(torch.equal(t, old[n]) for n, t in Robust(rule).merge(old, []).items())


@pytest.mark.parametrize("rule", RULES)
def test_claimed_rows_do_not_count(rule: str) -> None:
    old, given = replies_of("Residual", 3, 6)
    lied = [replace(c, weight=c.weight * (1e6 if k == 2 else 1.0)) for k, c in enumerate(given)]
    one, other = (Robust(rule).merge(old, some) for some in (given, lied))
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert any(not torch.equal(t, merge(old, lied)[n]) for n, t in merge(old, given).items())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("honest", [3, 4, 9])
@pytest.mark.parametrize("sign", [-1, 1])
def test_one_liar_moves_nothing_beyond_what_honest_clients_say(
    rule: str, honest: int, sign: int
) -> None:
    """An attacker that holds everything says ±1e6 of every entry, beside honest clients that hold a
    half or all. median, trimmed and krum stay between what honest holders say; a clipped liar moves
    an entry by at most the median length times √(entries it holds) / holders."""
    axes, old = AXES["Residual"], state_of("Residual", 0)
    views = [prefix(axes, 0.5) if k < 3 else full(axes) for k in range(honest)]
    torch.manual_seed(honest)
    given = [
        Contribution(v, {n: t + (0.1 * torch.randn(t.shape)).to(t.dtype) for n, t in part.items()})
        for v in views
        if (part := v.extract(old))
    ]
    whole = full(axes)
    liar = Contribution(whole, {n: torch.full_like(t, sign * 10**6) for n, t in old.items()}, 1e9)
    merged = Robust(rule).merge(old, [*given, liar])
    said = [held_at(c, old) for c in given]
    floats = {n for n, t in old.items() if t.is_floating_point()}
    tried, moved = 0, 0.0
    for (n, place), value in entries(merged):
        honest_said = [own[n, place] for own in said if (n, place) in own]
        if len(honest_said) < 3 or n not in floats:
            continue
        tried += 1
        if rule in ("clipped", "aligned"):
            length = 0.2 * math.sqrt(whole.numel()) / (len(honest_said) + 1)
            assert abs(float(value) - float(old[n][place])) <= 0.5 + length
        else:
            assert min(honest_said) - 1e-6 <= float(value) <= max(honest_said) + 1e-6
        moved = max(moved, abs(float(merge(old, [*given, liar])[n][place])) if tried == 1 else 0)
    assert tried > 50 and moved > 1e5  # the mean is ruined


def test_one_liar_alone_with_an_entry_is_bounded_too() -> None:
    """Three honest clients hold a half; the liar alone holds the rest."""
    axes, old = AXES["Residual"], state_of("Residual", 0)
    half = prefix(axes, 0.5)
    honest = {n: t + 0.1 if t.is_floating_point() else t for n, t in half.extract(old).items()}
    liar = {n: torch.full_like(t, 10**6) for n, t in old.items()}
    for rule in RULES:
        told = Robust(rule)
        merged = told.merge(
            old, [Contribution(half, honest)] * 3 + [Contribution(full(axes), liar)]
        )
        steps = [
            float((merged[n] - t).abs().max()) for n, t in old.items() if t.is_floating_point()
        ]
        assert max(steps) <= 0.1 * math.sqrt(full(axes).numel()) + 0.1
        news = told.news()
        assert told.news() == [] and (rule == "clipped") == (news == [])


def test_who_turns_its_sign_has_no_say_where_nobody_else_holds_an_entry_either() -> None:
    """Three honest clients hold a half, a fourth and a liar hold all. By the half that enough hold
    the liar is found out: of the rest the fourth alone decides, where other rules ask both."""
    axes, old = AXES["Residual"], state_of("Residual", 0)
    half, whole = prefix(axes, 0.5), full(axes)
    torch.manual_seed(0)
    way = {n: 0.1 * torch.rand(t.shape) for n, t in old.items() if t.is_floating_point()}
    true = {n: old[n] + way[n] if n in way else old[n] for n in old}
    false = {n: old[n] - way[n] if n in way else old[n] for n in old}
    given = [*[Contribution(half, half.extract(true))] * 3, Contribution(whole, true)]
    merged = Robust("aligned").merge(old, [*given, Contribution(whole, false)])
    clean = Robust("aligned").merge(old, given)
    assert all(torch.allclose(merged[n], clean[n], atol=1e-6) for n in way)
    lied = Robust("median").merge(old, [*given, Contribution(whole, false)])
    assert any(not torch.allclose(lied[n], clean[n], atol=1e-3) for n in way)


def test_the_share_of_entries_that_few_hold_is_told() -> None:
    axes, old = AXES["Residual"], state_of("Residual", 0)
    half, whole = prefix(axes, 0.5), full(axes)
    told = Robust("median")
    told.merge(old, [Contribution(v, v.extract(old)) for v in (half, half, half, whole)])
    share = 1 - half.numel() / whole.numel()
    assert f"{share:.0%} of the entries" in told.news()[0]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("median", "4 of 10"),
        ("trimmed", "2 of 10"),
        ("krum", "2 of 10"),
        ("clipped", "5 of 10"),
        ("aligned", "4 of 10"),
    ],
)
def test_what_is_promised(rule: str, said: str) -> None:
    assert said in Robust(rule).promise(10)
