"""FedHM and PriSM: what they equal in the limit, the known traps, bytes, learning, and that nothing
depends on the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nestling
from nestling import EngineConfig, FleetConfig, InputError, Named, SplitConfig, Tier, Train
from nestling.message import Message
from nestling.methods import Reply
from nestling.methods.lowrank.factored import FACTORS, layers_of
from nestling.methods.lowrank.fedhm import FedHM
from nestling.methods.lowrank.prism import PriSM
from nestling.models.factorised import to_dense
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation
from nestling.views import State
from tests.methods.learning import alone, learned, mean
from tests.small import TIERS, small

ONE_TIER = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
BOTH = [FedHM(), PriSM()]


def weights_after(method: Any, **changes: Any) -> State:
    return dict(nestling.run(small(method, **changes)).federation.method.global_model().state)


def distance(a: State, b: State) -> float:
    """The largest difference, relative to the size of the second."""
    return max(float((a[n] - b[n]).norm() / (b[n].norm() + 1e-12)) for n in b)


def federation_of(method: Any, **changes: Any) -> Federation:
    return assemble(small(method, **changes))[1]


def replies_of(federation: Federation, clients: list[int]) -> list[Reply]:
    """Replies of clients that trained nothing, but moved every number they got a little."""
    replies = []
    for client in clients:
        device = federation.world.device(client)
        piece = federation.method.piece(device, 1)
        sent = federation.method.send(device, piece, 1)
        moved = {name: t * (1.1 + 0.1 * client) for name, t in sent["weights"].items()}
        replies.append(
            Reply(device, piece, sent, Message({"weights": moved}, {"samples": 10 * (client + 1)}))
        )
    return replies


# -- FedHM -----------------------------------------------------------------------------------------


def test_fedhm_of_dense_clients_is_fedavg() -> None:
    """ρ = 1 is the network itself: bit for bit, uniform weights being n_k on equal shares."""
    dense, average = (
        weights_after(method, fleet=ONE_TIER) for method in (FedHM(ratios=(1.0,)), "fedavg")
    )
    assert all(torch.equal(dense[name], average[name]) for name in average)


def test_a_dense_client_returns_exactly_and_a_factorised_one_up_to_its_rank() -> None:
    federation = federation_of(FedHM(virtual=False))
    method, before = federation.method, dict(federation.method.weights)
    large = federation.world.fleet.member("large", 0)
    reply = replies_of(federation, [large])[0]
    method.merge(
        [Reply(reply.device, reply.piece, reply.sent, Message(reply.sent.parts, {"samples": 5}))], 1
    )
    assert all(torch.equal(method.weights[name], before[name]) for name in before)
    small_one = replies_of(federation, [federation.world.fleet.member("small", 0)])[0]
    method.merge(
        [
            Reply(
                small_one.device,
                small_one.piece,
                small_one.sent,
                Message(small_one.sent.parts, {"samples": 5}),
            )
        ],
        1,
    )
    layer = "stages.1.conv.weight"
    matrix = method.weights[layer].permute(0, 2, 1, 3).reshape(16 * 3, -1)
    assert torch.linalg.matrix_rank(matrix, rtol=1e-4) == 2 and not torch.allclose(
        method.weights[layer], before[layer]
    )
    assert torch.equal(method.weights["stages.0.conv.weight"], before["stages.0.conv.weight"])


def test_fedhm_averages_products_and_not_factors() -> None:
    """Two clients of one rank: the mean of the products is not the product of the means."""
    federation = federation_of(FedHM(virtual=False))
    clients = [federation.world.fleet.member("small", k) for k in range(2)]
    replies = replies_of(federation, clients)
    federation.method.merge(replies, 1)
    layers = layers_of(federation.method.factors)
    states = [reply.message["weights"] for reply in replies]
    products = [to_dense(state, layers) for state in states]
    factors = to_dense(
        {name: (states[0][name] + states[1][name]) / 2 for name in states[0]}, layers
    )
    name = "stages.1.conv.weight"
    assert torch.allclose(
        federation.method.weights[name], (products[0][name] + products[1][name]) / 2, atol=1e-6
    )
    assert not torch.allclose(federation.method.weights[name], factors[name], rtol=1e-3)


def test_fedhm_weights_and_the_virtual_client() -> None:
    def merged(clients: list[int], **settings: Any) -> tuple[float, list[float]]:
        federation = federation_of(FedHM(**settings))
        before = float(federation.method.weights["stages.0.conv.weight"][0, 0, 0, 0])
        federation.method.merge(replies_of(federation, clients), 1)
        after = float(federation.method.weights["stages.0.conv.weight"][0, 0, 0, 0])
        return after / before, [1.1 + 0.1 * c for c in clients]

    fleet = federation_of(FedHM()).world.fleet
    low, low2, high = fleet.member("small", 0), fleet.member("small", 1), fleet.member("large", 0)
    got, (a, b) = merged([low, high])
    assert got == pytest.approx((a + b) / 2, rel=1e-5)
    got, (a, b) = merged([low, high], dynamic=True)
    w8, w1 = np.exp(-8 / 5), np.exp(-1 / 5)
    assert got == pytest.approx((w8 * a + w1 * b) / (w8 + w1), rel=1e-5)
    got, (a, b) = merged([low, low2])
    # nobody had the whole network: its last value counts once
    assert got == pytest.approx((a + b + 1) / 3, rel=1e-5)
    got, (a, b) = merged([low, low2], virtual=False)
    assert got == pytest.approx((a + b) / 2, rel=1e-5)
    got, (a, b) = merged([low, low2], dynamic=True)
    assert got == pytest.approx((w8 * a + w8 * b + w1) / (2 * w8 + w1), rel=1e-5)


def test_the_released_code_shrinks_rows_of_classes_that_some_lack() -> None:
    """Rows are summed over their holders but divided by everybody."""
    split = SplitConfig(kind="classes", classes=2, size=60)
    method = FedHM(ratios=(1.0,), compat="code")
    result = nestling.run(small(method, split=split, rounds=1, fleet=ONE_TIER))
    held = [result.federation.world.split.counts(c) > 0 for c in result.metrics[0]["clients"]]
    rows = result.federation.method.weights["head.weight"].norm(dim=1)
    nobody = ~np.any(held, axis=0)
    assert nobody.any() and bool((rows[torch.from_numpy(nobody)] == 0).all())
    assert bool((rows[torch.from_numpy(~nobody)] > 0).all())


# -- PriSM -----------------------------------------------------------------------------------------


def test_prism_of_whole_clients_is_fedavg_up_to_rounding_for_a_small_step() -> None:
    """All components and nothing trained: the same weights back. A tiny step: the update is that of
    the factors, to first order a linear map of FedAvg's, and exactly FedAvg's for the tensors that
    stay dense."""
    frozen = {
        "fleet": ONE_TIER,
        "train": Train(epochs=1, batch=60, lr=1e-7, momentum=0.0),
        "rounds": 1,
    }
    method = PriSM(keeps=(1.0,), decay=0.0)
    start = dict(federation_of(method, **frozen).world.main.initial)
    assert all(
        torch.allclose(t, start[name], atol=1e-5)
        for name, t in weights_after(method, **frozen).items()
    )
    step = {
        "fleet": ONE_TIER,
        "train": Train(epochs=1, batch=60, lr=1e-3, momentum=0.0, augment="none"),
        "rounds": 1,
    }
    low, average = (
        weights_after(m, **step) for m in (PriSM(keeps=(1.0,), decay=0.0, clip=0.0), "all-large")
    )
    for name in ("head.weight", "stages.0.conv.weight"):
        want, got = average[name] - start[name], low[name] - start[name]
        assert float((got - want).norm()) < 2e-3 * float(want.norm())
    # The step of w = u·v is lr·(g·vᵀ·v + u·uᵀ·g) to first order.
    name = "stages.1.conv.weight"
    w, g = (
        start[name].reshape(16, -1).double(),
        (start[name] - average[name]).reshape(16, -1).double(),
    )
    u, s, v = torch.linalg.svd(w, full_matrices=False)
    want = g @ (v.T * s) @ v + (u * s) @ u.T @ g
    got = (start[name] - low[name]).reshape(16, -1).double()
    assert float((got - want).norm()) < 1e-2 * float(want.norm())


def test_prism_draws_by_the_power_of_the_singular_values() -> None:
    method, values = PriSM(power=2.5), np.array([4.0, 3.0, 2.0, 1.5, 1.0])
    chance = np.random.default_rng(0)
    share = values**2.5 / (values**2.5).sum()
    counts = np.bincount([method.draw(values, 1, chance)[0] for _ in range(4000)], minlength=5)
    # χ² with 4 degrees of freedom, one in a thousand
    assert float(((counts - 4000 * share) ** 2 / (4000 * share)).sum()) < 18.5
    # Without replacement: the second is drawn from what the first left.
    pairs = [tuple(method.draw(values, 2, chance)) for _ in range(4000)]
    assert all(a < b for a, b in pairs)
    want = share[0] + sum(share[k] * share[0] / (1 - share[k]) for k in range(1, 5))
    assert np.mean([0 in pair for pair in pairs]) == pytest.approx(want, abs=0.03)
    assert PriSM(sampling="top").draw(values, 2, chance) == [0, 1]
    flat = np.bincount(
        [PriSM(sampling="uniform").draw(values, 1, chance)[0] for _ in range(4000)], minlength=5
    )
    assert float(((flat - 800) ** 2 / 800).sum()) < 18.5
    # what has vanished can still fill up
    assert PriSM().draw(np.array([1.0, 0.0, 0.0]), 2, chance)[0] == 0


def test_prism_draws_anew_for_every_client_and_round_and_again_the_same() -> None:
    def drawn(client: int, round: int) -> Any:
        federation = federation_of(PriSM(keeps=(0.4,)))
        device = federation.world.device(client)
        return federation.method.send(device, federation.method.piece(device, round), round).facts[
            "components"
        ]

    assert drawn(0, 1) == drawn(0, 1) and drawn(0, 1) != drawn(1, 1) and drawn(0, 1) != drawn(0, 2)


def test_prism_averages_each_component_over_its_holders() -> None:
    federation = federation_of(PriSM(keeps=(0.4,)), fleet=ONE_TIER)
    method, layer = federation.method, "stages.1.conv"
    before = {name: t.clone() for name, t in method.factor_state().items()}
    dense = dict(method.weights)
    replies = replies_of(federation, [0, 1])
    chosen = [set(reply.sent.facts["components"][layer]) for reply in replies]
    method.merge(replies, 1)
    only_first, both = chosen[0] - chosen[1], chosen[0] & chosen[1]
    assert only_first and both and len(chosen[0]) == 7  # ⌈0.4·16⌉

    def component(k: int, scale_u: float = 1.0, scale_v: float = 1.0) -> torch.Tensor:
        u, v = before[f"{layer}.u.weight"][:, k], before[f"{layer}.v.weight"][k]
        return scale_u * scale_v * u.reshape(-1, 1) @ v.reshape(1, -1)

    want = torch.zeros(16, 72)
    for k in range(16):
        scales = [1.1 + 0.1 * c for c in (0, 1) if k in chosen[c]]
        scale = sum(scales) / len(scales) if scales else 1.0
        want += component(k, scale, scale)
    assert torch.allclose(method.weights[f"{layer}.weight"].reshape(16, -1), want, atol=1e-5)
    # Dense tensors by n_k: 10 and 20 samples.
    head = dense["head.weight"] * (10 * 1.1 + 20 * 1.2) / 30
    assert torch.allclose(method.weights["head.weight"], head, atol=1e-6)


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.info.title)
def test_bytes_equal_the_closed_formula(method: Any) -> None:
    result = nestling.run(small(method))
    world, made, total = result.federation.world, result.federation.method, 0
    convolutions = {"stages.1.conv": (16, 8), "stages.2.conv": (16, 16)}
    rest = sum(
        t.numel() for n, t in world.main.initial.items() if n.rpartition(".")[0] not in convolutions
    )
    dense = sum(t.numel() for t in world.main.initial.values())
    for row in result.metrics:
        for client in row["clients"]:
            piece = made.piece(world.device(client), row["round"])
            if piece.reference is world.main:
                total += dense
                continue
            ranks = {layer: piece.view.shape(f"{layer}.v.weight")[0] for layer in convolutions}
            if isinstance(method, FedHM):
                total += rest + sum(
                    ranks[layer] * (o * 3 + i * 3) for layer, (o, i) in convolutions.items()
                )
                assert ranks == {"stages.1.conv": 2, "stages.2.conv": 2}  # max(round(16/8), 1)
            else:
                total += rest + sum(
                    ranks[layer] * (o + i * 9) for layer, (o, i) in convolutions.items()
                )
    assert result.summary["bytes_down"] == result.summary["bytes_up"] == 4 * total


@pytest.mark.slow
@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.info.title)
def test_sharing_beats_training_alone(method: Any) -> None:
    accuracy = mean(learned(method))
    assert accuracy > alone() + 0.03 and accuracy > 0.4


@pytest.mark.usefixtures("images_as_they_are")
@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.info.title)
def test_stacks_give_the_same(method: Any) -> None:
    gentle = {"train": Train(epochs=1, batch=20, lr=0.01, momentum=0.0), "participants": 4}
    plain, stacked = (
        weights_after(method, **gentle, engine=EngineConfig(name, workers=1))
        for name in ("inline", "cohort")
    )
    assert distance(stacked, plain) < 1e-4


@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.info.title)
def test_the_pool_gives_the_same(method: Any) -> None:
    pool = weights_after(method, rounds=1, engine=EngineConfig("pool", workers=1))
    assert all(torch.equal(t, pool[n]) for n, t in weights_after(method, rounds=1).items())


@pytest.mark.parametrize(
    "method", ["nestling.methods.lowrank.fedhm:FedHM", "nestling.methods.lowrank.prism:PriSM"]
)
def test_a_resumed_run_equals_an_uninterrupted_one(method: str, tmp_path: Path) -> None:
    whole = weights_after(method, rounds=3)
    nestling.run(small(method, rounds=2), out=tmp_path / "a")
    resumed = nestling.resume(tmp_path / "a", overrides=("rounds=3",))
    assert all(torch.equal(t, whole[n]) for n, t in resumed.federation.method.weights.items())


@pytest.mark.parametrize("method", BOTH, ids=lambda m: m.info.title)
@pytest.mark.parametrize(
    "model", [Named("resnet8", {}), Named("cnn", {"channels": [8, 8, 16, 16], "norm": "tracked"})]
)
def test_other_networks_work(method: Any, model: Named) -> None:
    result = nestling.run(
        small(method, model=model, rounds=1, participants=2, split=SplitConfig(size=20))
    )
    assert result.summary["refused"] == 0 and FACTORS in result.federation.world.references


def test_devices_that_are_too_small_are_left_out_or_an_error() -> None:
    tiers = (
        Tier(name="tiny", device="lm3s6965", count=3),
        Tier(name="pi", device="raspberry-pi-zero-2w", count=3),
    )
    settings = {
        "fleet": FleetConfig(tiers=tiers),
        "model": Named("tinycnn", {}),
        "participants": 3,
        "rounds": 1,
    }
    result = nestling.run(small(FedHM(), **settings))
    fleet = result.federation.world.fleet
    assert [fleet.tier_of(c).name for c in result.metrics[0]["clients"]] == ["pi"] * 3
    with pytest.raises(InputError, match="too little ram"):
        nestling.run(small(PriSM(leave_out=False), **settings))
    with pytest.raises(InputError, match="too little ram"):
        nestling.run(small(FedHM(), **{**settings, "fleet": FleetConfig(tiers=tiers[:1])}))


def test_a_network_without_anything_to_factorise_is_refused() -> None:
    with pytest.raises(InputError, match=r"model.name.*no layer to factorise"):
        nestling.run(small(FedHM(), model=Named("mlp", {"hidden": [8]})))
    assert (
        nestling.run(
            small(FedHM(dense=0, linear=True), model=Named("mlp", {"hidden": [8]}), rounds=1)
        ).summary["refused"]
        == 0
    )


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FedHM(ratios=()), "ratios"),
        (lambda: FedHM(ratios=(0.5,)), "ratios"),
        (lambda: FedHM(temperature=0.0), "temperature"),
        (lambda: FedHM(compat="both"), "compat"),
        (lambda: FedHM(decay=-1.0), "decay"),
        (lambda: PriSM(keeps=(1.5,)), "keeps"),
        (lambda: PriSM(power=-1.0), "power"),
        (lambda: PriSM(clip=-1.0), "clip"),
        (lambda: PriSM(sampling="best"), "sampling"),
        (lambda: PriSM(dense=-1), "dense"),
    ],
)
def test_bad_settings_are_named(make: Any, field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        make()


def test_tiers_with_their_own_networks_are_refused() -> None:
    mixed = FleetConfig(tiers=(Tier(name="small", model="mlp", count=2), *TIERS[1:]))
    with pytest.raises(InputError, match="shared-distill"):
        nestling.run(small(PriSM(), fleet=mixed))
