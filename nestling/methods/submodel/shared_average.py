"""Shared-average: unequal clients fused by averaging over shared sub-structures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from nestling.methods.api import Client, Device, Info, Message, Phases, Piece, SharedWeights, View, World, made
from nestling.settings import NotNegative
from nestling.training.inner import with_inner
from nestling.training.rules import masked_gradients
from nestling.views import to_spec
from nestling.views.nested import common_head, nested_masks, own_masks, prepare


@dataclass
class SharedAverage(SharedWeights):
    """Shared-average: the TinyML architecture this project starts from, fused by averaging.

    Idea: one super-network; a device trains the largest part of it that fits its memory (pruned on small ones, expanded on large
    ones), and parts are nested. What makes a part worth averaging is that it means the same everywhere: channels of a part read no
    channel outside it, and a device also trains one of the smaller parts inside its own with every batch, so that each part is a
    network that works alone and larger ones only add to it.
    Loss: cross-entropy of the device's part, and with weight `inner` that of a smaller part inside it, in turn. Travels: the
    device's part down and up. Merge: per entry, mean weighted by n_k over the views that hold it; entries that nobody trained keep
    their value.
    Differs from the paper: its abstract fixes no more than averaging over shared sub-structures; the nesting is our reading. With
    `nested = false, inner = 0` what remains is the plain mean over prefixes (HeteroFL's merge with n_k weights). What a part may not
    read are zeros that are stored and travel like all weights; a run and its report say how many.

    nested: whether parts read only themselves.
    inner:  the weight of the smaller part's loss; 0 leaves it out.
    """

    nested: bool = True
    inner: NotNegative = 1.0

    masks: dict[str, Tensor] = made()

    info = Info(
        "fusion",
        "width: nested parts that fit each device",
        "from paper (abstract only); the design is ours",
        "A",
        title="Shared-average",
        paper="TinyML model-heterogeneous FL (abstract)",
        any_task=True,
    )

    @property
    def blocks(self) -> tuple[str, ...]:
        """Room for the mask of what a part may read, where parts are nested."""
        return ("mask",) if self.nested else ()

    @property
    def nests(self) -> bool:
        """True where parts read only themselves."""
        return self.nested

    def setup(self, world: World) -> None:
        """Makes the masks of the nesting, and sets to zero what they leave out."""
        super().setup(world)
        self.masks = nested_masks(world.main.axes, self._levels(), world.place) if self.nested else {}
        self.weights.update({name: self.weights[name] * mask for name, mask in self.masks.items()})

    def zeros(self, piece: Piece) -> int:
        """How many of the piece's weights the masks leave out."""
        return sum(int((~piece.view.cut(name, mask)).sum()) for name, mask in self.masks.items() if name in piece.view.members)

    def _levels(self) -> list[View]:
        return list({p.piece.view.key(): p.piece.view for p in self.world.plans.values()}.values())

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, Any]:
        """The tiers' parts that lie inside the piece."""
        return {"levels": [to_spec(view) for view in self._levels() if piece.view.contains(view)]}

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase with masked gradients, in which smaller parts inside the client's own are trained in turn."""
        levels = [client.reference.view(spec) for spec in received.facts["levels"]]
        masks = own_masks(client.reference, client.view, tuple(levels), client.place) if self.nested else {}
        smaller = [view for view in levels if view.key() != client.view.key()] if self.inner else []
        prepare(client.reference, smaller)
        head = common_head(client.reference, client.view, tuple(smaller)) if masks and smaller else ""
        objective = partial(
            with_inner, reference=client.reference, own=client.view, smaller=smaller, weight=self.inner, head=head
        )
        return [client.train.phase(client.round, objective=objective, given=masks, rule=masked_gradients if masks else None)]
