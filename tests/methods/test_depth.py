"""The methods that cut a network in depth: their formulas by hand, identities between them, known
traps, exact bytes, learning."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nestling
from benchmarks import fashion_table
from nestling import (
    Data,
    EngineConfig,
    Experiment,
    FleetConfig,
    InputError,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.devices import make_fleet
from nestling.message import Message
from nestling.methods import Method, Reply
from nestling.methods.submodel.by_depth import exit_accuracies
from nestling.methods.submodel.depthfl import DepthFL, _mutual
from nestling.methods.submodel.inclusivefl import InclusiveFL
from nestling.methods.submodel.incoavg import InCoAvg, correct, correcting
from nestling.methods.submodel.scalefl import ScaleFL, _weighted_exits
from nestling.models import build
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.seeds import torch_seeded
from nestling.training.client import Client, Errand, client_of, work
from nestling.training.objectives import Batch, Net, distillation
from nestling.training.stacks.stacked import train_stack
from nestling.training.stacks.together import work_together
from nestling.views import Contribution, Reference, State, merge
from nestling.views.depth import columns, depth_views, kept
from nestling.views.flat import Row
from nestling.world import Piece
from tests.methods.learning import alone, learned, mean
from tests.small import small

EXITS = Named("tinyexits", {"channels": [8, 16, 16, 16]})
BLOCKS = Named("tinyresnet", {"channels": [4, 8, 8]})
TIERS = (
    Tier(name="small", ratio=0.25, count=2),
    Tier(name="middle", ratio=0.75, count=1),
    Tier(name="large", ratio=1.0, count=2),
)
FLEET = FleetConfig(tiers=TIERS)
HERE = "nestling.methods.submodel."
FOUR = {
    "depthfl:DepthFL": EXITS,
    "inclusivefl:InclusiveFL": BLOCKS,
    "incoavg:InCoAvg": BLOCKS,
    "scalefl:ScaleFL": EXITS,
}


def tiny(method: Any, **changes: Any) -> Experiment:
    name = (
        type(method).__name__
        if isinstance(method, Method)
        else str(getattr(method, "name", method))
    )
    network = next(model for key, model in FOUR.items() if name.endswith(key.split(":")[1]))
    return small(method, **{"model": network, "fleet": FLEET, "participants": 5, **changes})


@lru_cache
def of(tier: str) -> list[int]:
    """The clients of a tier: "small" ones hold the first piece, "large" ones the last."""
    fleet = make_fleet(replace(FLEET, size=5), seed=small().seed)
    return [c for c in range(5) if fleet.tier_of(c).name == tier]


def one_round(
    experiment: Experiment, clients: list[int], number: int = 1
) -> tuple[Federation, list[Reply]]:
    settled, federation = assemble(experiment)
    return federation, replies_of(federation, settled.make_method(), clients, number)


def replies_of(
    federation: Federation, method: Method, clients: list[int], number: int
) -> list[Reply]:
    world, replies = federation.world, []
    for client in clients:
        device = world.device(client)
        piece = federation.method.piece(device, number)
        sent = federation.method.send(device, piece, number)
        errand = Errand(
            client, number, piece.reference.name, piece.spec(), sent, world.store.get(client)
        )
        done = work(method, errand, site_of(federation))
        world.store.put(client, done.memory, number)
        replies.append(Reply(device, piece, sent, done.reply))
    return replies


def weights_after(experiment: Experiment) -> State:
    model = nestling.run(experiment).federation.method.global_model()
    assert model is not None
    return model.state


def same(a: State, b: State, atol: float = 0.0) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], rtol=0, atol=atol) for k in a)


def exits_net() -> tuple[Net, Batch]:
    with torch_seeded(0, "test"):
        network = build("tinyexits", shape=(1, 12, 12), classes=4, channels=[4, 4, 4])
        x, y = torch.rand(6, 1, 12, 12), torch.randint(0, 4, (6,))
    return Net(network, dict(network.named_parameters())), Batch(x, y, torch.arange(6))


# -- DepthFL ---------------------------------------------------------------------------------------


def test_depthfl_loss_by_hand() -> None:
    net, batch = exits_net()
    outs = net.module.all_exits(batch.x)
    expected = sum(F.cross_entropy(o, batch.y) for o in outs)
    assert torch.allclose(_mutual(net, batch, {}), expected)
    for student in range(3):
        for teacher in range(3):
            if teacher != student:
                p = outs[teacher].softmax(-1)
                kl = (p * (p.log() - outs[student].log_softmax(-1))).sum(-1).mean()
                expected = expected + 0.3 / 2 * kl
    assert torch.allclose(_mutual(net, batch, {"kd": torch.tensor(0.3)}), expected, atol=1e-6)


def test_depthfl_teachers_are_held_still() -> None:
    """With two exits, the deep head's gradient is that of its cross-entropy and of what it is
    taught, not of what it teaches."""
    net, batch = exits_net()
    net = Net(net.module.prefix(2), {})
    head = net.module.heads[1].linear.weight
    shallow, deep = net.module.all_exits(batch.x)
    own = F.cross_entropy(deep, batch.y) + distillation(shallow.detach(), deep)
    (expected,) = torch.autograd.grad(own, head, retain_graph=True)
    (found,) = torch.autograd.grad(_mutual(net, batch, {"kd": torch.tensor(1.0)}), head)
    assert torch.allclose(found, expected, atol=1e-6)


def test_depthfl_distillation_grows_to_its_full_weight() -> None:
    for method, rounds in ((DepthFL(), 1000), (DepthFL(ramp=300), 40)):
        assert method.ramped(300, rounds) == method.ramped(1000, rounds) == 1.0
        assert method.ramped(150, rounds) == pytest.approx(math.exp(-1.25))
        assert method.ramped(1, rounds) == pytest.approx(math.exp(-5), rel=0.05)
    # In a short run it has its full weight as early, as a share of it.
    assert DepthFL().ramped(9, 30) == 1.0 and DepthFL().ramped(1, 2) == 1.0
    federation, replies = one_round(tiny(DepthFL(), rounds=30), of("small"), number=3)
    assert (
        replies[0].sent.facts["kd"]
        == federation.method.ramped(3, 30)
        == pytest.approx(math.exp(-5 * (2 / 3) ** 2))
    )


def test_a_shallow_depthfl_client_touches_nothing_deeper() -> None:
    federation, replies = one_round(tiny(DepthFL()), of("small"))
    method, before = federation.method, dict(federation.method.weights)
    held = {name for name in before if name.startswith(("stages.0.", "heads.0."))}
    assert all(set(reply.message["weights"]) == held for reply in replies)
    method.merge(replies, 1)
    for name, tensor in method.weights.items():
        assert torch.equal(tensor, before[name]) == (name not in held)
        assert bool((method.dynamics[name] == 0).all()) == (name not in held)


def test_depthfl_answers_with_the_mean_of_its_exits() -> None:
    result = nestling.run(tiny(DepthFL()))
    x = result.federation.bench.x_test[:20]
    for client, depth in ((of("small")[0], 1), (of("large")[0], 4)):
        network = result.model_for(client)
        exits = network.all_exits(x)
        assert len(exits) == depth and torch.allclose(network(x), sum(exits) / depth, atol=1e-6)
    assert not torch.allclose(result.model(x), result.model.all_exits(x)[-1], atol=1e-3)


def test_depthfl_feddyn_by_hand() -> None:
    experiment = tiny(
        DepthFL(alpha=0.5), train=replace(small().train, momentum=0.0, augment="none")
    )
    federation, replies = one_round(experiment, [0, 1, 2, 3, 4])
    method, before = federation.method, {n: t.clone() for n, t in federation.method.weights.items()}
    plain = merge(before, [Contribution(r.piece.view, r.message["weights"]) for r in replies])
    method.merge(replies, 1)
    for name, old in before.items():
        holders = sum(name in reply.message["weights"] for reply in replies)
        h = -0.5 * holders / 5 * (plain[name] - old)
        assert torch.allclose(method.dynamics[name], h, atol=1e-7)
        assert torch.allclose(method.weights[name], plain[name] - h / 0.5, atol=1e-6)
    memory, sent = federation.world.store.get(0), replies[0]
    for name, kept_ in memory.items():
        assert torch.allclose(
            kept_, -0.5 * (sent.message["weights"][name] - sent.sent["weights"][name]), atol=1e-7
        )


def test_depthfl_feddyn_bends_the_gradient() -> None:
    federation, _ = one_round(tiny(DepthFL()), [])
    device = federation.world.device(0)
    piece = federation.method.piece(device, 1)
    sent = federation.method.send(device, piece, 1)
    client = client_of(Errand(0, 1, "main", piece.spec(), sent), site_of(federation))
    client.memory = {name: torch.full_like(t, 2.0) for name, t in sent["weights"].items()}
    phase = DepthFL(alpha=0.1).phases(client, sent)[0]
    params = {name: t + 3.0 for name, t in sent["weights"].items()}
    ruled = phase.rule(
        params, {name: torch.ones_like(t) for name, t in params.items()}, phase.given
    )
    assert all(
        torch.allclose(g, torch.full_like(g, 1 - 2 + 0.1 * 3.0), atol=1e-5) for g in ruled.values()
    )


def test_depthfl_without_its_extras_is_inclusivefl_without_momentum() -> None:
    plain = weights_after(tiny(DepthFL(kd=False, feddyn=False, exits="last"), model=EXITS))
    assert same(plain, weights_after(tiny(InclusiveFL(beta=0.0), model=EXITS)))
    assert not same(plain, weights_after(tiny(InclusiveFL(beta=0.5), model=EXITS)))


# -- InclusiveFL -----------------------------------------------------------------------------------


def made_up(federation: Federation, client: int, change: float, samples: int) -> Reply:
    """A reply in which every weight of unit number k of its column moved by change·(k+1)."""
    method = federation.method
    device = federation.world.device(client)
    piece = method.piece(device, 1)
    sent = method.send(device, piece, 1)
    moved = {}
    for name, tensor in sent["weights"].items():
        places = [
            k
            for column in columns(federation.world.main)
            for k, unit in enumerate(column)
            if name.startswith(unit + ".")
        ]
        moved[name] = tensor + change * (places[0] + 1 if places else 1)
    return Reply(device, piece, sent, Message({"weights": moved}, {"samples": samples}))


@pytest.mark.parametrize("local_one", [False, True])
def test_inclusivefl_momentum_moves_the_last_layer_by_beta_times_g(local_one: bool) -> None:
    federation, _ = one_round(tiny(InclusiveFL(beta=0.2, local_one=local_one)), [])
    method = federation.method
    shallow, deep = of("small")[0], of("large")[0]
    replies = [made_up(federation, shallow, 0.0, 30), made_up(federation, deep, 1.0, 10)]
    views = [reply.piece.view for reply in replies]
    found = columns(federation.world.main)
    assert [kept(views[0], c) for c in found] == [1, 1] and [kept(views[1], c) for c in found] == [
        3,
        3,
    ]
    before = {n: t.clone() for n, t in method.weights.items()}
    method.merge(replies, 1)
    # The shallow group stood still; the deep one's blocks moved by 1, 2 and 3, so G = 2 for what
    # has the same shape in all three.
    name = "stages.0.0.conv2.weight"
    assert torch.allclose(
        method.weights[name], before[name] + (30 * 0.2 * 2.0 + 10 * 1.0) / 40, atol=1e-6
    )
    name = "stages.1.0.conv2.weight"
    if local_one:
        assert torch.allclose(method.own[0][name], before[name] + 0.2 * 2.0, atol=1e-6)
        assert torch.allclose(method.weights[name], before[name] + 1.0, atol=1e-6)
    else:
        assert torch.allclose(
            method.weights[name], before[name] + (30 * 0.2 * 2.0 + 10 * 1.0) / 40, atol=1e-6
        )
    # Shortcuts are nowhere else, so G is the deep group's own update of that tensor.
    name = "stages.1.0.shortcut.conv.weight"
    expected = 0.2 * 1.0 if local_one else (30 * 0.2 * 1.0 + 10 * 1.0) / 40
    assert torch.allclose(
        (method.own[0] if local_one else method.weights)[name], before[name] + expected, atol=1e-6
    )
    assert torch.allclose(
        method.weights["stem.conv.weight"], before["stem.conv.weight"] + 10 / 40, atol=1e-6
    )


def test_inclusivefl_momentum_keeps_the_rest_of_a_groups_own_update() -> None:
    federation, _ = one_round(tiny(InclusiveFL(beta=0.25, local_one=True)), [])
    shallow, deep = of("small")[0], of("large")[0]
    replies = [made_up(federation, shallow, 4.0, 30), made_up(federation, deep, 1.0, 10)]
    before = federation.method.own[0]["stages.1.0.conv2.weight"].clone()
    federation.method.merge(replies, 1)
    after = federation.method.own[0]["stages.1.0.conv2.weight"]
    assert torch.allclose(after, before + 0.75 * 4.0 + 0.25 * 2.0, atol=1e-5)


def test_inclusivefl_classifiers_stay_in_their_group() -> None:
    shallow = of("small")
    federation, replies = one_round(tiny(InclusiveFL()), shallow)
    method = federation.method
    before = [dict(own) for own in method.own]
    method.merge(replies, 1)
    assert [same(a, b) for a, b in zip(before, method.own, strict=True)] == [
        False,
        True,
        True,
        True,
        True,
    ]
    sent = [reply.message["weights"]["head.weight"] for reply in replies]
    assert torch.allclose(method.own[0]["head.weight"], sum(sent) / len(sent), atol=1e-6)
    assert torch.equal(
        method.model_for(federation.world.device(shallow[0])).state["head.weight"],
        method.own[0]["head.weight"],
    )


def test_inclusivefl_weighs_by_samples() -> None:
    federation, _ = one_round(tiny(InclusiveFL(beta=0.0)), [])
    shallow = of("small")
    replies = [made_up(federation, shallow[0], 1.0, 10), made_up(federation, shallow[1], 5.0, 30)]
    before = federation.method.weights["stem.conv.weight"].clone()
    federation.method.merge(replies, 1)
    assert torch.allclose(federation.method.weights["stem.conv.weight"], before + 4.0, atol=1e-5)


# -- InCoAvg ---------------------------------------------------------------------------------------


def by_kernel(g: Tensor, g0: Tensor, most: float | None) -> Tensor:
    out = torch.zeros_like(g)
    for o in range(g.shape[0]):
        for i in range(g.shape[1]):
            a, b = float((g0[o, i] ** 2).sum()), float((g0[o, i] * g[o, i]).sum())
            theta = max(0.0, -b / (a + 1e-7)) if most is None else min(most, abs(b) / (a + 1e-7))
            n, n0 = float(g[o, i].norm()), float(g0[o, i].norm())
            out[o, i] = (g[o, i] / (n + 1e-7) + theta * g0[o, i] / (n0 + 1e-7)) * (n + n0) / 2
    return out


@pytest.mark.parametrize("most", [None, 5.0, 0.5, 0.0])
def test_inco_norms_are_those_of_single_kernels(most: float | None) -> None:
    random = torch.Generator().manual_seed(1)
    g, g0 = torch.randn(3, 2, 3, 3, generator=random), torch.randn(3, 2, 3, 3, generator=random)
    g0[0, 0] *= 0.01  # with code's θ this kernel meets the limit
    assert torch.allclose(correct(g, g0, most), by_kernel(g, g0, most), atol=1e-4, rtol=1e-5)


def test_inco_paper_leaves_agreeing_updates_alone_and_code_does_not() -> None:
    g0 = torch.tensor([[[[1.0, 0.0]]], [[[1.0, 0.0]]]])
    g = torch.tensor([[[[1.0, 1.0]]], [[[-1.0, 1.0]]]])
    paper, code = correct(g, g0), correct(g, g0, 5.0)
    scale = (math.sqrt(2) + 1) / 2
    assert torch.allclose(paper[0], g[0] / math.sqrt(2) * scale, atol=1e-5)
    assert torch.allclose(code[0], (g[0] / math.sqrt(2) + g0[0]) * scale, atol=1e-5)
    assert torch.allclose(
        paper[1], (g[1] / math.sqrt(2) + g0[1]) * scale, atol=1e-5
    ) and torch.allclose(paper[1], code[1])


def test_inco_corrects_the_later_blocks_convolutions_by_the_first_blocks_second() -> None:
    names = correcting(
        Reference(
            "main", build("resnet18", shape=(3, 32, 32), classes=4, width=0.0625), (3, 32, 32)
        )
    )
    assert names == {
        f"stages.{s}.1.conv{c}.weight": f"stages.{s}.0.conv2.weight"
        for s in range(4)
        for c in (1, 2)
    }
    deep = build("resnet50", shape=(3, 32, 32), classes=4, width=0.0625)
    names = correcting(Reference("main", deep, (3, 32, 32)))
    assert names["stages.0.1.conv3.weight"] == "stages.0.0.conv3.weight" and not any(
        "shortcut" in n for n in names.values()
    )


def test_inco_without_theta_is_not_plain_averaging() -> None:
    experiment = tiny(InCoAvg(compat="code", most=0.0))
    federation, replies = one_round(experiment, [0, 1, 2, 3, 4])
    method, before = federation.method, federation.method.weights
    plain = merge(before, [Contribution(r.piece.view, r.message["weights"]) for r in replies])
    method.merge(replies, 1)
    assert len(method.pairs) == 8
    for name, tensor in method.weights.items():
        assert torch.equal(tensor, plain[name]) == (name not in method.pairs)
        if name in method.pairs:
            g, g0 = (
                plain[name] - before[name],
                plain[method.pairs[name]] - before[method.pairs[name]],
            )
            expected = before[name] + by_kernel(g, g0, 0.0).clamp(-0.1, 0.1)
            assert torch.allclose(tensor, expected, atol=1e-5)


def test_inco_holds_every_entry() -> None:
    federation, replies = one_round(tiny(InCoAvg(clip=1e-4)), [0, 1, 2, 3, 4])
    before = federation.method.weights
    federation.method.merge(replies, 1)
    moved = [
        (federation.method.weights[name] - before[name]).abs().max()
        for name in federation.method.pairs
    ]
    assert max(map(float, moved)) <= 1.01e-4 and max(map(float, moved)) > 0.99e-4


def test_inco_does_not_move_what_nobody_trained() -> None:
    federation, replies = one_round(tiny(InCoAvg(compat="code")), of("small"))
    before = federation.method.weights
    federation.method.merge(replies, 1)
    assert all(
        torch.equal(federation.method.weights[name], before[name])
        for name in federation.method.pairs
    )


# -- ScaleFL ---------------------------------------------------------------------------------------


def test_scalefl_loss_by_hand() -> None:
    net, batch = exits_net()
    one, two, three = net.module.all_exits(batch.x)
    ce = [F.cross_entropy(o, batch.y) for o in (one, two, three)]
    plain = (ce[0] + 2 * ce[1] + 3 * ce[2]) / 6
    assert torch.allclose(_weighted_exits(net, batch, {}, temperature=3.0), plain)
    # The published coefficient goes with torch's default reduction, a mean over classes as well.
    published = [
        9 * F.kl_div((o / 3).log_softmax(-1), (three / 3).softmax(-1), reduction="none").mean()
        for o in (one, two)
    ]
    expected = plain + 0.05 * (published[0] + 2 * published[1]) / 6
    found = _weighted_exits(net, batch, {"kd": torch.tensor(0.05 / 4)}, temperature=3.0)
    assert torch.allclose(found, expected, atol=1e-6)


def test_scalefl_levels_are_cut_both_ways() -> None:
    found = Reference(
        "main",
        build("tinyexits", shape=(1, 28, 28), classes=10, channels=[8, 20, 20, 20]),
        (1, 28, 28),
    )
    views = ScaleFL(widths=(0.5, 0.6, 0.8, 1.0)).views(found)
    assert [view.shape("stages.0.conv.weight")[0] for view in views] == [4, 8, 8, 8]
    assert [kept(view, columns(found)[0]) for view in views] == [1, 2, 3, 4]
    assert views[2].shape("stages.2.conv.weight") == (16, 16, 3, 3)
    assert all(big.contains(little) for little, big in pairwise(views))
    assert [kept(v, columns(found)[0]) for v in ScaleFL(widths=(0.5, 1.0)).views(found)] == [2, 4]
    assert [
        kept(v, columns(found)[0]) for v in ScaleFL(widths=(0.5, 1.0), depths=(1, 4)).views(found)
    ] == [1, 4]


def test_scalefl_keeps_entries_outside_every_view() -> None:
    method = ScaleFL(widths=(0.5, 0.5, 0.5, 1.0))
    model = Named("tinyexits", {"channels": [8, 16, 16, 16]})
    federation, replies = one_round(tiny(method, model=model), of("small"))
    before = dict(federation.method.weights)
    federation.method.merge(replies, 1)
    view = replies[0].piece.view
    assert view.shape("stages.0.conv.weight")[0] == 4 and "stages.3.conv.weight" not in view.shapes
    for name, tensor in federation.method.weights.items():
        inside = torch.zeros_like(tensor, dtype=torch.bool)
        if name in view.shapes:
            inside[view.where(name)] = True
        assert torch.equal(tensor[~inside], before[name][~inside])
        assert not inside.any() or not torch.equal(tensor[inside], before[name][inside])


def test_scalefl_distils_after_a_quarter_of_the_rounds() -> None:
    _, federation = assemble(tiny(ScaleFL(gamma=0.5), rounds=8))
    method, device = federation.method, federation.world.device(0)
    weights = [method.send(device, method.piece(device, r), r).facts["kd"] for r in range(1, 9)]
    assert weights == [0.0, 0.0] + [0.05] * 6


def test_scalefl_divides_alike_in_training_and_evaluation() -> None:
    model = Named("tinyexits", {"channels": [8, 16, 16, 16], "norm": "none"})
    federation, _ = one_round(tiny(ScaleFL(widths=(0.5, 0.5, 0.5, 1.0)), model=model), [])
    method, world = federation.method, federation.world
    device = world.device(of("small")[0])
    piece, x = method.piece(device, 1), federation.bench.x_test[:8]
    tested = method.model_for(device)
    evaluated = world.main.network(tested.view, tested.state).eval()(x)
    client: Client = client_of(
        Errand(0, 1, "main", piece.spec(), method.send(device, piece, 1)), site_of(federation)
    )
    hooks = method.phases(client, method.send(device, piece, 1))[0].hooks
    network = world.main.network(piece.view, piece.view.extract(method.weights)).train()
    handles = [
        layer.register_forward_hook(lambda layer, _, out: hooks[0].change(layer, out))
        for layer in network.modules()
        if isinstance(layer, hooks[0].layers)
    ]
    assert torch.allclose(network(x), evaluated, atol=1e-5)
    for handle in handles:
        handle.remove()
    assert not torch.allclose(network(x), evaluated, atol=1e-3)


def test_accuracies_of_exits_are_each_their_own() -> None:
    federation = nestling.run(tiny(ScaleFL(), rounds=1)).federation
    model, bench = federation.method.global_model(), federation.bench
    state = dict(model.state)
    state["heads.1.linear.weight"] = torch.zeros_like(state["heads.1.linear.weight"])
    state["heads.1.linear.bias"] = F.one_hot(torch.tensor(3), 10).float()
    found = exit_accuracies(replace(model, state=state), bench.x_test, bench.y_test)
    whole = exit_accuracies(model, bench.x_test, bench.y_test)
    assert found[1] == pytest.approx(float((bench.y_test == 3).float().mean()))
    assert [found[k] for k in (0, 2, 3)] == [whole[k] for k in (0, 2, 3)] and len(set(whole)) > 1


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOUR)
def test_bytes_are_those_of_the_views(name: str) -> None:
    result = nestling.run(tiny(Named(HERE + name), participants=3))
    method, world = result.federation.method, result.federation.world
    for row in result.metrics:
        expected = sum(
            method.piece(world.device(c), row["round"]).view.nbytes() for c in row["clients"]
        )
        assert row["bytes_up"] == row["bytes_down"] == expected
        assert row["refused"] == 0


def errands_of(federation: Federation, clients: list[int]) -> list[Errand]:
    method, found = federation.method, []
    for client in clients:
        device = federation.world.device(client)
        piece = method.piece(device, 1)
        # With what it kept of earlier rounds, so that it matters.
        memory = {
            n: torch.full_like(t, 0.01 * client)
            for n, t in piece.view.extract(method.weights).items()
        }
        found.append(Errand(client, 1, "main", piece.spec(), method.send(device, piece, 1), memory))
    return found


@pytest.mark.parametrize("name", FOUR)
def test_clients_as_one_stack_end_where_they_end_one_by_one(name: str) -> None:
    experiment, federation = assemble(tiny(Named(HERE + name)))
    errands, site, method = (
        errands_of(federation, of("large")),
        site_of(federation),
        experiment.make_method(),
    )
    stacked = work_together(
        method, errands, site, lambda found: [train_stack(group) for group in found]
    )
    for errand, got in zip(errands, stacked, strict=True):
        one = work(method, errand, site)
        assert isinstance(got.reply["weights"], Row)
        assert same(dict(one.reply["weights"]), dict(got.reply["weights"].items()), 1e-4)
        assert same(one.memory, got.memory, 1e-4) and float(got.loss) == pytest.approx(
            float(one.loss), rel=1e-4
        )


def test_a_run_in_stacks_ends_where_a_plain_one_does() -> None:
    plain = nestling.run(tiny(DepthFL())).federation.method.state()
    stacks = nestling.run(
        tiny(DepthFL(), engine=EngineConfig("cohort", workers=1))
    ).federation.method.state()
    assert all(same(plain[kind], stacks[kind], 1e-4) for kind in ("weights", "dynamics"))


@pytest.mark.parametrize("name", FOUR)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    method = Named(HERE + name, {"local_one": True} if "Inclusive" in name else {})
    nestling.run(tiny(method, rounds=2, participants=3), out=tmp_path / "parts")
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=4",)).federation.method
    whole = nestling.run(tiny(method, rounds=4, participants=3)).federation.method
    assert parts.state().keys() == whole.state().keys()
    assert all(same(state, whole.state()[kind]) for kind, state in parts.state().items())


@pytest.mark.parametrize("name", FOUR)
def test_the_default_fleet_trains_every_depth(name: str) -> None:
    """From 64 KB to a GPU box: the smallest device trains the first piece, the largest all of
    it."""
    _, federation = assemble(Experiment(method=Named(HERE + name)))
    ladder = federation.method.ladder
    rungs = [ladder.at_rest(tier) for tier in federation.world.plans]
    assert rungs == sorted(rungs) and rungs[0] == 0 and rungs[-1] == len(ladder.pieces) - 1


@pytest.mark.parametrize("method", [DepthFL(), InclusiveFL(), InCoAvg(), ScaleFL()])
def test_a_network_without_depth_is_refused(method: Method) -> None:
    with pytest.raises(InputError) as error:
        assemble(small(method))
    assert error.value.field == "model.name" and error.value.fix


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("depthfl:DepthFL", {"ramp": 0}),
        ("depthfl:DepthFL", {"alpha": 0.0}),
        ("depthfl:DepthFL", {"exits": "some"}),
        ("inclusivefl:InclusiveFL", {"beta": 1.5}),
        ("incoavg:InCoAvg", {"compat": "both"}),
        ("incoavg:InCoAvg", {"clip": 0.0}),
        ("incoavg:InCoAvg", {"most": -1.0}),
        ("scalefl:ScaleFL", {"widths": [0.5, 0.75]}),
        ("scalefl:ScaleFL", {"widths": [1.0, 0.5]}),
        ("scalefl:ScaleFL", {"depths": [1, 2]}),
        ("scalefl:ScaleFL", {"depths": [1, 2, 3, 3]}),
        ("scalefl:ScaleFL", {"gamma": -1.0}),
        ("scalefl:ScaleFL", {"kd_start": 2.0}),
    ],
)
def test_bad_settings_are_named(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        assemble(tiny(Named(HERE + name, options)))
    assert error.value.field == f"method.{next(iter(options))}"


def test_feddyn_state_follows_a_client_whose_depth_changes() -> None:
    """A client short of memory trains less for a while; what it kept of its deeper part stays."""
    tier = Tier(name="all", ratio=1.0, count=3, memory_mean=100.0, memory_std=(60.0,))
    result = nestling.run(
        tiny(DepthFL(), fleet=FleetConfig(tiers=(tier,)), participants=3, rounds=6)
    )
    method, world = result.federation.method, result.federation.world
    depths = [
        {len(method.piece(world.device(c, r), r).view.names) for r in range(1, 7)} for c in range(3)
    ]
    assert any(len(found) > 1 for found in depths)
    for client, found in enumerate(depths):
        assert len(world.store.get(client)) == max(found)


@pytest.mark.parametrize("heads", ["convs", "attention"])
def test_exits_as_published(heads: str) -> None:
    """The papers' heads can be traced, cut, trained one by one and as a stack."""
    model = Named("exitcnn", {"channels": [4, 8, 8], "heads": heads})
    changes = {
        "model": model,
        "rounds": 1,
        "split": SplitConfig(kind="dirichlet", alpha=1.0, size=20),
    }
    one_by_one = weights_after(tiny(DepthFL(), **changes))
    stacked = weights_after(tiny(DepthFL(), engine=EngineConfig("cohort", workers=1), **changes))
    assert same(one_by_one, stacked, 1e-4)
    views = depth_views(
        Reference(
            "main", build("exitcnn", shape=(1, 28, 28), classes=10, **model.options), (1, 28, 28)
        )
    )
    assert len(views) == 3


# -- budgets of parameters -------------------------------------------------------------------------


def sizes_of(federation: Federation, round: int = 0) -> list[int]:
    world, method = federation.world, federation.method
    devices = [world.device(world.fleet.member(tier, 0), round) for tier in world.plans]
    return [world.cost(method.piece(device, round)).params for device in devices]


@pytest.mark.parametrize(
    ("group", "name"), [line for line in fashion_table.lines_of("") if line[0] == "B"]
)
def test_methods_of_the_table_train_what_its_five_budgets_allow(group: str, name: str) -> None:
    experiment = replace(fashion_table.experiment(group, name, 0), data=Data())
    _, federation = assemble(replace(experiment, fleet=replace(experiment.fleet, size=20)))
    found, whole = (
        sizes_of(federation),
        federation.world.cost(Piece(federation.world.main, federation.world.main.full)).params,
    )
    budgets = fashion_table.BUDGETS[-1:] * 5 if name == "fedavg" else fashion_table.BUDGETS
    assert all(
        0.9 * share * whole <= size <= share * whole
        for size, share in zip(found, budgets, strict=True)
    )
    assert len(set(found)) == (1 if name == "fedavg" else 5)


def test_a_tier_that_is_cut_in_depth() -> None:
    model = Named("tinyresnet", {"blocks": [5], "channels": [8, 8]})
    tiers = (
        Tier(name="all", ratio=1.0, cut="depth", count=1),
        Tier(name="half", ratio=0.5, cut="depth", count=2),
    )
    _, federation = assemble(small("local", model=model, fleet=FleetConfig(tiers=tiers)))
    every = [
        federation.world.cost(Piece(federation.world.main, view)).params
        for view in depth_views(federation.world.main)
    ]
    assert sizes_of(federation) == [every[4], max(size for size in every if size <= every[4] / 2)]
    tiny_ratio = (Tier(name="none", ratio=0.01, cut="depth"),)
    with pytest.raises(InputError, match=rf"{every[0]} of {every[4]} parameters"):
        assemble(small("local", model=model, fleet=FleetConfig(tiers=tiny_ratio, size=3)))
    with pytest.raises(InputError, match="cannot be cut in depth"):
        assemble(small("local", fleet=FleetConfig(tiers=tiers)))


def test_a_tier_that_is_cut_in_depth_follows_its_free_memory() -> None:
    model = Named("tinyresnet", {"blocks": [5], "channels": [8, 8]})
    tiers = (
        Tier(name="busy", ratio=0.8, cut="depth", count=3, memory_mean=90.0, memory_std=(60.0,)),
    )
    _, federation = assemble(small("fedavg", model=model, fleet=FleetConfig(tiers=tiers)))
    world = federation.world
    whole, most = (
        world.cost(Piece(world.main, world.main.full)).params,
        world.plans["busy"].cost.params,
    )
    shallowest = world.cost(Piece(world.main, depth_views(world.main)[0])).params
    met = set()
    for round in range(1, 30):
        size, free = (
            world.cost(world.device(0, round).piece).params,
            world.fleet.free_memory(0, round) / 100,
        )
        assert size <= max(shallowest, min(most, free * whole))
        met.add(size)
    assert len(met) > 2 and min(met) == shallowest


EXITS_LEARNING: dict[str, Any] = {"model": Named("tinyexits")}
# Seven thousand parameters of residual blocks want more steps than the exits do.
BLOCKS_LEARNING: dict[str, Any] = {
    "model": Named("tinyresnet"),
    "participants": 9,
    "train": Train(epochs=2, batch=10, lr=0.03),
    "engine": EngineConfig("cohort", workers=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_it_learns(name: str) -> None:
    setting = EXITS_LEARNING if FOUR[name] is EXITS else BLOCKS_LEARNING
    found = learned(Named(HERE + name), **setting)
    assert mean(found) > alone(**setting) + 0.03 and mean(found) > 0.3
