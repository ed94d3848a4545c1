"""What methods share whose server makes its own inputs: the generator, and networks that are only asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from nestling.methods.api import Reply, State, World
from nestling.models.generators import generator
from nestling.schema import require
from nestling.seeds import torch_seeded
from nestling.training.distiller import Forward, Student, whole
from nestling.training.optimisers import Optim

Asked = Callable[[Tensor], Tensor]
"""A network whose weights are fixed: inputs → logits, with a gradient for the inputs."""


def check_generator(nz: int, channels: int, batch: int, lr: float) -> None:
    """Refuses settings that no generator can have."""
    require(nz >= 1, "must be at least 1", "method.nz")
    require(channels >= 1, "must be at least 1", "method.channels")
    require(batch >= 2, "must be at least 2 (what is made is normalised over the batch)", "method.batch")
    require(lr > 0, "must be above 0", "method.generator_lr")


def make_generator(world: World, nz: int, channels: int, classes: int = 0) -> nn.Module:
    """The generator of the data's inputs, as every run of the experiment starts with it."""
    with torch_seeded(world.seed, "generator"):
        made = generator(world.main.shape, nz=nz, channels=channels, classes=classes)
    return made.to(world.place)


def learner(world: World, module: nn.Module, state: State, optim: Optim) -> Student:
    """A generator, which has no buffers, to be trained one step at a time."""
    return world.recorder.student("generator", state, state.keys(), whole(module), optim)


def asked(world: World, replies: Sequence[Reply]) -> list[Asked]:
    """What came back as teachers: the clients' networks under the clients' weights, in evaluation mode."""
    kept = [world.recorder.keep(("teacher", number), reply.message["weights"]) for number, reply in enumerate(replies)]
    networks = [whole(reply.piece.reference.network(reply.piece.view), training=False) for reply in replies]
    return [partial(_ask, network, weights) for network, weights in zip(networks, kept, strict=True)]


def _ask(network: Forward, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return network(weights, x, 0)


def kinds(replies: Sequence[Reply]) -> tuple[tuple[str, bytes], ...]:
    """Equal for replies of the same networks in the same order: with them a server's work is the same."""
    return tuple((reply.piece.reference.name, reply.piece.view.form()) for reply in replies)


def noise(count: int, nz: int, world: World) -> Tensor:
    """Codes from torch's generator on the CPU, which is the same on every machine."""
    return torch.randn(count, nz).to(world.place)
