"""PruneFL: one mask for all, adjusted to what learns most in least time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from nestling.methods.api import Client, Info, Message, Phase, Phases, Replies, Reply, SharedWeights, kept, made, pack, require
from nestling.methods.part import Part, Tensors
from nestling.methods.schedule import in_rounds
from nestling.methods.sparse.adjust import adjust, squared_gradients, trained_part, weight_seconds
from nestling.methods.sparse.survivors import SURVIVORS
from nestling.settings import Count, NotNegative, Positive, ShareBelowOne, Whole
from nestling.training.distiller import logits_of
from nestling.training.phase import Train
from nestling.training.rules import masked_gradients
from nestling.training.trainer import train
from nestling.views import Contribution, State, masked
from nestling.views.sparse import flagged, like_survivors, masks_of, prunable, restored, survivors
from nestling.world import Device, Piece, World

_MASK = Part("mask", lambda _method, _device, piece, _: masks_of(piece.view))
_SQUARES = Part(
    "squares",
    up=lambda method, client, received: method.squares(client, received),
    like=lambda m, piece, sent: like_survivors(trained_part(piece), m.weights) if sent.facts["adjust"] else {},
)


@dataclass
class PruneFL(SharedWeights):
    """PruneFL (Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas, "Model Pruning Enables Efficient Federated Learning on Edge Devices",
    IEEE TNNLS 2022).

    Idea: all clients train one sparse network. Every so often its mask is adjusted: the smallest weights may go, and among those and
    all that were pruned before the ones with the largest squared gradient per second of their cost (re)enter, as long as that raises
    the whole network's squared gradient per second. A first stage does the same on the server, before anybody trains.
    Loss: cross-entropy, with gradients masked. Travels: the weights that the mask keeps, and the mask, down; the weights up, and when
    the mask is adjusted the squared gradients of all weights. Merge: mean weighted by n_k under the mask.
    Differs from the released code: squared gradients are (Σ g)² over the round's batches at the weights received, in the rounds that
    adjust, where the code sums along the steps of all rounds; the first stage uses the server's labelled share and not a client's
    samples (without public data there is no first stage); seconds per weight follow from the fleet's slowest devices where the code
    has tables of a Raspberry Pi. The trained weights of the first stage are kept (from memory). On unequal devices everybody has the
    mask's part of the piece that fits. One mask is one model for all: in tables of personal models it is a reference only.

    steps:      batches that a client trains on in a round (0: the epochs of [train]).
    every:      rounds between adjustments; below 1, as a share of a stage's rounds (published: 50 of 1000).
    rho:        share of every layer's weights that an adjustment may drop at first; it halves every `half_life` rounds.
    half_life:  rounds.
    stage_one:  the most rounds of the first stage (0: none).
    proxy:      rows of the public data that the first stage trains on.
    settled:    the first stage ends after this many adjustments in a row that change the size by at most a tenth.
    seconds:    seconds per round for one weight of a tensor, by its name; others follow from the fleet.
    constant:   seconds of a round that pruning cannot save.
    """

    steps: Whole = 5
    every: Positive = 0.05
    rho: ShareBelowOne = 0.3
    half_life: Positive = 10000.0
    stage_one: Whole = 1000
    proxy: Count = 200
    settled: Count = 5
    seconds: dict[str, float] = field(default_factory=dict)
    constant: NotNegative = 0.0

    masks: State = kept()
    started: bool = kept()
    _pieces: tuple[State, dict[bytes, Piece]] = made()
    _seconds: dict[str, float] = made()

    info = Info("sparse", "none: one adaptive mask for all", "official code read", "C", "server proxy (labelled)")
    parts = (SURVIVORS, _MASK, _SQUARES)

    def __post_init__(self) -> None:
        """Checks the settings; given seconds must be above 0."""
        super().__post_init__()
        require(all(t > 0 for t in self.seconds.values()), "every entry must be above 0", "method.seconds")

    @property
    def as_set(self) -> Info:
        """Without the first stage no auxiliary data is needed."""
        return self.info if self.stage_one else replace(self.info, auxiliary="none")

    def setup(self, world: World) -> None:
        """A mask that keeps everything, and the seconds that one weight of every tensor takes."""
        super().setup(world)
        names = prunable(world.main)
        unknown = sorted(set(self.seconds) - set(names))
        require(not unknown, f"there is no weight {unknown}", "method.seconds", f"allowed: {', '.join(names)}")
        self.masks = {name: torch.ones_like(self.weights[name], dtype=torch.bool) for name in names}
        self.started = self.stage_one == 0
        self._pieces = (self.masks, {})
        self._seconds = {**weight_seconds(world, self.steps), **self.seconds}

    def piece(self, device: Device, round: int) -> Piece:
        """What fits the device, under the common mask; the first stage runs before the first round's pieces."""
        if round and not self.started:
            self._first_stage()
        base, key = device.piece, device.piece.view.key()
        if self._pieces[0] is not self.masks:
            self._pieces = (self.masks, {})
        return self._pieces[1].setdefault(key, Piece(base.reference, masked(base.view, self.masks)))

    def alike(self, device: Device, piece: Piece) -> bytes:
        """Holders of the same part get the same message."""
        return piece.view.key()  # the mask is everybody's

    def weights_for(self, piece: Piece) -> State:
        """What the mask keeps of the piece's weights."""
        return survivors(piece.view, piece.view.extract(self.weights))

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, bool]:
        """Whether this round adjusts the mask."""
        return {"adjust": self._adjusts(round)}

    def _adjusts(self, round: int) -> bool:
        return round % in_rounds(self.every, self.world.rounds) == 0

    def merge(self, replies: Replies, round: int) -> None:
        """The mean under the mask; in rounds that adjust, also a new mask by the mean squared gradients."""
        super().merge(replies, round)
        if replies and self._adjusts(round):
            nothing = {name: torch.zeros_like(self.weights[name]) for name in self.weights if name in self.world.main.parameters}
            given = [Contribution(trained_part(r.piece), r.message["squares"], float(r.samples)) for r in replies]
            # A mean where the code has a sum: the rule compares ratios, and on unequal devices not everybody holds every weight.
            self._adjust(self.fuse(nothing, given), round)

    def contribution(self, reply: Reply) -> Contribution:
        """The reply's weights back in their places, weighted by samples."""
        whole = restored(reply.piece.view, reply.message["weights"])
        return Contribution(reply.piece.view, whole, float(reply.samples), client=reply.device.id)

    def _adjust(self, squares: Tensors, round: int) -> None:
        rho = self.rho * 0.5 ** (round / self.half_life)
        self.masks = adjust(self.weights, self.masks, squares, self._seconds, self.constant, rho)
        self.take_weights({"": self.weights})

    def take_weights(self, weights: Mapping[str, State]) -> None:
        """What is pruned stays so, whoever moves the weights."""
        self.weights = pack({name: t * self.masks[name] if name in self.masks else t for name, t in weights[""].items()})

    def _first_stage(self) -> None:
        """Trains and adjusts on the server's labelled rows until the size settles."""
        world, calm, self.started = self.world, 0, True
        if world.public is None or world.public_labels is None:
            return
        x, y = world.public[: self.proxy], world.public_labels[: self.proxy]
        module = world.main.network(world.main.full)
        every = in_rounds(self.every, self.stage_one)
        a_round = self.steps or world.train.epochs * -(-len(x) // world.train.batch)
        for number, done in enumerate(range(0, self.stage_one, every)):
            rounds = min(every, self.stage_one - done)
            phase = _phase(world.train, 1, self.masks, rounds * a_round)
            module.load_state_dict(self.weights)
            train(module, phase, x, y, world.seed, round=0, number=number)
            self.weights = pack(module.state_dict())
            if float((logits_of(module, x).argmax(-1) == y).float().mean()) < 1.5 / world.classes:
                continue
            before, short = _size(self.masks), replace(phase, steps=self.steps, epochs=world.train.epochs)
            self._adjust(squared_gradients(module, short, x, y, world.seed, 0, 0, number), done + rounds)
            calm = calm + 1 if abs(_size(self.masks) - before) <= 0.1 * before else 0
            if calm == self.settled:
                return

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The received weights in their places under the received mask."""
        client.view = flagged(client.view, received["mask"])
        return restored(client.view, received["weights"])

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase under the received mask."""
        return [_phase(client.train, client.round, received["mask"], self.steps)]

    def squares(self, client: Client, received: Message) -> State:
        """The squared gradients of all weights, at those that were received, where the mask is adjusted."""
        if not received.facts["adjust"]:
            return {}
        module = client.reference.network(client.view, restored(client.view, received["weights"]))
        phase = self.phases(client, received)[0]
        return squared_gradients(module, phase, client.x, client.y, client.site.seed, client.id, client.round)


def _phase(settings: Train, round: int, masks: Tensors, steps: int) -> Phase:
    """Local training under a mask; epochs without end where the number of batches ends it."""
    return settings.phase(round, given=masks, rule=masked_gradients, steps=steps, epochs=max(settings.epochs, steps))


def _size(masks: Tensors) -> int:
    return sum(int(mask.sum()) for mask in masks.values())
