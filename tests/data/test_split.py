from __future__ import annotations

import pickle
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.data import partition
from nestling.data.dataset import Dataset
from nestling.data.split import KINDS, DrawnSplit, SplitConfig, make_split, take_public
from nestling.errors import InputError

DIVIDED = [kind for kind in KINDS if kind != "natural"]
DRAWN = ["iid", "dirichlet", "classes"]


def labels(rows: int, classes: int, skew: float, seed: int) -> np.ndarray:
    """Every class occurs; `skew` > 0 makes later classes rarer."""
    weight = np.exp(-skew * np.arange(classes))
    drawn = np.random.default_rng(seed).choice(classes, rows, p=weight / weight.sum())
    drawn[:classes] = np.arange(classes)
    return drawn


@st.composite
def problems(draw, kinds=tuple(DIVIDED)):
    classes = draw(st.integers(2, 12))
    clients = draw(st.integers(1, 25))
    min_size = draw(st.integers(1, 8))
    rows = max(classes, clients * min_size) + draw(st.integers(0, 400))
    config = SplitConfig(
        kind=draw(st.sampled_from(kinds)),
        alpha=draw(st.sampled_from([1e-300, 0.01, 0.1, 0.5, 10.0, 1e308])),
        classes=draw(st.integers(1, classes)),
        min_size=min_size,
        holdout=draw(st.sampled_from([0.0, 0.1, 0.5, 0.99])),
    )
    y = labels(rows, classes, draw(st.sampled_from([0.0, 0.3, 1.0])), draw(st.integers(0, 99)))
    return config, {
        "y": y,
        "classes": classes,
        "clients": clients,
        "seed": draw(st.integers(0, 2**40)),
    }


def divided(config, given_):
    """The split, or None where classes are too rare for what is asked (which must be said, not
    hidden)."""
    try:
        return make_split(config, **given_)
    except InputError as error:
        if config.kind == "classes" and error.field in ("split.min_size", "split.classes"):
            return None
        raise


def everything(split) -> list[np.ndarray]:
    return [
        np.concatenate([split.indices(client), split.holdout(client)])
        for client in range(split.clients)
    ]


# Divided rows


@settings(max_examples=200, deadline=None)
@given(problems())
def test_rows_are_covered_exactly_once_and_nobody_is_too_small(problem):
    config, given_ = problem
    split = divided(config, given_)
    if split is None:
        return
    parts = everything(split)
    covered = np.sort(np.concatenate(parts))
    if config.kind == "classes" and split.clients * config.classes < given_["classes"]:
        assert len(np.unique(covered)) == len(covered)
    else:
        assert np.array_equal(covered, np.arange(len(given_["y"])))
    assert min(map(len, parts)) >= config.min_size


@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_the_same_seed_gives_the_same_split_in_any_order(problem, order):
    config, given_ = problem
    one, two = divided(config, given_), divided(config, given_)
    if one is None or two is None:
        assert one is two
        return
    clients = list(range(one.clients))
    first = {client: one.indices(client) for client in clients}
    order.shuffle(clients)
    for client in clients:
        two.counts(client), two.holdout(client)
        assert np.array_equal(two.indices(client), first[client])


@settings(max_examples=100, deadline=None)
@given(problems())
def test_sizes_counts_and_holdout_agree(problem):
    config, given_ = problem
    split = divided(config, given_)
    if split is None:
        return
    for client in range(split.clients):
        rows, kept = split.indices(client), split.holdout(client)
        assert rows.dtype == np.int64
        assert split.size(client) == len(rows) >= 1
        assert np.array_equal(
            split.counts(client), [(given_["y"][rows] == c).sum() for c in range(given_["classes"])]
        )
        wanted = config.holdout * (len(rows) + len(kept))
        assert abs(len(kept) - wanted) <= 0.5 or len(rows) == 1


@settings(max_examples=150, deadline=None)
@given(problems(kinds=("classes",)))
def test_every_client_holds_exactly_its_classes(problem):
    config, given_ = problem
    split = divided(replace(config, holdout=0.0), given_)
    if split is None:
        return
    counts = np.stack([split.counts(client) for client in range(split.clients)])
    assert (np.count_nonzero(counts, axis=1) == config.classes).all()
    if split.clients * config.classes >= given_["classes"]:
        assert counts.sum(0).all(), "each class has a holder"
    for column in counts.T:
        shares = column[column > 0]
        assert len(shares) == 0 or shares.max() - shares.min() <= 1, (
            "a class is divided evenly among its holders"
        )


def test_balanced_classes_are_dealt_in_many_combinations():
    split = make_split(
        SplitConfig(kind="classes"), y=np.arange(10_000) % 10, classes=10, clients=100, seed=0
    )
    counts = np.stack([split.counts(client) for client in range(100)])
    assert (np.count_nonzero(counts, axis=0) == 20).all()
    assert len({tuple(np.flatnonzero(row)) for row in counts}) > 25
    assert {split.size(client) for client in range(100)} == {100}


def test_a_class_that_does_not_occur_is_no_trouble():
    y = np.array([0, 2, 5] * 100)
    for kind in DIVIDED:
        split = make_split(SplitConfig(kind=kind, classes=6), y=y, classes=6, clients=10, seed=0)
        assert sum(split.counts(client) for client in range(10)).tolist() == [
            100,
            0,
            100,
            0,
            0,
            100,
        ]
    for kind in DRAWN:
        split = make_split(
            SplitConfig(kind=kind, classes=6, size=30), y=y, classes=6, clients=10, seed=0
        )
        assert split.counts(3)[[1, 3, 4]].sum() == 0


def test_classes_too_rare_for_the_clients_are_refused():
    y = np.array([0] * 100 + [1])
    with pytest.raises(InputError) as caught:
        make_split(SplitConfig(kind="classes", classes=2), y=y, classes=2, clients=5, seed=0)
    assert caught.value.field == "split.classes"
    with pytest.raises(InputError) as caught:
        make_split(SplitConfig(kind="classes", classes=1), y=y, classes=2, clients=2, seed=0)
    assert caught.value.field == "split.min_size"


def test_iid_sizes_differ_by_at_most_one():
    split = make_split(
        SplitConfig(kind="iid"), y=np.arange(1003) % 10, classes=10, clients=10, seed=0
    )
    assert sorted({split.size(client) for client in range(10)}) == [100, 101]


def label_skew(alpha: float, size: int) -> float:
    """Mean share of a client's largest class: 0.1 for equal classes, 1 for a single one."""
    y = np.arange(20_000) % 10
    split = make_split(
        SplitConfig(kind="dirichlet", alpha=alpha, size=size), y=y, classes=10, clients=40, seed=0
    )
    return float(np.mean([split.counts(client).max() / split.size(client) for client in range(40)]))


@pytest.mark.parametrize("size", [0, 400])
def test_smaller_alpha_means_more_label_skew(size):
    skews = [label_skew(alpha, size) for alpha in (1000.0, 1.0, 0.1, 0.01)]
    assert skews == sorted(skews)
    assert skews[0] < 0.15
    assert skews[-1] > 0.8


def test_drawn_labels_follow_the_dirichlet_law():
    # For Dirichlet(alpha) over C classes the variance of one share is (1/C)(1 - 1/C) / (C alpha +
    # 1).
    y = np.arange(50_000) % 5
    split = make_split(SplitConfig(alpha=0.7, size=2000), y=y, classes=5, clients=600, seed=1)
    shares = np.stack([split.counts(client) / 2000 for client in range(600)])
    assert np.allclose(shares.mean(0), 0.2, atol=0.03)
    assert np.isclose(shares.var(0).mean(), 0.2 * 0.8 / (5 * 0.7 + 1), rtol=0.1)


def test_quantity_skews_sizes_and_not_labels():
    y = np.arange(50_000) % 5
    split = make_split(SplitConfig(kind="quantity", alpha=0.3), y=y, classes=5, clients=20, seed=0)
    sizes = [split.size(client) for client in range(20)]
    assert max(sizes) > 10 * min(sizes)
    assert np.allclose(split.counts(int(np.argmax(sizes))) / max(sizes), 0.2, atol=0.03)
    even = make_split(SplitConfig(kind="quantity", alpha=1e4), y=y, classes=5, clients=20, seed=0)
    assert max(even.size(client) for client in range(20)) < 2700


def test_a_tight_dirichlet_split_still_ends():
    y = np.arange(1000) % 10
    split = make_split(SplitConfig(alpha=0.01, min_size=10), y=y, classes=10, clients=100, seed=0)
    assert {split.size(client) for client in range(100)} == {10}


def test_a_client_with_its_fair_share_takes_no_further_class():
    y = np.arange(4000) % 10
    for seed in range(10):
        split = make_split(
            SplitConfig(alpha=0.01, min_size=1), y=y, classes=10, clients=20, seed=seed
        )
        assert max(split.size(client) for client in range(20)) < 4000 / 20 + 400, (
            "below the share before its last class of 400"
        )


@pytest.mark.parametrize("alpha", [1e-300, 1e-9, 0.5, 1e9, 1e308])
def test_proportions_are_shares_for_any_alpha(alpha):
    rng = np.random.default_rng(0)
    shares = np.stack([partition.proportions(alpha, 4, rng) for _ in range(400)])
    assert np.isfinite(shares).all()
    assert np.allclose(shares.sum(1), 1)
    assert np.allclose(shares.mean(0), 0.25, atol=0.1), "no party is favoured"


def test_topping_up_takes_from_the_largest_only():
    sizes = np.array([50, 1, 30, 12, 7])
    owner = np.repeat(np.arange(5), sizes)
    moved = partition._top_up(owner, sizes, 10, np.random.default_rng(0))
    after = np.bincount(moved, minlength=5)
    assert after.tolist() == [38, 10, 30, 12, 10]
    kept = moved == owner
    assert kept.sum() == 100 - 12
    assert set(owner[~kept]) == {0}


# Natural clients


CLIENT = np.repeat([0, 1, 2, 3], [5, 1, 9, 10])


def test_natural_clients_keep_their_own_rows():
    split = make_split(
        SplitConfig(kind="natural"),
        y=np.arange(25) % 5,
        classes=5,
        clients=4,
        seed=0,
        client=CLIENT,
    )
    for client in range(4):
        assert sorted(split.indices(client)) == np.flatnonzero(client == CLIENT).tolist()


def test_fewer_natural_clients_are_a_prefix_of_a_shuffle():
    y, config = np.arange(25) % 5, SplitConfig(kind="natural")
    chosen = {}
    for clients in (1, 2, 3):
        split = make_split(config, y=y, classes=5, clients=clients, seed=1, client=CLIENT)
        people = [set(CLIENT[rows]) for rows in everything(split)]
        assert all(len(person) == 1 for person in people)
        assert [len(rows) for rows in everything(split)] == [
            int((next(iter(person)) == CLIENT).sum()) for person in people
        ]
        chosen[clients] = people
    assert chosen[3][:2] == chosen[2]
    assert chosen[2][:1] == chosen[1]
    starts = {
        tuple(make_split(config, y=y, classes=5, clients=1, seed=seed, client=CLIENT).counts(0))
        for seed in range(20)
    }
    assert len(starts) == 4, "the seed decides who is chosen"


def test_natural_needs_clients_and_enough_of_them():
    y = np.arange(25) % 5
    with pytest.raises(InputError, match="no natural clients") as caught:
        make_split(SplitConfig(kind="natural"), y=y, classes=5, clients=4, seed=0)
    assert caught.value.field == "split.kind"
    with pytest.raises(InputError, match="5 clients wanted, the data has 4"):
        make_split(SplitConfig(kind="natural"), y=y, classes=5, clients=5, seed=0, client=CLIENT)
    with pytest.raises(InputError, match="clients are"):
        make_split(
            SplitConfig(kind="natural"), y=y, classes=5, clients=4, seed=0, client=CLIENT[1:]
        )


# Drawn rows


@settings(max_examples=150, deadline=None)
@given(problems(kinds=tuple(DRAWN)), st.integers(1, 60), st.integers(1, 10**6))
def test_a_drawn_client_equals_itself_on_every_draw(problem, size, clients):
    config, given_ = problem
    size = min(max(size, config.classes), len(given_["y"]))
    config, given_ = replace(config, size=size), {**given_, "clients": clients}
    one, two = make_split(config, **given_), make_split(config, **given_)
    asked = [0, clients - 1, clients // 2]
    first = {client: (one.indices(client), one.holdout(client)) for client in asked}
    for client in reversed(asked):
        rows, kept = two.indices(client), two.holdout(client)
        assert np.array_equal(rows, first[client][0])
        assert np.array_equal(kept, first[client][1])
        assert len(rows) + len(kept) == size
        assert len(rows) >= 1
        assert two.size(client) == len(rows)
        assert not set(rows) & set(kept), "no row is both trained on and tested with"
        assert np.array_equal(
            two.counts(client), np.bincount(given_["y"][rows], minlength=given_["classes"])
        )
        everything_ = np.concatenate([rows, kept])
        times, held = np.bincount(everything_, minlength=len(given_["y"])), np.bincount(given_["y"])
        for label in set(given_["y"][everything_[times[everything_] > 1]]):
            assert (times[given_["y"] == label] >= 1).all(), (
                f"class {label} repeats before all its {held[label]} rows are used"
            )
        if config.kind == "iid":
            assert times.max() == 1
        if config.kind == "classes":
            assert len(set(given_["y"][everything_])) == config.classes


def test_numpy_numbers_name_the_same_client():
    split = make_split(SplitConfig(size=20), y=np.arange(100) % 5, classes=5, clients=10, seed=0)
    assert np.array_equal(split.indices(np.int64(3)), split.indices(3))
    assert not np.array_equal(split.indices(4), split.indices(3))


def test_a_million_clients_take_no_memory_of_their_own():
    y = np.arange(10_000) % 10
    tracemalloc.start()
    small = make_split(SplitConfig(size=50), y=y, classes=10, clients=10, seed=0)
    small_bytes = tracemalloc.get_traced_memory()[0]
    large = make_split(SplitConfig(size=50), y=y, classes=10, clients=1_000_000, seed=0)
    large_bytes = tracemalloc.get_traced_memory()[0] - small_bytes
    tracemalloc.stop()
    assert large_bytes < 1.1 * small_bytes
    assert large.size(999_999) == len(large.indices(999_999)) == 50
    assert np.array_equal(large.indices(7), small.indices(7)), (
        "a client's rows do not depend on how many others there are"
    )


def test_a_size_needs_no_draw_and_one_draw_answers_for_a_client(monkeypatch):
    y, draws = np.arange(1000) % 10, []
    split = make_split(
        SplitConfig(size=20, holdout=0.2), y=y, classes=10, clients=1_000_000, seed=0
    )
    drawing = DrawnSplit._drawn
    monkeypatch.setattr(
        DrawnSplit, "_drawn", lambda self, client: draws.append(client) or drawing(self, client)
    )
    assert [split.size(client) for client in (3, 999_999)] == [16, 16] and draws == []
    assert (len(split.indices(3)), len(split.holdout(3)), split.counts(3).sum()) == (
        16,
        4,
        16,
    ) and draws == [3]


def test_clients_out_of_range_are_an_error():
    for config in (SplitConfig(), SplitConfig(size=20)):
        split = make_split(config, y=np.arange(100) % 5, classes=5, clients=3, seed=0)
        for ask in (split.indices, split.holdout, split.size, split.counts):
            for client in (-1, 3):
                with pytest.raises(IndexError):
                    ask(client)


def test_answers_are_the_callers_to_change():
    for config in (SplitConfig(holdout=0.2), SplitConfig(size=20, holdout=0.2)):
        split = make_split(config, y=np.arange(100) % 5, classes=5, clients=3, seed=0)
        before = split.indices(1).copy()
        split.indices(1)[:] = 0
        torch.from_numpy(split.holdout(1)).zero_()
        assert np.array_equal(split.indices(1), before)


@pytest.mark.parametrize("config", [SplitConfig(), SplitConfig(size=20)])
def test_a_split_travels_to_another_process(config):
    split = make_split(config, y=np.arange(100) % 5, classes=5, clients=3, seed=0)
    assert np.array_equal(pickle.loads(pickle.dumps(split)).indices(2), split.indices(2))


def test_the_seed_matters_and_global_generators_do_not():
    y = np.arange(200) % 5
    for config in (
        *(SplitConfig(kind=kind) for kind in DIVIDED),
        *(SplitConfig(kind=kind, size=20) for kind in DRAWN),
    ):
        np.random.seed(0)
        random.seed(0)
        one = make_split(config, y=y, classes=5, clients=4, seed=1).indices(0)
        np.random.seed(1)
        random.seed(1)
        assert np.array_equal(one, make_split(config, y=y, classes=5, clients=4, seed=1).indices(0))
        assert not np.array_equal(
            one, make_split(config, y=y, classes=5, clients=4, seed=2).indices(0)
        )


# Bad input


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "dirichlett"}, "split.kind"),
        ({"alpha": 0.0}, "split.alpha"),
        ({"alpha": -1.0}, "split.alpha"),
        ({"alpha": float("nan")}, "split.alpha"),
        ({"alpha": float("inf")}, "split.alpha"),
        ({"classes": 0}, "split.classes"),
        ({"kind": "classes", "classes": 6}, "split.classes"),
        ({"min_size": 0}, "split.min_size"),
        ({"size": -1}, "split.size"),
        ({"size": 101}, "split.size"),
        ({"holdout": 1.0}, "split.holdout"),
        ({"holdout": -0.1}, "split.holdout"),
        ({"holdout": float("nan")}, "split.holdout"),
        ({"public": 1.0}, "split.public"),
        ({"public": -0.1}, "split.public"),
        ({"public": float("nan")}, "split.public"),
        ({"kind": "quantity", "size": 10}, "split.size"),
        ({"kind": "natural", "size": 10}, "split.size"),
        ({"kind": "classes", "classes": 3, "size": 2}, "split.size"),
        ({"min_size": 34}, "split.size"),
    ],
)
def test_bad_fields_are_named(change, field):
    with pytest.raises(InputError) as caught:
        make_split(
            replace(SplitConfig(), **change), y=np.arange(100) % 5, classes=5, clients=3, seed=0
        )
    assert caught.value.field == field
    assert caught.value.fix


def test_too_many_clients_are_told_to_draw():
    with pytest.raises(InputError, match=r"set split\.size .* or use fewer clients"):
        make_split(SplitConfig(), y=np.arange(100) % 5, classes=5, clients=1_000_000, seed=0)


@pytest.mark.parametrize(
    "y",
    [
        np.arange(10) - 1,
        np.arange(10) + 1,
        np.zeros(10),
        np.zeros(0, np.int64),
        np.zeros((10, 1), np.int64),
    ],
)
def test_bad_labels_are_refused(y):
    with pytest.raises(InputError) as caught:
        make_split(SplitConfig(), y=y, classes=10, clients=1, seed=0)
    assert caught.value.field == "data"


def test_no_clients_are_refused():
    with pytest.raises(InputError) as caught:
        make_split(SplitConfig(), y=np.arange(100) % 5, classes=5, clients=0, seed=0)
    assert caught.value.field == "clients"


# The server's public rows


def dataset(rows: int, classes: int, clients: int = 0) -> Dataset:
    x = torch.arange(rows, dtype=torch.float32)[:, None].contiguous()
    y = torch.from_numpy(labels(rows, classes, 0.5, 0))
    client = np.sort(np.arange(rows) % clients) if clients else None
    return Dataset("rows", x, y, x[:2].clone(), y[:2].clone(), classes, client)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(20, 500),
    st.integers(2, 8),
    st.sampled_from([0, 1, 5, 20]),
    st.floats(0.001, 0.99),
    st.integers(0, 99),
)
def test_public_rows_are_taken_out_and_stratified(rows, classes, clients, share, seed):
    data = dataset(rows, classes, clients)
    try:
        rest, public = take_public(data, share, seed)
    except InputError as error:
        if error.field == "split.public" and rows == clients:  # every row is somebody's last
            return
        raise
    assert public is not None
    rest.check()
    public.check()
    assert sorted(torch.cat([rest.x, public.x]).flatten().tolist()) == list(range(rows))
    assert torch.equal(data.y[rest.x.flatten().long()], rest.y)
    assert torch.equal(data.y[public.x.flatten().long()], public.y)
    before, taken = (
        torch.bincount(data.y, minlength=classes),
        torch.bincount(public.y, minlength=classes),
    )
    assert (before - taken >= 1).all(), "every class stays"
    if not clients:
        room = before - 1
        assert ((taken - torch.minimum(before * share, room)).abs() <= 1.5).all(), "stratified"
    if data.client is not None:
        assert rest.client is not None
        assert set(rest.client) == set(data.client), "every client stays"
        assert np.array_equal(rest.client, data.client[rest.x.flatten().long().numpy()])
        assert public.client is None
    again, _ = take_public(data, share, seed)
    assert torch.equal(again.x, rest.x)


def test_no_public_rows_on_request():
    data = dataset(50, 3)
    rest, public = take_public(data, 0.0, 0)
    assert rest is data
    assert public is None


def test_one_percent_of_balanced_data_is_balanced():
    x = torch.zeros(10_000, 1)
    data = Dataset("even", x, torch.arange(10_000) % 10, x[:10], torch.arange(10), 10)
    _, public = take_public(data, 0.01, 0)
    assert public is not None
    assert torch.bincount(public.y).tolist() == [10] * 10


def test_a_bad_share_is_refused():
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError) as caught:
            take_public(dataset(50, 3), share, 0)
        assert caught.value.field == "split.public"


def test_public_rows_that_nobody_can_spare_are_refused():
    x = torch.zeros(4, 1)
    data = Dataset("tiny", x, torch.arange(4), x, torch.arange(4), 4)
    with pytest.raises(InputError, match="no row can be spared"):
        take_public(data, 0.5, 0)
