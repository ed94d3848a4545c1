"""Fleets: how devices are laid out over tiers, who is chosen, and what is random about them."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.devices import (
    DEFAULT_TIERS,
    Fleet,
    FleetConfig,
    Tier,
    catalogue,
    make_fleet,
    read_fleet,
)
from nestling.errors import InputError
from nestling.seeds import derive, stream


def fleet_of(*tiers: Tier, size: int = 20, seed: int = 0) -> Fleet:
    return make_fleet(FleetConfig(size=size, tiers=tiers), seed)


def half_and_half(size: int, seed: int = 0, **options: float) -> Fleet:
    return fleet_of(
        Tier(ratio=1.0, share=0.5, **options),
        Tier(ratio=0.25, share=0.5, **options),
        size=size,
        seed=seed,
    )  # type: ignore[arg-type]


def test_the_default_fleet() -> None:
    fleet = make_fleet(FleetConfig(), 1)
    assert len(fleet) == 20
    assert fleet.tiers == DEFAULT_TIERS
    assert [fleet.count_of(tier) for tier in DEFAULT_TIERS] == [
        round(20 * tier.share) for tier in DEFAULT_TIERS
    ]
    assert len({tier.device for tier in DEFAULT_TIERS}) >= 5
    assert {catalogue()[tier.device].kind for tier in DEFAULT_TIERS} >= {
        "microcontroller",
        "board",
        "server",
    }
    assert fleet.profile_of(0).name == fleet.tier_of(0).device
    assert all(
        fleet.available(i, 0) and not fleet.drops(i, 0) and fleet.slowdown(i, 0) == 1.0
        for i in range(20)
    )
    assert all(fleet.free_memory(i, 0) == 100.0 for i in range(20))


@settings(max_examples=80, deadline=None)
@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    size=st.integers(1, 500),
    seed=st.integers(0, 2**40),
)
def test_counts_follow_shares(weights: list[int], size: int, seed: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    tiers = [Tier(name=f"tier {k}", ratio=0.5, share=share) for k, share in enumerate(shares)]
    fleet = fleet_of(*tiers, size=size, seed=seed)
    met = Counter(fleet.tier_index(i) for i in range(size))
    assert [met[k] for k in range(len(tiers))] == list(fleet.counts)
    assert sum(fleet.counts) == size
    for share, count in zip(shares, fleet.counts, strict=True):
        assert abs(count - share * size) < 1


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(1, 60), min_size=2, max_size=6), seed=st.integers(0, 2**40))
def test_counts_are_exact_and_members_enumerate_them(counts: list[int], seed: int) -> None:
    tiers = [Tier(name=f"tier {k}", ratio=0.5, count=count) for k, count in enumerate(counts)]
    fleet = fleet_of(*tiers, size=sum(counts), seed=seed)
    assert [fleet.count_of(f"tier {k}") for k in range(len(counts))] == counts
    members = [[fleet.member(k, j) for j in range(count)] for k, count in enumerate(counts)]
    assert sorted(i for tier in members for i in tier) == list(range(len(fleet)))
    assert all(fleet.tier_index(i) == k for k, tier in enumerate(members) for i in tier)


@pytest.mark.parametrize("size", [2, 3, 10, 20, 100, 999, 4096])
def test_tiers_are_interleaved(size: int) -> None:
    """Any stretch of numbers holds its fair part of a tier, so that no tier coincides with a range
    of clients."""
    fleet = half_and_half(size)
    firsts = [fleet.tier_index(i) == 0 for i in range(size)]
    for width in (size // 4, size // 2):
        for start in range(0, size - width + 1, max(1, size // 20)):
            assert abs(sum(firsts[start : start + width]) - width / 2) <= 1 + 1.5 * math.log2(size)


def test_the_layout_depends_on_the_seed_only() -> None:
    layouts = {
        tuple(half_and_half(50, seed).tier_index(i) for i in range(50)) for seed in (1, 1, 2, 3)
    }
    assert len(layouts) > 1
    assert [half_and_half(50, 7).tier_index(i) for i in range(50)] == [
        half_and_half(50, 7).tier_index(i) for i in range(50)
    ]


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(1, 300),
    n=st.integers(0, 60),
    availability=st.floats(0, 1),
    seed=st.integers(0, 2**40),
    round=st.integers(0, 10**6),
)
def test_choose(size: int, n: int, availability: float, seed: int, round: int) -> None:
    fleet = fleet_of(Tier(ratio=1.0, availability=availability), size=size, seed=seed)
    chosen = fleet.choose(round, n)
    assert chosen == sorted(set(chosen)) == fleet.choose(round, n)
    assert all(0 <= i < size and fleet.available(i, round) for i in chosen)
    reachable = [i for i in range(size) if fleet.available(i, round)]
    assert len(chosen) == min(n, len(reachable))
    if n >= len(reachable):
        assert chosen == reachable


def test_choose_is_uniform_and_differs_between_rounds() -> None:
    fleet = half_and_half(50)
    met = Counter(i for round in range(2000) for i in fleet.choose(round, 5))
    # 200 expected each; a standard deviation is 13.4.
    assert min(met[i] for i in range(50)) > 200 - 5 * 13.4
    assert max(met[i] for i in range(50)) < 200 + 5 * 13.4
    assert len({tuple(fleet.choose(round, 5)) for round in range(50)}) == 50
    assert half_and_half(50, seed=1).choose(0, 5) != fleet.choose(0, 5)


def test_choose_finds_the_rare_ones() -> None:
    fleet = half_and_half(1_000_000, availability=0.001)
    chosen = fleet.choose(0, 10)
    assert len(chosen) == 10
    assert all(fleet.available(i, 0) for i in chosen)
    assert half_and_half(1000, availability=0.0).choose(0, 10) == []


def test_a_million_devices_cost_what_the_chosen_cost() -> None:
    half_and_half(10).choose(0, 2)  # first-use imports aside
    tracemalloc.start()
    fleet = half_and_half(1_000_000, availability=0.5)
    assert len(fleet.choose(3, 100)) == 100
    assert fleet.free_memory(999_999, 3) == 100.0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000


@pytest.mark.parametrize("size", [5000, 1_000_000])
def test_choose_is_a_shuffle_drawn_one_by_one(size: int) -> None:
    """Draws are made many at a time; the numbers are those of one draw after another."""
    fleet, wanted = half_and_half(size, seed=3), min(size, 2500)
    rng, moved, found = stream(3, "choose", 8), dict[int, int](), []
    for step in range(wanted):
        other = int(rng.integers(step, size))
        found.append(moved.get(other, other))
        moved[other] = moved.pop(step, step)
    assert fleet.choose(8, wanted) == sorted(found)


@pytest.mark.parametrize("size", [5, 3000])
def test_a_small_fleet_is_shuffled_whole(size: int) -> None:
    fleet = half_and_half(size, seed=3)
    assert fleet.choose(8, size) == list(range(size))
    counts = np.zeros(size)
    for round in range(400):
        chosen = fleet.choose(round, max(1, size // 5))
        assert len(set(chosen)) == len(chosen) and chosen == sorted(chosen)
        counts[chosen] += 1
    # Everybody is drawn about equally often: 80 times, give or take five standard deviations.
    assert abs(counts - 80).max() < 5 * np.sqrt(80 * 0.8)


def test_what_is_certain_costs_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    certain, uncertain = (
        half_and_half(1000),
        half_and_half(1000, availability=0.5, dropout=0.5, slow=0.5),
    )
    hashed: list[object] = []
    monkeypatch.setattr(
        "nestling.devices.fleet.derive", lambda *purpose: hashed.append(purpose) or derive(*purpose)
    )
    for fleet in (certain, uncertain):
        chosen = fleet.choose(1, 100)
        assert len(chosen) == 100
        hashed.clear()  # one for the whole choice
        for i in chosen:
            fleet.drops(i, 1), fleet.slowdown(i, 1), fleet.free_memory(i, 1)
        assert (fleet is certain) == (not hashed)


def test_probabilities_come_out() -> None:
    fleet = half_and_half(100, availability=0.7, dropout=0.2, slow=0.5)
    pairs = [(i, round) for i in range(100) for round in range(100)]
    assert np.mean([fleet.available(i, r) for i, r in pairs]) == pytest.approx(0.7, abs=0.02)
    assert np.mean([fleet.drops(i, r) for i, r in pairs]) == pytest.approx(0.2, abs=0.02)
    logs = np.log([fleet.slowdown(i, r) for i, r in pairs])
    assert np.mean(logs) == pytest.approx(0, abs=0.02)
    assert np.std(logs) == pytest.approx(0.5, abs=0.02)


def test_what_is_random_is_independent_between_purposes() -> None:
    fleet = half_and_half(100, availability=0.5, dropout=0.5)
    both = np.mean(
        [fleet.available(i, r) and fleet.drops(i, r) for i in range(100) for r in range(50)]
    )
    assert both == pytest.approx(0.25, abs=0.03)


def test_free_memory_is_never_above_the_mean_nor_below_zero() -> None:
    fleet = fleet_of(Tier(ratio=1.0, memory_mean=50, memory_std=(10.0, 40.0)), size=200)
    free = np.array([[fleet.free_memory(i, r) for r in range(50)] for i in range(200)])
    assert free.max() <= 50
    assert free.min() == 0.0
    # One standard deviation per device: two groups of devices, whose mean distance from 50 is std *
    # sqrt(2 / pi).
    near = np.sort(50 - free.mean(axis=1))
    assert near[:40].mean() == pytest.approx(10 * math.sqrt(2 / math.pi), rel=0.2)
    assert near[-40:].mean() > 20


SIZES = {"M1": 0.25, "M2'": 0.40, "M2": 0.50, "M3'": 0.90, "M3": 1.00}
POOL = list(SIZES)


def trained(dispatched: str, free: float) -> str:
    """The largest pool model up to the one dispatched that fits; the smallest always trains."""
    fitting = [name for name in POOL[: POOL.index(dispatched) + 1] if free >= 100 * SIZES[name]]
    return (fitting or ["M1"])[-1]


def test_uncertain_memory_of_the_flexfl_fleet() -> None:
    """Upload over dispatch, and the share of each trained level, of 100 devices with 35/60/110 %
    memory and std {5, 8, 10}."""
    sent, trains = [], []
    for seed in range(6):
        tiers = [
            Tier(name=name, ratio=ratio, share=share, memory_mean=mean, memory_std=(5.0, 8.0, 10.0))
            for name, ratio, share, mean in (
                ("weak", 0.25, 0.4, 35.0),
                ("medium", 0.5, 0.3, 60.0),
                ("strong", 1.0, 0.3, 110.0),
            )
        ]
        fleet = fleet_of(*tiers, size=100, seed=seed)
        for round in range(200):
            rng, taken = stream(seed, "levels", round), set[int]()
            for level in rng.integers(0, 3, size=10):
                # The level is drawn first, then a device whose tier can hold it, each device at
                # most once.
                able = (
                    int(i)
                    for i in rng.permutation(100)
                    if i not in taken and fleet.tier_index(int(i)) >= level
                )
                i = next(able)
                taken.add(i)
                sent.append(("M1", "M2", "M3")[level])
                trains.append(trained(sent[-1], fleet.free_memory(i, round)))
    assert len(sent) == 12_000
    ratio = sum(SIZES[name] for name in trains) / sum(SIZES[name] for name in sent)
    assert ratio == pytest.approx(0.98, abs=0.01)
    shares = {name: trains.count(name) / len(trains) for name in POOL}
    expected = {"M1": 0.337, "M2'": 0.027, "M2": 0.311, "M3'": 0.059, "M3": 0.266}
    assert shares == pytest.approx(expected, abs=0.02)


GOOD = """
size = 10
deadline = 30

[[tiers]]
device = "nrf52840"
share = 0.4
memory_mean = 80
memory_std = [5, 10]

[[tiers]]
name = "big"
ratio = 0.5
share = 0.3
availability = 0.9

[[tiers]]
model = "mlp"
model_options = { hidden = 32 }
share = 0.3
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def test_a_fleet_file(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    config = read_fleet(path)
    assert (config.size, config.deadline) == (10, 30)
    assert [tier.name for tier in config.tiers] == ["nrf52840", "big", "mlp"]
    assert config.tiers[0].memory_std == (5, 10)
    assert config.tiers[2].model_options == {"hidden": 32}
    fleet = make_fleet(FleetConfig(path=str(path)), 0)
    assert fleet.counts == (4, 3, 3)
    assert fleet.deadline == 30.0
    assert fleet.profile_of(fleet.member("big", 0)).name == "reference"


def test_what_a_file_leaves_out(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("size = 10\ndeadline = 30\n", ""))
    fleet = make_fleet(FleetConfig(path=str(path), size=100, deadline=5.0), 0)
    assert (len(fleet), fleet.deadline) == (100, 5.0)
    counted = "[[tiers]]\nratio = 1\ncount = 3\n[[tiers]]\nratio = 0.5\ncount = 4\n"
    assert len(make_fleet(FleetConfig(path=str(written(tmp_path, counted)), size=100), 0)) == 7
    # the caller may know how many clients the data has
    assert read_fleet(written(tmp_path, "deadline = 3")).size == 0
    assert (
        make_fleet(FleetConfig(path=str(written(tmp_path, "size = 40"))), 0).tiers == DEFAULT_TIERS
    )


def test_own_devices_beside_the_built_in_ones(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "nestling" / "devices" / "catalogue.toml").read_text()
    board = (
        text[text.index("[stm32f446]") :]
        .split("\n\n")[0]
        .replace("[stm32f446]", "[my-board]")
        .replace("128 KB", "96 KB")
    )
    (tmp_path / "mine.toml").write_text(board)
    path = written(
        tmp_path,
        'catalogue = "mine.toml"\n[[tiers]]\ndevice = "my-board"\nshare = 0.5\n[[tiers]]\ndevice '
        '= "esp32"\nshare = 0.5',
    )
    fleet = make_fleet(FleetConfig(path=str(path)), 0)
    assert float(fleet.profile_of(fleet.member("my-board", 0)).ram_bytes) == 96 * 1024


def test_names_by_default() -> None:
    names = [
        Tier(device="esp32", ratio=0.5).name,
        Tier(ratio=0.25).name,
        Tier(ratio=1).name,
        Tier(model="mlp").name,
    ]
    assert names == ["esp32", "ratio-0.25", "ratio-1", "mlp"]
    assert Tier(ratio=1.0, memory_std=3.0).memory_std == (3.0,)  # type: ignore[arg-type]
    assert fleet_of(Tier(ratio=1.0), size=7).counts == (7,)  # a lone tier is the whole fleet


A, B = Tier(ratio=1.0, share=0.5), Tier(ratio=0.5, share=0.5)
BAD = [
    ((A, replace(B, share=0.4)), "fleet.tiers", "add up to 0.9"),
    ((A, replace(B, share=0.0)), "fleet.tiers[1].share", "missing"),
    ((A, replace(B, share=-0.5)), "fleet.tiers[1].share", "-0.5"),
    ((A, replace(B, share=float("nan"))), "fleet.tiers[1].share", "nan"),
    ((A, replace(B, share=0.0, count=10)), "fleet.tiers[0].share", "some a count"),
    ((A, replace(B, share=0.5, count=-2)), "fleet.tiers[1].count", "-2"),
    ((A, replace(B, name=A.name)), "fleet.tiers[1].name", "two tiers"),
    ((A, Tier(name="x", share=0.5)), "fleet.tiers[1]", "device, ratio or model"),
    ((A, Tier(ratio=0.5, model="mlp", share=0.5)), "fleet.tiers[1].ratio", "both"),
    ((A, replace(B, model_options={"hidden": 3})), "fleet.tiers[1].model_options", "model"),
    ((A, replace(B, ratio=1.5)), "fleet.tiers[1].ratio", "1.5"),
    ((A, replace(B, ratio=-0.5)), "fleet.tiers[1].ratio", "-0.5"),
    ((A, replace(B, cut="length")), "fleet.tiers[1].cut", "allowed: depth, width"),
    ((A, Tier(device="esp32", cut="depth", share=0.5)), "fleet.tiers[1].cut", "ratio"),
    ((A, Tier(device="esp23", share=0.5)), "fleet.tiers[1].device", "esp32"),
    ((A, replace(B, availability=1.1)), "fleet.tiers[1].availability", "1.1"),
    ((A, replace(B, dropout=-0.1)), "fleet.tiers[1].dropout", "-0.1"),
    ((A, replace(B, slow=-1.0)), "fleet.tiers[1].slow", "-1"),
    ((A, replace(B, memory_mean=-1.0)), "fleet.tiers[1].memory_mean", "-1"),
    ((A, replace(B, device="esp32", memory_mean=110.0)), "fleet.tiers[1].memory_mean", "110"),
    ((A, replace(B, memory_std=())), "fleet.tiers[1].memory_std", "at least one"),
    ((A, replace(B, memory_std=(1.0, -1.0))), "fleet.tiers[1].memory_std", "-1"),
]


@pytest.mark.parametrize(("tiers", "field", "text"), BAD)
def test_bad_tiers_name_the_field(tiers: tuple[Tier, ...], field: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        make_fleet(FleetConfig(tiers=tiers), 0)
    assert caught.value.field == field
    assert caught.value.fix
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("size", "deadline", "field"), [(-3, 0, "size"), (10**400, 0, "size"), (5, -1, "deadline")]
)
def test_bad_sizes(size: int, deadline: float, field: str) -> None:
    with pytest.raises(InputError) as caught:
        make_fleet(FleetConfig(size=size, deadline=deadline), 0)
    assert caught.value.field == f"fleet.{field}"


def test_counts_and_size_must_agree() -> None:
    tiers = (Tier(ratio=1.0, count=3), Tier(ratio=0.5, count=3))
    assert len(make_fleet(FleetConfig(tiers=tiers), 0)) == 6
    with pytest.raises(InputError, match="set size = 6") as caught:
        make_fleet(FleetConfig(size=20, tiers=tiers), 0)
    assert caught.value.field == "fleet.tiers"


@pytest.mark.parametrize(
    ("old", "new", "field", "text"),
    [
        ("share = 0.4", "shrae = 0.4", "fleet.tiers[0].shrae", "'share'"),
        ("deadline = 30", "dedline = 30", "fleet.dedline", "'deadline'"),
        ("deadline = 30", 'deadline = "soon"', "fleet.deadline", "soon"),
        ("size = 10", "size = 2.5", "fleet.size", "whole"),
        ("size = 10", "size = true", "fleet.size", "True"),
        ("size = 10", "catalogue = 3", "fleet.catalogue", "3"),
        ("size = 10", 'catalogue = "nowhere.toml"', "catalogue", "there is no file"),
        ("size = 10", "size = = 10", "fleet.path", "TOML"),
        ("ratio = 0.5", 'ratio = "half"', "fleet.tiers[1].ratio", "half"),
        ("ratio = 0.5", "device = 3", "fleet.tiers[1].device", "text"),
        ("memory_std = [5, 10]", 'memory_std = "5"', "fleet.tiers[0].memory_std", "5"),
        (
            "model_options = { hidden = 32 }",
            "model_options = 32",
            "fleet.tiers[2].model_options",
            "table",
        ),
        (GOOD, "tiers = 3", "fleet.tiers", "[[tiers]]"),
    ],
)
def test_bad_files_name_the_field(
    tmp_path: Path, old: str, new: str, field: str, text: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_fleet(written(tmp_path, GOOD.replace(old, new, 1)))
    assert caught.value.field == field
    assert text in str(caught.value)


def test_missing_file_and_two_sources(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file") as caught:
        make_fleet(FleetConfig(path=str(tmp_path / "none.toml")), 0)
    assert caught.value.field == "fleet.path"
    with pytest.raises(InputError, match="keep one"):
        make_fleet(FleetConfig(path=str(written(tmp_path, GOOD)), tiers=DEFAULT_TIERS), 0)


def test_numbers_outside_the_fleet() -> None:
    fleet = half_and_half(10)
    for wrong in (-1, 10):
        with pytest.raises(IndexError):
            fleet.tier_of(wrong)
    with pytest.raises(IndexError):
        fleet.member(0, 5)
    with pytest.raises(InputError, match="ratio-1"):
        fleet.count_of("ratio-2")
    with pytest.raises(InputError):
        fleet.choose(0, -1)
