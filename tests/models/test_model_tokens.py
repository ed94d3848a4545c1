"""Networks that tell the next token (gpt, lstm with every), and the one for forecasts: what a step
may see, how much of them can be cut, and that they train alike alone, in a stack and in a
federation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import nestling
from nestling import Data, EngineConfig, FleetConfig, Tier
from nestling.devices import Budget, cost_of, device, fit
from nestling.models import build, parameters
from nestling.seeds import torch_seeded
from nestling.views import Reference, prefix
from tests.small import small

WORDS, STEPS = 11, 9
OPTIONS: dict[str, dict[str, Any]] = {"gpt": {}, "lstm": {"words": WORDS, "every": True}}
BUDGET = Budget(batch=10, samples=100, epochs=1)
HALVES = FleetConfig(tiers=(Tier(name="half", ratio=0.5, count=2), Tier(ratio=1.0, count=2)))


def make(name: str, **options: object) -> nn.Module:
    with torch_seeded(0, "test", name):
        return build(name, shape=(STEPS,), classes=WORDS, **OPTIONS[name], **options)


def ids(rows: int, steps: int = STEPS) -> Tensor:
    return torch.randint(WORDS, (rows, steps), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("norm", ["layer", "none"])
@pytest.mark.parametrize("width", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_next_token_is_told_at_every_step(name: str, width: float, norm: str) -> None:
    network = make(name, width=width, norm=norm)
    out = network(ids(3))
    assert out.shape == (3, STEPS, WORDS)
    nn.functional.cross_entropy(out.flatten(0, 1), ids(3).flatten()).backward()
    assert [n for n, p in network.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", OPTIONS)
def test_no_step_sees_a_later_one(name: str) -> None:
    network, x = make(name).eval(), ids(4)
    whole = network(x)
    for step in range(STEPS):
        changed = x.clone()
        changed[:, step] = (changed[:, step] + 1) % WORDS
        again = network(changed)
        assert torch.equal(again[:, :step], whole[:, :step])
        assert not torch.isclose(again[:, step:], whole[:, step:]).all(-1).any()


@pytest.mark.parametrize("name", OPTIONS)
def test_fewer_steps_give_what_the_first_of_more_give(name: str) -> None:
    network, x = make(name).eval(), ids(4)
    whole = network(x)
    for steps in range(1, STEPS):
        assert torch.allclose(network(x[:, :steps]), whole[:, :steps], atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_nearly_all_of_it_can_be_cut_but_the_words(name: str) -> None:
    reference = Reference("main", make(name), (STEPS,))
    assert reference.axes.share(reference.parameters) > 0.999
    assert reference.axes.notes == ()
    half = reference.network(prefix(reference.axes, 0.5))
    assert parameters(half) < 0.4 * parameters(reference.module)
    assert half(ids(2)).shape == (2, STEPS, WORDS)
    assert half(ids(2, 4)).shape == (2, 4, WORDS)


def test_heads_embedding_and_perceptrons_are_axes_of_their_own() -> None:
    axes = Reference("main", make("gpt", depth=1, dim=12, heads=3, hidden=20), (STEPS,)).axes
    assert sorted(axes.sizes) == [3, 12, 20]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_a_stack_equal_those_of_one(name: str) -> None:
    network = make(name, width=0.25).double()
    weights = {key: value.detach() for key, value in network.named_parameters()}
    x = torch.stack([ids(4), ids(4).flip(0)])

    def loss(state: dict[str, Tensor], data: Tensor) -> Tensor:
        return functional_call(network, state, (data,)).square().mean()

    stacked = {key: value.expand(2, *value.shape) for key, value in weights.items()}
    together = vmap(grad(loss))(stacked, x)
    alone = grad(loss)(weights, x[1])
    for key in weights:
        torch.testing.assert_close(together[key][1], alone[key], rtol=1e-6, atol=1e-8)


def test_gpt_costs_what_its_layers_cost() -> None:
    cost = cost_of(make("gpt", depth=2, dim=12, heads=3, head_dim=4, hidden=20), (STEPS,))
    attention = 4 * 12 * 12 + 2 * STEPS * 12  # its four layers; every step with every other, twice
    assert cost.macs == STEPS * (2 * (attention + 2 * 12 * 20) + 12 * WORDS)
    assert cost.params == parameters(make("gpt", depth=2, dim=12, heads=3, head_dim=4, hidden=20))


ALL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "autoencoder": ((640,), {}),
    "forecaster": ((7, 48), {}),
    "gpt": ((32,), {}),
    "lstm": ((8,), OPTIONS["lstm"]),
}


@pytest.mark.parametrize("name", ALL)
def test_a_wider_piece_never_costs_less_and_the_largest_that_fits_is_found(name: str) -> None:
    shape, options = ALL[name]
    with torch_seeded(0, "test", name):
        network = build(name, shape=shape, classes=640, **options)
    reference = Reference("main", network, shape)
    costs = {
        ratio: cost_of(reference.network(prefix(reference.axes, ratio)), shape)
        for ratio in (0.125, 0.25, 0.5, 1.0)
    }
    for narrow, wide in pairwise(costs.values()):
        assert narrow.params < wide.params and narrow.macs < wide.macs
        assert narrow.activation_bytes <= wide.activation_bytes
    # A board trains the autoencoder alone of them.
    assert (costs[1.0].planned is not None) == (name == "autoencoder")
    assert fit(device("gpu-box"), costs.__getitem__, BUDGET, tuple(costs)).ratio == 1.0
    if name == "autoencoder":
        board = fit(device("nrf52840"), costs.__getitem__, BUDGET, tuple(costs))
        assert 0 < board.ratio < 1


def test_gpt_learns_what_comes_next() -> None:
    network = make("gpt", depth=1, dim=16, heads=2, head_dim=8, hidden=32)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    rows = (torch.arange(STEPS + 1) * 2 + torch.arange(WORDS)[:, None]) % WORDS
    for _ in range(60):
        loss = nn.functional.cross_entropy(network(rows[:, :-1]).mT, rows[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1


def test_no_step_of_a_forecaster_sees_a_later_one() -> None:
    with torch_seeded(0, "test"):
        network = build("forecaster", shape=(3, 20), classes=6, depth=3)
    x = torch.randn(2, 3, 20)
    steps = network.stages(network.stem(x))
    for step in range(20):
        changed = x.clone()
        changed[..., step] += 1
        again = network.stages(network.stem(changed))
        assert torch.equal(again[..., :step], steps[..., :step])
        assert not torch.equal(again[..., step], steps[..., step])
    # It sees 1 + 2 · 2 · (2³ - 1) = 29 steps, so the first of twenty counts.
    changed = x.clone()
    changed[..., 0] += 1
    assert not torch.allclose(network(changed), network(x))


def test_nearly_all_of_a_forecaster_can_be_cut() -> None:
    reference = Reference("main", build("forecaster", shape=(7, 48), classes=14), (7, 48))
    assert reference.axes.share(reference.parameters) > 0.999
    half = reference.network(prefix(reference.axes, 0.5))
    assert parameters(half) < 0.3 * parameters(reference.module)
    assert half(torch.randn(2, 7, 48)).shape == (2, 14)


@pytest.mark.parametrize("name", ["autoencoder", "forecaster"])
def test_unlike_devices_train_it_alike_on_two_engines(name: str) -> None:
    made = np.random.default_rng(0)
    y = np.arange(120) % 3
    x = (made.normal(size=(120, 2, 12)) + y[:, None, None]).astype(np.float32)
    options = {"depth": 2, "channels": 8} if name == "forecaster" else {"hidden": [16, 12]}
    states = []
    for engine in ("inline", "cohort"):
        experiment = small(
            "heterofl",
            data=Data.of(x, y, layout="cl"),
            model=nestling.Named(name, options),
            fleet=HALVES,
            participants=4,
            rounds=1,
            engine=EngineConfig(engine),
        )
        result = nestling.run(experiment)
        assert result.model is not None
        states.append(result.model.state_dict())
    for key, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][key], atol=1e-5), key
