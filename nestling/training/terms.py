"""How much a method's own terms weigh beside cross-entropy: one that is too small to matter trains
as if it were not there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nestling.seeds import torch_seeded
from nestling.training.client import (
    Client,
    ClientSide,
    Errand,
    Site,
    carry_out,
    source_of,
    train_client,
    working,
)
from nestling.training.objectives import Batch, Net, Objective, supervised
from nestling.training.phase import Phase
from nestling.training.trainer import Trained, batches, hooked, trained

WEAK = 0.01
"""A term whose gradient is a smaller share of cross-entropy's hardly does anything."""


@dataclass
class _Watched:
    """The norms of gradients, after the training of each phase of a round: of what it adds to
    cross-entropy, and of that."""

    added: list[float] = field(default_factory=list)
    plain: float = 0.0

    def train(self, client: Client, phase: Phase, number: int) -> Trained:
        """Trains the phase and looks at the gradients where it ends: a pull towards what was
        received is nothing where it begins."""
        done = train_client(client, phase, number)
        with torch_seeded(client.site.seed, "terms", client.id, client.round, number):
            self._look(client, phase, number)
        return done

    def _look(self, client: Client, phase: Phase, number: int) -> None:
        module = client.reference.network(client.view, client.weights).train()
        net, batch = (
            Net(module, trained(module, phase)),
            _first_batch(module, client, phase, number),
        )
        if batch is None or not _says_classes(net, batch):
            return
        with hooked(module, phase):
            own = _gradient(net, batch, phase, phase.objective)
            if phase.source == "private":
                plain = _gradient(net, batch, phase, supervised)
                self.plain, own = float(plain.norm()), own - plain
        self.added.append(float(own.norm()))


def shares(method: ClientSide, errand: Errand, site: Site) -> list[float]:
    """Of each phase of a client's round: the gradient of what it adds to cross-entropy (all of it,
    where it trains on public data), as a share of that of cross-entropy on the client's own rows.
    The round is played beside the others and leaves nothing behind."""
    seen = _Watched()
    carry_out(working(method, errand, site), seen.train)
    return [added / seen.plain for added in seen.added] if seen.plain else []


def weak(found: list[float]) -> bool:
    """Whether all that a method adds is too small to matter; not so where it adds nothing at all,
    which is a choice."""
    return 0 < max(found, default=0.0) < WEAK


def _first_batch(module: nn.Module, client: Client, phase: Phase, number: int) -> Batch | None:
    """The first batch of the phase, as it was before augmentation, if there was any."""
    x, y = source_of(phase, client)
    rows = next(
        batches(len(x), phase, module, client.site.seed, client.id, client.round, number), None
    )
    return (
        None
        if rows is None
        else Batch(x[rows.to(x.device)], y[rows.to(x.device)], rows.to(x.device))
    )


@torch.no_grad()
def _says_classes(net: Net, batch: Batch) -> bool:
    """Whether the network puts out a row of logits for an input, so that there is a cross-entropy
    to compare with; two networks that are trained as one do not."""
    return net(batch.x).dim() == 2


def _gradient(net: Net, batch: Batch, phase: Phase, objective: Objective) -> Tensor:
    leaves = list(net.params.values())
    grads = torch.autograd.grad(objective(net, batch, phase.given), leaves, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).reshape(-1)
            for p, g in zip(leaves, grads, strict=True)
        ]
    )
