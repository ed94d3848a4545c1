"""What is shared by methods whose server makes its own inputs: the generator, and networks that are only asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from nestling.methods.api import Replies, State, Tensors, World, require
from nestling.models.generators import generator
from nestling.models.record import words_of
from nestling.seeds import torch_seeded
from nestling.settings import Bounds
from nestling.training.distiller import Forward, Student, whole
from nestling.training.optimisers import Optim

Asked = Callable[[Tensor], Tensor]
"""A network whose weights are fixed: inputs → logits, with a gradient for the inputs."""


Several = Annotated[int, Bounds(2)]
"""How many are made at a time: at least two, since what is made is normalised over the batch."""


def make_generator(world: World, nz: int, channels: int, classes: int = 0) -> tuple[nn.Module, State]:
    """The generator of the data's inputs, as every run of the experiment starts with it."""
    fix = "take a method that needs no generator"
    require(not words_of(world.main.module), "a generator makes values, and the network takes token ids", "method.name", fix)
    return started(world, lambda: generator(world.main.shape, nz=nz, channels=channels, classes=classes))


def started(world: World, make: Callable[[], nn.Module]) -> tuple[nn.Module, State]:
    """A generator, and the state that every run of the experiment starts with."""
    with torch_seeded(world.seed, "generator"):
        network = make()
    network.to(world.place)
    return network, {name: t.detach().clone() for name, t in network.state_dict().items()}


def learner(world: World, module: nn.Module, state: State, optim: Optim) -> Student:
    """A generator, to be trained one step at a time."""
    return world.recorder.student("generator", state, dict(module.named_parameters()), whole(module), optim)


def asked(world: World, replies: Replies) -> list[Asked]:
    """What came back as teachers: the clients' networks under the clients' weights, in evaluation mode."""
    states = [world.recorder.keep(("teacher", number), reply.message["weights"]) for number, reply in enumerate(replies)]
    networks = [whole(reply.piece.reference.network(reply.piece.view), training=False) for reply in replies]
    return [partial(_ask, network, weights) for network, weights in zip(networks, states, strict=True)]


def _ask(network: Forward, weights: Tensors, x: Tensor) -> Tensor:
    return network(weights, x, 0)


def kinds(replies: Replies) -> tuple[tuple[str, bytes], ...]:
    """Equal for replies of the same networks in the same order: with them a server's work is the same."""
    return tuple((reply.piece.reference.name, reply.piece.view.form()) for reply in replies)


def noise(count: int, nz: int, world: World) -> Tensor:
    """Codes from torch's generator on the CPU, which is the same on every machine."""
    return torch.randn(count, nz).to(world.place)
