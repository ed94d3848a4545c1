"""DraftFed: unlike CNNs learn from each other's first and last feature maps and logits of common inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from nestling.methods.api import Client, Device, Info, InputError, Message, Phase, Piece, Replies, State, World, kept, made
from nestling.methods.distill import drafts
from nestling.methods.distill.draft_networks import DraftNetwork, Key, key_of, networks_of, refuse_without_convolutions
from nestling.methods.distill.drafts import DraftPool, Weights, drafts_of, taps_of
from nestling.methods.part import Part, Tensors
from nestling.methods.personal import Personal
from nestling.methods.public import drawn
from nestling.seeds import derive
from nestling.settings import Count, NotNegative

_TARGETS = Part("targets", lambda method, device, piece, _: method.targets.get(method.alike(device, piece), {}))
_DRAFTS = Part(
    "drafts",
    up=lambda _method, client, _: client.memory,  # where its phases put them
    like=lambda method, piece, _: method.drafts_like(piece),
)


@dataclass
class DraftFed(Personal):
    """DraftFed: federated learning of any mix of CNNs by exchanged drafts.

    Idea: on common unlabelled inputs G every client drafts D1, what its first convolution puts out, D2, what its last one does (both
    behind the normalisation that directly follows), and D3, its logits. A network of l convolutions learns D2 from what the l-th
    convolution of every network at least as deep puts out, so a deep client also sends its maps at each depth where another one ends.
    Loss: λ1·MSE(D1) + λ2·MSE(D2) + λ3·CE(D3, softmax of the mean logits) on G, and cross-entropy on the client's own rows. Travels: up
    |G|·(D1 + D2 + classes + those supplements) numbers; down |G|·(D1 + D2 + classes), the targets of the client's network. Of a draft
    whose λ is 0 nothing travels. Merge: per network the mean of all drafts, maps resized bilinearly, channels cut off or filled up
    with zeros. With all λ = 0 it is Local.
    Differs from the paper: a round is one message down and one up. A client drafts after its local training, and the targets that it
    gets come from the last round's drafts (in the first round there are none). So "draft-local" is the paper's cycle of training,
    drafting and learning from drafts, looked at after the training; in "local-draft" the targets are one training older. Where not
    everybody takes part, means are over those who do, and a target that nobody renews stays. D2's mean is over the networks that
    have the place, as Algorithm 1 and Figure 5 have it; equation 6 as printed sums over those that do not. The paper does not say
    with which optimiser, learning rate, epochs and batch drafts are learned, nor which cross-entropy D3's is (soft labels are our
    reading). What the drafts take in a device's memory is not in its budget.

    lambda1, lambda2, lambda3: the weights of the three drafts.
    rows:    |G|, drawn once from the public rows (all of them, where there are fewer).
    order:   "draft-local" learns from drafts, then from the client's rows: with one message per round this is Algorithm 1's cycle, in
             which targets come from the networks as they are. "local-draft" has the order of its lines, with targets that are one
             training older.
    divisor: "clients" divides by all clients, so that channels which narrower networks do not have shrink (equation 7); "count" by
             those that have the channel.
    epochs:  passes over G in a round.
    batch:   rows of G per step (128 fits the published traffic).
    lr:      the learning rate on G; 0 takes that of local training.
    """

    lambda1: NotNegative = 1.0
    lambda2: NotNegative = 1.0
    lambda3: NotNegative = 1.0
    rows: Count = 512
    order: Literal["local-draft", "draft-local"] = "draft-local"
    divisor: Literal["clients", "count"] = "clients"
    epochs: Count = 1
    batch: Count = 128
    lr: NotNegative = 0.0

    networks: dict[Key, DraftNetwork] = made()
    targets: dict[str, State] = kept()

    info = replace(
        Info.of_own_networks("public data", "any convolutional networks", "from paper", "D", "public set, unlabelled"),
        title="DraftFed",
        paper="DraftFed",
    )
    parts = (_TARGETS, _DRAFTS)

    @property
    def _weights(self) -> Weights:
        return self.lambda1, self.lambda2, self.lambda3

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Refuses a fleet without public inputs or convolutions, and starts without targets."""
        super().setup(world)
        if world.public is None:
            raise InputError(
                "DraftFed needs public inputs and there are none", field="split.public", fix="give it a share above 0"
            )
        refuse_without_convolutions(world, self.pieces)
        self.networks = networks_of(self.pieces.values(), world.public[:1], self._weights)
        self.targets = {}

    def alike(self, device: Device, piece: Piece) -> str:
        """Devices with the same network learn from the same targets."""
        return self.networks[key_of(piece)].name

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, Any]:
        """The depths of the fleet's networks, and the number from which the common rows are drawn."""
        depths = sorted({network.depth for network in self.networks.values()})
        return {"depths": depths, "rows": derive(self.world.seed, "draft rows")}

    def drafts_like(self, piece: Piece) -> State:
        """What drafts of a piece look like."""
        assert self.world.public is not None
        count, shapes = min(self.rows, len(self.world.public)), self.networks[key_of(piece)].shapes
        return {name: torch.empty(count, *shape, device="meta") for name, shape in shapes.items()}

    def merge(self, replies: Replies, round: int) -> None:
        """New targets for every network from this round's drafts; those that nobody renews stay."""
        said: dict[Key, list[Tensors]] = {}
        for reply in replies:
            said.setdefault(key_of(reply.piece), []).append(reply.message.parts.get("drafts", {}))
        if not said:
            return
        pools = [DraftPool.of(self.networks[key].depth, own) for key, own in said.items()]
        self.targets = {
            net.name: {**self.targets.get(net.name, {}), **drafts.targets(pools, net.depth, net.shapes, self.divisor)}
            for net in self.networks.values()
        }

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Iterator[Phase]:
        """Local training, after which drafts are made, with the phase on the targets before or behind both."""
        targets = received.parts.get("targets")
        if targets and self.order == "draft-local":
            yield self._draft_phase(client, received)
        yield client.train.phase(client.round)
        # What others learn from is what local training taught, before it is drawn towards what they said.
        client.memory = self._drafts(client, received)
        if targets and self.order == "local-draft":
            yield self._draft_phase(client, received)

    def _draft_phase(self, client: Client, received: Message) -> Phase:
        taps, usual = taps_of(client.reference, client.view), client.train.optim(client.round)
        return Phase(
            objective=partial(drafts.draft_loss, layers=(taps.first, taps.last), weights=self._weights),
            optim=replace(usual, lr=self.lr or usual.lr),
            epochs=self.epochs,
            batch=self.batch,
            source="public",
            rows=self._common(client, received),
            given=dict(received["targets"]),
        )

    def _drafts(self, client: Client, received: Message) -> State:
        assert client.public is not None
        module, taps = client.reference.network(client.view, client.weights), taps_of(client.reference, client.view)
        return drafts_of(module, taps, received.facts["depths"], client.public[self._common(client, received)], self._weights)

    def _common(self, client: Client, received: Message) -> Tensor:
        """The public rows that drafts are about."""
        assert client.public is not None
        return drawn(int(received.facts["rows"]), self.rows, len(client.public), client.place)
