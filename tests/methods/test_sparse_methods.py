"""LotteryFL, Hermes and PruneFL: what each promises, checked on federations of a few small
clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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
from nestling.methods.baselines.fedavg import FedAvg
from nestling.methods.method import Reply
from nestling.methods.sparse.adjust import adjust, squared_gradients, weight_seconds, weight_uses
from nestling.methods.sparse.hermes import Hermes
from nestling.methods.sparse.lotteryfl import LotteryFL
from nestling.methods.sparse.prunefl import PruneFL
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.training.client import Client, Errand, Outcome, work
from nestling.views import Contribution, masked, prefix, to_spec
from nestling.views.sparse import prunable, prune_lowest, restored
from tests.methods.learning import alone, learned, mean
from tests.small import small

ONE = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
NAMES = {
    "LotteryFL": "nestling.methods.sparse.lotteryfl:LotteryFL",
    "Hermes": "nestling.methods.sparse.hermes:Hermes",
    "PruneFL": "nestling.methods.sparse.prunefl:PruneFL",
}
SHORT: dict[str, dict[str, Any]] = {
    "LotteryFL": {"acc_thr": 0.12},
    "Hermes": {"acc_thr": 0.12},
    "PruneFL": {"every": 2, "stage_one": 6, "steps": 3, "settled": 1},
}


@dataclass
class EagerLottery(LotteryFL):
    """LotteryFL whose gate is always open."""

    def opens(self, client: Client, weights: Mapping[str, Tensor], prunings: int) -> bool:
        return self.may_prune(prunings)


@dataclass
class EagerHermes(Hermes):
    """Hermes whose gate is always open."""

    def opens(self, client: Client, weights: Mapping[str, Tensor], prunings: int) -> bool:
        return self.may_prune(prunings)


def one_round(
    method: Any, round: int = 1, **changes: Any
) -> tuple[Federation, list[Reply], list[Outcome]]:
    """A federation and its clients' replies of one round, which are not merged yet."""
    settled, federation = assemble(small(method, **{"fleet": ONE, **changes}))
    replies, outcomes = [], []
    server, world = federation.method, federation.world
    for number in range(4):
        device = world.device(number)
        piece = server.piece(device, round)
        sent = server.send(device, piece, round)
        errand = Errand(number, round, piece.reference.name, piece.spec(), sent)
        outcomes.append(work(settled.make_method(), errand, site_of(federation)))
        back = server.returned(piece, sent, outcomes[-1].reply.facts)
        replies.append(Reply(device, back, sent, outcomes[-1].reply))
    return federation, replies, outcomes


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- LotteryFL -------------------------------------------------------------------------------------


@dataclass
class UniformFedAvg(FedAvg):
    def contribution(self, reply: Reply) -> Contribution:
        return replace(super().contribution(reply), weight=1.0)


def test_lottery_that_never_prunes_is_uniform_fedavg_bit_for_bit() -> None:
    runs = [
        nestling.run(small(m, fleet=ONE, rounds=3))
        for m in (LotteryFL(acc_thr=1.0), UniformFedAvg())
    ]
    assert equal(*(run.federation.method.state()["weights"] for run in runs))
    assert runs[0].summary["bytes_up"] == runs[1].summary["bytes_up"]


@pytest.mark.parametrize("compat", ["paper", "code"])
def test_lottery_rewinds_to_the_initial_weights_and_pruned_ones_stay_zero(compat: str) -> None:
    decaying = Train(epochs=2, batch=20, lr=0.02, momentum=0.9, weight_decay=0.01)
    federation, replies, _ = one_round(EagerLottery(compat=compat), train=decaying)
    world = federation.world
    # a global model far from the initial one
    moved = {name: t + 1.0 for name, t in world.main.initial.items()}
    federation.method.weights = moved
    device = world.device(0)
    piece = federation.method.piece(device, 2)
    sent = federation.method.send(device, piece, 2)
    client = Client(0, 2, world.main, piece.view, site_of(federation), {}, {})
    weights = federation.method.start(client, sent)
    masks = prune_lowest(world.main.full, moved, prunable(world.main), 0.2)
    for name, tensor in weights.items():
        mask = masks.get(name, torch.ones_like(tensor, dtype=torch.bool))
        assert (
            torch.equal(tensor[mask], world.main.initial[name][mask]) and (tensor[~mask] == 0).all()
        )
    for reply in replies:
        view, trained = reply.piece.view, restored(reply.piece.view, reply.message["weights"])
        for name, mask in reply.message["mask"].items():
            assert torch.equal(mask, view.mask(name))  # the server works out the same mask
            assert (trained[name][~mask] == 0).all() and trained[name][mask].abs().min() > 0


@pytest.mark.parametrize(("recover", "epochs"), [(10, 10), (1, 2), (0, 2)])
def test_lottery_trains_longer_after_a_rewind_and_only_then(recover: int, epochs: int) -> None:
    brief = Train(epochs=2, batch=20, lr=0.02)
    for made, expected in (
        (EagerLottery(recover=recover), epochs),
        (LotteryFL(acc_thr=1.0, recover=recover), 2),
    ):
        federation, _, _ = one_round(made, train=brief)
        device = federation.world.device(0)
        piece = federation.method.piece(device, 1)
        sent = federation.method.send(device, piece, 1)
        client = Client(0, 1, federation.world.main, piece.view, site_of(federation), {}, {})
        client.weights = federation.method.start(client, sent)
        assert [phase.epochs for phase in federation.method.phases(client, sent)] == [expected]


def test_lottery_means_over_holders_and_leaves_alone_what_nobody_keeps() -> None:
    federation, replies, _ = one_round(EagerLottery(prune_step=0.6))
    method, name = federation.method, "head.weight"
    before = method.weights[name].clone()
    # Two clients with masks of their own, made so that all four cases occur.
    one, other = (
        torch.rand(before.shape, generator=torch.Generator().manual_seed(k)) < 0.5 for k in (1, 2)
    )
    pair = []
    for reply, mask, samples in zip(replies, (one, other), (10, 1000), strict=False):
        view = masked(federation.world.main.full, {name: mask})
        dense = restored(reply.piece.view, reply.message["weights"])
        values = {n: t[mask] if n == name else t for n, t in dense.items()}
        pair.append(
            replace(
                reply,
                piece=replace(reply.piece, view=view),
                message=replace(
                    reply.message,
                    parts={"weights": values},
                    facts={**reply.message.facts, "samples": samples},
                ),
            )
        )
    a, b = (method.contribution(reply).state for reply in pair)
    method.merge(pair, 1)
    after, both = method.weights[name], one & other
    assert torch.equal(after[~one & ~other], before[~one & ~other]) and bool((~one & ~other).any())
    assert torch.equal(after[one & ~other], a[name][one & ~other])
    assert torch.allclose(after[both], (a[name][both] + b[name][both]) / 2)
    assert torch.allclose(method.weights["head.bias"], (a["head.bias"] + b["head.bias"]) / 2)


def test_lottery_passes_the_target_by_less_than_one_step() -> None:
    settings = EagerLottery(prune_step=0.3, r_target=0.4)
    result = nestling.run(small(settings, fleet=ONE, rounds=6, participants=0))
    method, world = result.federation.method, result.federation.world
    for client in range(4):
        known = method.records.get(client)
        assert int(known["prunings"]) == 3 and 0.7 * 0.4 < method.kept(3) <= 0.4
        for name in prunable(world.main):
            share = float(known[f"mask/{name}"].float().mean())
            assert 0.7 * 0.4 < share <= 0.4 + 4 / known[f"mask/{name}"].numel()
    masks = {name: world.store.get(0)[f"mask/{name}"] for name in prunable(world.main)}
    assert equal(masks, {name: method.records.get(0)[f"mask/{name}"] for name in masks})


@pytest.mark.parametrize("kind", [LotteryFL, Hermes])
def test_the_gate_uses_held_out_training_rows_and_no_others(kind: Any) -> None:
    """Training never sees the held-out rows; the gate sees only them; test rows are not even at
    hand."""
    method = kind(acc_thr=0.99, validation=0.2)
    settled, federation = assemble(
        small(method, fleet=ONE, split=SplitConfig(kind="iid", size=60, holdout=0.2))
    )
    site, world = site_of(federation), federation.world
    rows = world.split.indices(0)
    assert not set(rows.tolist()) & set(world.split.holdout(0).tolist())
    sent = federation.method.send(world.device(0), federation.method.piece(world.device(0), 1), 1)

    def played(changed: np.ndarray) -> Mapping[str, Tensor]:
        labels = site.y.clone()
        labels[torch.from_numpy(changed)] = (labels[torch.from_numpy(changed)] + 1) % 10
        spec = federation.method.piece(world.device(0), 1).spec()
        return work(
            settled.make_method(), Errand(0, 1, "main", spec, sent), replace(site, y=labels)
        ).reply["weights"]

    held = int(0.2 * len(rows))
    nothing = np.zeros(0, dtype=np.int64)
    assert held > 0 and equal(played(nothing), played(rows[:held]))
    assert not equal(played(nothing), played(rows[held : held + 1]))

    client = Client(0, 1, world.main, world.main.full, site, {}, {})
    weights = world.main.initial
    said = world.main.network(world.main.full, weights).eval()(client.x).argmax(-1)
    right = site.y.clone()
    right[torch.from_numpy(rows)] = (said + 1) % 10
    right[torch.from_numpy(rows[:held])] = said[:held]
    good = Client(0, 1, world.main, world.main.full, replace(site, y=right), {}, {})
    assert federation.method.opens(good, weights, 0) and not federation.method.opens(
        client, weights, 0
    )
    assert not replace(method, acc_thr=1.0).opens(good, weights, 0) and not method.opens(
        good, weights, 40
    )


def test_a_client_whose_reply_was_lost_goes_back_to_the_mask_the_server_knows() -> None:
    settled, federation = assemble(small(EagerLottery(), fleet=ONE))
    method, world, site = federation.method, federation.world, site_of(federation)
    device = world.device(0)
    piece = method.piece(device, 1)
    sent = method.send(device, piece, 1)
    lost = work(settled.make_method(), Errand(0, 1, "main", piece.spec(), sent), site)
    again = work(settled.make_method(), Errand(0, 1, "main", piece.spec(), sent, lost.memory), site)
    assert again.reply.facts["prunings"] == 1 and equal(again.reply["mask"], lost.reply["mask"])
    method.merge(
        [Reply(device, method.returned(piece, sent, again.reply.facts), sent, again.reply)], 1
    )
    piece = method.piece(device, 2)
    sent = method.send(device, piece, 2)
    further = work(
        settled.make_method(), Errand(0, 2, "main", piece.spec(), sent, again.memory), site
    )
    assert further.reply.facts["prunings"] == 2
    relapsed = work(
        settled.make_method(), Errand(0, 2, "main", piece.spec(), sent, further.memory), site
    )
    assert equal(relapsed.reply["weights"], further.reply["weights"])


@pytest.mark.parametrize("said", [-1, 2, 7, True, None, "1", 1.0])
def test_a_lie_about_prunings_is_refused(said: object) -> None:
    federation, replies, _ = one_round(EagerLottery())
    with pytest.raises(InputError, match="number of prunings"):
        federation.method.returned(replies[0].piece, replies[0].sent, {"prunings": said})


def kept_after(size: int, prunings: int, step: float) -> int:
    for _ in range(prunings):
        size -= math.floor(step * size + 1e-9)
    return size


def test_lottery_bytes_equal_the_closed_formula() -> None:
    result = nestling.run(
        small(EagerLottery(prune_step=0.3, r_target=0.5), fleet=ONE, rounds=4, participants=0)
    )
    world = result.federation.world
    sizes = {name: t.numel() for name, t in world.main.initial.items()}
    weights = {name: n for name, n in sizes.items() if name in prunable(world.main)}
    rest = sum(sizes.values()) - sum(weights.values())

    def payload(prunings: int) -> int:
        return 4 * (rest + sum(kept_after(n, prunings, 0.3) for n in weights.values()))

    bits = sum(math.ceil(n / 8) for n in weights.values())
    for row, (down, up) in zip(result.metrics, [(0, 1), (1, 2), (2, 2), (2, 2)], strict=True):
        assert row["bytes_down"] == 4 * payload(down) and row["bytes_up"] == 4 * (
            payload(up) + bits
        )
    silent = nestling.run(
        small(
            EagerLottery(prune_step=0.3, r_target=0.5, send_mask=False),
            fleet=ONE,
            rounds=1,
            participants=0,
        )
    )
    assert silent.metrics[0]["bytes_up"] == 4 * payload(1)


@pytest.mark.parametrize("personal", ["shared", "trained"])
def test_lottery_personal_models_are_masked(personal: str) -> None:
    changing = FleetConfig(
        tiers=(Tier(name="all", ratio=1.0, count=4, memory_mean=70, memory_std=(20, 20)),)
    )
    result = nestling.run(
        small(EagerLottery(personal=personal), fleet=changing, rounds=3, participants=0)
    )
    method, world = result.federation.method, result.federation.world
    own = [method.model_for(world.device(client)) for client in range(4)]
    assert all((m.state["head.weight"] == 0).any() for m in own)
    if personal == "shared":
        mask = method.records.get(1)["mask/head.weight"]
        assert (
            torch.equal(own[1].state["head.weight"] != 0, mask)
            or own[1].view.key() != world.main.full.key()
        )


# -- Hermes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["all", "holders"])
def test_hermes_averages_the_overlap_and_leaves_the_rest_personal(overlap: str) -> None:
    wide = Named("tinycnn", {"channels": [8, 16, 32], "norm": "tracked"})
    federation, replies, _ = one_round(EagerHermes(overlap=overlap, prune_step=0.4), model=wide)
    method, world, name = federation.method, federation.world, "stages.2.conv.weight"
    # Client 1 keeps other channels than the rest, as it would with data of its own.
    axes = world.main.axes
    for k, reply in enumerate(replies):
        index = {
            n: np.roll(np.arange(size), -k)[: len(reply.piece.view.indices(n))]
            for n, size in zip(axes.names, axes.sizes, strict=True)
        }
        view = nestling.views.by_index(axes, {n: np.sort(i) for n, i in index.items()})
        replies[k] = replace(reply, piece=replace(reply.piece, view=view))
    method.merge(replies, 1)
    models = [method.model_for(reply.device) for reply in replies]
    whole = [
        m.view.scatter(
            {
                n: torch.full_like(t, torch.nan) if t.is_floating_point() else t
                for n, t in world.main.initial.items()
            },
            m.state,
        )[name]
        for m in models
    ]
    sent = [
        r.piece.view.scatter(
            {
                n: torch.full_like(t, torch.nan) if t.is_floating_point() else t
                for n, t in world.main.initial.items()
            },
            r.message["weights"],
        )[name]
        for r in replies
    ]
    common = torch.stack([~torch.isnan(w) for w in whole]).all(0)
    n = torch.tensor([float(r.samples) for r in replies]).reshape(-1, 1)
    expected = (torch.stack([s[common] for s in sent]) * n).sum(0) / n.sum()
    assert bool(common.any()) and all(torch.allclose(w[common], expected, atol=1e-6) for w in whole)
    pair = ~common & ~torch.isnan(whole[0]) & ~torch.isnan(whole[1])
    assert bool(pair.any())
    if overlap == "all":
        assert torch.equal(whole[0][pair], sent[0][pair]) and not torch.equal(
            whole[0][pair], whole[1][pair]
        )
    else:
        assert torch.equal(whole[0][pair], whole[1][pair]) and not torch.equal(
            whole[0][pair], sent[0][pair]
        )
    assert equal(
        method.send(replies[0].device, method.piece(replies[0].device, 2), 2)["weights"],
        models[0].state,
    )


def test_hermes_drops_the_weakest_channels_down_to_the_target() -> None:
    result = nestling.run(
        small(
            EagerHermes(),
            fleet=ONE,
            rounds=6,
            participants=0,
            model=Named("tinycnn", {"channels": [8, 16, 32]}),
        )
    )
    method, world = result.federation.method, result.federation.world
    for client in range(4):
        view = method.piece(world.device(client), 7).view
        # 0.8⁴ ≈ 0.41 is the first power below 0.5, and groups of four channels are rounded up.
        assert [len(view.indices(a)) for a in range(3)] == [4, 8, 16] and int(
            method.records.get(client)["prunings"]
        ) == 4
        assert {
            n: tuple(t.shape) for n, t in method.model_for(world.device(client)).state.items()
        } == view.shapes
    assert result.federation.method.global_model() is None and world.store.clients() == []


def test_hermes_bytes_equal_the_closed_formula() -> None:
    result = nestling.run(
        small(
            EagerHermes(),
            fleet=ONE,
            rounds=5,
            participants=0,
            model=Named("tinycnn", {"channels": [8, 16, 32]}),
        )
    )

    def payload(a: int, b: int, c: int) -> int:
        return 4 * (25 * a + 2 * a + 9 * a * b + 2 * b + 9 * b * c + 2 * c + 10 * 9 * c + 10)

    widths = [(8, 16, 32), (8, 16, 28), (8, 12, 24), (8, 12, 20), (4, 8, 16), (4, 8, 16)]
    for number, row in enumerate(result.metrics):
        assert row["bytes_down"] == 4 * payload(*widths[number]) and row["bytes_up"] == 4 * payload(
            *widths[number + 1]
        )


def test_hermes_rewinds_only_on_request() -> None:
    for rewind in (False, True):
        federation, _, _ = one_round(EagerHermes(rewind=rewind, prune_step=0.4))
        world, method = federation.world, federation.method
        method.weights = {
            name: t + 1.0 if t.is_floating_point() else t for name, t in world.main.initial.items()
        }
        sent = method.send(world.device(0), world.device(0).piece, 1)
        client = Client(0, 1, world.main, world.main.full, site_of(federation), {}, {})
        weights = method.start(client, sent)
        source = world.main.initial if rewind else method.weights
        assert (
            equal(dict(weights), dict(client.view.extract(source)))
            and client.view.numel() < world.main.full.numel()
        )


@pytest.mark.parametrize(
    "index",
    [
        None,
        {},
        {"nowhere": 3},
        {"stages.0.conv": 10**15},
        {"stages.0.conv": "all"},
        {"stages.0.conv": [99]},
        5,
    ],
)
def test_a_lie_about_channels_is_refused(index: object) -> None:
    federation, replies, _ = one_round(EagerHermes(prune_step=0.4))
    sent = replies[0].sent
    piece = federation.world.device(0).piece
    with pytest.raises(InputError, match="channels"):
        federation.method.returned(piece, sent, {"prunings": 1, "index": index})
    good = to_spec(replies[0].piece.view)["index"]
    assert (
        federation.method.returned(piece, sent, {"prunings": 1, "index": good}).view.key()
        == replies[0].piece.view.key()
    )


# -- PruneFL ---------------------------------------------------------------------------------------


def greedy(w: Any, m: Any, g: Any, t: Any, c: float, rho: float) -> dict[str, list[bool]]:
    """The rule one candidate after another, as it is written down."""
    kept = {n: list(m[n]) for n in w}
    for n in w:
        alive = sorted((abs(w[n][i]), i) for i in range(len(w[n])) if m[n][i])
        for _, i in alive[: int(rho * len(alive))]:
            kept[n][i] = False
    num = sum(g[n][i] for n in w for i in range(len(w[n])) if kept[n][i]) + sum(g.get("bias", []))
    den = c + sum(t[n] * sum(kept[n]) for n in w)
    left = sorted(
        ((-g[n][i] / t[n], n, i) for n in w for i in range(len(w[n])) if not kept[n][i]),
        key=lambda x: x[0],
    )
    for ratio, n, i in left:
        if not -ratio > num / den:
            break
        kept[n][i] = True
        num, den = num + g[n][i], den + t[n]
    return kept


@pytest.mark.parametrize("seed", range(5))
def test_prunefl_adjusts_as_the_greedy_rule(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = {n: rng.normal(size=k).tolist() for n, k in (("a", 30), ("b", 50))}
    m = {n: (rng.random(len(v)) < 0.6).tolist() for n, v in w.items()}
    g = {**{n: (rng.random(len(v)) ** 4).tolist() for n, v in w.items()}, "bias": [0.5, 0.1]}
    t = {"a": 0.5, "b": 2.0}
    ours = adjust(*({n: torch.tensor(v) for n, v in d.items()} for d in (w, m, g)), t, 3.0, 0.3)
    theirs = greedy(w, m, {n: torch.tensor(v).tolist() for n, v in g.items()}, t, 3.0, 0.3)
    assert {n: mask.tolist() for n, mask in ours.items()} == theirs
    assert any(ours[n].tolist() != m[n] for n in m)


def test_prunefl_size_is_constant_without_dropping_and_gradients() -> None:
    weights = {"a": torch.randn(6, 5), "b": torch.randn(4)}
    masks = {"a": torch.rand(6, 5) < 0.5}
    squares = {name: torch.zeros_like(t) for name, t in weights.items()}
    assert equal(adjust(weights, masks, squares, {"a": 1.0}, 0.0, 0.0), masks)
    assert equal(adjust(weights, masks, squares, {"a": 1.0}, 2.0, 0.0), masks)
    assert int(adjust(weights, masks, squares, {"a": 1.0}, 2.0, 0.5)["a"].sum()) == math.ceil(
        int(masks["a"].sum()) / 2
    )


def test_prunefl_regrown_weights_start_at_zero_and_pruned_ones_are_zero() -> None:
    federation, replies, _ = one_round(PruneFL(stage_one=0, every=2), fleet=ONE)
    method = federation.method
    method.merge(replies, 1)
    first = {name: mask.clone() for name, mask in method.masks.items()}
    squares = {name: torch.zeros_like(t) for name, t in method.weights.items()}
    method._adjust(squares, 1)
    assert all(int(mask.sum()) < mask.numel() for mask in method.masks.values()) and all(
        m.all() for m in first.values()
    )
    assert all((method.weights[name][~mask] == 0).all() for name, mask in method.masks.items())
    before, kept = dict(method.masks), {name: t.clone() for name, t in method.weights.items()}
    squares["head.weight"][~before["head.weight"]] = 1e6
    method._adjust(squares, 1)
    grown = method.masks["head.weight"] & ~before["head.weight"]
    assert bool(grown.any()) and (method.weights["head.weight"][grown] == 0).all()
    stayed = method.masks["head.weight"] & before["head.weight"]
    assert torch.equal(method.weights["head.weight"][stayed], kept["head.weight"][stayed])


def test_prunefl_gradients_are_dense_and_squared_after_the_sum() -> None:
    settled, federation = assemble(small(PruneFL(stage_one=0, every=1, steps=2), fleet=ONE))
    method, world, site = federation.method, federation.world, site_of(federation)
    method.masks = prune_lowest(world.main.full, method.weights, method.masks, 0.5)
    method.weights = masked(world.main.full, method.masks).extract(method.weights)
    piece = method.piece(world.device(0), 1)
    sent = method.send(world.device(0), piece, 1)
    done = work(settled.make_method(), Errand(0, 1, "main", piece.spec(), sent), site)
    assert done.steps == 2 and set(done.reply["squares"]) == set(world.main.parameters)
    assert all(
        (done.reply["squares"][name][~mask] > 0).any() for name, mask in method.masks.items()
    )
    client = Client(0, 1, world.main, piece.view, site, {}, {})
    phase = method.phases(client, sent)[0]
    module = world.main.network(piece.view, restored(piece.view, sent["weights"])).train()
    from nestling.training.trainer import batches

    total: dict[str, Tensor] = {}
    for rows in batches(client.samples, phase, module, site.seed, 0, 1):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(client.x[rows]), client.y[rows]).backward()
        total = {
            n: total.get(n, 0) + p.grad.clone()
            for n, p in module.named_parameters()
            if p.grad is not None
        }
    assert all(
        torch.allclose(done.reply["squares"][n], g.square(), rtol=1e-3, atol=1e-9)
        for n, g in total.items()
    )
    trained = restored(piece.view, done.reply["weights"])
    assert all((trained[name][~mask] == 0).all() for name, mask in method.masks.items())
    assert squared_gradients(module, replace(phase, steps=1), client.x, client.y, 0, 0, 1)


def test_prunefl_first_stage_prunes_on_the_servers_rows() -> None:
    staged = PruneFL(stage_one=30, every=5, settled=2)
    _, federation = assemble(small(staged, fleet=ONE, split=SplitConfig(size=60, public=0.02)))
    method = federation.method
    assert method.started is False and all(m.all() for m in method.masks.values())
    method.piece(federation.world.device(0), 1)
    assert method.started and not all(m.all() for m in method.masks.values())
    assert all((method.weights[name][~mask] == 0).all() for name, mask in method.masks.items())
    without = nestling.run(small(staged, fleet=ONE, split=SplitConfig(size=60, public=0.0)))
    assert all(m.all() for m in without.federation.method.masks.values())


def test_prunefl_seconds_follow_the_fleet_and_may_be_given() -> None:
    _, federation = assemble(small(PruneFL(seconds={"head.weight": 9.0})))
    uses, seconds = weight_uses(federation.world.main), weight_seconds(federation.world, 5)
    assert uses == {
        "stages.0.conv.weight": 196,
        "stages.1.conv.weight": 196,
        "stages.2.conv.weight": 49,
        "head.weight": 1,
    }
    assert (
        seconds["stages.0.conv.weight"]
        > seconds["stages.2.conv.weight"]
        > seconds["head.weight"]
        > 0
    )
    assert federation.method._seconds["head.weight"] == 9.0
    with pytest.raises(InputError, match=r"method\.seconds"):
        assemble(small(PruneFL(seconds={"nothing": 1.0})))


def test_prunefl_bytes_equal_the_closed_formula() -> None:
    method = PruneFL(stage_one=0, every=2, steps=3)
    result = nestling.run(small(method, fleet=ONE, rounds=3, participants=0))
    world, masks = result.federation.world, result.federation.method.masks
    every = sum(t.numel() for t in world.main.initial.values())
    bits = sum(math.ceil(m.numel() / 8) for m in masks.values())
    later = every - sum(int((~m).sum()) for m in masks.values())
    assert later < every
    down = [4 * (4 * kept + bits) for kept in (every, every, later)]
    up = [4 * 4 * every, 4 * 4 * 2 * every, 4 * 4 * later]
    assert [(r["bytes_down"], r["bytes_up"]) for r in result.metrics] == list(
        zip(down, up, strict=True)
    )


def test_prunefl_is_one_mask_also_on_unequal_devices() -> None:
    result = nestling.run(small(PruneFL(stage_one=0, every=1, steps=3), participants=0, rounds=2))
    method, world = result.federation.method, result.federation.world
    narrow = prefix(world.main.axes, 0.25)
    model = next(
        method.model_for(world.device(c))
        for c in range(4)
        if world.fleet.tier_of(c).name == "small"
    )
    assert model.view.key() == narrow.key()
    assert equal(dict(model.state), dict(narrow.extract(method.weights)))


# -- all three -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_one_that_went_through(tmp_path: Path, name: str) -> None:
    named = Named(NAMES[name], SHORT[name])
    nestling.run(small(named, rounds=2), out=tmp_path / "parts")
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=4",))
    whole = nestling.run(small(named, rounds=4), out=tmp_path / "whole")
    a, b = parts.federation, whole.federation
    assert a.totals == b.totals and [r["personal_score"] for r in parts.metrics] == [
        r["personal_score"] for r in whole.metrics
    ]
    assert all(
        equal(*(f.method.model_for(f.world.device(c)).state for f in (a, b))) for c in range(4)
    )
    assert all(equal(a.method.state()[part], b.method.state()[part]) for part in a.method.state())
    if name != "PruneFL":
        assert all(equal(a.method.records.get(c), b.method.records.get(c)) for c in range(4))
        assert any(a.method.records.get(c) for c in range(4))


@pytest.mark.parametrize("name", NAMES)
def test_stacks_give_what_one_by_one_gives(name: str) -> None:
    named = Named(NAMES[name], SHORT[name])
    engines = [EngineConfig("inline"), EngineConfig("cohort", workers=1)]
    runs = [
        nestling.run(small(named, fleet=ONE, participants=0, rounds=3, engine=engine)).federation
        for engine in engines
    ]
    for client in range(4):
        first, stacked = (run.method.model_for(run.world.device(client)) for run in runs)
        assert first.view.key() == stacked.view.key()
        assert all(torch.allclose(t, stacked.state[n], atol=1e-4) for n, t in first.state.items())
    assert runs[0].totals.bytes_up == runs[1].totals.bytes_up


def test_other_processes_give_the_same_bits() -> None:
    named = Named(NAMES["LotteryFL"], SHORT["LotteryFL"])
    runs = [
        nestling.run(small(named, rounds=2, engine=engine))
        for engine in (EngineConfig("inline"), EngineConfig("pool", 2))
    ]
    one, other = (run.federation.method for run in runs)
    assert (
        equal(one.weights, other.weights)
        and runs[0].summary["bytes_up"] == runs[1].summary["bytes_up"]
    )
    assert all(equal(one.records.get(c), other.records.get(c)) for c in range(4))


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (LotteryFL, {"acc_thr": 1.5}),
        (LotteryFL, {"prune_step": 0.0}),
        (LotteryFL, {"r_target": 0.0}),
        (LotteryFL, {"validation": 1.0}),
        (LotteryFL, {"personal": "mine"}),
        (LotteryFL, {"compat": "old"}),
        (Hermes, {"overlap": "some"}),
        (PruneFL, {"steps": -1}),
        (PruneFL, {"every": 0}),
        (PruneFL, {"rho": 1.0}),
        (PruneFL, {"half_life": 0.0}),
        (PruneFL, {"seconds": {"a": 0.0}}),
        (PruneFL, {"constant": -1.0}),
    ],
)
def test_bad_settings_are_named(kind: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"method.{next(iter(bad))}"):
        kind(**bad)


PERSONAL: dict[str, Any] = {
    "split": SplitConfig(kind="dirichlet", alpha=5.0, size=60),
    "fleet": FleetConfig(tiers=(Tier(name="all", ratio=0.5, count=8),)),
    "participants": 0,
    "rounds": 12,
    "evaluate": Evaluation(every=12, clients=8),
    "train": Train(epochs=3, batch=20, lr=0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [LotteryFL(acc_thr=0.6, r_target=0.7), Hermes(acc_thr=0.6, r_target=0.7)]
)
def test_sharing_masked_models_beats_training_alone(method: Any) -> None:
    """Little data a client and a pruning that ends early; each rewinding costs LotteryFL a round of
    training."""
    accuracies = learned(method, "personal_score", **PERSONAL)
    assert mean(accuracies) > alone("personal_score", **PERSONAL) > 0.5, accuracies


@pytest.mark.slow
def test_one_sparse_model_for_all_learns() -> None:
    accuracies = learned(PruneFL(steps=0, every=3, stage_one=0))
    assert mean(accuracies) > alone() and min(accuracies) > 0.3, accuracies


def test_adjustments_come_as_often_in_short_runs_as_in_long_ones() -> None:
    for every, rounds, expected in ((0.05, 1000, 20), (0.05, 40, 20), (0.05, 4, 4), (50, 200, 4)):
        _, federation = assemble(small(PruneFL(stage_one=0, every=every), rounds=rounds))
        assert (
            sum(federation.method._adjusts(number) for number in range(1, rounds + 1)) == expected
        )
