"""FedIN: its three rules by hand, what its second loss may and may not touch, the pool of pairs,
noise, identities, learning."""

from __future__ import annotations

import copy
from collections import OrderedDict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from nestling.message import Message
from nestling.methods import Reply
from nestling.methods.representation.fedin import FedIN
from nestling.models import build
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.seeds import derive, numbers, torch_seeded
from nestling.training.client import Client, Errand, client_of, work
from nestling.training.noise import normal
from nestling.training.objectives import Batch, Net
from nestling.training.optimisers import Buffers, Optim
from nestling.training.order import counters
from nestling.training.phase import Phase
from nestling.training.stacks.stacked import train_stack
from nestling.training.stacks.together import work_together
from nestling.training.trainer import train_step
from nestling.views import Reference, State
from nestling.views.middle import features, middle_of, still, through
from tests.methods.learning import SEEDS, experiment, mean
from tests.methods.mixed import clearly_above
from tests.small import small

NAME = "nestling.methods.representation.fedin:FedIN"
BLOCKS = Named("tinyresnet", {"channels": [4, 8], "blocks": [2]})
TRACKED = Named("tinyresnet", {**BLOCKS.options, "norm": "tracked"})
FLEET = FleetConfig(
    tiers=(Tier(name="small", ratio=0.5, count=2), Tier(name="large", ratio=1.0, count=2))
)
SETTING: dict[str, Any] = {"model": BLOCKS, "fleet": FLEET, "participants": 4}


def made(method: FedIN | None = None, **changes: Any) -> Federation:
    return assemble(small(method or FedIN(), **{**SETTING, **changes}))[1]


def task_of(federation: Federation, client: int, round: int) -> Errand:
    world, method = federation.world, federation.method
    device = world.device(client)
    piece = method.piece(device, round)
    return Errand(
        client, round, piece.reference.name, piece.spec(), method.send(device, piece, round)
    )


def play(federation: Federation, clients: list[int], round: int) -> list[Reply]:
    world, method, replies = federation.world, federation.method, []
    for client in clients:
        errand = task_of(federation, client, round)
        device = world.device(client)
        outcome = work(method, errand, site_of(federation))
        replies.append(Reply(device, method.piece(device, round), errand.message, outcome.reply))
    method.merge(replies, round)
    return replies


def second_round(method: FedIN, client: int = 0, **changes: Any) -> tuple[Client, Phase, Message]:
    """A client of the second round, which has pairs, the phase it does, and what it received."""
    federation = made(method, **changes)
    play(federation, [client, client + 1], 1)
    errand = task_of(federation, client, 2)
    found = client_of(errand, site_of(federation))
    found.weights = method.start(found, errand.message)
    return found, next(iter(method.phases(found, errand.message))), errand.message


def applied(client: Client, phase: Phase) -> State:
    """The direction that one step of plain SGD takes on the client's first rows."""
    module = client.reference.network(client.view, client.weights).train()
    net = Net(module, dict(module.named_parameters()))
    before = {name: p.detach().clone() for name, p in net.params.items()}
    rows = torch.arange(12)
    bare = Phase(**{**vars(phase), "optim": Optim("sgd", 1.0, 0.0)})
    train_step(net, bare, Batch(client.x[:12], client.y[:12], rows), Buffers())
    return {name: before[name] - p.detach() for name, p in net.params.items()}


def by_hand(client: Client, received: Message, mu: float) -> tuple[State, State]:
    """G_local and G_IN, written out for a network of stem, stages, neck and head."""
    module = client.reference.network(client.view, client.weights).train()
    params, start = dict(module.named_parameters()), received["weights"]
    distance = sum(((p - start[n]) ** 2).sum() for n, p in params.items())
    local = F.cross_entropy(module(client.x[:12]), client.y[:12]) + mu * distance
    pairs = received["pairs"]
    inner = F.mse_loss(module.neck(module.stages(pairs["in"])), pairs["out"])
    grads = [
        torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        for loss in (local, inner)
    ]
    first, second = (dict(zip(params, found, strict=True)) for found in grads)
    return first, {name: grad for name, grad in second.items() if grad is not None}


def close(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=1e-4, atol=1e-6) for n in a)


# -- the local step --------------------------------------------------------------------------------


def test_the_rules_are_their_formulas_and_differ() -> None:
    found = {}
    for rule in ("simplified", "exact", "sum"):
        client, phase, received = second_round(FedIN(rule=rule, lam=0.6))
        # Away from where it started, so that the pull has a gradient.
        client.weights = {
            n: t * 1.1 if t.is_floating_point() else t for n, t in client.weights.items()
        }
        local, inner = by_hand(client, received, 0.05)
        b = sum(float((inner[n] * local[n]).sum()) for n in inner)
        a = sum(float((local[n] ** 2).sum()) for n in inner)
        along = {"simplified": 0.3, "sum": 1.0, "exact": 0.0 if b >= 0 else -b / a}[rule]
        found[rule] = applied(client, phase)
        assert close(
            found[rule], {n: inner[n] + along * g if n in inner else g for n, g in local.items()}
        )
    assert not any(close(found[one], found[other]) for one, other in combinations(found, 2))


@pytest.mark.parametrize("agree", [True, False])
def test_the_exact_rule_turns_only_where_the_gradients_disagree(agree: bool) -> None:
    client, phase, _ = second_round(FedIN(rule="exact", mu=0.0))
    assert phase.rule is not None
    middle = middle_of(client.reference, client.view)
    torch.manual_seed(0)
    local = {
        n: torch.randn_like(t)
        for n, t in client.weights.items()
        if n in client.reference.parameters
    }
    inner = {n: (g if agree else -2 * g) + torch.randn_like(g) for n, g in local.items()}
    ruled = phase.rule({}, local, {f"also/{n}": g for n, g in inner.items()})
    names = middle.parameters
    if agree:
        assert all(torch.equal(ruled[n], inner[n]) for n in names)
    else:
        # What is left is at right angles to the local gradient.
        assert (
            abs(sum(float((ruled[n] * local[n]).sum()) for n in names))
            < 1e-2
            < sum(float(ruled[n].norm()) for n in names)
        )
    assert all(torch.equal(ruled[n], local[n]) for n in local if n not in names)


def test_extractor_and_classifier_do_not_depend_on_the_pairs() -> None:
    client, phase, _ = second_round(FedIN())
    other = Phase(
        **{**vars(phase), "given": {**phase.given, "pairs/in": phase.given["pairs/in"].flip(0) * 3}}
    )
    one, two = applied(client, phase), applied(client, other)
    inside = set(middle_of(client.reference, client.view).parameters)
    assert inside and {n.split(".")[0] for n in one if n not in inside} == {"stem", "head"}
    for name in one:
        assert torch.equal(one[name], two[name]) == (name not in inside), name


def test_without_pairs_the_first_round_is_plain() -> None:
    federation = made(FedIN(mu=0.0))
    errand = task_of(federation, 0, 1)
    assert "pairs" not in errand.message
    client = client_of(errand, site_of(federation))
    phase = next(iter(federation.method.phases(client, errand.message)))
    assert phase.also is None and phase.rule is None and not phase.given


def test_a_network_agrees_with_its_own_pairs() -> None:
    federation = made(FedIN(), model=TRACKED)
    reply = play(federation, [0], 1)[0]
    view = reply.piece.view
    module = reply.piece.reference.network(view, reply.message["weights"]).train()
    middle = middle_of(reply.piece.reference, view)
    pairs = reply.message["pairs"]
    out = through(module, middle.entry, middle.head, pairs["in"], reply.piece.reference.shape)
    assert torch.allclose(out, pairs["out"], atol=1e-5)


def test_running_statistics_do_not_move_in_the_second_pass() -> None:
    reference = Reference(
        "main", build("tinyresnet", shape=(1, 12, 12), classes=3, norm="tracked"), (1, 12, 12)
    )
    module, middle = reference.network(reference.full).train(), middle_of(reference, reference.full)
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(4, 1, 12, 12)
    s_in, _ = features(module, middle.entry, middle.head, x)
    through(module, middle.entry, middle.head, s_in, reference.shape)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    module(x)
    assert any(not torch.equal(t, before[n]) for n, t in module.state_dict().items())
    # A whole phase with pairs moves them exactly as far as one without.
    client, phase, _ = second_round(FedIN(), model=TRACKED)
    moved = []
    for also in (phase.also, None):
        network = client.reference.network(client.view, client.weights).train()
        frozen = Phase(**{**vars(phase), "also": also, "rule": _nowhere})
        train_step(
            Net(network, dict(network.named_parameters())),
            frozen,
            Batch(client.x, client.y, torch.arange(60)),
            Buffers(),
        )
        moved.append({n: t.clone() for n, t in network.named_buffers()})
    assert all(torch.equal(t, moved[1][n]) for n, t in moved[0].items())


def _nowhere(params: Any, grads: Any, given: Any) -> Any:
    return {n: torch.zeros_like(g) for n, g in grads.items()}


def test_statistics_by_width_stay_too() -> None:
    module = build("tinyresnet", shape=(1, 12, 12), classes=3, norm="per-width").train()
    before = copy.deepcopy(module.state_dict())
    with still(module):
        module(torch.randn(4, 1, 12, 12))
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items()) and all(
        m.training for m in module.modules()
    )


# -- where the middle is ---------------------------------------------------------------------------


class Plain(nn.Module):
    """A user's network: nothing in it is called stem, stage or head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = nn.Conv2d(1, 4, 5, stride=2), nn.Conv2d(4, 6, 3)
        self.last = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x).relu()).relu().mean((2, 3)))


def test_a_users_layers_can_be_named() -> None:
    with torch_seeded(0, "test"):
        reference = Reference("main", Plain(), (1, 12, 12))
    middle = middle_of(reference, reference.full, "between")
    assert (middle.head, middle.before, middle.after) == ("last", (4, 4, 4), (6,))
    assert middle.parameters == ("between.weight", "between.bias")
    s_in = torch.randn(3, 4, 4, 4)
    expected = reference.module.between(s_in).relu().mean((2, 3))
    assert torch.allclose(through(reference.module, "between", "last", s_in, (1, 12, 12)), expected)
    with pytest.raises(InputError, match="where does its middle begin") as error:
        middle_of(reference, reference.full)
    assert error.value.field == "method.entry"
    with pytest.raises(InputError, match="no layer 'stages'"):
        middle_of(reference, reference.full, "stages")


def test_repeated_blocks_are_found_in_any_network() -> None:
    inner = build("tinyresnet", shape=(1, 12, 12), classes=3, channels=[4, 8], blocks=[2])
    renamed = nn.Sequential(
        OrderedDict(
            front=inner.stem,
            trunk=inner.stages[0],
            pool=inner.neck.pool,
            flat=inner.neck.flat,
            top=inner.head,
        )
    )
    reference = Reference("main", renamed, (1, 12, 12))
    middle = middle_of(reference, reference.full)
    assert (middle.entry, middle.head) == ("trunk.0", "top") and middle.before == (4, 3, 3)


def test_raw_inputs_are_never_sent() -> None:
    with pytest.raises(InputError, match="inputs themselves") as error:
        made(
            FedIN(averaging="group", cut="width"),
            model=Named("tinycnn"),
            fleet=FleetConfig(tiers=(Tier(ratio=1.0, count=4),)),
        )
    assert error.value.fix and "stem" in error.value.fix


def test_unequal_features_are_refused_or_kept_apart() -> None:
    exits = Named("tinyresnet", {"blocks": [2, 2], "channels": [4, 8, 16], "exits": [2, 4]})
    tiers = FleetConfig(
        tiers=(Tier(name="small", ratio=0.5, count=2), Tier(name="large", ratio=1.0, count=2))
    )
    with pytest.raises(InputError, match="has others in every depth"):
        made(FedIN(), model=exits, fleet=tiers)
    federation = made(FedIN(averaging="group"), model=exits, fleet=tiers)
    play(federation, [0, 1, 2, 3], 1)
    for client in range(4):
        errand, method = task_of(federation, client, 2), federation.method
        own = next(pair for owner, pair in method.pairs if owner == client)
        assert {n: t.shape for n, t in errand.message["pairs"].items()} == {
            n: t.shape for n, t in own.items()
        }
    with pytest.raises(InputError, match="unequal width"):
        FedIN(cut="width")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rule", "best"),
        ("noise_in", "air"),
        ("mu", -1.0),
        ("lam", -1.0),
        ("noise", -0.1),
        ("batch", 0),
        ("pool", 0),
    ],
)
def test_settings_are_checked(field: str, value: Any) -> None:
    with pytest.raises(InputError) as error:
        FedIN(**{field: value})
    assert error.value.field == f"method.{field}"


# -- the pool --------------------------------------------------------------------------------------


def test_pairs_come_from_somebody_else_and_the_pool_is_bounded() -> None:
    federation = made(FedIN(pool=3))
    method = federation.method
    play(federation, [2], 1)
    # nobody else has sent any
    assert task_of(federation, 2, 2).message["pairs"] is method.pairs[0][1]
    play(federation, [0, 1, 2, 3], 2)
    assert [owner for owner, _ in method.pairs] == [1, 2, 3]
    owned = {id(pair): owner for owner, pair in method.pairs}
    drawn = [
        [owned[id(task_of(federation, c, r).message["pairs"])] for r in range(3, 23)]
        for c in range(4)
    ]
    for client, owners in enumerate(drawn):
        assert set(owners) == {1, 2, 3} - {client}
    assert drawn[0] != drawn[1]
    play(federation, [1], 3)
    assert [owner for owner, _ in method.pairs] == [2, 3, 1]


def test_few_rows_are_repeated() -> None:
    federation = made(FedIN(batch=100), split=SplitConfig(kind="iid", size=30))
    reply = play(federation, [0], 1)[0]
    assert (
        len(reply.message["pairs"]["in"]) == 100
        and len(reply.message["pairs"]["in"].unique(dim=0)) == 30
    )


def test_no_replies_change_nothing() -> None:
    federation = made()
    before = federation.method.state()
    federation.method.merge([], 1)
    assert federation.method.state().keys() == before.keys() and not federation.method.pairs


def test_bytes_are_weights_and_pairs() -> None:
    result = nestling.run(small(Named(NAME, {"batch": 5}), **{**SETTING, "rounds": 3}))
    world, method = result.federation.world, result.federation.method
    pairs = 4 * 5 * (4 * 7 * 7 + 8 * 4)
    weights = sum(4 * world.cost(method.piece(world.device(c), 0)).params for c in range(4))
    assert [row["bytes_up"] for row in result.metrics] == [weights + 4 * pairs] * 3
    assert [row["bytes_down"] for row in result.metrics] == [weights, *[weights + 4 * pairs] * 2]


def test_the_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    method = Named(NAME, {"noise": 0.5})
    nestling.run(
        small(method, **{**SETTING, "participants": 3, "rounds": 2}), out=tmp_path / "parts"
    )
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=4",))
    whole = nestling.run(
        small(method, **{**SETTING, "participants": 3, "rounds": 4}), out=tmp_path / "whole"
    )
    one, other = (r.federation.method.state() for r in (parts, whole))
    assert one.keys() == other.keys()
    for kind in one:
        assert one[kind].keys() == other[kind].keys() and all(
            torch.equal(one[kind][n], other[kind][n]) for n in one[kind]
        )
    orders = [[owner for owner, _ in r.federation.method.pairs] for r in (parts, whole)]
    assert orders[0] == orders[1] != []


# -- noise -----------------------------------------------------------------------------------------


def test_noise_is_normal_and_counted() -> None:
    key = torch.tensor(derive(0, "test"))
    draws = normal(key, 3, (100, 100))
    assert (
        abs(float(draws.mean())) < 0.03
        and abs(float(draws.std()) - 1) < 0.03
        and float(draws.abs().max()) > 3.3
    )
    assert torch.equal(draws, normal(key, 3, (100, 100))) and not torch.equal(
        draws, normal(key, 4, (100, 100))
    )
    assert torch.equal(normal(key, 3, (7,)), draws.reshape(-1)[:7])
    first = numbers(int(key), counters(0, 1))[0] >> np.uint64(40)
    assert (
        abs(float(normal(key, 0, (1,))))
        <= float(np.sqrt(-2 * np.log((float(first) + 1) / 2**24))) + 1e-6
    )


@pytest.mark.parametrize("where", ["training", "message"])
def test_where_noise_is(where: str) -> None:
    loud, quiet = (
        play(made(FedIN(mu=0.0, noise=amount, noise_in=where)), [0], 1)[0] for amount in (0.8, 0.0)
    )
    trained_alike = all(
        torch.equal(t, quiet.message["weights"][n]) for n, t in loud.message["weights"].items()
    )
    assert trained_alike == (where == "message")
    if where == "message":
        clean = quiet.message["pairs"]
        for name, tensor in loud.message["pairs"].items():
            ratio = (tensor - clean[name]).std() / clean[name].std()
            assert float(ratio) == pytest.approx(0.8, rel=0.1)
    else:
        # s_out comes from the noisy s_in, and has noise of its own.
        module = loud.piece.reference.network(loud.piece.view, loud.message["weights"]).train()
        middle = middle_of(loud.piece.reference, loud.piece.view)
        out = through(
            module,
            middle.entry,
            middle.head,
            loud.message["pairs"]["in"],
            loud.piece.reference.shape,
        )
        noise = loud.message["pairs"]["out"] - out.detach()
        assert float(noise.std() / out.detach().std()) == pytest.approx(0.8, rel=0.15)


def test_every_step_has_noise_of_its_own() -> None:
    client, phase, _ = second_round(FedIN(noise=0.8))
    module = client.reference.network(client.view, client.weights).train()
    net = Net(module, dict(module.named_parameters()))
    losses = [
        float(
            phase.objective(net, Batch(client.x, client.y, torch.arange(60), number), phase.given)
        )
        for number in (0, 1, 0)
    ]
    assert losses[0] == losses[2] != losses[1]


# -- engines, identities, learning -----------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"rule": "exact"}, {"noise": 0.8}], ids=str)
@pytest.mark.parametrize("model", [BLOCKS, TRACKED], ids=["group", "tracked"])
def test_a_stack_gives_the_same(options: dict[str, Any], model: Named) -> None:
    method = FedIN(**options)
    federation = made(method, model=model)
    play(federation, [0, 1, 2, 3], 1)
    site, errands = site_of(federation), [task_of(federation, c, 2) for c in range(4)]
    alone = [work(method, errand, site) for errand in errands]
    stacked = work_together(
        method, errands, site, lambda found: [train_stack(group) for group in found]
    )
    for one, other in zip(alone, stacked, strict=True):
        assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-4)
        for kind, part in one.reply.parts.items():
            for name, tensor in part.items():
                assert torch.allclose(
                    tensor.float(), other.reply[kind][name].float(), rtol=1e-3, atol=1e-4
                ), name


@pytest.mark.parametrize("engine", [EngineConfig("cohort", 1), EngineConfig("pool", 1)], ids=str)
def test_every_engine_plays_the_same(engine: EngineConfig) -> None:
    train = Train(epochs=1, batch=20, lr=0.01, momentum=0.0)
    method = Named(NAME, {"noise": 0.3})
    one, other = (
        nestling.run(small(method, **SETTING, train=train, engine=e))
        for e in (EngineConfig("inline"), engine)
    )
    for kind, part in one.federation.method.state().items():
        for name, tensor in part.items():
            gap = tensor - other.federation.method.state()[kind][name]
            assert float(gap.norm()) <= 1e-4 * float(tensor.norm()) + 1e-6, (kind, name)


@pytest.mark.parametrize("averaging", ["layer", "group"])
def test_without_exchange_and_pull_it_is_heteroavg(averaging: str) -> None:
    off = Named(NAME, {"exchange": False, "mu": 0.0, "averaging": averaging})
    methods = (off, Named("heteroavg", {"cut": "depth", "averaging": averaging}))
    one, other = (
        nestling.run(small(method, **SETTING)).federation.method.state() for method in methods
    )
    assert one.keys() == other.keys()
    assert all(
        torch.equal(t, other[kind][n]) for kind, part in one.items() for n, t in part.items()
    )


DEEP = FleetConfig(
    tiers=tuple(Tier(name=f"ratio-{r}", ratio=r, count=3) for r in (0.25, 0.75, 1.0))
)
LEARNING: dict[str, Any] = {
    "model": Named("tinyresnet", {"channels": [8, 8], "blocks": [3]}),
    "fleet": DEEP,
    "rounds": 8,
    "participants": 0,
    "split": SplitConfig(kind="iid", size=60),
    "train": Train(epochs=2, batch=10, lr=0.05),
    "evaluate": Evaluation(every=8, clients=9),
    "engine": EngineConfig("cohort", 1),
}


@pytest.mark.slow
def test_it_learns_more_than_everybody_alone() -> None:
    ours, others = (
        [nestling.run(experiment(m, s, **LEARNING)).summary for s in SEEDS]
        for m in (Named(NAME), "local")
    )
    for kind in ("global_score", "personal_score"):
        one, other = ([run[kind]["last"] for run in runs] for runs in (ours, others))
        assert clearly_above(one, other), (kind, one, other)
        assert mean(one) > 0.5
