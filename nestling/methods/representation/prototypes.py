"""What servers share that train on the prototypes of a round: clients' rows by class as a small data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from nestling.methods.api import Reply
from nestling.methods.representation.class_means import STATISTICS
from nestling.training.distiller import rows_of


def gathered(replies: Sequence[Reply], name: str, place: torch.device) -> tuple[Tensor, Tensor]:
    """A statistic of all clients, (rows, …), and the class of each row."""
    rows = torch.cat([reply.message[STATISTICS][name].to(place) for reply in replies])
    labels = [label for reply in replies for label in reply.message.facts["classes"]]
    return rows, torch.tensor(labels, dtype=torch.int64, device=place)


def passes(
    x: Tensor, y: Tensor, epochs: int, batch: int, seed: int, *purpose: str | int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of some passes over a data set, each in an order of its own, and which of their rows count. How many rows there are
    differs from round to round; batches are filled up, so that a server's step has one form and is recorded once."""
    for rows in islice(rows_of(len(x), batch, seed, *purpose, place=x.device), epochs * -(-len(x) // batch)):
        filled = torch.cat([rows, rows.new_zeros(batch - len(rows))])
        yield x[filled], y[filled], torch.arange(batch, device=x.device) < len(rows)
