"""HeteroFL, FjORD and FedRolex: identities between them, known traps, learning, and exact bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nestling
from nestling import EngineConfig, FleetConfig, InputError, Named, SplitConfig, Tier, Train
from nestling.methods import Reply
from nestling.methods.submodel.fedrolex import FedRolex
from nestling.methods.submodel.fjord import FjORD
from nestling.methods.submodel.heterofl import HeteroFL
from nestling.methods.submodel.scaler import narrowed
from nestling.models import build, norm_layer
from nestling.models.norm import used_rows
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.training import widths
from nestling.training.client import Client, Errand, client_of, work
from nestling.training.phase import Phase
from nestling.training.stacks.group import Group
from nestling.training.stacks.together import Losses, work_together
from nestling.training.trainer import hooked
from nestling.training.widths import widths_by_batch
from nestling.views import Reference, State, View, prefix, rolled, rolling, sub_module, trace
from nestling.views.nested import by_zeros
from tests.engines.test_cohort import assert_same, trainer
from tests.methods.learning import alone, learned, mean
from tests.small import errands_of, small
from tests.views.networks import NETWORKS, SHAPE


@pytest.fixture
def stacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """FjORD as on a GPU: zeros stand for what is left out."""
    monkeypatch.setattr(widths, "_stacks_pay", lambda client: True)


MANY = FleetConfig(
    tiers=(Tier(name="small", ratio=0.25, count=3), Tier(name="large", ratio=1.0, count=3))
)
PLAIN = {"mask_labels": False, "scaler": False}
ALL_FULL = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
ALL_HALF = FleetConfig(tiers=(Tier(name="all", ratio=0.5, count=4),))
NO_FULL = FleetConfig(
    tiers=(Tier(name="small", ratio=0.25, count=2), Tier(name="middle", ratio=0.5, count=2))
)
PER_WIDTH = Named("tinycnn", {"channels": [8, 16, 16], "norm": "per-width"})
DEEP = Train(epochs=1, batch=20, lr=0.02, weight_decay=0.1)


def equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def weights_after(experiment: nestling.Experiment) -> State:
    return nestling.run(experiment).federation.method.state()["weights"]


def one_round(
    experiment: nestling.Experiment, clients: list[int], round: int = 1
) -> tuple[Federation, list[Reply]]:
    """Sends, trains and collects by hand, so that the merge can be looked at."""
    settled, federation = assemble(experiment)
    method, world, replies = federation.method, federation.world, []
    for client in clients:
        device = world.device(client)
        piece = method.piece(device, round)
        sent = method.send(device, piece, round)
        done = work(
            settled.make_method(),
            Errand(client, round, piece.reference.name, piece.spec(), sent),
            site_of(federation),
        )
        replies.append(Reply(device, piece, sent, done.reply))
    return federation, replies


def clients_of(federation: Federation, tier: str) -> list[int]:
    return [
        c
        for c in range(federation.world.fleet.size)
        if federation.world.fleet.tier_of(c).name == tier
    ]


def drawn(client: Client, views: tuple[View, ...]) -> tuple[int, ...]:
    """The widths of a client's batches."""
    inner, given = widths_by_batch(client, views)
    return tuple(given["draws"].tolist()) if given else inner.keywords["draws"]


def inside(view: View, name: str, tensor: Tensor) -> Tensor:
    flags = torch.zeros_like(tensor, dtype=torch.bool)
    flags[
        np.ix_(
            *(np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in view.where(name))
        )
    ] = True
    return flags


# -- identities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compat", ["paper", "code"])
def test_fedrolex_begins_as_heterofl(compat: str) -> None:
    assert equal(
        weights_after(small(FedRolex(compat=compat), rounds=1)),
        weights_after(small("heterofl", rounds=1)),
    )


def test_fedrolex_leaves_heterofl_with_its_second_round() -> None:
    assert not equal(weights_after(small(FedRolex())), weights_after(small("heterofl")))


def test_fedrolex_at_full_width_is_heterofl_forever() -> None:
    assert equal(
        weights_after(small(FedRolex(), fleet=ALL_FULL)),
        weights_after(small("heterofl", fleet=ALL_FULL)),
    )


@pytest.mark.parametrize("distil", [False, True])
@pytest.mark.parametrize(("level", "fleet"), [(1.0, ALL_FULL), (0.5, ALL_HALF)])
def test_fjord_with_one_width_is_fedavg_at_that_width(
    level: float, fleet: FleetConfig, distil: bool
) -> None:
    method = nestling.run(
        small(FjORD(levels=(level,), distil=distil), fleet=fleet)
    ).federation.method
    plain = nestling.run(small("fedavg", fleet=fleet)).federation.method
    assert equal(dict(method.global_model().state), dict(plain.global_model().state))


def test_fjord_whose_draws_are_all_the_widest_is_heterofl_without_extras() -> None:
    """Two levels that round to the same channels: whatever is drawn, the whole part is trained."""
    twice = FjORD(levels=(0.95, 1.0))
    plain = small(HeteroFL(**PLAIN), fleet=ALL_FULL)
    expected = weights_after(plain)
    for name, tensor in weights_after(small(twice, fleet=ALL_FULL)).items():
        assert torch.allclose(tensor, expected[name], atol=1e-5)


# -- the rolling window ----------------------------------------------------------------------------


def selected(axes: Any, ratio: float, steps: int) -> np.ndarray:
    return np.sum([rolling(axes, ratio, step).keep for step in range(steps)], axis=0)


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5, 0.7])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_every_channel_is_selected_equally_often(norm: str, ratio: float) -> None:
    axes = trace(
        build("tinycnn", shape=(1, 12, 12), classes=3, channels=(8, 12, 24), norm=norm), (1, 12, 12)
    )
    for number, (size, grain) in enumerate(zip(axes.sizes, axes.grains, strict=True)):
        counts = selected(axes, ratio, size // grain)[
            axes.offsets[number] : axes.offsets[number] + size
        ]
        assert grain == (4 if norm == "group" else 1)
        assert (counts == len(prefix(axes, ratio).indices(number)) // grain).all()


def test_the_window_is_the_paper_s() -> None:
    axes = trace(NETWORKS["Residual"](), SHAPE)
    for step in range(30):
        view = rolling(axes, 0.4, step)
        for number, size in enumerate(axes.sizes):
            width = len(prefix(axes, 0.4).indices(number))
            assert view.indices(number).tolist() == sorted((i + step) % size for i in range(width))
    assert rolling(axes, 0.4, 0).key() == prefix(axes, 0.4).key()


def test_windows_hold_whole_groups_of_a_group_norm() -> None:
    axes = trace(build("resnet8", shape=(1, 16, 16), classes=3, norm="group"), (1, 16, 16))
    for step in (1, 3, 7):
        view = rolling(axes, 0.3, step)
        for number, grain in enumerate(axes.grains):
            blocks = view.indices(number).reshape(-1, grain)
            assert (blocks[:, 0] % grain == 0).all() and (np.diff(blocks, axis=1) == 1).all()


@pytest.mark.parametrize("step", [1, 3, 5])
def test_residual_groups_stay_aligned(step: int) -> None:
    """The window's network computes what the whole one does when everything outside the window is
    zero, across identity and projected shortcuts: were the two sides of an add cut at different
    channels, it could not."""
    with torch.random.fork_rng():
        torch.manual_seed(step)
        net = build("resnet8", shape=(1, 16, 16), classes=3, norm="batch").train()
        x = torch.randn(6, 1, 16, 16)
    axes = trace(net, (1, 16, 16))
    view, state = rolling(axes, 0.4, step), net.state_dict()
    assert view.indices(0)[0] != 0 and all(
        len(view.indices(n)) < size for n, size in enumerate(axes.sizes)
    )
    zeros = {name: torch.zeros_like(t) for name, t in state.items()}
    alone_out = sub_module(net, view).train()(x)
    net.load_state_dict(view.scatter(zeros, view.extract(state)))
    assert torch.allclose(alone_out, net(x), atol=1e-4)


def test_tied_layers_of_a_residual_stage_share_their_window() -> None:
    reference = Reference(
        "main",
        build("preresnet18", shape=(1, 16, 16), classes=3, channels=(8, 12, 16, 20)),
        (1, 16, 16),
    )
    view = rolling(reference.axes, 0.5, 3)
    one, other = (view.where(f"stages.1.{block}.conv2.weight")[0] for block in (0, 1))
    assert np.array_equal(np.arange(12)[one], np.arange(12)[other])
    assert np.array_equal(
        np.arange(12)[one], np.arange(12)[view.where("stages.1.0.shortcut.weight")[0]]
    )


def test_compat_code_rolls_the_other_way() -> None:
    federation, _ = one_round(small(FedRolex(compat="code")), [])
    upwards, _ = one_round(small(FedRolex()), [])
    device = federation.world.device(0)
    plain = device.piece.view
    assert federation.method.piece(device, 3).view.key() == rolled(plain, -2).key()
    assert (
        upwards.method.piece(upwards.world.device(0), 3).view.key()
        == rolled(upwards.world.device(0).piece.view, 2).key()
    )


def test_a_server_larger_than_every_client_is_trained_everywhere() -> None:
    """HeteroFL leaves what no tier holds as it was; the window reaches all of it."""
    before = dict(assemble(small("heterofl", fleet=NO_FULL))[1].world.main.initial)
    held, reached = (
        weights_after(small(m, fleet=NO_FULL, rounds=6, participants=4))
        for m in ("heterofl", FedRolex())
    )
    biases = [name for name in before if name.endswith("norm.bias")]
    assert biases and all(bool((held[n] == before[n]).any()) for n in biases)
    assert all(bool((reached[n] != before[n]).all()) for n in biases)


def test_fedrolex_merges_only_the_window() -> None:
    federation, _ = one_round(small(FedRolex()), [])
    federation, replies = one_round(small(FedRolex()), clients_of(federation, "small"), round=2)
    before = dict(federation.method.weights)
    federation.method.merge(replies, 2)
    view = replies[0].piece.view
    assert view.key() != federation.world.plans["small"].piece.view.key()
    for name, tensor in federation.method.weights.items():
        flags = inside(view, name, tensor)
        assert torch.equal(tensor[~flags], before[name][~flags])
        assert not torch.equal(tensor[flags], before[name][flags])
    assert (
        federation.method.model_for(
            federation.world.device(clients_of(federation, "small")[0])
        ).view.key()
        == view.key()
    )


def test_fedrolex_state_goes_round() -> None:
    first = nestling.run(small(FedRolex(), rounds=3)).federation
    again, _ = one_round(small(FedRolex()), [])
    again.method.restore(first.method.state())
    device = again.world.device(0)
    assert again.method.steps == 2
    assert (
        again.method.model_for(device).view.key()
        == first.method.model_for(first.world.device(0)).view.key()
    )
    assert equal(again.method.weights, first.method.weights)


@pytest.mark.parametrize("method", [FedRolex(), FjORD(), FjORD(distil=True)])
def test_a_resumed_run_is_the_run(method: Any, tmp_path: Any) -> None:
    whole = nestling.run(small(method, rounds=4), out=tmp_path / "whole")
    nestling.run(small(method, rounds=2), out=tmp_path / "half")
    resumed = nestling.resume(tmp_path / "half", overrides=("rounds=4",))
    for kind, part in whole.federation.method.state().items():
        assert equal(part, resumed.federation.method.state()[kind])
    assert whole.metrics[-1]["by_tier"] == resumed.metrics[-1]["by_tier"]


# -- FjORD -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Named("tinycnn", {"channels": [8, 16, 16]}), PER_WIDTH])
@pytest.mark.parametrize("distil", [False, True])
def test_weight_decay_moves_nothing_outside_the_widest_width(model: Named, distil: bool) -> None:
    federation, _ = one_round(small(FjORD()), [])
    members = clients_of(federation, "middle")
    federation, replies = one_round(small(FjORD(distil=distil), model=model, train=DEEP), members)
    before = dict(federation.method.weights)
    federation.method.merge(replies, 1)
    view, whole = replies[0].piece.view, federation.world.main
    assert view.key() != whole.full.key()
    for name, tensor in federation.method.weights.items():
        flags = inside(view, name, tensor)
        assert torch.equal(tensor[~flags], before[name][~flags])
        assert name in whole.by_width or not torch.equal(tensor[flags], before[name][flags])


def test_weight_decay_moves_what_a_batch_leaves_out() -> None:
    """Entries of p_max outside the width drawn have no gradient, and decay still shrinks them: the
    optimiser holds all of p_max."""

    def drift(decay: float) -> float:
        train = Train(epochs=1, batch=60, lr=0.1, momentum=0.0, weight_decay=decay, augment="none")
        settled, federation = assemble(small(FjORD(), fleet=ALL_FULL, train=train))
        for round in range(1, 50):
            client = client_of(errands_of(federation, 1)[0], site_of(federation))
            client.round = round
            views = tuple(level.view for level in federation.method.rungs.pieces)
            if drawn(client, views)[0] == 0:
                break
        errand = replace(errands_of(federation, 1)[0], round=round)
        after = work(settled.make_method(), errand, site_of(federation)).reply["weights"][
            "stages.2.conv.weight"
        ]
        return float((after[-1] / errand.message["weights"]["stages.2.conv.weight"][-1]).mean())

    assert drift(0.0) == 1.0
    assert drift(0.5) == pytest.approx(1 - 0.1 * 0.5, abs=1e-6)


def test_a_width_is_drawn_for_every_batch_of_every_client() -> None:
    _, federation = assemble(
        small(FjORD(), train=Train(epochs=60, batch=20), split=SplitConfig(kind="iid", size=60))
    )
    views = tuple(level.view for level in federation.method.rungs.pieces)
    found = []
    for client in range(3):
        errand = errands_of(federation, 3)[client]
        large = replace(errand, spec=federation.method.rungs.pieces[-1].spec())
        found.append(drawn(client_of(large, site_of(federation)), views))
    assert found[0] != found[1] != found[2] and [len(draws) for draws in found] == [180] * 3
    shares = np.bincount(np.concatenate(found), minlength=5) / 540
    assert shares == pytest.approx([0.2] * 5, abs=0.06)


def test_a_client_draws_no_width_above_its_own() -> None:
    federation, _ = one_round(small(FjORD()), [])
    seen = {}
    for client in range(4):
        device = federation.world.device(client)
        sent = federation.method.send(device, federation.method.piece(device, 1), 1)
        views = [federation.world.main.view(spec) for spec in sent.facts["levels"]]
        assert all(federation.method.piece(device, 1).view.contains(view) for view in views)
        seen[device.tier] = len(views)
    assert seen == {"small": 1, "middle": 2, "large": 5}


def test_a_tier_below_the_smallest_width_adds_its_own() -> None:
    tiny = FleetConfig(
        tiers=(Tier(name="tiny", ratio=0.25, count=2), Tier(name="large", ratio=1.0, count=2))
    )
    federation, replies = one_round(small(FjORD(levels=(0.5, 1.0)), fleet=tiny), [0, 1, 2, 3])
    assert [level.view.key() for level in federation.method.rungs.pieces] == [
        prefix(federation.world.main.axes, p).key() for p in (0.25, 0.5, 1.0)
    ]
    assert {r.device.tier: len(r.sent.facts["levels"]) for r in replies} == {"tiny": 1, "large": 3}


@pytest.mark.parametrize("method", [FjORD(), FedRolex()])
def test_the_default_fleet_needs_no_options(method: Any) -> None:
    experiment = nestling.Experiment(
        method=method,
        rounds=1,
        participants=2,
        split=SplitConfig(size=40),
        engine=EngineConfig("inline"),
    )
    assert nestling.run(experiment).metrics[-1]["refused"] == 0


def test_rounding_is_the_same_on_tied_layers() -> None:
    reference = Reference(
        "main", build("resnet8", shape=(1, 16, 16), classes=3, norm="per-width"), (1, 16, 16)
    )
    for level in (0.2, 0.4, 0.6, 0.8):
        view = prefix(reference.axes, level)
        assert all(
            len(view.indices(n)) == int(np.ceil(level * size - 1e-9))
            for n, size in enumerate(reference.axes.sizes)
        )
        assert reference.network(view, view.extract(reference.initial))(
            torch.zeros(2, 1, 16, 16)
        ).shape == (2, 3)


def by_hand(
    federation: Federation, errand: Errand, x: Tensor, y: Tensor, width: int, distil: bool
) -> dict[str, Tensor]:
    """The gradients of one batch, from networks that are really cut out."""
    reference = federation.world.main
    view, own = federation.method.rungs.pieces[width].view, reference.view(errand.spec)
    state = {name: t.clone().requires_grad_() for name, t in errand.message["weights"].items()}
    cut = {name: t[tuple(slice(0, n) for n in view.shape(name))] for name, t in state.items()}
    said = torch.func.functional_call(sub_module(reference.module, view).train(), cut, (x,))
    loss = F.cross_entropy(said, y)
    if distil:
        whole = torch.func.functional_call(sub_module(reference.module, own).train(), state, (x,))
        target = F.softmax(whole, 1).detach()
        loss = F.cross_entropy(whole, y) + F.cross_entropy(said, target)
    return dict(zip(state, torch.autograd.grad(loss, list(state.values())), strict=True))


@pytest.mark.parametrize("distil", [False, True])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_step_is_the_paper_s(norm: str, distil: bool) -> None:
    """One step of plain gradient descent: cross-entropy at the width drawn, or cross-entropy at
    p_max plus the soft cross-entropy of the width drawn against p_max's own detached softmax."""
    train = Train(epochs=1, batch=60, lr=0.1, momentum=0.0, augment="none")
    model = Named("tinycnn", {"channels": [8, 16, 16], "norm": norm})
    settled, federation = assemble(
        small(FjORD(distil=distil), fleet=ALL_FULL, model=model, train=train)
    )
    errand, site = errands_of(federation, 1)[0], site_of(federation)
    client = client_of(errand, site)
    width = drawn(client, tuple(level.view for level in federation.method.rungs.pieces))[0]
    assert width < 4
    grads = by_hand(federation, errand, client.x, client.y, width, distil)
    after = work(settled.make_method(), errand, site).reply["weights"]
    for name, tensor in errand.message["weights"].items():
        assert torch.allclose(after[name], tensor - 0.1 * grads[name], atol=2e-5), name


@pytest.mark.parametrize("model", ["tinycnn", "resnet8", "dscnn"])
def test_zeros_compute_what_cutting_does(model: str) -> None:
    """The way of stacks against the networks themselves; where it would differ it is not taken."""
    reference = Reference(
        "main", build(model, shape=(1, 16, 16), classes=3, norm="group"), (1, 16, 16)
    )
    views = tuple(prefix(reference.axes, p) for p in (0.2, 0.4, 0.6, 0.8, 1.0))
    assert by_zeros(reference, reference.full, views)[1] is not None
    tracked = Reference(
        "main", build(model, shape=(1, 16, 16), classes=3, norm="tracked"), (1, 16, 16)
    )
    assert (
        by_zeros(tracked, tracked.full, tuple(prefix(tracked.axes, p) for p in (0.5, 1.0)))[1]
        is None
    )


class LayerNormed(nn.Module):
    """Its norm mixes channels, so that zeros are not the same as being left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(9, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x.flatten(1)))))


def test_a_layer_that_mixes_channels_is_cut_not_zeroed() -> None:
    reference = Reference("main", LayerNormed(), (1, 3, 3))
    assert (
        by_zeros(reference, reference.full, (prefix(reference.axes, 0.5), reference.full))[1]
        is None
    )


def in_stacks(method: Any, norm: str, way: str) -> None:
    model = Named("tinycnn", {"channels": [8, 16, 16], "norm": norm})
    train = Train(epochs=1, batch=20, lr=0.01, momentum=0.5)
    settled, federation = assemble(small(method, model=model, train=train, fleet=MANY))
    made, errands, site = settled.make_method(), errands_of(federation, 6), site_of(federation)
    sizes: list[int] = []

    def train_groups(found: list[Group]) -> list[Losses]:
        sizes.extend(len(group.clients) for group in found)
        return trainer(way)(found)

    together = work_together(made, errands, site, train_groups)
    assert_same([work(made, errand, site) for errand in errands], together)
    assert sorted(sizes) == (
        [1, 1, 1, 3] if isinstance(method, FjORD) and norm == "per-width" else [3, 3]
    )


@pytest.mark.parametrize("way", ["step by step", "stack", "streams"])
@pytest.mark.parametrize("method", [FjORD(), FjORD(distil=True)])
def test_fjord_in_a_stack_is_fjord_one_by_one(method: FjORD, way: str, stacking: None) -> None:
    in_stacks(method, "group", way)


@pytest.mark.parametrize("way", ["step by step", "stack", "streams"])
@pytest.mark.parametrize("method", [FjORD(), FjORD(distil=True), FedRolex()])
def test_statistics_by_width_move_in_a_stack_as_they_do_alone(
    method: Any, way: str, stacking: None
) -> None:
    """FjORD's own widths are then cut out, so that only the clients of one width are a stack."""
    in_stacks(method, "per-width", way)


@pytest.mark.parametrize("distil", [False, True])
def test_both_ways_to_run_a_width_train_the_same(
    distil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled, federation = assemble(small(FjORD(distil=distil)))
    errands, found = errands_of(federation, 4), []
    for zeros in (False, True):
        monkeypatch.setattr(widths, "_stacks_pay", lambda client, zeros=zeros: zeros)
        found.append(
            [work(settled.make_method(), errand, site_of(federation)) for errand in errands]
        )
    assert_same(*found)


@pytest.mark.parametrize("method", [FjORD(), FedRolex()])
def test_engines_agree_over_rounds(method: Any) -> None:
    train = Train(epochs=1, batch=20, lr=0.01, momentum=0.0)
    plain, stacked = (
        nestling.run(small(method, train=train, engine=EngineConfig(e, 1)))
        for e in ("inline", "cohort")
    )
    for kind, part in plain.federation.method.state().items():
        for name, tensor in part.items():
            other = stacked.federation.method.state()[kind][name]
            assert (
                float((tensor - other).double().norm())
                <= 1e-4 * float(tensor.double().norm()) + 1e-7
            )


# -- statistics by width ---------------------------------------------------------------------------


def test_statistics_of_a_width_come_from_clients_that_reach_it() -> None:
    """A row of the merged statistics is the n_k-weighted mean over the clients whose p_max is at
    least that width."""
    experiment = small(
        FjORD(), model=PER_WIDTH, split=SplitConfig(kind="quantity", alpha=8.0, min_size=20)
    )
    federation, replies = one_round(experiment, [0, 1, 2, 3])
    before = dict(federation.method.weights)
    federation.method.merge(replies, 1)
    name = "stages.1.norm.means"
    after = federation.method.weights[name]
    views = [level.view for level in federation.method.rungs.pieces]
    reached = 0
    for row, view in enumerate(views):
        wide = view.shape(name)[1]
        own = [r for r in replies if r.piece.view.contains(view)]
        total = sum(r.samples for r in own)
        expected = (
            sum(r.message["weights"][name][row, :wide].double() * r.samples for r in own) / total
        )
        assert torch.allclose(after[row, :wide].double(), expected, atol=1e-6)
        assert torch.equal(after[row, wide:], before[name][row, wide:])
        reached += not torch.equal(after[row], before[name][row])
    assert reached >= 3


def test_a_client_moves_the_statistics_of_the_widths_it_drew_and_no_others() -> None:
    experiment = small(
        FjORD(), model=PER_WIDTH, fleet=ALL_FULL, train=Train(epochs=1, batch=30, lr=0.02)
    )
    _, replies = one_round(experiment, [0])
    draws = nestling.seeds.stream(0, "width", 0, 1).integers(5, size=2)
    moved = (replies[0].message["weights"]["stages.0.norm.means"] != 0).any(1)
    assert moved.tolist() == [row in draws for row in range(5)]


def test_used_rows_end_with_the_width_of_the_network() -> None:
    reference = Reference(
        "main",
        build("tinycnn", shape=(1, 8, 8), classes=3, channels=(8, 16), norm="per-width"),
        (1, 8, 8),
    )
    for number, level in enumerate((0.2, 0.4, 0.6, 0.8, 1.0)):
        flags = used_rows(reference.network(prefix(reference.axes, level)))
        assert set(flags) == reference.by_width and all(
            f[:, 0].sum() == number + 1 for f in flags.values()
        )


def test_networks_and_methods_must_mean_the_same_widths() -> None:
    with pytest.raises(InputError, match=r"per-width:0.5,1") as caught:
        nestling.run(small(FjORD(levels=(0.5, 1.0)), model=PER_WIDTH))
    assert caught.value.field == "model.norm"
    stated = Named("tinycnn", {"channels": [8, 16, 16], "norm": "per-width:0.5,1"})
    assert (
        nestling.run(small(FjORD(levels=(0.5, 1.0)), model=stated)).summary["global_score"]["last"]
        > 0
    )


def test_the_global_model_is_the_widest_that_anybody_trains() -> None:
    model = nestling.run(small(FjORD(), fleet=NO_FULL)).federation.method.global_model()
    assert model.view.key() == prefix(model.reference.axes, 0.4).key()


# -- HeteroFL's traps ------------------------------------------------------------------------------


@torch.no_grad()
def test_the_scaler_before_batch_statistics_does_nothing() -> None:
    """Unless activations are so small that the norm's epsilon counts."""
    norm, x = (
        norm_layer("batch", 8).train(),
        torch.randn(16, 8, 5, 5, generator=torch.Generator().manual_seed(0)),
    )
    assert float((norm(x / 0.25) - norm(x)).abs().max()) < 1e-4
    assert float((norm(1e-3 * x / 0.25) - norm(1e-3 * x)).abs().max()) > 0.1


NO_NORM = Named("tinycnn", {"channels": [8, 16, 16], "norm": "none"})


def phase_of(federation: Federation, member: int) -> tuple[Client, Phase]:
    device = federation.world.device(member)
    sent = federation.method.send(device, device.piece, 1)
    client = client_of(Errand(member, 1, "main", device.piece.spec(), sent), site_of(federation))
    return client, next(iter(federation.method.phases(client, sent)))


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_the_scaler_divides_after_convolutions_by_the_share_of_their_channels(method: str) -> None:
    _, federation = assemble(small(method, model=NO_NORM))
    client, phase = phase_of(federation, clients_of(federation, "small")[0])
    shares = {
        name: by
        for hook in phase.hooks
        for name, by in zip(hook.names, [hook.change.keywords["by"]] * 9, strict=False)
    }
    full = {
        n: m.out_channels
        for n, m in client.reference.module.named_modules()
        if isinstance(m, nn.Conv2d)
    }
    cut = {
        n: m.out_channels
        for n, m in client.reference.network(client.view).named_modules()
        if isinstance(m, nn.Conv2d)
    }
    assert shares == {name: cut[name] / full[name] for name in full} and max(shares.values()) < 1
    assert not any(
        layer._forward_hooks for layer in client.reference.network(client.view).modules()
    )
    whole, plain = phase_of(federation, clients_of(federation, "large")[0])
    assert whole.view.keep.all() and plain.hooks == ()


@torch.no_grad()
@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_a_part_is_tested_with_the_scaler_it_was_trained_with(method: str) -> None:
    """Its weights hold the division, so that a model that leaves the simulator computes the
    same."""
    _, federation = assemble(small(method, model=NO_NORM))
    member = clients_of(federation, "small")[0]
    client, phase = phase_of(federation, member)
    x = torch.rand(4, *client.reference.shape)
    trained = client.reference.network(
        client.view, client.view.extract(federation.method.weights)
    ).eval()
    with hooked(trained, phase):
        wanted = trained(x)
    without = trained(x)
    model = federation.method.model_for(federation.world.device(member))
    found = model.reference.network(model.view, model.state).eval()(x)
    assert torch.allclose(found, wanted, atol=1e-6) and not torch.allclose(
        found, without, atol=1e-3
    )
    whole = federation.method.global_model()
    assert all(torch.equal(whole.state[name], t) for name, t in federation.method.weights.items())


def test_layers_that_keep_all_their_channels_are_not_divided() -> None:
    reference = assemble(small("heterofl", model=NO_NORM))[1].world.main
    first = reference.axes.names[0]
    shares = narrowed(reference, prefix(reference.axes, {first: 0.5}))
    assert list(shares.values()) == [0.5] and narrowed(reference, reference.full) == {}


def test_without_the_label_mask_no_classes_travel() -> None:
    federation, replies = one_round(small(HeteroFL(mask_labels=False)), [0])
    assert set(replies[0].message.parts) == {"weights"} and set(
        federation.method.expects(replies[0].piece, replies[0].sent)
    ) == {"weights"}
    _, replies = one_round(small(FedRolex()), [0])
    assert replies[0].message["present"]["classes"].shape == (10,)


@pytest.mark.parametrize("method", [HeteroFL(), FedRolex()])
def test_rows_of_absent_classes_do_not_move(method: HeteroFL) -> None:
    federation, replies = one_round(
        small(method, split=SplitConfig(kind="classes", classes=2, size=60)), [0], round=2
    )
    before = federation.method.weights["head.weight"].clone()
    federation.method.merge(replies, 2)
    held, after = replies[0].message["present"]["classes"], federation.method.weights["head.weight"]
    assert int(held.sum()) == 2 and torch.equal(after[~held], before[~held])
    assert not torch.equal(after[held], before[held])


class Convolutional(nn.Module):
    """Ends with a convolution and a mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Conv2d(1, 8, 5, stride=4), nn.Conv2d(8, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.body(x))).mean((2, 3))


def test_the_output_layer_may_be_a_convolution() -> None:
    experiment = small(
        "heterofl", model=Convolutional(), split=SplitConfig(kind="classes", classes=2, size=60)
    )
    federation, replies = one_round(experiment, [0])
    before = federation.method.weights["out.weight"].clone()
    federation.method.merge(replies, 1)
    held = replies[0].message["present"]["classes"]
    assert torch.equal(federation.method.weights["out.weight"][~held], before[~held])


class Eleven(Convolutional):
    """Its last layer has a row more than there are classes."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Conv2d(8, 11, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :10]


def test_a_label_mask_without_a_row_a_class_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="label mask") as caught:
        assemble(small("heterofl", model=Eleven()))
    assert caught.value.field == "method.mask_labels"
    assemble(small(HeteroFL(mask_labels=False), model=Eleven()))


# -- settings, bytes, learning ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FjORD(levels=()), "method.levels"),
        (lambda: FjORD(levels=(0.5, 0.25)), "method.levels"),
        (lambda: FjORD(levels=(0.5, 1.5)), "method.levels"),
        (lambda: FjORD(alpha=2.0), "method.alpha"),
        (lambda: FjORD(temperature=0.0), "method.temperature"),
        (lambda: FedRolex(compat="other"), "method.compat"),
    ],
)
def test_bad_settings_are_named(make: Any, field: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize("model", [Named("tinycnn", {"channels": [8, 16, 16]}), PER_WIDTH])
@pytest.mark.parametrize(
    "method", [FjORD(), FjORD(distil=True), FedRolex(), HeteroFL(), HeteroFL(**PLAIN)]
)
def test_bytes_equal_the_closed_formula(method: Any, model: Named) -> None:
    result = nestling.run(small(method, model=model))
    world, made = result.federation.world, result.federation.method
    for row in result.metrics:
        down = sum(
            4 * made.piece(world.device(c), row["round"]).view.numel() for c in row["clients"]
        )
        flags = 2 * len(row["clients"]) if getattr(method, "mask_labels", False) else 0
        assert (row["bytes_down"], row["bytes_up"]) == (down, down + flags)


@pytest.mark.slow
@pytest.mark.parametrize("method", [FjORD(), FjORD(distil=True), FedRolex()])
def test_sharing_beats_training_alone(method: Any) -> None:
    found = learned(method)
    assert mean(found) > alone() + 0.05 and min(found) > 0.35


def test_dynamic_levels_roll_too() -> None:
    federation, _ = one_round(small(FedRolex(dynamic=True)), [])
    plain, _ = one_round(small(HeteroFL(dynamic=True)), [])
    for round in range(1, 20):
        view, static = (
            f.method.piece(f.world.device(0, round), round).view for f in (federation, plain)
        )
        assert view.key() == rolled(replace(static, axes=view.axes), round - 1).key()
