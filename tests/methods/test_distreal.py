"""DISTREAL: sub-networks drawn for every batch, the search, and the traps that concern it."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import EngineConfig, FleetConfig, InputError, Named, SplitConfig, Tier, Train
from nestling.methods.submodel.distreal import Distreal
from nestling.methods.submodel.dropout_search import affordable, front, loss_after, search
from nestling.methods.submodel.random_filters import draws, dropped, filters_phase, narrowed
from nestling.models import build
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.training.client import Errand, client_of
from nestling.training.optimisers import Optim
from nestling.training.phase import Phase
from nestling.training.trainer import train
from nestling.views import Reference, State, by_index
from nestling.views.nested import forward, prepare
from nestling.views.picked import picker
from tests.methods.learning import alone, learned, mean
from tests.small import small

VECTORS = ((0.0, 0.0, 0.0), (0.3, 0.3, 0.3), (0.5, 0.5, 0.5), (0.5, 0.75, 0.75))
CPU = torch.device("cpu")


def made(method: Distreal, **changes: Any) -> Federation:
    return assemble(small(method, **changes))[1]


def weights(experiment: nestling.Experiment) -> State:
    return nestling.run(experiment).federation.method.weights


def far(a: State, b: State) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# -- sub-networks by index tensors -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("tinycnn", {"channels": (8, 16, 16)}, (1, 28, 28)),
        (
            "resnet10",
            {"channels": (8, 8, 16, 16, 24), "norm": "batch", "stem": "cifar"},
            (3, 16, 16),
        ),
        ("mobilenetv2", {"width": 0.25, "norm": "batch"}, (3, 16, 16)),
        ("mlp", {"hidden": (12, 8)}, (6,)),
    ],
)
def test_index_tensors_give_the_network_of_the_view(
    name: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """Flattened maps, residual sums and depth-wise convolutions included: same output, same
    gradients as `nested.forward`."""
    reference = Reference("main", build(name, shape=shape, classes=10, **options), shape)
    axes, rng = reference.axes, np.random.default_rng(0)
    chosen = {}
    for axis, size, grain in zip(axes.names, axes.sizes, axes.grains, strict=True):
        groups = np.sort(rng.permutation(size // grain)[: max(1, size // grain // 2)])
        chosen[axis] = (groups[:, None] * grain + np.arange(grain)).reshape(-1)
    view = by_index(axes, chosen)
    skeleton = by_index(axes, {axis: range(len(kept)) for axis, kept in chosen.items()})
    state = dict(reference.module.named_parameters())
    kept = {axes.number(axis): torch.from_numpy(index) for axis, index in chosen.items()}
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    mine = picker(reference, CPU).forward(skeleton, state, kept, x)
    same = forward(reference, view, state, x)
    assert torch.allclose(mine, same, atol=1e-5)
    one, other = (
        torch.autograd.grad(out.square().sum(), list(state.values())) for out in (mine, same)
    )
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(one, other, strict=True))


def test_rescaling_keeps_the_expected_output_of_a_linear_layer() -> None:
    reference = Reference("main", build("mlp", shape=(3,), classes=2, hidden=(8,)), (3,))
    reference.module.eval()
    state, x = dict(reference.module.named_parameters()), torch.randn(5, 3)
    skeleton = narrowed(reference.axes, (0.5,))
    drawn = draws(skeleton, 4000, 0, 0, 1)["0"]
    with torch.no_grad():
        out = torch.stack(
            [
                picker(reference, CPU).forward(skeleton, state, {0: rows}, x, rescale=True)
                for rows in drawn
            ]
        ).mean(0)
        assert torch.allclose(out, reference.module(x), atol=0.05)


def test_every_batch_draws_filters_of_its_own_and_all_equally_often() -> None:
    reference = Reference(
        "main", build("tinycnn", shape=(1, 28, 28), classes=10, norm="none"), (1, 28, 28)
    )
    view = narrowed(reference.axes, (0.5, 0.5, 0.9))
    drawn = draws(view, 2000, seed=0, client=3, round=2)
    assert [drawn[str(axis)].shape for axis in range(3)] == [(2000, 10), (2000, 20), (2000, 8)]
    assert all(bool((rows.diff() > 0).all()) for rows in drawn.values())
    often = torch.bincount(drawn["0"].reshape(-1), minlength=20) / 2000
    assert often.tolist() == pytest.approx([0.5] * 20, abs=0.05)
    assert len({tuple(row) for row in drawn["0"].tolist()}) > 1000
    other = draws(view, 2000, seed=0, client=4, round=2)
    assert not torch.equal(drawn["0"], other["0"])
    fewer = draws(view, 100, seed=0, client=3, round=2)
    assert torch.equal(fewer["0"], drawn["0"][:100])


def test_group_norms_are_dropped_by_whole_groups() -> None:
    reference = Reference("main", build("tinycnn", shape=(1, 28, 28), classes=10), (1, 28, 28))
    rows = draws(narrowed(reference.axes, (0.5, 0.5, 0.5)), 8, 0, 0, 1)["1"]
    assert rows.shape == (8, 20) and bool(
        (rows.reshape(8, 5, 4) // 4 == rows.reshape(8, 5, 4)[:, :, :1] // 4).all()
    )


@pytest.mark.parametrize(
    "optim", [Optim("sgd", 0.1, 0.9, 0.01), Optim("adam", 0.01), Optim("sgd", 0.1, 0.9, clip=0.5)]
)
def test_neither_momentum_nor_decay_moves_dropped_filters(optim: Optim) -> None:
    reference = Reference(
        "main",
        build("tinycnn", shape=(1, 12, 12), classes=4, channels=(6, 8), norm="none"),
        (1, 12, 12),
    )
    view = narrowed(reference.axes, (0.5, 0.5))
    prepare(reference, [view])
    given = {
        "0": torch.tensor([[0, 1, 2], [3, 4, 5]]),
        "1": torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]),
    }
    x, y = torch.randn(16, 1, 12, 12), torch.arange(16) % 4

    def after(steps: int, lazy: bool = True) -> State:
        module = build("tinycnn", shape=(1, 12, 12), classes=4, channels=(6, 8), norm="none")
        module.load_state_dict(reference.module.state_dict())
        objective = partial(dropped, picker=picker(reference, CPU), view=view, rescale=True)
        train(
            module,
            Phase(
                objective, replace(optim, lazy=lazy), epochs=2, batch=16, steps=steps, given=given
            ),
            x,
            y,
            seed=0,
        )
        return {name: t.detach().clone() for name, t in module.state_dict().items()}

    start, one, two = reference.module.state_dict(), after(1), after(2)
    first, name = (slice(0, 3), slice(3, 6)), "stages.0.conv.weight"
    assert not torch.equal(start[name][first[0]], one[name][first[0]]) and torch.equal(
        start[name][first[1]], one[name][first[1]]
    )
    assert torch.equal(one[name][first[0]], two[name][first[0]]) and not torch.equal(
        one[name][first[1]], two[name][first[1]]
    )
    assert torch.equal(start["stages.1.conv.weight"][4:], two["stages.1.conv.weight"][4:])
    # what the trap looks like
    assert not torch.equal(after(2, lazy=False)[name][first[0]], one[name][first[0]])


# -- the method ------------------------------------------------------------------------------------


def test_without_dropout_it_is_fedavg_on_the_full_network() -> None:
    nothing = Distreal(pareto=((0.0, 0.0, 0.0),))
    assert far(weights(small(nothing)), weights(small("all-large"))) == 0
    assert far(weights(small(Distreal(pareto=VECTORS))), weights(small("all-large"))) > 0


def test_a_device_takes_the_dearest_vector_that_it_can_afford() -> None:
    table = [[0.5, 1.0, 2.0], [0.1, 3.0, 4.0], [0.9, 5.0, 6.0]]
    assert (
        affordable(table, 0.6) == (1.0, 2.0)
        and affordable(table, 1.0) == (5.0, 6.0)
        and affordable(table, 0.01) == (3.0, 4.0)
    )
    federation = made(Distreal(pareto=VECTORS))
    world, method = federation.world, federation.method
    costs = [method.cost(vector) for vector in VECTORS]
    assert costs[0] == 1.0 and costs == sorted(costs, reverse=True)
    for tier, plan in world.plans.items():
        device = world.device(world.fleet.member(tier, 0))
        sent = method.send(device, method.piece(device, 1), 1)
        full = world.cost(method.piece(device, 1)).train_macs
        assert sent.facts["budget"] == pytest.approx(plan.cost.train_macs / full)
        errand = Errand(device.id, 1, "main", method.piece(device, 1).spec(), sent)
        client = client_of(errand, site_of(federation))
        (phase,) = method.phases(client, sent)
        wanted = max((c for c in costs if c <= sent.facts["budget"] + 1e-6), default=min(costs))
        if tier == "large":
            assert phase.objective is client.train.phase(1).objective and not phase.optim.lazy
        else:
            assert phase.optim.lazy
            kept = {int(axis): rows.shape[1] for axis, rows in phase.given.items()}
            view = narrowed(world.main.axes, VECTORS[costs.index(wanted)])
            assert kept == {
                k: len(view.indices(k))
                for k in range(3)
                if len(view.indices(k)) < world.main.axes.sizes[k]
            }


def test_bytes_are_the_full_network_and_the_list_once_a_device() -> None:
    result = nestling.run(small(Distreal(pareto=VECTORS), rounds=4))
    full = 4 * sum(t.numel() for t in result.federation.method.weights.values())
    seen: set[int] = set()
    for row in result.metrics:
        new = set(row["clients"]) - seen
        seen |= new
        assert row["bytes_up"] == full * len(row["clients"])
        assert row["bytes_down"] == full * len(row["clients"]) + len(new) * 4 * len(VECTORS) * 4
    assert len(seen) == 4


def test_going_on_equals_going_through(tmp_path: Path) -> None:
    """With a search, which is not made again: the list is part of the state."""
    method = Named(
        "nestling.methods.submodel.distreal:Distreal",
        {"population": 4, "generations": 2, "steps": 4},
    )
    nestling.run(small(method, rounds=1), out=tmp_path / "parts")
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=3",))
    whole = nestling.run(small(method, rounds=3))
    assert parts.federation.method.vectors == whole.federation.method.vectors
    assert far(parts.federation.method.weights, whole.federation.method.weights) == 0
    assert [m["bytes_down"] for m in parts.metrics][-2:] == [
        m["bytes_down"] for m in whole.metrics
    ][-2:]


def test_stacked_clients_get_what_single_ones_get() -> None:
    fleet = FleetConfig(tiers=(Tier(name="small", ratio=0.5, count=4),))
    common = {
        "fleet": fleet,
        "participants": 4,
        "train": Train(epochs=2, batch=20, lr=0.02, momentum=0.9, weight_decay=1e-3),
    }
    both = [
        weights(small(Distreal(pareto=VECTORS), **common, engine=EngineConfig(name, workers=1)))
        for name in ("inline", "cohort")
    ]
    assert far(*both) < 1e-4


def test_equal_clients_are_one_stack() -> None:
    """Their draws differ in value only, so that nothing keeps them apart."""
    from nestling.training.stacks.group import groups
    from nestling.training.stacks.stacked import train_stack

    fleet = FleetConfig(tiers=(Tier(name="small", ratio=0.5, count=4),))
    federation = made(Distreal(pareto=VECTORS), fleet=fleet)
    world, method, waiting = federation.world, federation.method, []
    for number in range(4):
        device = world.device(number, 1)
        sent = method.send(device, method.piece(device, 1), 1)
        client = client_of(
            Errand(number, 1, "main", method.piece(device, 1).spec(), sent), site_of(federation)
        )
        client.weights = method.start(client, sent)
        waiting.append((client, method.phases(client, sent)[0]))
    (group,) = groups(waiting, 0)
    assert group.phase.given and not group.shared("0")
    assert len(train_stack(group).values) == 4


@pytest.mark.slow
def test_it_learns() -> None:
    found = learned(Distreal(pareto=VECTORS))
    assert mean(found) > alone() + 0.03 and mean(found) > 0.4


# -- the search ------------------------------------------------------------------------------------


def test_the_search_finds_a_known_front() -> None:
    """Cost falls with every rate, loss only rises with the first: the front drops the second and
    keeps the choice of the first."""
    found = search(lambda v: (2 - v[0] - v[1], v[0]), 2, 0.9, population=16, generations=15, seed=0)
    assert len(found) > 4 and all(v[1] > 0.8 for v in found)
    assert min(v[0] for v in found) < 0.1 and max(v[0] for v in found) > 0.8
    assert found == search(
        lambda v: (2 - v[0] - v[1], v[0]), 2, 0.9, population=16, generations=15, seed=0
    )


def test_the_front_leaves_out_what_is_beaten() -> None:
    assert front([(0.5, 1.0), (0.2, 3.0), (0.6, 1.0), (0.3, 3.5), (0.9, 0.5), (0.5, 1.0)]) == [
        1,
        0,
        4,
    ]


def test_the_searched_list_spans_costs_and_no_entry_beats_another() -> None:
    federation = made(
        Distreal(population=6, generations=2, steps=6),
        model=Named("tinycnn", {"channels": [8, 16, 16]}),
    )
    vectors = federation.method._search()
    costs = [federation.method.cost(vector) for vector in vectors]
    assert costs == sorted(set(costs)) and len(costs) > 1
    assert all(0 <= rate <= 0.9 + 1e-6 for vector in vectors for rate in vector)


def test_candidates_are_judged_by_what_they_learn() -> None:
    method = made(Distreal(steps=40), split=SplitConfig(size=60, public=0.05)).method
    *_, x, y = proxy = method._proxy()
    world = method.world
    phases = [
        filters_phase(world.main, vector, 40, world.seed, 0, 0, world.train, False)
        for vector in ((0.0, 0.0, 0.0), (0.5, 0.74, 0.74))
    ]
    losses = [loss_after(world, phase, 40, proxy) for phase in phases]
    untrained = float(F.cross_entropy(method.world.main.module.eval()(x), y).detach())
    assert losses[0] < losses[1] and losses[0] < untrained


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"pareto": ((1.0,),)}, {"most": 1.0}, {"population": 1}, {"generations": 0}, {"steps": 0}],
)
def test_bad_settings_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"method.{next(iter(settings))}"):
        Distreal(**settings)


def test_what_it_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"split.public.*labelled proxy"):
        made(Distreal(), split=SplitConfig(size=60, public=0.0))
    with pytest.raises(InputError, match=r"method.pareto.*needs 3 rates"):
        made(Distreal(pareto=((0.5,),)))
    with pytest.raises(InputError, match=r"model.norm.*running statistics"):
        made(Distreal(pareto=VECTORS), model=Named("tinycnn", {"norm": "tracked"}))
    monkeypatch.setitem(sys.modules, "pymoo.algorithms.moo.nsga2", None)
    with pytest.raises(InputError, match=r"nestling\[search\]"):
        made(Distreal())
    assert made(Distreal(pareto=VECTORS), split=SplitConfig(size=60, public=0.0)).method.vectors
