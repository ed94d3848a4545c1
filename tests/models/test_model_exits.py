"""Early exits: every prefix is a network of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models import ExitNet, build
from nestling.seeds import torch_seeded

SMALL: dict[str, dict[str, object]] = {
    "exitcnn": {},
    "exitresnet": {"width": 0.125, "blocks": (1, 1, 1, 1)},
    "tinyexits": {"channels": (4, 8, 8, 8)},
    "tinyresnet": {"blocks": (3, 2), "channels": (4, 4, 8), "exits": (1, 2, 4, 5)},
}
NAMES = tuple(SMALL)


def make(name: str) -> ExitNet:
    with torch_seeded(0, "test"):
        network = build(name, shape=(1, 16, 16), classes=3, **SMALL[name])
    assert isinstance(network, ExitNet)
    return network


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_last_exit(name: str, x: Tensor) -> None:
    network = make(name)
    exits = network.all_exits(x)
    assert [out.shape for out in exits] == [(4, 3)] * 4
    assert torch.equal(network(x), exits[-1])
    assert torch.equal(network.head(network.features(x)), exits[-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_prefix_is_a_network_that_agrees_with_the_whole(name: str, depth: int, x: Tensor) -> None:
    network = make(name)
    short = network.prefix(depth)
    exits = network.all_exits(x)
    assert torch.equal(short(x), exits[depth - 1])
    assert len(short.all_exits(x)) == depth
    assert short.head is network.heads[depth - 1].linear
    whole = network.state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in short.state_dict().items())


def test_cutting_both_lists_in_place_gives_a_valid_network(x: Tensor) -> None:
    network = make("exitcnn")
    expected = network.all_exits(x)[1]
    cut = copy.deepcopy(network)
    del cut.stages[2:], cut.heads[2:]
    assert torch.equal(cut(x), expected)
    assert cut.head is cut.heads[1].linear
    assert len(network.stages) == 4


def test_all_exits_together_train_every_parameter(x: Tensor) -> None:
    network = make("exitcnn")
    torch.stack(network.all_exits(x)).square().sum().backward()
    assert all(value.grad is not None for value in network.parameters())


def test_exits_of_a_residual_network_are_all_that_is_added_to_it(x: Tensor) -> None:
    """The last exit answers what the network without exits does with the same weights."""
    network = make("tinyresnet")
    plain = build(
        "tinyresnet", shape=(1, 16, 16), classes=3, **{**SMALL["tinyresnet"], "exits": ()}
    )
    trunk = [
        tensor for name, tensor in network.state_dict().items() if not name.startswith("heads")
    ]
    own = [*trunk, network.head.weight, network.head.bias]
    plain.load_state_dict(dict(zip(plain.state_dict(), own, strict=True)))
    assert torch.equal(plain(x), network(x))


@pytest.mark.parametrize("exits", [(2, 4), (5, 4), (3, 3, 5), (4, 6)])
def test_exits_must_rise_to_the_last_block(exits: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="the last one 5"):
        build("tinyresnet", shape=(1, 16, 16), classes=3, **{**SMALL["tinyresnet"], "exits": exits})


@pytest.mark.parametrize("depth", [0, 5, -1])
def test_a_depth_outside_the_network_is_refused(depth: int) -> None:
    with pytest.raises(InputError, match="1 to 4"):
        make("exitcnn").prefix(depth)


@pytest.mark.parametrize("heads", [0, 1])
def test_every_stage_needs_a_head(heads: int) -> None:
    with pytest.raises(InputError, match=f"{heads} heads"):
        ExitNet(
            nn.Identity(),
            nn.ModuleList([nn.Identity(), nn.Identity()]),
            nn.ModuleList([nn.Linear(1, 1)] * heads),
        )
