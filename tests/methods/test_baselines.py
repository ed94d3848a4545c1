"""Baselines on unequal networks: identities between them, known traps, bytes, state, and
learning."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nestling
from nestling import (
    EngineConfig,
    Evaluation,
    FleetConfig,
    InputError,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.methods import Reply, method_class
from nestling.methods.baselines.averaged import Averaged
from nestling.methods.baselines.fednova import FedNova
from nestling.methods.baselines.fedper import FedPer
from nestling.methods.baselines.fedprox import FedProx
from nestling.methods.baselines.moon import Moon
from nestling.methods.baselines.scaffold import Scaffold
from nestling.runs.assemble import assemble, site_of
from nestling.training.client import Client, Errand, Outcome, client_of, work
from nestling.training.effective import effective_steps, steps_of
from nestling.training.memory import keep, recall
from nestling.training.objectives import Batch, Net, proximal, supervised
from nestling.training.optimisers import Buffers, Optim, step
from nestling.views import State, prefix, without
from nestling.views.units import units
from tests.methods.learning import alone, learned, mean
from tests.small import TIERS, small

BASELINES: dict[str, type[Averaged]] = {
    "averaged:Averaged": Averaged,
    "fedprox:FedProx": FedProx,
    "scaffold:Scaffold": Scaffold,
    "fednova:FedNova": FedNova,
    "moon:Moon": Moon,
    "fedper:FedPer": FedPer,
}
QUICK: dict[str, Any] = {"evaluate": Evaluation(every=100, clients=3, batch=1000)}
SGD = Train(epochs=1, batch=20, lr=0.02, momentum=0.0)
ONE_TIER = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
UNEQUAL = SplitConfig(kind="quantity", alpha=2.0, min_size=20, public=0.97)
TRACKED = Named("tinycnn", {"channels": [8, 16, 16], "norm": "tracked"})


class Table:
    """A federation played by hand, round by round, all replies and memories in sight."""

    def __init__(self, method: Any, **changes: Any) -> None:
        self.experiment, self.federation = assemble(small(method, **{**QUICK, **changes}))
        self.method, self.world, self.site = (
            self.federation.method,
            self.federation.world,
            site_of(self.federation),
        )
        self.outcomes: dict[int, Outcome] = {}

    def play(self, clients: Iterable[int], round: int = 1) -> list[Reply]:
        """One round up to the merge."""
        replies, side = [], self.experiment.make_method()
        for client in clients:
            device = self.world.device(client, round)
            piece = self.method.piece(device, round)
            sent = self.method.send(device, piece, round)
            before = {
                kind: {n: t.clone() for n, t in part.items()} for kind, part in sent.parts.items()
            }
            errand = Errand(
                client,
                round,
                piece.reference.name,
                piece.spec(),
                sent,
                self.world.store.get(client),
            )
            self.outcomes[client] = done = work(side, errand, self.site)
            assert all(
                torch.equal(t, before[k][n])
                for k, part in sent.parts.items()
                for n, t in part.items()
            ), "written to"
            self.world.store.put(client, done.memory, round)
            replies.append(Reply(device, piece, sent, done.reply))
        return replies

    def round(self, clients: Iterable[int], number: int = 1) -> list[Reply]:
        """One whole round."""
        replies = self.play(clients, number)
        self.method.merge(replies, number)
        return replies

    def tier(self, name: str) -> list[int]:
        return [c for c in range(4) if self.world.fleet.tier_of(c).name == name]


def played(method: Any, rounds: int = 2, **changes: Any) -> State:
    """The first group's weights after rounds of everybody."""
    table = Table(method, **changes)
    for number in range(1, rounds + 1):
        table.round(range(4), number)
    return next(iter(table.method.state().values()))


def equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a: State, b: State, tolerance: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[k].double(), b[k].double(), atol=tolerance) for k in a
    )


# -- identities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("averaging", ["layer", "group"])
def test_averaging_equal_networks_is_fedavg(averaging: str) -> None:
    assert equal(played(Averaged(averaging), fleet=ONE_TIER), played("fedavg", fleet=ONE_TIER))


def test_layer_averaging_by_samples_is_shared_average_without_its_extras() -> None:
    unequal = {"split": UNEQUAL}
    plain = Named("shared-average", {"nested": False, "inner": 0.0})
    by_samples = played(Averaged(weighting="samples"), **unequal)
    assert equal(by_samples, played(plain, **unequal)) and not equal(
        by_samples, played(Averaged(), **unequal)
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"model": TRACKED}, {"train": Train(epochs=1, batch=20, optimizer="adam", lr=1e-3)}],
)
def test_fedprox_without_its_pull_is_layer_averaging(changes: dict[str, Any]) -> None:
    assert equal(
        played(FedProx(mu=0.0), **changes), played(Averaged(weighting="samples"), **changes)
    )
    assert not equal(
        played(FedProx(mu=1.0), **changes), played(Averaged(weighting="samples"), **changes)
    )


def test_moon_without_its_contrast_is_layer_averaging() -> None:
    plain = Averaged(weighting="samples")
    assert equal(played(Moon(mu=0.0), rounds=3), played(plain, rounds=3))
    assert equal(played(Moon(mu=0.0), model=TRACKED), played(plain, model=TRACKED))
    assert not equal(played(Moon(mu=5.0), rounds=3), played(plain, rounds=3))


@pytest.mark.parametrize(
    ("method", "rounds"), [(FedProx(mu=0.0), 2), (Moon(mu=0.0), 2), (Scaffold(), 1)]
)
def test_without_what_they_add_they_are_fedavg_on_equal_networks_and_unequal_data(
    method: Any, rounds: int
) -> None:
    changes = {"fleet": ONE_TIER, "split": UNEQUAL, "rounds": rounds}
    assert equal(played(method, **changes), played("fedavg", **changes))
    assert not equal(
        played(replace(method, weighting="uniform"), **changes), played("fedavg", **changes)
    )


@pytest.mark.parametrize("train", [SGD, Train(epochs=2, batch=20, lr=0.02, momentum=0.9)])
def test_scaffold_with_zero_controls_is_layer_averaging(train: Train) -> None:
    assert equal(
        played(Scaffold(), rounds=1, train=train),
        played(Averaged(weighting="samples"), rounds=1, train=train),
    )
    assert not close(
        played(Scaffold(), rounds=2, train=train),
        played(Averaged(weighting="samples"), rounds=2, train=train),
    )


@pytest.mark.parametrize(
    "train",
    [SGD, Train(epochs=2, batch=20, lr=0.02, momentum=0.9), Train(optimizer="adam", lr=1e-3)],
)
def test_fednova_with_equal_steps_is_averaging(train: Train) -> None:
    assert close(played(FedNova(), train=train), played(Averaged(weighting="samples"), train=train))


def test_fednova_with_unequal_steps_is_not() -> None:
    unequal = {"split": UNEQUAL, "train": SGD}
    assert not close(played(FedNova(), **unequal), played(Averaged(weighting="samples"), **unequal))


def test_fednova_is_its_formula() -> None:
    """x − (Σ p_k a_k)·Σ p_k d_k, entry by entry over the holders, from weights that plain clients
    of unequal sizes return."""
    unequal = {"split": UNEQUAL, "train": SGD}
    table, plain = Table(FedNova(), **unequal), Table(Averaged(), **unequal)
    replies, theirs = table.play(range(4)), plain.play(range(4))
    before = dict(table.method.weights[""])
    table.method.merge(replies, 1)
    name = "stages.1.conv.weight"
    d, a, weight = (torch.zeros_like(before[name], dtype=torch.float64) for _ in range(3))
    for reply in theirs:
        where, n, steps = reply.piece.view.where(name), reply.samples, -(-reply.samples // 20)
        d[where] += (
            n * (reply.sent["weights"][name] - reply.message["weights"][name]).double() / steps
        )
        a[where] += n * steps
        weight[where] += n
    expected = before[name].double() - (a / weight) * (d / weight)
    assert torch.allclose(table.method.weights[""][name].double(), expected, atol=1e-6)
    assert len({reply.message.facts["effective_steps"] for reply in replies}) > 1


# -- SCAFFOLD --------------------------------------------------------------------------------------


def control_of(table: Table, client: int, view: Any = None) -> State:
    return {
        n.removeprefix("control/"): t
        for n, t in table.world.store.get(client).items()
        if n.startswith("control/")
    }


@pytest.mark.parametrize(
    "train",
    [SGD, Train(epochs=1, batch=20, lr=0.02), Train(epochs=1, batch=20, optimizer="adam", lr=1e-3)],
)
@pytest.mark.parametrize("averaging", ["layer", "group"])
def test_the_servers_control_is_the_mean_of_the_clients(averaging: str, train: Train) -> None:
    """With everybody in every round, per entry over those that own it."""
    table = Table(Scaffold(averaging), train=train)
    for number in (1, 2, 3):
        table.round(range(4), number)
    device = table.world.device(table.tier("small")[0])
    piece = table.method.piece(device, 3)
    server = table.method.controls[table.method.group_of(piece)]
    name = "stages.0.conv.weight"
    total, count = torch.zeros_like(server[name]), torch.zeros_like(server[name])
    for client in range(4) if averaging == "layer" else table.tier("small"):
        where = table.method.piece(table.world.device(client), 3).view.where(name)
        total[where] += control_of(table, client)[name]
        count[where] += 1
    held = count > 0
    assert bool(server[name][held].abs().max() > 0)
    assert torch.allclose(server[name][held], (total / count)[held], atol=1e-5)
    assert bool((server[name][~held] == 0).all())


def test_a_share_of_the_fleet_moves_the_control_by_its_share() -> None:
    table = Table(Scaffold(), fleet=ONE_TIER, train=SGD)
    replies = table.round([0])
    change = replies[0].message["control"]
    assert all(
        torch.allclose(table.method.controls[""][n], t / 4, atol=1e-7) for n, t in change.items()
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_clients_control_is_its_mean_gradient(momentum: float) -> None:
    """With a vanishing rate all gradients are taken at x: both options then agree, with momentum by
    its effective steps."""
    train = Train(epochs=1, batch=20, lr=1e-4, momentum=momentum, augment="none")
    by_steps, by_gradient = (Table(Scaffold(control=c), train=train) for c in ("steps", "gradient"))
    for table in (by_steps, by_gradient):
        table.round([0, 1])
    for client in (0, 1):
        one, other = control_of(by_steps, client), control_of(by_gradient, client)
        gap = sum(float((one[n] - t).norm() ** 2) for n, t in other.items()) / sum(
            float(t.norm() ** 2) for t in other.values()
        )
        # Momentum weighs early batches more than late ones, so that there the two means are not
        # over the same weights.
        assert gap**0.5 < (0.35 if momentum else 0.02)


def test_the_averaged_gradient_is_the_gradient() -> None:
    table = Table(Scaffold(control="gradient"), train=Train(epochs=1, batch=20, augment="none"))
    client = client_of_task(table, 0)
    table.round([0])
    module = client.reference.network(client.view, dict(client.weights))
    # equal batches: their mean is that of all rows
    loss = torch.nn.functional.cross_entropy(module(client.x), client.y)
    grads = dict(
        zip(
            dict(module.named_parameters()),
            torch.autograd.grad(loss, list(module.parameters())),
            strict=True,
        )
    )
    assert all(torch.allclose(control_of(table, 0)[n], g, atol=1e-5) for n, g in grads.items())


def client_of_task(table: Table, number: int) -> Client:
    device = table.world.device(number)
    piece = table.method.piece(device, 1)
    sent = table.method.send(device, piece, 1)
    client = client_of(Errand(number, 1, piece.reference.name, piece.spec(), sent, {}), table.site)
    client.weights = sent["weights"]
    return client


def test_scaffold_costs_twice_the_bytes_and_buffers_have_no_control() -> None:
    plain, scaffold = (nestling.run(small(m, **QUICK)) for m in (Averaged(), Scaffold()))
    assert scaffold.summary["bytes_up"] == 2 * plain.summary["bytes_up"]
    assert scaffold.summary["bytes_down"] == 2 * plain.summary["bytes_down"]
    reply = Table(Scaffold(), model=TRACKED).round([0])[0]
    assert set(reply.message["weights"]) - set(reply.message["control"]) == {
        n for n in reply.message["weights"] if "running" in n or "num_batches" in n
    }


def test_scaffold_refuses_steps_with_adam() -> None:
    with pytest.raises(InputError, match=r"method.control.*gradient"):
        Table(Scaffold(control="steps"), train=Train(optimizer="adam", lr=1e-3))


# -- FedNova ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("momentum", "mu"), [(0.0, 0.0), (0.5, 0.0), (0.9, 0.0), (0.0, 2.0), (0.9, 2.0)]
)
@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_effective_steps_are_how_far_a_constant_gradient_leads(
    momentum: float, mu: float, steps: int
) -> None:
    optim = Optim("sgd", 0.05, momentum)
    w, gradient, buffers = (
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([-3.0], dtype=torch.float64),
        Buffers(),
    )
    for _ in range(steps):
        step(optim, [w], [gradient + mu * w], buffers)
    a = effective_steps(optim, steps, mu)
    assert float(w) == pytest.approx(0.05 * 3.0 * a, rel=1e-9)
    if not mu:
        assert a == pytest.approx(
            (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum), rel=1e-9
        )
    elif not momentum:
        assert a == pytest.approx((1 - (1 - 0.05 * mu) ** steps) / (0.05 * mu), rel=1e-9)


def test_adam_counts_steps() -> None:
    assert effective_steps(Optim("adam", 1e-3), 12) == 12.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": TRACKED, "split": SplitConfig(size=41)},
        {"train": Train(drop_last=True, batch=25)},
    ],
)
def test_steps_are_counted_as_they_are_taken(changes: dict[str, Any]) -> None:
    table = Table(Averaged(), **changes)
    table.play([0])
    client = client_of_task(table, 0)
    assert steps_of(client, client.train.phase(1)) == table.outcomes[0].steps


@pytest.mark.parametrize("steps", [0, -1.0, float("nan"), float("inf"), "3", None, True])
def test_a_lie_about_the_steps_is_refused(steps: object) -> None:
    table = Table(FedNova())
    piece = table.world.device(0).piece
    with pytest.raises(InputError, match="effective number of steps"):
        table.method.returned(
            piece, table.method.send(table.world.device(0), piece, 1), {"effective_steps": steps}
        )


# -- FedProx and MOON ------------------------------------------------------------------------------


def test_the_pull_is_half_mu_times_the_squared_distance_of_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net = Net(module, dict(module.named_parameters()))
    batch = Batch(
        torch.randn(6, 3, generator=torch.Generator().manual_seed(0)),
        torch.arange(6) % 4,
        torch.arange(6),
    )
    given = {name: p.detach() + 0.5 for name, p in module.named_parameters()}
    entries = sum(p.numel() for p in module.parameters())
    pulled, plain = proximal(net, batch, given, mu=0.1), supervised(net, batch, {})
    assert float((pulled - plain).detach()) == pytest.approx(0.05 * 0.25 * entries, rel=1e-4)


def test_a_strong_pull_keeps_clients_near() -> None:
    def moved(mu: float) -> float:
        reply = Table(FedProx(mu=mu), train=Train(epochs=2, batch=20, lr=0.02, momentum=0.0)).play(
            [0]
        )[0]
        return (
            sum(
                float((t - reply.sent["weights"][n]).norm() ** 2)
                for n, t in reply.message["weights"].items()
            )
            ** 0.5
        )

    assert moved(20.0) < 0.5 * moved(0.0)


def test_moon_takes_three_forwards_and_three_networks() -> None:
    table = Table(Moon())
    table.round([0])
    client = client_of_task(table, 0)
    client.memory = table.world.store.get(0)
    phase = table.method.phases(
        client, table.method.send(table.world.device(0), table.world.device(0).piece, 1)
    )[0]
    module = client.reference.network(client.view, dict(client.weights))
    calls: list[nn.Module] = []
    handle = module.register_forward_pre_hook(lambda m, _: calls.append(m))
    phase.objective(
        Net(module, dict(module.named_parameters())),
        Batch(client.x[:4], client.y[:4], torch.arange(4)),
        phase.given,
    )
    handle.remove()
    assert len(calls) == 3
    own = sum(t.numel() for t in client.weights.values())
    assert own + sum(t.numel() for t in phase.given.values()) == 3 * own


def test_moon_is_its_formula() -> None:
    from nestling.methods.baselines.moon import _contrastive

    table = Table(Moon())
    client = client_of_task(table, 0)
    module = client.reference.network(client.view, dict(client.weights))
    noise = torch.Generator().manual_seed(1)
    others = {
        of: {n: t + 0.3 * torch.randn(t.shape, generator=noise) for n, t in client.weights.items()}
        for of in ("global", "previous")
    }
    z = {"own": module.features(client.x)}
    for of, weights in others.items():
        z[of] = copy.deepcopy(module)
        z[of].load_state_dict(weights)
        z[of] = z[of].features(client.x)
    near, far = (
        torch.cosine_similarity(z["own"], z[of], dim=1) / 0.5 for of in ("global", "previous")
    )
    contrast = -torch.log(near.exp() / (near.exp() + far.exp())).mean()
    batch = Batch(client.x, client.y, torch.arange(len(client.x)))
    net, given = (
        Net(module, dict(module.named_parameters())),
        {f"{of}/{n}": t for of, w in others.items() for n, t in w.items()},
    )
    found = _contrastive(net, batch, given, mu=2.0, temperature=0.5, head="head") - supervised(
        net, batch, {}
    )
    assert (
        float(found.detach()) == pytest.approx(2 * float(contrast.detach()), rel=1e-3)
        and module.training
    )


def test_moons_first_round_has_no_contrast() -> None:
    """A client without a previous model takes the received one for it, and then the term has no
    gradient."""
    assert close(played(Moon(mu=5.0), rounds=1), played(Averaged(), rounds=1), 1e-6)


def test_moon_remembers_the_last_local_model() -> None:
    table = Table(Moon())
    reply = table.round([0])[0]
    kept = {
        n.removeprefix("previous/"): t
        for n, t in table.world.store.get(0).items()
        if n.startswith("previous/")
    }
    assert equal(kept, dict(reply.message["weights"])) and not close(
        kept, dict(reply.sent["weights"])
    )


def test_moons_projection_head_is_a_network_of_its_own() -> None:
    table = Table(Moon(projection=24))
    replies = table.round(range(4))
    shapes = {
        n: tuple(t.shape) for n, t in table.method.weights[""].items() if n.startswith("head")
    }
    features = table.world.main.module.head.in_features
    assert shapes["head.0.weight"] == (features, features) and shapes["head.3.weight"] == (10, 24)
    for reply in replies:
        plan = table.world.plans[reply.device.tier]
        assert (
            reply.piece.reference.name == "moon"
            and table.world.cost(reply.piece).params <= plan.cost.params
        )
    with pytest.raises(InputError, match=r"method.projection"):
        Table(Moon(projection=24), model=Named("exitcnn", {"channels": [8, 16]}))


# -- groups and depth ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [Averaged("group"), FedProx("group"), Scaffold("group"), FedNova("group"), Moon("group")],
)
def test_groups_never_mix(method: Averaged) -> None:
    """What a tier trains is what it trains in a fleet in which nobody else replies."""
    table, quiet = Table(method), Table(copy.deepcopy(method))
    for number in (1, 2):
        table.round(range(4), number)
        quiet.round(quiet.tier("small"), number)
    small_device = table.world.device(table.tier("small")[0])
    assert equal(
        table.method.model_for(small_device).state, quiet.method.model_for(small_device).state
    )
    large = table.world.device(table.tier("large")[0])
    assert not equal(table.method.model_for(large).state, quiet.method.model_for(large).state)
    assert equal(table.method.global_model().state, table.method.model_for(large).state)


def test_layers_do_mix() -> None:
    table, quiet = Table(Averaged()), Table(Averaged())
    table.round(range(4))
    quiet.round(quiet.tier("small"))
    device = table.world.device(table.tier("small")[0])
    assert not equal(table.method.model_for(device).state, quiet.method.model_for(device).state)


DEEP = {"model": Named("resnet14", {"channels": [4, 4, 8, 8, 8], "norm": "group"}), "rounds": 1}


@pytest.mark.parametrize("name", BASELINES)
def test_networks_may_be_cut_in_depth(name: str) -> None:
    table = Table(BASELINES[name](cut="depth"), **DEEP)
    before = {n: t.clone() for n, t in table.method.weights[""].items()}
    replies = table.round(table.tier("small"))
    view = replies[0].piece.view
    assert view.dropped and bool(view.keep.all())
    after = table.method.weights[""]
    assert any(not torch.equal(after[n], before[n]) for n in view.names)
    assert all(torch.equal(after[n], t) for n, t in before.items() if n not in view.names)


def test_a_network_without_depths_is_refused() -> None:
    with pytest.raises(InputError, match="depth"):
        Table(Averaged(cut="depth"))


# -- FedPer ----------------------------------------------------------------------------------------


def test_personal_heads_differ_and_never_travel() -> None:
    table = Table(FedPer())
    for number in (1, 2):
        for reply in table.round(range(4), number):
            assert not any(
                n.startswith("head") for n in (*reply.sent["weights"], *reply.message["weights"])
            )
    heads = [
        table.method.model_for(table.world.device(c)).state["head.weight"]
        for c in table.tier("small")
    ]
    assert not torch.equal(*heads)
    bases = [
        table.method.model_for(table.world.device(c)).state["stages.0.conv.weight"]
        for c in table.tier("small")
    ]
    assert torch.equal(*bases)
    assert torch.equal(
        table.method.weights[""]["head.weight"], table.world.main.initial["head.weight"]
    )


def test_a_personal_part_goes_on_from_where_it_was() -> None:
    table = Table(FedPer())
    table.round([0])
    kept = table.world.store.get(0)["personal/head.weight"]
    device = table.world.device(0)
    piece = table.method.piece(device, 2)
    sent = table.method.send(device, piece, 2)
    client = client_of(
        Errand(0, 2, piece.reference.name, piece.spec(), sent, table.world.store.get(0)),
        table.site,
    )
    assert torch.equal(table.method.start(client, sent)["head.weight"], kept)
    assert torch.equal(table.method.model_for(device).state["head.weight"], kept)


def test_units_are_counted_from_the_last() -> None:
    table = Table(FedPer(personal=2))
    assert units(table.world.main) == ["stages.0", "stages.1", "stages.2", "head"]
    sent = table.round([0])[0].message["weights"]
    assert {n.split(".conv")[0].split(".norm")[0] for n in sent} == {"stages.0", "stages.1"}
    named = Table(FedPer(personal=("stages.2", "head"))).round([0])[0].message["weights"]
    assert equal(dict(sent), dict(named))
    blocks = units(Table(Averaged(), **DEEP).world.main)
    assert blocks[-1] == "head" and len(blocks) == 8 and blocks[-2].count(".") == 2


@pytest.mark.parametrize("personal", [0, -1, (), 4, ("nothing",), ("stages", "head")])
def test_personal_parts_that_make_no_sense_are_refused(personal: Any) -> None:
    with pytest.raises(InputError, match=r"method\.personal"):
        Table(FedPer(personal=personal))


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("averaged:Averaged", {"averaging": "tier"}),
        ("averaged:Averaged", {"cut": "time"}),
        ("averaged:Averaged", {"weighting": "n"}),
        ("fedprox:FedProx", {"mu": -1.0}),
        ("fednova:FedNova", {"mu": -1.0}),
        ("scaffold:Scaffold", {"server_lr": 0.0}),
        ("scaffold:Scaffold", {"control": "both"}),
        ("moon:Moon", {"mu": -1.0}),
        ("moon:Moon", {"temperature": 0.0}),
        ("moon:Moon", {"projection": -1}),
    ],
)
def test_bad_settings_are_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"method\.{next(iter(options))}"):
        small(Named(f"nestling.methods.baselines.{name}", options)).make_method()


@pytest.mark.parametrize("name", BASELINES)
def test_they_are_found_by_name(name: str) -> None:
    assert method_class(f"nestling.methods.baselines.{name}") is BASELINES[name]


@pytest.mark.parametrize("name", BASELINES)
def test_bytes_equal_the_closed_formula(name: str) -> None:
    result = nestling.run(small(BASELINES[name](), **QUICK))
    total = 0
    for row in result.metrics:
        for client in row["clients"]:
            piece = result.federation.world.device(client).piece
            state = piece.reference.network(piece.view).state_dict()
            total += 4 * sum(
                t.numel()
                for n, t in state.items()
                if name != "fedper:FedPer" or not n.startswith("head")
            )
    total *= 2 if name == "scaffold:Scaffold" else 1
    assert (result.summary["bytes_down"], result.summary["bytes_up"]) == (total, total)


@pytest.mark.parametrize(
    ("name", "averaging"),
    [
        ("scaffold:Scaffold", "layer"),
        ("scaffold:Scaffold", "group"),
        ("moon:Moon", "layer"),
        ("fedper:FedPer", "group"),
    ],
)
def test_a_resumed_run_is_the_run(name: str, averaging: str, tmp_path: Path) -> None:
    experiment = small(
        Named(f"nestling.methods.baselines.{name}", {"averaging": averaging}), **QUICK
    )
    whole = nestling.run(experiment.with_changes(rounds=4))
    nestling.run(experiment.with_changes(rounds=2), out=tmp_path / "run")
    resumed = nestling.resume(tmp_path / "run", overrides=("rounds=4",))
    before, after = whole.federation.method.state(), resumed.federation.method.state()
    assert before.keys() == after.keys() and all(
        equal(dict(before[k]), dict(after[k])) for k in before
    )


CHANGING = FleetConfig(
    tiers=(Tier(name="small", ratio=0.5, count=2, memory_mean=60, memory_std=(30.0,)), *TIERS[1:])
)


@pytest.mark.parametrize("averaging", ["layer", "group"])
@pytest.mark.parametrize("name", BASELINES)
def test_pieces_that_change_with_free_memory(name: str, averaging: str) -> None:
    """Controls, personal heads and previous models follow a client whose piece becomes larger or
    smaller."""
    result = nestling.run(
        small(BASELINES[name](averaging), fleet=CHANGING, participants=4, **{**QUICK, "rounds": 5})
    )
    assert result.summary["refused"] == 0
    world = result.federation.world
    assert any(
        len({world.device(c, r).piece.view.numel() for r in range(1, 6)}) > 1 for c in range(4)
    )


def test_what_is_kept_survives_a_smaller_piece() -> None:
    _, federation = assemble(small(**QUICK))
    reference = federation.world.main
    wide, narrow = reference.full, prefix(reference.axes, 0.25)
    name = "stages.1.conv.weight"
    ones = {name: torch.ones(wide.shape(name))}
    memory = keep({"other": torch.zeros(1)}, "control", reference, wide, ones)
    twos = {
        name: 2
        * recall(memory, "control", reference, narrow, {name: torch.zeros(narrow.shape(name))})[
            name
        ]
    }
    assert torch.equal(twos[name], torch.full(narrow.shape(name), 2.0))
    memory = keep(memory, "control", reference, narrow, twos)
    back = recall(memory, "control", reference, wide, {name: torch.zeros(wide.shape(name))})[name]
    assert (
        torch.equal(back[narrow.where(name)], twos[name])
        and int((back == 1).sum()) == back.numel() - twos[name].numel()
    )
    only_narrow = keep({}, "control", reference, narrow, twos)
    grown = recall(only_narrow, "control", reference, wide, {name: torch.zeros(wide.shape(name))})[
        name
    ]
    assert (
        int((grown == 2).sum()) == twos[name].numel()
        and int((grown == 0).sum()) == grown.numel() - twos[name].numel()
    )
    assert "other" in memory
    shallow = without(wide, ["stages.2"])
    deep = {n: torch.ones(wide.shape(n)) for n in (name, "stages.2.conv.weight")}
    memory = keep(
        keep({}, "personal", reference, wide, deep),
        "personal",
        reference,
        shallow,
        {name: 3 * deep[name]},
    )
    back = recall(
        memory, "personal", reference, wide, {n: torch.zeros_like(t) for n, t in deep.items()}
    )
    assert bool((back[name] == 3).all()) and bool((back["stages.2.conv.weight"] == 1).all())


STACKS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "adam": {"train": Train(epochs=1, batch=16, optimizer="adam", lr=1e-3)},
    "batch norm": {"model": TRACKED, "train": Train(epochs=1, batch=25, lr=0.005, momentum=0.0)},
}


@pytest.mark.parametrize("setting", STACKS)
@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.usefixtures("images_as_they_are")
def test_a_stack_gives_what_clients_give_one_by_one(name: str, setting: str) -> None:
    settings = {"participants": 0, "split": UNEQUAL, **QUICK, **STACKS[setting]}
    fleet = FleetConfig(
        tiers=(Tier(name="small", ratio=0.25, count=2), Tier(name="large", ratio=1.0, count=2))
    )
    plain, stacked = (
        nestling.run(small(BASELINES[name](), fleet=fleet, **settings, engine=EngineConfig(e, 1)))
        for e in ("inline", "cohort")
    )
    assert not stacked.federation.engine.notes
    before, after = plain.federation.method.state(), stacked.federation.method.state()
    for kind, part in before.items():
        for n, t in part.items():
            assert (
                float((t - after[kind][n]).double().norm())
                <= 1e-4 * float(t.double().norm()) + 1e-6
            ), (kind, n)
    for client in plain.federation.world.store.clients():
        mine, theirs = (r.federation.world.store.get(client) for r in (plain, stacked))
        assert mine.keys() == theirs.keys()


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in BASELINES if n != "fedper:FedPer"])
def test_sharing_beats_training_alone(name: str) -> None:
    found = learned(BASELINES[name]())
    assert mean(found) > alone() and mean(found) > 0.3, found


@pytest.mark.slow
def test_a_shared_base_beats_training_alone() -> None:
    """With everybody in every round, as alone."""
    found = learned(FedPer(), kind="personal_score", participants=0)
    assert mean(found) > alone(kind="personal_score") + 0.01, found
