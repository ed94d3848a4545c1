"""FlexFL: the pool, the devices that cut further, self-distillation, and the identities and traps
that concern it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nestling
from nestling import EngineConfig, FleetConfig, InputError, Named, SplitConfig, Tier
from nestling.methods.submodel.apoz import WidthScale, measure, units_of
from nestling.methods.submodel.flexfl import FlexFL
from nestling.methods.submodel.inner_teachers import self_distilled
from nestling.methods.submodel.pool import params
from nestling.models import build
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.training.client import Client, Errand, client_of, work
from nestling.training.objectives import Batch, Net
from nestling.views import Reference, State
from nestling.views.nested import forward
from nestling.world import Piece
from tests.methods.learning import alone, learned, mean
from tests.small import TIERS, small

LEVELS = (0.25, 0.5, 1.0)
FAST = {"levels": LEVELS, "pretrain": 3}
BATCH_NORM = Named("tinycnn", {"channels": [8, 16, 32], "norm": "batch"})
MEMORY = FleetConfig(
    tiers=(
        Tier(name="weak", ratio=1.0, count=2, memory_mean=35.0),
        Tier(name="medium", ratio=1.0, count=2, memory_mean=60.0, memory_std=(30.0,)),
        Tier(name="strong", ratio=1.0, count=2, memory_mean=110.0, memory_std=(40.0,)),
    )
)
UNCERTAIN = {"fleet": MEMORY, "model": BATCH_NORM, "participants": 4, "rounds": 3}


def made(method: Any = None, **changes: Any) -> Federation:
    return assemble(small(method or FlexFL(**FAST), **changes))[1]


def weights(experiment: nestling.Experiment) -> State:
    return nestling.run(experiment).federation.method.weights


def far(a: State, b: State) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# -- the pool --------------------------------------------------------------------------------------


def test_the_pool_is_nested_and_within_its_sizes() -> None:
    pool = made(model=BATCH_NORM).method.pool.rungs
    whole = params(pool[-1].piece)
    assert [rung.size for rung in pool] == pytest.approx([0.25, 0.4, 0.5, 0.9, 1.0])
    assert [rung.level for rung in pool] == [True, False, True, False, True]
    for little, large in pairwise(pool):
        assert large.piece.view.contains(little.piece.view) and params(little.piece) < params(
            large.piece
        )
    assert all(params(rung.piece) <= rung.size * whole for rung in pool)


def test_without_levels_every_tier_gets_the_largest_it_trains() -> None:
    federation = made(FlexFL(pretrain=3))
    method, world = federation.method, federation.world
    for tier, plan in world.plans.items():
        piece = method.piece(world.device(world.fleet.member(tier, 0)), 0)
        assert params(piece) <= plan.cost.params or params(piece) == params(
            method.pool.rungs[0].piece
        )
    assert params(method.pool.rungs[-1].piece) == world.plans["large"].cost.params


def test_ablations_change_what_they_name() -> None:
    uniform = made(
        FlexFL(ratios="uniform", levels=LEVELS), split=SplitConfig(size=60, public=0.0)
    ).method
    assert len(set(uniform.scale.ratios(0.6))) == 1 and "idle" not in uniform.state()
    assert all(rung.level for rung in made(FlexFL(adapt=0.0, **FAST)).method.pool.rungs)
    assert made(FlexFL(proxy=0.5, **FAST)).method.scale.apoz != made().method.scale.apoz
    assert len(set(made().method.scale.ratios(0.6))) > 1


def test_zeros_are_counted_behind_the_relus_of_every_unit() -> None:
    """Against plain hooks on the modules of a residual network, whose last ReLU of a block reads a
    sum."""
    reference = Reference(
        "main",
        build(
            "resnet10", shape=(3, 16, 16), classes=10, stem="cifar", channels=(8, 12, 16, 24, 32)
        ),
        (3, 16, 16),
    )
    units = units_of(reference.axes)
    x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    module, seen = reference.module.eval(), dict[str, list[float]]()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.ReLU):
            unit = "stem" if name.startswith("stem") else ".".join(name.split(".")[:2])
            layer.register_forward_hook(
                lambda _, __, out, unit=unit: seen.setdefault(unit, []).append(
                    float((out == 0).float().mean())
                )
            )
    with torch.no_grad():
        module(x)
    assert [len(values) for values in seen.values()] == [1, 2, 2, 2, 2]
    expected = [np.mean(values) for values in seen.values()]
    assert measure(reference, units, module, x, batch=4) == pytest.approx(expected, abs=1e-6)


def test_functions_count_like_modules() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)
            nn.init.zeros_(self.a.weight)
            self.a.bias.data = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -1.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.relu(self.a(x)))

    reference = Reference("main", Plain(), (4,))
    assert measure(
        reference, units_of(reference.axes), reference.module, torch.randn(5, 4)
    ) == pytest.approx([4 / 6])


def test_large_idle_units_are_cut_most() -> None:
    reference = Reference(
        "main", build("tinycnn", shape=(1, 28, 28), classes=10, norm="none"), (1, 28, 28)
    )
    units = units_of(reference.axes)
    assert (
        WidthScale(reference, units, (0.5, 0.5, 0.5)).base[0]
        > WidthScale(reference, units, (0.5, 0.5, 0.5)).base[2]
    )
    assert (
        WidthScale(reference, units, (0.5, 0.9, 0.5)).base[1]
        < WidthScale(reference, units, (0.5, 0.5, 0.5)).base[1]
    )
    assert WidthScale(reference, units, (0.0, 0.0, 1.0)).ratios(0.5) == pytest.approx(
        (0.5, 0.5, 0.01)
    )


# -- who gets what ---------------------------------------------------------------------------------


def test_slots_are_distinct_reachable_and_within_what_tiers_hold() -> None:
    tiers = tuple(Tier(name=t.name, ratio=t.ratio, count=8, availability=0.5) for t in TIERS)
    federation = made(FlexFL(pretrain=3), fleet=FleetConfig(tiers=tiers), participants=24)
    method, world = federation.method, federation.world
    levels: list[int] = []
    for round in range(1, 60):
        chosen = method.choose(round, 5)
        assert chosen == sorted(set(chosen)) and all(
            world.fleet.available(c, round) for c in chosen
        )
        for client in chosen:
            device = world.device(client, round)
            number = next(
                k
                for k, rung in enumerate(method.pool.rungs)
                if rung.piece is method.piece(device, round)
            )
            assert number <= method.pool.most(device.tier)
            levels.append(number)
        everyone = method.choose(round, 24)
        assert everyone == [c for c in range(24) if world.fleet.available(c, round)]
    shares = [levels.count(k) / len(levels) for k in method.pool.levels]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.1)


def outcome(
    federation: Federation, method: FlexFL, client: int, number: int, fits: int
) -> tuple[Client, Any]:
    """One client's round with the pool's model `number`, of which it has room for `fits`."""
    world = federation.world
    method._dispatched = (1, {client: number})
    device = world.device(client, 1)
    piece = method.piece(device, 1)
    sent = method.send(device, piece, 1)
    sent.facts["fits"] = fits  # type: ignore[index]
    errand = Errand(client, 1, piece.reference.name, piece.spec(), sent)
    return client_of(errand, site_of(federation)), (errand, piece, sent)


def test_a_device_short_of_memory_trains_the_largest_that_fits() -> None:
    federation = made(**UNCERTAIN)
    method = federation.method
    client, (errand, piece, sent) = outcome(federation, method, 0, number=4, fits=1)
    assert client.view.key() == method.pool.rungs[4].piece.view.key()
    start = method.start(client, sent)
    expected = method.pool.rungs[1].piece.view.extract(method.weights)
    assert (
        far(dict(start), expected) == 0
        and client.view.key() == method.pool.rungs[1].piece.view.key()
    )
    reply = work(FlexFL(**FAST), errand, site_of(federation)).reply
    returned = method.returned(piece, sent, reply.facts)
    assert returned is method.pool.rungs[1].piece and reply.nbytes == returned.view.nbytes()
    like = method.expects(returned, sent)["weights"]
    assert {n: t.shape for n, t in reply["weights"].items()} == {
        n: t.shape for n, t in like.items()
    }


@pytest.mark.parametrize("word", [None, -1, 3, "1", True, 1.0])
def test_a_reply_of_a_model_that_was_not_sent_is_refused(word: Any) -> None:
    federation = made(**UNCERTAIN)
    _, (_, piece, sent) = outcome(federation, federation.method, 0, number=2, fits=2)
    with pytest.raises(InputError, match="one up to the dispatched, cannot be"):
        federation.method.returned(piece, sent, {"trained": word})


def test_bytes_are_the_models_and_one_float_a_unit() -> None:
    result = nestling.run(small(FlexFL(**FAST), **UNCERTAIN))
    method, world = result.federation.method, result.federation.world
    smaller = 0
    for row in result.metrics:
        given = method.pool.slots(row["round"], 4)
        assert row["clients"] == sorted(given)
        held = {
            c: method.pool.held(
                world.fleet.tier_of(c).name, world.device(c, row["round"]), row["round"]
            )
            for c in given
        }
        trained = {c: min(given[c], held[c]) for c in given}
        smaller += sum(trained[c] < given[c] for c in given)
        sizes = [4 * params(rung.piece) for rung in method.pool.rungs]
        assert row["bytes_down"] == sum(
            sizes[k] + 4 * len(method.scale.apoz) for k in given.values()
        )
        assert row["bytes_up"] == sum(sizes[k] for k in trained.values())
        assert row["refused"] == 0
    assert smaller > 0


# -- self-distillation -----------------------------------------------------------------------------


def test_teachers_get_no_gradient() -> None:
    """The gradient is that of a loss whose teachers' logits are constants."""
    federation = made(model=BATCH_NORM)
    world, pool = federation.world, federation.method.pool.rungs
    own, teachers = pool[4].piece.view, [pool[0].piece.view, pool[2].piece.view]
    module = world.main.network(own, own.extract(federation.method.weights)).train()
    net = Net(module, dict(module.named_parameters()))
    x, y = torch.randn(12, *world.main.shape), torch.arange(12) % 10
    batch = Batch(x, y, torch.arange(12))
    with torch.no_grad():
        said = [
            forward(world.main, view, net.state(), x, inside=own, training=False)
            for view in teachers
        ]
    settings = {"reference": world.main, "own": own, "weight": 5.0, "temperature": 3.0}
    ours = torch.autograd.grad(
        self_distilled(net, batch, {}, teachers=teachers, **settings), list(net.params.values())
    )
    logits = net(x)
    apart = (
        sum(
            F.kl_div((logits / 3).log_softmax(-1), (t / 3).softmax(-1), reduction="batchmean") * 9
            for t in said
        )
        / 2
    )
    constant = torch.autograd.grad(
        F.cross_entropy(logits, y) + 5.0 * apart, list(net.params.values())
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, constant, strict=True))


@pytest.mark.parametrize("classes", [10, 20])
def test_lambda_is_the_published_one_whatever_the_number_of_classes(classes: int) -> None:
    """λ times the mean over batch *and classes*, as published."""
    module = build("mlp", shape=(4,), classes=classes, hidden=(8,))
    reference = Reference("main", module, (4,))
    teacher = nestling.views.prefix(reference.axes, 0.5)
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    net = Net(module, dict(module.named_parameters()))
    loss = partial(
        self_distilled,
        net,
        Batch(x, y, torch.arange(6)),
        {},
        reference=reference,
        own=reference.full,
        temperature=3.0,
    )
    term = loss(teachers=[teacher], weight=10.0 / classes) - loss(teachers=[teacher], weight=0.0)
    said = forward(reference, teacher, net.state(), x).detach()
    published = (
        10.0
        * 9
        * F.kl_div((module(x) / 3).log_softmax(-1), (said / 3).softmax(-1), reduction="none").mean()
    )
    assert term.item() == pytest.approx(published.item(), rel=1e-4)
    assert FlexFL().lam == 10.0 and FlexFL().temperature == 3.0


@pytest.mark.parametrize("compat", ["paper", "code"])
def test_models_begin_as_slices_of_one_network_or_each_by_itself(compat: str) -> None:
    """As released every model is drawn anew, which the first merge ends; which draw it is follows
    from the seed."""
    first, second = (
        made(FlexFL(compat=compat, **FAST), model=BATCH_NORM, fleet=MEMORY) for _ in range(2)
    )
    for client in first.method.choose(1, 6):
        device = first.world.device(client)
        piece = first.method.piece(device, 1)
        sent, again = (
            f.method.send(device, piece, 1)["weights"]
            for f in (first, second)
            if f.method.choose(1, 6)
        )
        slices = piece.view.extract(first.method.weights)
        assert sent.keys() == slices.keys() and all(torch.equal(sent[n], again[n]) for n in sent)
        whole = piece.view.key() == first.world.main.full.key()
        assert all(torch.equal(sent[n], slices[n]) for n in sent if n.endswith("weight")) is (
            compat == "paper" or whole
        )
        assert torch.equal(
            first.method.send(device, piece, 2)["weights"][n := min(sent)], slices[n]
        )


@pytest.mark.parametrize(("compat", "teachers"), [("paper", 2), ("code", 4)])
def test_whom_the_full_model_learns_from(compat: str, teachers: int) -> None:
    federation = made(FlexFL(compat=compat, **FAST), model=BATCH_NORM, fleet=MEMORY)
    client, (_, _, sent) = outcome(federation, federation.method, 0, number=4, fits=4)
    federation.method.start(client, sent)
    (phase,) = federation.method.phases(client, sent)
    assert len(phase.objective.keywords["teachers"]) == teachers  # type: ignore[attr-defined]
    assert phase.objective.keywords["weight"] == pytest.approx(1.0)  # type: ignore[attr-defined]


def test_the_smallest_model_and_those_without_distillation_train_plainly() -> None:
    federation = made(**UNCERTAIN)
    for method, number in (
        (federation.method, 0),
        (made(FlexFL(distil=False, **FAST), **UNCERTAIN).method, 4),
    ):
        client, (_, _, sent) = outcome(federation, method, 0, number=number, fits=number)
        method.start(client, sent)
        (phase,) = method.phases(client, sent)
        assert phase.objective is client.train.phase(1).objective


# -- identities, state, engines, learning ----------------------------------------------------------


def test_with_one_width_everywhere_and_no_distillation_it_is_heterofl() -> None:
    """Design check (i): constant ratios, equal sizes of data, everybody's own level."""
    plain = Named("heterofl", {"mask_labels": False, "scaler": False})
    common = {"model": Named("tinycnn", {"channels": [8, 16, 32]})}
    sizes = [plan.cost.params for plan in assemble(small(plain, **common))[1].world.plans.values()]
    flex = FlexFL(
        levels=tuple(s / max(sizes) for s in sizes),
        ratios="uniform",
        distil=False,
        selection="fleet",
        adapt=0.0,
        tolerance=1e-9,
    )
    assert far(weights(small(flex, **common)), weights(small(plain, **common))) == 0
    assert far(weights(small(FlexFL(**FAST), **common)), weights(small(plain, **common))) > 0


def test_going_on_equals_going_through(tmp_path: Path) -> None:
    method = Named(
        "nestling.methods.submodel.flexfl:FlexFL", {"levels": list(LEVELS), "pretrain": 3}
    )
    nestling.run(small(method, **{**UNCERTAIN, "rounds": 1}), out=tmp_path / "parts")
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=3",)).federation.method
    whole = nestling.run(small(method, **UNCERTAIN)).federation.method
    assert far(parts.weights, whole.weights) == 0


def test_a_restored_vector_makes_the_pool() -> None:
    method, other = made(model=BATCH_NORM).method, made(model=BATCH_NORM, seed=3).method
    assert method.scale.apoz != other.scale.apoz
    other.restore(method.state())
    assert method.scale.apoz == other.scale.apoz and far(method.weights, other.weights) == 0
    assert [r.piece.view.key() for r in method.pool.rungs] == [
        r.piece.view.key() for r in other.pool.rungs
    ]


def test_stacked_clients_get_what_single_ones_get() -> None:
    both = [
        weights(small(FlexFL(**FAST), **UNCERTAIN, engine=EngineConfig(name, workers=1)))
        for name in ("inline", "cohort")
    ]
    assert far(*both) < 1e-4


@pytest.mark.slow
def test_it_learns() -> None:
    found = learned(FlexFL(levels=LEVELS, pretrain=20))
    assert mean(found) > alone() + 0.1 and mean(found) > 0.5


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"levels": (0.5, 0.25)},
        {"levels": (0.5, 1.5)},
        {"adapt": 1.0},
        {"apoz": (2.0,)},
        {"pretrain": 0},
        {"proxy": 0.0},
        {"tolerance": -1.0},
        {"lam": -1.0},
        {"temperature": 0.0},
        {"ratios": "some"},
        {"units": "some"},
        {"selection": "some"},
        {"compat": "some"},
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"method.{next(iter(settings))}"):
        FlexFL(**settings)


def test_a_missing_or_tiny_proxy_and_a_vector_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(InputError, match=r"split.public.*labelled proxy"):
        made(split=SplitConfig(size=60, public=0.0))
    with pytest.raises(InputError, match=r"split.public.*too small"):
        made(FlexFL(proxy=0.001))
    with pytest.raises(InputError, match=r"method.apoz.*2 shares for 3 units"):
        made(FlexFL(apoz=(0.5, 0.5)))
    preset = made(FlexFL(apoz=(0.5, 0.4, 0.3)), split=SplitConfig(size=60, public=0.0)).method
    assert preset.scale.apoz == pytest.approx((0.5, 0.4, 0.3))


def test_the_pool_refuses_a_device_that_holds_no_model() -> None:
    tiny = FleetConfig(tiers=(Tier(device="lm3s6965", count=2), Tier(device="gpu-box", count=2)))
    with pytest.raises(InputError, match="not even the smallest piece"):
        made(FlexFL(levels=(0.5, 1.0), pretrain=1), fleet=tiny, model=Named("tinycnn"))
    assert isinstance(
        made(FlexFL(pretrain=1), fleet=tiny, model=Named("tinycnn")).method.pool.rungs[0].piece,
        Piece,
    )
