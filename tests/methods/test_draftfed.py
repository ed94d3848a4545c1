"""DraftFed: who teaches whom at which depth, how unlike maps are brought together, what travels,
and that it helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nestling
from nestling import (
    EngineConfig,
    Experiment,
    FleetConfig,
    InputError,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.message import Message
from nestling.methods import Reply
from nestling.methods.distill.draftfed import DraftFed
from nestling.methods.distill.drafts import (
    DraftPool,
    align,
    aligned_mean,
    draft_loss,
    draw,
    targets,
)
from nestling.methods.personal import own_weights
from nestling.methods.public import drawn
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.training.client import Errand, work
from nestling.training.distiller import logits_of
from nestling.training.objectives import Batch, Net
from tests.methods.exchange import same_models
from tests.methods.learning import SEEDS, experiment
from tests.methods.mixed import clearly_above
from tests.small import small

NAME = "nestling.methods.distill.draftfed:DraftFed"
TIERS = (
    Tier(name="narrow", ratio=0.5, count=2),
    Tier(name="wide", ratio=1.0, count=1),
    Tier(name="residual", model="tinyresnet", model_options={"blocks": [1, 1]}, count=1),
    Tier(name="depthwise", model="dscnn", model_options={"width": 0.125, "blocks": 3}, count=2),
)
DEPTHS = {"narrow": 3, "wide": 3, "residual": 5, "depthwise": 7}
FIRST = {
    "narrow": (4, 14, 14),
    "wide": (8, 14, 14),
    "residual": (4, 14, 14),
    "depthwise": (8, 14, 14),
}
LAST = {"narrow": (8, 7, 7), "wide": (16, 7, 7), "residual": (8, 4, 4), "depthwise": (8, 14, 14)}
SUPPLEMENTS = {"residual": {3: (8, 7, 7)}, "depthwise": {3: (8, 14, 14), 5: (8, 14, 14)}}
"""The networks' maps of 28×28 inputs, by hand: the first convolution strides everywhere; the
residual network pools once before its two blocks, of which the second halves the map."""

ROWS = 40


def mixed(method: Any, **changes: Any) -> Experiment:
    """Six clients with four networks of three families and three depths; everybody takes part."""
    settings: dict[str, Any] = {
        "fleet": FleetConfig(tiers=TIERS),
        "participants": 0,
        "split": SplitConfig(kind="dirichlet", alpha=1.0, size=40, public=0.01),
    }
    return small(method, **{**settings, **changes})


def federation_of(method: Any, **changes: Any) -> Federation:
    return assemble(mixed(method, **changes))[1]


def replies_of(
    federation: Federation, value: Callable[[int], float], clients: list[int]
) -> list[Reply]:
    """Replies of which every number is the client's value."""
    world, method, found = federation.world, federation.method, []
    for client in clients:
        device = world.device(client)
        piece = method.piece(device, 1)
        sent = method.send(device, piece, 1)
        like = method.expects(piece, sent)["drafts"]
        drafts = {name: torch.full(t.shape, value(client)) for name, t in like.items()}
        found.append(Reply(device, piece, sent, Message({"drafts": drafts}, {"samples": 1})))
    return found


def target_of(federation: Federation, tier: str) -> dict[str, Tensor]:
    world = federation.world
    device = world.device(world.fleet.member(tier, 0))
    sent = federation.method.send(device, federation.method.piece(device, 2), 2)
    return dict(sent.parts.get("targets", {}))


def work_of(federation: Federation, client: int, round: int) -> Any:
    """What a client does in a round, from where the federation stands."""
    world, method = federation.world, federation.method
    device = world.device(client)
    piece = method.piece(device, round)
    sent = method.send(device, piece, round)
    return work(
        method,
        Errand(client, round, piece.reference.name, piece.spec(), sent, world.store.get(client)),
        site_of(federation),
    )


# -- unlike maps -----------------------------------------------------------------------------------


def test_maps_are_resized_and_channels_cut_off_or_filled_up() -> None:
    maps = torch.randn(3, 4, 6, 6)
    assert torch.equal(align(maps, (4, 6, 6)), maps)
    assert torch.equal(align(maps, (2, 6, 6)), maps[:, :2])
    wider = align(maps, (7, 6, 6))
    assert torch.equal(wider[:, :4], maps) and not wider[:, 4:].any()
    assert torch.allclose(
        align(maps, (4, 3, 3)), maps.reshape(3, 4, 3, 2, 3, 2).mean((3, 5)), atol=1e-6
    )
    assert align(torch.ones(2, 1, 3, 5), (2, 8, 4))[:, 0].unique().tolist() == [1.0]
    assert align(torch.randn(2, 4, 9), (3, 5)).shape == (2, 3, 5)


def test_channels_that_some_do_not_have_shrink_unless_their_holders_are_counted() -> None:
    narrow, wide = torch.full((2, 2, 3, 3), 6.0), torch.full((2, 4, 3, 3), 4.0)
    # sums of three clients that say 2 each, and of one that says 4
    parts = [(narrow, 3), (wide, 1)]
    by_clients, by_count = (
        aligned_mean(parts, (4, 3, 3), divisor)[0, :, 0, 0].tolist()
        for divisor in ("clients", "count")
    )
    assert by_clients == [2.5, 2.5, 1.0, 1.0]
    assert by_count == [2.5, 2.5, 4.0, 4.0]


def test_channels_that_nobody_has_are_zero_or_left_out() -> None:
    parts = [(torch.ones(2, 2, 3, 3), 1)]
    assert aligned_mean(parts, (4, 3, 3), "clients")[0, :, 0, 0].tolist() == [1, 1, 0, 0]
    assert aligned_mean(parts, (4, 3, 3), "count").shape == (2, 2, 3, 3)


def test_adding_up_before_aligning_is_the_mean_of_aligned_drafts() -> None:
    own = [{"first": torch.randn(2, 3, 8, 8)} for _ in range(3)]
    other = [{"first": torch.randn(2, 5, 4, 4)} for _ in range(2)]
    found = targets(
        [DraftPool.of(1, own), DraftPool.of(2, other)],
        1,
        {"first": torch.Size((4, 6, 6))},
        "clients",
    )["first"]
    assert torch.allclose(
        found,
        torch.stack([align(d["first"], (4, 6, 6)) for d in (*own, *other)]).mean(0),
        atol=1e-6,
    )


# -- who teaches whom ------------------------------------------------------------------------------


def test_the_shallowest_learn_their_last_map_from_all_and_the_deepest_from_their_like() -> None:
    federation = federation_of(DraftFed(rows=ROWS))
    clients = list(range(federation.world.fleet.size))
    federation.method.merge(replies_of(federation, lambda client: 2.0**client, clients), 1)
    depth = {client: DEPTHS[federation.world.device(client).tier] for client in clients}
    for tier, own in DEPTHS.items():
        found = target_of(federation, tier)
        deep = [2.0**client for client in clients if depth[client] >= own]
        assert {name: tuple(t.shape[1:]) for name, t in found.items()} == {
            "first": FIRST[tier],
            "last": LAST[tier],
            "logits": (10,),
        }
        assert found["last"][0, 0, 0, 0] == pytest.approx(mean(deep))
        assert found["first"][0, 0, 0, 0] == pytest.approx(mean(2.0**client for client in clients))
        assert found["logits"].unique().tolist() == pytest.approx(
            [mean(2.0**client for client in clients)]
        )
    assert len({depth[client] for client in clients}) == 3
    assert target_of(federation, "narrow")["last"][0, 0, 0, 0] == pytest.approx(
        mean(2.0**client for client in clients)
    )
    assert target_of(federation, "depthwise")["last"][0, 0, 0, 0] == pytest.approx(
        mean(2.0**c for c in clients if depth[c] == 7)
    )


def test_targets_are_means_over_those_who_took_part_and_stay_where_nobody_renews_them() -> None:
    federation = federation_of(DraftFed(rows=ROWS))
    fleet, method = federation.world.fleet, federation.method
    shallow, deep = fleet.member("narrow", 0), fleet.member("depthwise", 0)
    assert target_of(federation, "narrow") == {}
    method.merge([], 1)
    assert target_of(federation, "narrow") == {}
    method.merge(replies_of(federation, lambda _: 3.0, [shallow]), 1)
    assert target_of(federation, "depthwise").keys() == {"first", "logits"}
    assert target_of(federation, "wide")["last"][0, :, 0, 0].tolist() == [3.0] * 8 + [0.0] * 8
    method.merge(replies_of(federation, lambda _: 5.0, [deep]), 2)
    assert target_of(federation, "depthwise")["last"].unique().tolist() == [5.0]
    assert target_of(federation, "narrow")["last"].unique().tolist() == [5.0]
    method.merge(replies_of(federation, lambda _: 7.0, [shallow]), 3)
    assert target_of(federation, "depthwise")["last"].unique().tolist() == [5.0]
    assert target_of(federation, "depthwise")["logits"].unique().tolist() == [7.0]
    before = target_of(federation, "depthwise")
    method.merge([], 4)
    assert target_of(federation, "depthwise")["first"] is before["first"]


def test_networks_cut_in_depth_have_places_of_their_own() -> None:
    """Nine blocks and what is left of them at a smaller share: places are counted in the cut
    network."""
    tiers = tuple(Tier(name=f"d{ratio}", ratio=ratio, cut="depth", count=2) for ratio in (0.4, 1.0))
    deep = Named("tinyresnet", {"blocks": [4], "channels": [4, 8]})
    result = nestling.run(
        mixed(DraftFed(rows=ROWS, epochs=2), model=deep, fleet=FleetConfig(tiers=tiers), rounds=3)
    )
    networks = sorted(result.federation.method.networks.values(), key=lambda network: network.depth)
    assert len(networks) == 2 and networks[0].depth < networks[1].depth == 9
    assert f"conv {networks[0].depth}" in networks[1].shapes and set(networks[0].shapes) == {
        "first",
        "last",
        "logits",
    }
    assert result.summary["refused"] == 0


# -- the loss --------------------------------------------------------------------------------------


class Overwriting(nn.Module):
    """A network whose activation writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.head = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Linear(4, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.conv(x)).mean((2, 3)))


def test_drafts_are_what_the_layer_put_out_even_if_it_is_overwritten() -> None:
    module, x = Overwriting(), torch.randn(6, 1, 8, 8)
    drafts = draw(module, {"first": "conv"}, x, batch=4)
    # Not bit for bit: a product of four rows may be rounded otherwise than one of six.
    assert torch.allclose(drafts["first"], module.conv(x), atol=1e-6) and torch.allclose(
        drafts["logits"], module(x), atol=1e-6
    )
    assert float(drafts["first"].min()) < 0


def test_the_loss_is_the_weighted_sum_of_two_mean_squares_and_a_soft_cross_entropy() -> None:
    module, x = Overwriting(), torch.randn(6, 1, 8, 8)
    goal = {
        "first": torch.randn(9, 4, 8, 8),
        "last": torch.randn(9, 2, 8, 8),
        "logits": torch.randn(9, 5),
    }
    rows = torch.tensor([8, 0, 3, 3, 7, 1])
    batch, net = (
        Batch(x, torch.zeros(6, dtype=torch.int64), rows),
        Net(module, dict(module.named_parameters())),
    )
    maps = module.conv(x)
    terms = {
        "first": ((maps - goal["first"][rows]) ** 2).mean(),
        "last": ((maps[:, :2] - goal["last"][rows]) ** 2).mean(),
        "logits": -(goal["logits"][rows].softmax(-1) * module(x).log_softmax(-1)).sum() / 6,
    }
    weights = dict(zip(goal, (0.5, 2.0, 3.0), strict=True))
    for names in (("first",), ("last",), ("logits",), ("first", "last", "logits")):
        found = draft_loss(
            net,
            batch,
            {n: goal[n] for n in names},
            layers=("conv", "conv"),
            weights=tuple(weights.values()),
        )
        assert torch.allclose(found, sum(weights[n] * terms[n] for n in names))


@pytest.mark.parametrize("order", ["local-draft", "draft-local"])
def test_a_client_drafts_what_its_training_taught_and_learns_the_targets(order: str) -> None:
    """How hard it learns from the targets changes its weights; its drafts too, only where that
    comes before its training."""
    done = {}
    for lr in (1e-6, 0.05):
        federation = federation_of(DraftFed(rows=ROWS, order=order, lr=lr, epochs=3))
        federation.method.merge(replies_of(federation, lambda _: 0.5, list(range(6))), 1)
        done[lr] = work_of(federation, 0, 2)
    little, much = (done[lr] for lr in (1e-6, 0.05))
    assert any(
        not torch.allclose(t, much.memory[name], atol=1e-3) for name, t in little.memory.items()
    )
    same = [
        torch.equal(t, much.reply["drafts"][name]) for name, t in little.reply["drafts"].items()
    ]
    assert all(same) if order == "local-draft" else not any(same)
    assert little.samples == 40 + 3 * ROWS


def test_learning_the_targets_brings_the_drafts_closer_to_them() -> None:
    federation = federation_of(DraftFed(rows=ROWS, lr=0.05, epochs=8, batch=20))
    federation.method.merge(replies_of(federation, lambda _: 0.25, list(range(6))), 1)
    world, apart = federation.world, []
    for after in (False, True):
        outcome = work_of(federation, 0, 2)
        piece = federation.method.piece(world.device(0), 2)
        weights = (
            own_weights(outcome.memory) if after else piece.view.extract(piece.reference.initial)
        )
        module = piece.reference.network(piece.view, weights)
        taps = piece.reference.taps
        drafts = draw(module, {"first": taps.first, "last": taps.last}, world.public)
        apart.append([float(((drafts[name] - 0.25) ** 2).mean()) for name in ("first", "last")])
    assert all(late < 0.8 * early for early, late in zip(*apart, strict=True))


def test_without_any_draft_it_is_local_and_nothing_travels() -> None:
    ours, alone = (
        nestling.run(mixed(m)).federation
        for m in (DraftFed(lambda1=0, lambda2=0, lambda3=0), "local")
    )
    same_models(ours, alone, 0.0)
    assert (ours.totals.bytes_up, ours.totals.bytes_down) == (0, 0)


# -- what travels ----------------------------------------------------------------------------------


def size(*shapes: tuple[int, ...]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


@pytest.mark.parametrize("on", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0.5, 0.5)])
def test_exactly_the_drafts_travel(on: tuple[float, float, float]) -> None:
    """|G|·(c₁hw + c₂hw + C + supplements) up, the same without supplements down, of the drafts that
    count."""
    rows = nestling.run(mixed(DraftFed(*on, rows=ROWS), rounds=3)).metrics
    one, two, three = (int(bool(weight)) for weight in on)
    up = down = 0
    for tier in TIERS:
        own = one * size(FIRST[tier.name]) + two * size(LAST[tier.name]) + three * 10
        more = two * size(*SUPPLEMENTS.get(tier.name, {}).values())
        up, down = up + tier.count * ROWS * (own + more) * 4, down + tier.count * ROWS * own * 4
    assert [(r["bytes_up"], r["bytes_down"]) for r in rows] == [(up, 0), (up, down), (up, down)]


def test_all_public_rows_are_taken_where_there_are_fewer() -> None:
    federation = federation_of(DraftFed())
    assert federation.world.public is not None and len(federation.world.public) < 512
    drafts = work_of(federation, 0, 1).reply["drafts"]
    assert {len(t) for t in drafts.values()} == {len(federation.world.public)}


def test_everybody_drafts_on_the_same_rows_every_round() -> None:
    federation = federation_of(DraftFed(lambda1=0, lambda2=0, rows=ROWS))
    world, method = federation.world, federation.method
    assert world.public is not None
    numbers = {
        method.send(d, method.piece(d, t), t).facts["rows"]
        for d in map(world.device, range(6))
        for t in (1, 2)
    }
    common = world.public[drawn(numbers.pop(), ROWS, len(world.public), world.place)]
    assert not numbers and len(common) == ROWS
    for client in (0, 5):
        outcome = work_of(federation, client, 1)
        piece = method.piece(world.device(client), 1)
        module = piece.reference.network(piece.view, own_weights(outcome.memory))
        assert torch.equal(logits_of(module, common), outcome.reply["drafts"]["logits"])


def test_clients_with_one_network_get_one_message() -> None:
    federation = federation_of(DraftFed(rows=ROWS))
    world, method = federation.world, federation.method
    sent = [method.send(d, method.piece(d, 1), 1) for d in map(world.device, range(6))]
    assert len({id(message) for message in sent}) == 4


# -- in a run --------------------------------------------------------------------------------------

CNN1D = FleetConfig(
    tiers=(
        Tier(name="short", model="tests.methods.test_draftfed:one_axis", count=1),
        Tier(name="image", ratio=1.0, count=1),
    )
)


def one_axis(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Rows of pixels as channels of one axis."""
    high, wide = shape[1:]
    return nn.Sequential(
        nn.Flatten(1, 2),
        nn.Conv1d(high, 4, 3, padding=1),
        nn.Flatten(),
        nn.Linear(4 * wide, classes),
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"fleet": FleetConfig(tiers=(*TIERS, Tier(name="flat", model="mlp", count=1)))},
            "the network of tier 'flat' has none",
        ),
        ({"model": Named("mlp")}, "the network of tier 'narrow' has none"),
        ({"split": SplitConfig(kind="iid", size=40, public=0.0)}, "needs public inputs"),
        ({"fleet": CNN1D}, "cannot align"),
    ],
)
def test_what_it_cannot_do_it_says_in_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        federation_of(DraftFed(), **changes)
    assert "\n" not in str(refused.value) and refused.value.field and refused.value.fix


@pytest.mark.parametrize(
    "options",
    [
        {"lambda1": -1.0},
        {"lambda3": -0.1},
        {"rows": 0},
        {"order": "both"},
        {"divisor": "none"},
        {"epochs": 0},
        {"lr": -1.0},
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        DraftFed(**options)
    assert refused.value.field == f"method.{next(iter(options))}"


@pytest.mark.parametrize("order", ["local-draft", "draft-local"])
def test_clients_trained_as_a_stack_end_where_single_ones_do(order: str) -> None:
    method = Named(NAME, {"rows": ROWS, "batch": 16, "order": order})
    one, other = (
        nestling.run(mixed(method, engine=EngineConfig(kind, workers=1))).federation
        for kind in ("inline", "cohort")
    )
    same_models(one, other, 1e-4)
    for name, state in one.method.state().items():
        assert all(
            torch.allclose(t, other.method.state()[name][key], atol=1e-3)
            for key, t in state.items()
        )


def test_a_resumed_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    """With some clients a round, of which some vanish."""
    fleet = FleetConfig(tiers=tuple(Tier(**{**vars(tier), "dropout": 0.2}) for tier in TIERS))
    settings: dict[str, Any] = {"fleet": fleet, "participants": 3}
    method = Named(NAME, {"rows": ROWS, "divisor": "count"})
    nestling.run(mixed(method, rounds=2, **settings), out=tmp_path / "parts")
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=4",)).federation
    whole = nestling.run(mixed(method, rounds=4, **settings), out=tmp_path / "whole").federation
    assert parts.totals == whole.totals and whole.totals.refused == 0
    same_models(parts, whole, 0.0)
    for name, state in whole.method.state().items():
        assert all(torch.equal(t, parts.method.state()[name][key]) for key, t in state.items())


# -- learning --------------------------------------------------------------------------------------

FAMILIES = FleetConfig(
    tiers=(
        Tier(name="strided", ratio=1.0, count=3),
        Tier(name="depthwise", model="dscnn", model_options={"width": 0.25, "blocks": 2}, count=2),
        Tier(name="residual", model="tinyresnet", model_options={"blocks": [1, 1]}, count=3),
    )
)
SCARCE: dict[str, Any] = {
    "fleet": FAMILIES,
    "participants": 0,
    "split": SplitConfig(kind="iid", size=30, public=0.015),
    "train": Train(epochs=4, batch=10, optimizer="adam", lr=0.01, decay=0.95, augment="none"),
}
"""As published all clients take part and hold equal mixes of classes; thirty rows each, so that
there is something to learn from others."""


@pytest.mark.slow
def test_three_families_learn_from_each_other() -> None:
    """Measured on the common test rows, as published, and on each client's own mix of classes."""
    found: dict[str, dict[str, list[float]]] = {"ours": {}, "alone": {}}
    for name, method in (
        ("ours", DraftFed(order="draft-local", epochs=2, batch=32)),
        ("alone", "local"),
    ):
        runs = [nestling.run(experiment(method, seed, **SCARCE)).summary for seed in SEEDS]
        found[name] = {
            kind: [run[kind]["last"] for run in runs] for kind in ("personal_score", "global_score")
        }
    for kind, ours in found["ours"].items():
        assert clearly_above(ours, found["alone"][kind]), (kind, ours, found["alone"][kind])
    assert mean(found["ours"]["personal_score"]) > 0.5
