"""The methods: identities between them, known traps, learning, and exact bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nestling
from nestling import FleetConfig, InputError, Named, SplitConfig, Tier, Train
from nestling.methods import METHODS, Reply, method_class
from nestling.methods.submodel.heterofl import HeteroFL
from nestling.runs.assemble import assemble, site_of
from nestling.runs.describe import describe
from nestling.runs.federation import Federation
from nestling.training.objectives import Batch, Net, present_cross_entropy
from nestling.views import State
from nestling.views.nested import forward
from tests.small import QUICK, TIERS, small


def weights_after(experiment: nestling.Experiment) -> State:
    model = nestling.run(experiment).federation.method.global_model()
    assert model is not None
    return model.state


def equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


ONE_TIER = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))


PLAIN_AVERAGE = Named("shared-average", {"nested": False, "inner": 0.0})


@pytest.mark.parametrize(
    "method",
    ["shared-average", "fedavg", "all-large", "decoupled", Named("shared-distill", {"steps": 0})],
)
def test_equal_devices_make_every_weight_method_fedavg(method: str | Named) -> None:
    """With one tier at full width they are all the same algorithm, bit for bit."""
    assert equal(
        weights_after(small(method, fleet=ONE_TIER)), weights_after(small("fedavg", fleet=ONE_TIER))
    )


def test_heterofl_without_its_extras_on_equal_sizes_is_fedavg() -> None:
    """Uniform weights equal n_k weights when every client has as many samples."""
    plain = Named("heterofl", {"mask_labels": False, "scaler": False})
    assert equal(
        weights_after(small(plain, fleet=ONE_TIER)), weights_after(small("fedavg", fleet=ONE_TIER))
    )


def test_heterofl_without_its_extras_is_shared_average_on_equal_sizes() -> None:
    plain = Named("heterofl", {"mask_labels": False, "scaler": False})
    assert equal(weights_after(small(plain)), weights_after(small(PLAIN_AVERAGE)))


def test_a_nested_part_computes_the_same_alone_and_inside_a_larger_one() -> None:
    """After rounds of training, the features of the small part are bit for bit a prefix of the
    whole network's."""
    result = nestling.run(
        small("shared-average", model=Named("tinycnn", {"channels": [8, 16, 16], "norm": "group"}))
    )
    method, world = result.federation.method, result.federation.world
    piece = world.plans["small"].piece
    whole = world.main.network(world.main.full, method.weights).eval()
    with torch.no_grad():
        features = whole.features(result.federation.bench.x_test[:50])
        part = world.main.network(piece.view, piece.view.extract(method.weights)).eval()
        own = part.features(result.federation.bench.x_test[:50])
    assert (
        torch.allclose(own, features[:, : own.shape[1]], atol=1e-5)
        and own.shape[1] < features.shape[1]
    )
    for name, mask in method.masks.items():
        assert bool((method.weights[name][~mask] == 0).all()) and bool((~mask).any())


def test_plain_averaging_does_not_nest() -> None:
    method = nestling.run(small(PLAIN_AVERAGE)).federation.method
    assert method.masks == {} and bool((method.weights["stages.1.conv.weight"][:4, 4:] != 0).any())


def test_all_large_ignores_the_tiers() -> None:
    assert equal(
        weights_after(small("all-large")), weights_after(small("all-large", fleet=ONE_TIER))
    )


def test_fedavg_trains_what_fits_the_smallest() -> None:
    only_small = FleetConfig(tiers=(Tier(name="all", ratio=0.25, count=4),))
    assert equal(weights_after(small("fedavg")), weights_after(small("fedavg", fleet=only_small)))


def one_round(
    experiment: nestling.Experiment, clients: list[int]
) -> tuple[Federation, list[Reply]]:
    """Sends, trains and collects by hand, so that the merge can be looked at."""
    from nestling.runs.assemble import site_of
    from nestling.training.client import Errand, work

    settled, federation = assemble(experiment)
    method, world, replies = federation.method, federation.world, []
    for client in clients:
        device = world.device(client)
        piece = method.piece(device, 1)
        sent = method.send(device, piece, 1)
        done = work(
            settled.make_method(),
            Errand(client, 1, piece.reference.name, piece.spec(), sent),
            site_of(federation),
        )
        replies.append(Reply(device, piece, sent, done.reply))
    return federation, replies


def test_untrained_entries_keep_their_value() -> None:
    federation, _ = one_round(small(), [])
    world = federation.world
    narrow = [c for c in range(4) if world.fleet.tier_of(c).name == "small"]
    federation, replies = one_round(small(PLAIN_AVERAGE), narrow)
    before = dict(federation.method.weights)
    federation.method.merge(replies, 1)
    view = federation.world.plans["small"].piece.view
    for name, tensor in federation.method.weights.items():
        inside = torch.zeros_like(tensor, dtype=torch.bool)
        inside[view.where(name)] = True
        assert torch.equal(tensor[~inside], before[name][~inside])
        assert not torch.equal(tensor[inside], before[name][inside])


def test_heterofl_rows_of_absent_classes_do_not_move() -> None:
    two_classes = small("heterofl", split=SplitConfig(kind="classes", classes=2, size=60))
    federation, replies = one_round(two_classes, [0])
    before = federation.method.weights["head.weight"].clone()
    federation.method.merge(replies, 1)
    held = replies[0].message["present"]["classes"]
    after = federation.method.weights["head.weight"]
    columns = replies[0].piece.view.where("head.weight")[1]
    assert int(held.sum()) == 2
    assert torch.equal(after[~held], before[~held]) and not torch.equal(
        after[held][:, columns], before[held][:, columns]
    )


def test_heterofl_masks_with_zero_not_minus_infinity() -> None:
    logits, label = torch.tensor([[2.0, 1.0, 0.5, -3.0]]), torch.tensor([0])
    present = torch.tensor([1.0, 1.0, 0.0, 0.0])
    net = Net(torch.nn.Identity(), {})
    zero_filled = present_cross_entropy(
        net, Batch(logits, label, torch.tensor([0])), {"present": present}
    )
    assert float(zero_filled) == pytest.approx(0.494, abs=5e-4)
    assert float(
        F.cross_entropy(logits.masked_fill(present == 0, -torch.inf), label)
    ) == pytest.approx(0.313, abs=5e-4)


def test_heterofl_dynamic_levels_follow_the_shares() -> None:
    federation, _ = one_round(small(HeteroFL(dynamic=True)), [])
    method, world = federation.method, federation.world
    drawn = [method.piece(world.device(0, r), r).view.key() for r in range(1, 400)]
    shares = {
        name: drawn.count(plan.piece.view.key()) / len(drawn) for name, plan in world.plans.items()
    }
    assert shares["small"] == pytest.approx(0.5, abs=0.1) and shares["large"] == pytest.approx(
        0.25, abs=0.1
    )
    assert method.piece(world.device(0, 7), 7).view.key() == drawn[6]


def test_alone_means_everybody_in_every_round() -> None:
    result = nestling.run(small("local", participants=1))
    assert all(row["clients"] == [0, 1, 2, 3] for row in result.metrics)
    assert sorted(result.federation.world.store.clients()) == [0, 1, 2, 3]
    asked = nestling.run(small(Named("local", {"everybody": False}), participants=1))
    assert all(len(row["clients"]) == 1 for row in asked.metrics)


LEVELS = FleetConfig(
    tiers=tuple(
        Tier(name=n, ratio=r, count=6)
        for n, r in (("small", 0.25), ("middle", 0.5), ("large", 1.0))
    ),
)


@pytest.mark.parametrize("holders", ["able", "own"])
def test_a_level_is_trained_by_those_who_can_hold_it(holders: str) -> None:
    """And a client trains one of them in a round, so that the work is that of any other method."""
    _, federation = assemble(small(Named("decoupled", {"holders": holders}), fleet=LEVELS))
    method, world = federation.method, federation.world
    rank = {"small": 0, "middle": 1, "large": 2}
    counts: Counter[str] = Counter()
    for number in range(1, 31):
        chosen = method.choose(number, 9)
        assert len(chosen) == 9
        given = {c: method._level_of(method.piece(world.device(c), number)) for c in chosen}
        own = {c: world.fleet.tier_of(c).name for c in chosen}
        assert all(rank[given[c]] <= rank[own[c]] for c in chosen)
        if holders == "own":
            assert given == own
        elif min(list(own.values()).count(tier) for tier in rank) >= 3:
            # Enough devices of every kind: every level gets its third.
            assert set(Counter(given.values()).values()) == {3}
        counts.update(given.values())
    assert holders == "own" or counts["small"] >= counts["large"] > 60
    assert method.piece(world.device(chosen[0]), 0) is world.plans[own[chosen[0]]].piece


def test_larger_devices_teach_the_small_level_too() -> None:
    settings = {"fleet": LEVELS, "participants": 18, "rounds": 1}
    able, own = (
        nestling.run(small(Named("decoupled", {"holders": h}), **settings)).federation
        for h in ("able", "own")
    )
    same = {
        tier: equal(able.method.weights[tier], own.method.weights[tier])
        for tier in ("small", "middle", "large")
    }
    # six of each: everybody trains its own
    assert same == {"small": True, "middle": True, "large": True}
    few = {"fleet": LEVELS, "participants": 3, "rounds": 6, "seed": 3}
    able, own = (
        nestling.run(small(Named("decoupled", {"holders": h}), **few)).federation
        for h in ("able", "own")
    )
    assert not equal(able.method.weights["small"], own.method.weights["small"])


def test_decoupled_tiers_never_meet() -> None:
    federation, _ = one_round(small("decoupled"), [])
    members = [c for c in range(4) if federation.world.fleet.tier_of(c).name == "small"]
    federation, replies = one_round(small("decoupled"), members)
    before = {tier: dict(state) for tier, state in federation.method.weights.items()}
    federation.method.merge(replies, 1)
    assert equal(before["large"], federation.method.weights["large"]) and equal(
        before["middle"], federation.method.weights["middle"]
    )
    assert not equal(before["small"], federation.method.weights["small"])


def mixed(own: str = "mlp", **options: object) -> FleetConfig:
    """A fleet whose smallest tier brings a network of its own."""
    return FleetConfig(
        tiers=(Tier(name="small", model=own, model_options=options, count=2), *TIERS[1:])
    )


MIXED = mixed(hidden=[16])


@pytest.mark.parametrize("method", METHODS)
def test_networks_that_share_nothing_are_taken_or_refused(method: str) -> None:
    # DraftFed compares what convolutions put out.
    experiment = small(method, fleet=mixed("dscnn", width=0.25) if method == "draftfed" else MIXED)
    if method_class(method).info.own_networks:
        result = nestling.run(experiment)
        assert result.summary["by_tier"]["small"]["global_score"]["last"] > 0
    else:
        with pytest.raises(InputError, match=r"fleet.tiers\[0\].model.*shared-distill"):
            nestling.run(experiment)


def test_distillation_reaches_networks_that_share_nothing() -> None:
    """The compact networks of clients that were not asked this round change too: knowledge comes
    back to them."""
    federation, _ = one_round(small("shared-distill", fleet=MIXED), [])
    large = [c for c in range(4) if federation.world.fleet.tier_of(c).name != "small"]
    federation, replies = one_round(small("shared-distill", fleet=MIXED), large)
    before = dict(federation.method.weights["small"])
    federation.method.merge(replies, 1)
    assert not equal(before, federation.method.weights["small"])


MODES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS),
    ("fedgen", {"share": "head"}),
    ("fedhkd", {"variant": "weights"}),
    ("fedhkd", {"variant": "hyper"}),
    ("heteroavg", {"averaging": "group"}),
    ("feddf", {"source": "noise", "validation": 0.0}),
]
"""Every method as it is, and those that are something else when they are set otherwise."""


@pytest.mark.parametrize(("name", "options"), MODES, ids=str)
def test_a_method_has_a_global_model_if_it_says_so(name: str, options: dict[str, Any]) -> None:
    method = assemble(
        small(Named(name, {**QUICK.get(name, {}), **options}), model=small(name).model)
    )[1].method
    assert method.as_set.global_model == (method.global_model() is not None)


def test_what_data_a_method_needs_depends_on_how_it_is_set() -> None:
    def says(name: str, **options: Any) -> str:
        return method_class(name)(**options).as_set.auxiliary

    assert says("fedmd", pretrain=0) == "public inputs on every client, unlabelled"
    assert (
        says("feddf") == method_class("feddf").info.auxiliary
        and says("feddf", source="noise") == "a labelled validation set"
    )
    assert says("feddf", source="noise", validation=0.0) == "none (noise)"
    without = [
        says("distreal", pareto=((0.0,),)),
        says("flexfl", ratios="uniform"),
        says("prunefl", stage_one=0),
    ]
    assert without == ["none"] * 3 and "none" not in {
        says(name) for name in ("distreal", "flexfl", "prunefl")
    }


def test_distillation_moves_the_student_towards_its_teachers() -> None:
    from nestling.training.distiller import combine, logits_of
    from nestling.training.objectives import distillation

    def gap(steps: int) -> float:
        federation, replies = one_round(
            small(Named("shared-distill", {"steps": steps})), [0, 1, 2, 3]
        )
        world = federation.world
        assert world.public is not None
        said = [
            logits_of(r.piece.reference.network(r.piece.view, r.message["weights"]), world.public)
            for r in replies
        ]
        target = combine(said, [r.samples for r in replies])
        federation.method.merge(replies, 1)
        model = federation.method.global_model()
        assert model is not None
        return float(
            distillation(
                target, logits_of(world.main.network(model.view, model.state), world.public), 3.0
            )
        )

    assert gap(60) < 0.5 * gap(0)


def test_without_public_data_noise_stands_in() -> None:
    result = nestling.run(small("shared-distill", split=SplitConfig(size=60, public=0.0)))
    assert result.federation.world.public is None and result.summary["global_score"]["last"] > 0.1


def closed_formula(federation: Federation, method: str, clients: list[int]) -> tuple[int, int]:
    """(bytes down, bytes up) of a round, from the sizes of the views alone."""
    world = federation.world
    sizes = []
    for client in clients:
        piece = federation.method.piece(world.device(client), 1)
        sizes.append(
            4 * sum(t.numel() for t in piece.reference.network(piece.view).state_dict().values())
        )
    if method == "local":
        return 0, 0
    classes = -(-world.classes // 8) * len(clients) if method in ("heterofl", "fedrolex") else 0
    return sum(sizes), sum(sizes) + classes


SEND_VIEWS = [
    name
    for name in METHODS
    if method_class(name).info.family not in ("public data", "data-free", "representation")
    and name
    not in (
        "distreal",
        "flexfl",
        "fedper",
        "hermes",
        "lotteryfl",
        "prunefl",
        "prism",
        "scaffold",
        "hafl-ghn",
        "fedhm",
    )
]
"""Methods of which nothing but a view's weights travels; the formulas of the others stand beside
their other tests."""


@pytest.mark.parametrize("method", SEND_VIEWS)
def test_bytes_equal_the_closed_formula(method: str) -> None:
    result = nestling.run(small(method))
    down = up = 0
    for row in result.metrics:
        more_down, more_up = closed_formula(result.federation, method, row["clients"])
        down, up = down + more_down, up + more_up
    assert (result.summary["bytes_down"], result.summary["bytes_up"]) == (down, up)


LEARNING = {
    "rounds": 8,
    "participants": 0,
    "split": SplitConfig(kind="iid", size=250),
    "train": Train(epochs=2, batch=20, lr=0.02),
    "evaluate": nestling.Evaluation(every=8, clients=4),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sharing_beats_training_alone(seed: int) -> None:
    """Same budget for all: every method that shares is above Local, and far above chance."""
    sharing = ("fedavg", "all-large", "heterofl", "shared-average", "shared-distill")
    accuracy = {
        m: nestling.run(small(m, seed=seed, **LEARNING)).summary["global_score"]["last"]
        for m in ("local", *sharing)
    }
    assert accuracy["local"] > 0.4
    for method in sharing:
        assert accuracy[method] > accuracy["local"], accuracy


def test_replies_that_are_not_finite_are_refused_and_counted() -> None:
    told: list[tuple[int, int, str]] = []
    watcher = nestling.Watcher(
        refusal=lambda client, round, reason: told.append((client, round, reason))
    )
    exploding = small(PLAIN_AVERAGE, train=Train(epochs=3, batch=5, lr=1e8, momentum=0.0), rounds=1)
    result = nestling.run(exploding, watcher=watcher)
    assert result.summary["refused"] == len(told) == 3 and "not finite" in told[0][2]
    assert equal(
        result.federation.method.state()["weights"], dict(result.federation.world.main.initial)
    )


@pytest.mark.parametrize("samples", [0, -5, 2**41, "12", None, True, 3.5])
def test_a_lie_about_the_number_of_samples_is_refused(samples: object) -> None:
    from nestling.message import Message
    from nestling.runs.admission import wrong_count

    assert wrong_count(Message({}, {"samples": samples}), 12) is not None
    assert wrong_count(Message({}, {"samples": 12}), 12) is None
    told = wrong_count(Message({}, {"samples": 13}), 12)
    assert told is not None and "13" in told and "12" in told  # both numbers


def test_an_own_method_is_one_short_class() -> None:
    from tests.methods.own import LastWins

    result = nestling.run(small(LastWins()))
    named = nestling.run(small("tests.methods.own:LastWins"))
    assert equal(result.federation.method.weights, named.federation.method.weights)
    assert replace(result.federation.method) == LastWins()


def test_an_own_network_runs() -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(1, 8, 5, stride=4), torch.nn.ReLU(), torch.nn.Flatten()
            )
            self.out = torch.nn.Linear(8 * 36, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(x))

    result = nestling.run(small("heterofl", model=Mine()))
    assert isinstance(result.model, Mine) and result.model_for(0)(
        torch.zeros(1, 1, 28, 28)
    ).shape == (1, 10)


@pytest.mark.parametrize("method", ["shared-average", "heterofl"])
def test_parameters_that_are_always_zero_are_counted(method: str) -> None:
    """What a run says of a piece's zeros is what a trained model has of them."""
    result = nestling.run(small(method))
    made, world = result.federation.method, result.federation.world
    said = describe(small(method), result.federation)["tiers"]
    for tier, plan in zip(said, world.plans.values(), strict=True):
        state = made.model_for(world.device(world.fleet.member(plan.tier.name, 0))).state
        weights = torch.cat(
            [
                t.reshape(-1)
                for name, t in state.items()
                if name in world.main.parameters and t.dim() > 1
            ]
        )
        assert tier["zeros"] == int((weights == 0).sum())
    assert (max(tier["zeros"] for tier in said) > 0) == (method == "shared-average")


def test_shared_distill_trains_smaller_parts_inside_larger_ones() -> None:
    """With `inner` the part of the smallest device, cut out of a larger device's reply, is better
    than without."""

    def loss(inner: float) -> float:
        experiment = small(
            Named("shared-distill", {"inner": inner}), train=Train(epochs=12, batch=16, lr=0.05)
        )
        federation, _ = one_round(experiment, [])
        world, site = federation.world, site_of(federation)
        largest = max(
            range(len(world.fleet)), key=lambda c: int(world.device(c).piece.view.keep.sum())
        )
        federation, (reply,) = one_round(experiment, [largest])
        smallest = min(
            (plan.piece.view for plan in world.plans.values()),
            key=lambda view: int(view.keep.sum()),
        )
        assert reply.piece.view.contains(smallest) and reply.piece.view.key() != smallest.key()
        rows = site.split.indices(largest)
        logits = forward(
            reply.piece.reference,
            smallest,
            reply.message["weights"],
            site.x[rows],
            inside=reply.piece.view,
        )
        return float(F.cross_entropy(logits, site.y[rows]))

    assert loss(1.0) < 0.8 * loss(0.0)
