"""LotteryFL: every client finds a winning ticket of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nestling.methods.api import Client, Contribution, Device, Info, Message, Model, Phases, Piece, Replies, Reply, State, View
from nestling.methods.part import Part, Tensors
from nestling.methods.sparse.gate import HELD_OUT, PRUNINGS, PrunesItself
from nestling.methods.sparse.survivors import SURVIVORS
from nestling.settings import Compat, NonZeroShare, UnitShare, Whole
from nestling.training.memory import section, sectioned
from nestling.training.rules import frozen_near_zero, masked_gradients
from nestling.views import masked
from nestling.views.sparse import masks_of, prunable, prune_lowest, restored, survivors

_CHANNELS = "channels"
_MASKS = Part("mask", up=lambda method, client, _: method.mask_of(client), like=lambda method, piece, _: method.mask_of(piece))


@dataclass
class LotteryFL(PrunesItself):
    """LotteryFL (Li, Sun, Wang, Duan, Li, Chen, Li, "LotteryFL: Empower Edge Intelligence with Personalized and Communication-Efficient
    Federated Learning", SEC 2021).

    Idea: a client whose masked model is good enough prunes the smallest of its weights, layer by layer, and rewinds the others to their
    initial values; what it trains and sends shrinks to a lottery ticket that suits its own data.
    Loss: cross-entropy, with gradients masked. Travels: the weights that the client's mask keeps, down and up, and the mask with every
    reply. Merge: per entry the uniform mean over clients whose mask keeps it; entries that nobody keeps retain their value; biases and
    norms, which have no mask, are the plain mean.
    Differs from the released code: the gate looks at rows held out of the client's own training rows, where the code looks at test
    rows; weights are frozen by the mask, where the code freezes any below 1e-6 (`compat`); accuracies are not the best so far. As in
    the code the last step may pass `r_target`, by less than one step. On unequal devices a ticket is a part of the piece that fits.
    Which personal model is tested is from memory (`personal`).

    acc_thr:    accuracy above which a client prunes (0.7 for activity recognition); 1 is uniform FedAvg.
    prune_step: share of the kept weights of every layer that go in one pruning.
    r_target:   pruning ends when the kept share is not above it (0.5 for CIFAR-10).
    validation: share of a client's training rows held out to decide on pruning.
    recover:    epochs of local training after a rewind, where [train] has fewer: the papers' clients train for 10 (from memory; 60 in
                the released code's example) in every round, and one epoch leaves a rewound ticket untrained.
    personal:   a client's model: "shared" (the global weights under its mask) or "trained" (its own after its last local training).
    compat:     "code" freezes, as the released code does, every weight that is nearly zero (below 1e-6) instead of those masked.
    send_mask:  whether replies of clients that have pruned carry the mask, as published; the server works it out anyway.
    """

    acc_thr: UnitShare = 0.2
    r_target: NonZeroShare = 0.1
    recover: Whole = 10
    personal: Literal["trained", "shared"] = "shared"
    compat: Compat = "paper"
    send_mask: bool = True

    info = Info("sparse", "unstructured masks, one a client", "official code read", "C", HELD_OUT, personal=True)
    parts = (SURVIVORS, _MASKS)

    def piece(self, device: Device, round: int) -> Piece:
        """What fits the device now, under the client's recorded mask."""
        known = self._here(self.records.get(device.id))
        if not known:
            return device.piece
        return Piece(device.piece.reference, masked(device.piece.view, section(known, "mask")))

    def weights_for(self, piece: Piece) -> Tensors:
        """The weights that the mask keeps; all of them before the first pruning."""
        whole = super().weights_for(piece)
        return survivors(piece.view, whole) if piece.view.masks else whole

    def mask_of(self, of: Piece | Client) -> State:
        """The mask that a reply carries."""
        return masks_of(of.view) if self.send_mask and of.view.masks else {}

    def pruned(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        """The next ticket, worked out from the weights that were sent."""
        return Piece(piece.reference, self._ticket(piece, restored(piece.view, sent["weights"])))

    def merge(self, replies: Replies, round: int) -> None:
        """The uniform mean over who keeps an entry; records the masks of those that have pruned."""
        super().merge(replies, round)
        for reply in replies:
            prunings = int(reply.message.facts[PRUNINGS])
            if prunings > reply.sent.facts[PRUNINGS]:
                self.records.put(reply.device.id, _remembered(prunings, reply.piece.view.masks), round)

    def contribution(self, reply: Reply) -> Contribution:
        """The reply's weights back in their places, with the same weight for every client."""
        return Contribution(reply.piece.view, restored(reply.piece.view, reply.message["weights"]), 1.0)

    def model_for(self, device: Device) -> Model:
        """The client's own trained model if it keeps one, else the global weights under its mask."""
        memory = self._here(self.world.store.get(device.id))
        own = section(memory, "own")
        if not own:
            return super().model_for(device)
        # Its own model is of the piece that it had last, which may not be the one it has at rest.
        view = masked(View(self.world.main.axes, memory[_CHANNELS].cpu().numpy()), section(memory, "mask"))
        return Model(self.world.main, view, restored(view, own))

    def _here(self, state: State) -> State:
        return {name: t.to(self.world.place) for name, t in state.items()}

    def _ticket(self, piece: Piece, weights: Tensors) -> View:
        return masked(piece.view, prune_lowest(piece.view, weights, prunable(piece.reference), self.prune_step))

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The received weights; a client that prunes now rewinds what its new ticket keeps."""
        known, memory = int(received.facts[PRUNINGS]), client.memory
        masks = section(memory, "mask" if int(memory.get(PRUNINGS, 0)) == known else "before")
        client.view = masked(client.view, masks)
        weights = restored(client.view, received["weights"])
        client.memory = _remembered(known, masks)
        if self.opens(client, weights, known):
            client.view = self._ticket(Piece(client.reference, client.view), weights)
            client.memory = {**_remembered(known + 1, client.view.masks), **sectioned(before=masks)}
            return client.view.extract(client.reference.initial)
        return weights

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase under the mask, of at least `recover` epochs after a rewind."""
        masks = {name: mask.float() for name, mask in masks_of(client.view).items()}
        rule = frozen_near_zero if self.compat == "code" else masked_gradients
        rewound = int(client.memory.get(PRUNINGS, 0)) > received.facts[PRUNINGS]
        epochs = max(client.train.epochs, self.recover) if rewound else 0
        return [self.training(client, masks, rule if masks else None, epochs)]

    def keep(self, client: Client, received: Message) -> None:
        """With `personal` "trained" the client also keeps its weights and channels."""
        if self.personal == "trained":
            own = sectioned(own=survivors(client.view, client.weights))
            client.memory = {**client.memory, **own, _CHANNELS: torch.from_numpy(client.view.keep.copy())}


def _remembered(prunings: int, masks: Tensors) -> State:
    return {PRUNINGS: torch.tensor(prunings), **sectioned(mask=masks)} if prunings else {}
