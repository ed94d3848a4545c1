"""What the comparisons with other people's code share: our order of batches, and how far two states are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nestling.assemble import site_of
from nestling.rounds import Federation
from nestling.training import trainer

APART = 1e-5
"""How far weights of the same method may be apart after a round: rounding."""


def lay_out_as_they_do() -> None:
    """Images lie in memory as torch has them, channel by channel, for one thread. Our engines lay them out pixel by pixel, which rounds
    otherwise; where rounding decides which of two equal values is the largest, a client's weights are then 1e-3 apart."""
    torch.set_num_threads(1)
    trainer.by_pixel = lambda module, x: x


def our_batches(federation: Federation, client: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The inputs and labels of a client's batches in a round, in the order in which our engines train them."""
    world, site = federation.world, site_of(federation)
    rows, model = site.split.indices(client), federation.method.model_for(world.device(client))
    skeleton = model.reference.network(model.view)
    for some in trainer.batches(len(rows), world.train.phase(round), skeleton, site.seed, client, round):
        at = torch.from_numpy(rows)[some]
        yield site.x[at], site.y[at]


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of an entry, over all that `one` has."""
    assert not set(one) - set(other), f"names differ: {sorted(set(one) ^ set(other))[:4]}"
    return max(float((t.detach() - other[name]).abs().max()) for name, t in one.items())
