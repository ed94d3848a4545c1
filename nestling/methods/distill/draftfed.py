"""DraftFed: unlike CNNs learn from each other's first and last feature maps and logits of common inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nestling.errors import InputError
from nestling.methods.api import Client, Device, Info, Message, Phase, Piece, Reply, State, World
from nestling.methods.distill import drafts
from nestling.methods.distill.drafts import DIVISORS, FIRST, LAST, LOGITS, Pool, taps_of
from nestling.methods.kept import made
from nestling.methods.personal import Personal, keep_weights
from nestling.methods.public import drawn
from nestling.models.taps import Taps
from nestling.schema import require
from nestling.seeds import derive

ORDERS = ("local-draft", "draft-local")


@dataclass(frozen=True)
class Network:
    """One of the fleet's networks: its number, how many convolutions it has, and the shapes of one row of its drafts."""

    number: int
    depth: int
    shapes: Mapping[str, torch.Size]

    @property
    def name(self) -> str:
        return f"network {self.number}"


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
    order:   "draft-local" learns from drafts, then from the client's rows: with one message a round this is Algorithm 1's cycle, in
             which targets come from the networks as they are. "local-draft" has the order of its lines, with targets that are one
             training older.
    divisor: "clients" divides by all clients, so that channels which narrower networks do not have shrink (equation 7); "count" by
             those that have the channel.
    epochs:  passes over G in a round.
    batch:   rows of G a step (128 fits the published traffic).
    lr:      the learning rate on G; 0 takes that of local training.
    """

    lambda1: float = 1.0
    lambda2: float = 1.0
    lambda3: float = 1.0
    rows: int = 512
    order: str = "draft-local"
    divisor: str = "clients"
    epochs: int = 1
    batch: int = 128
    lr: float = 0.0

    networks: dict[tuple[str, bytes], Network] = made()
    targets: dict[str, State] = made()
    _sent: dict[str, Message] = made()

    info = Info(
        "public data",
        "any convolutional networks",
        "from paper",
        "D",
        auxiliary="public set, unlabelled",
        global_model=False,
        own_networks=True,
        personal=True,
        title="DraftFed",
        paper="DraftFed",
    )

    def __post_init__(self) -> None:
        for number, weight in enumerate((self.lambda1, self.lambda2, self.lambda3), start=1):
            require(weight >= 0, "must not be negative (0 turns the draft off)", f"method.lambda{number}")
        for name in ("rows", "epochs", "batch"):
            require(getattr(self, name) >= 1, "must be at least 1", f"method.{name}")
        for name, allowed in (("order", ORDERS), ("divisor", DIVISORS)):
            value = getattr(self, name)
            require(value in allowed, f"unknown {name} {value!r}", f"method.{name}", f"allowed: {', '.join(allowed)}")
        require(self.lr >= 0, "must not be negative (0: that of local training)", "method.lr")

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        super().setup(world)
        if world.public is None:
            raise InputError(
                "DraftFed needs public inputs and there are none", field="split.public", fix="give it a share above 0"
            )
        _refuse_without_convolutions(world, self.pieces)
        found = {_key(piece): piece for piece in self.pieces.values()}
        depths = [_taps(piece).depth for piece in found.values()]
        self.networks = {
            key: Network(number, depths[number], self._shapes(piece, depths, world.public[:1]))
            for number, (key, piece) in enumerate(found.items())
        }
        _refuse_unlike_maps(self.networks.values())
        self.targets, self._sent = {}, {}

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        name = self.networks[_key(piece)].name
        if name not in self._sent:
            depths = sorted({network.depth for network in self.networks.values()})
            parts = {"targets": self.targets[name]} if name in self.targets else {}
            self._sent[name] = Message(parts, {"depths": depths, "rows": derive(self.world.seed, "draft rows")})
        return self._sent[name]

    def expects(self, piece: Piece, sent: Message) -> Mapping[str, Mapping[str, Tensor]]:
        assert self.world.public is not None
        count, shapes = min(self.rows, len(self.world.public)), self.networks[_key(piece)].shapes
        return {"drafts": {name: torch.empty(count, *shape, device="meta") for name, shape in shapes.items()}}

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        said: dict[tuple[str, bytes], list[Mapping[str, Tensor]]] = {}
        for reply in replies:
            said.setdefault(_key(reply.piece), []).append(reply.message["drafts"])
        if not said:
            return
        pools = [Pool.of(self.networks[key].depth, own) for key, own in said.items()]
        self.targets = {
            net.name: {**self.targets.get(net.name, {}), **drafts.targets(pools, net.depth, net.shapes, self.divisor)}
            for net in self.networks.values()
        }
        self._sent = {}

    def state(self) -> dict[str, State]:
        return self.targets

    def restore(self, state: Mapping[str, State]) -> None:
        self.targets, self._sent = {name: dict(tensors) for name, tensors in state.items()}, {}

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Iterator[Phase]:
        local, targets = client.train.phase(client.round), received.parts.get("targets")
        if targets and self.order == "draft-local":
            yield self._draft_phase(client, received)
        yield local
        # What others learn from is what local training taught, before it is drawn towards what they said.
        client.memory = self._drafts_of(client, received)
        if targets and self.order == "local-draft":
            yield self._draft_phase(client, received)

    def _draft_phase(self, client: Client, received: Message) -> Phase:
        taps, plain = taps_of(client.reference, client.view), client.train.phase(client.round)
        weights = (self.lambda1, self.lambda2, self.lambda3)
        return replace(
            plain,
            objective=partial(drafts.draft_loss, layers=(taps.first, taps.last), weights=weights),
            optim=replace(plain.optim, lr=self.lr or plain.optim.lr),
            epochs=self.epochs,
            batch=self.batch,
            source="public",
            rows=self._common(client, received),
            given=dict(received["targets"]),
            drop_last=False,
            augment="none",
        )

    def reply(self, client: Client, received: Message) -> Message:
        made = client.memory
        keep_weights(client)
        return Message({"drafts": made}, {"samples": client.samples})

    def _drafts_of(self, client: Client, received: Message) -> State:
        assert client.public is not None
        module = client.reference.network(client.view, client.weights)
        inputs = client.public[self._common(client, received)]
        return self._drafts(module, taps_of(client.reference, client.view), received.facts["depths"], inputs)

    def _common(self, client: Client, received: Message) -> Tensor:
        """The public rows that drafts are about."""
        assert client.public is not None
        return drawn(int(received.facts["rows"]), self.rows, len(client.public), client.place)

    # -- on both ---------------------------------------------------------------------------------------------------------------

    def _drafts(self, module: torch.nn.Module, taps: Taps, depths: Sequence[int], inputs: Tensor) -> State:
        """The drafts that a client sends."""
        layers = {FIRST: taps.first} if self.lambda1 else {}
        if self.lambda2:
            layers |= {LAST: taps.last, **{drafts.supplement(d): taps.convs[d - 1] for d in depths if d < taps.depth}}
        made = drafts.draw(module, layers, inputs)
        return {name: t for name, t in made.items() if name != LOGITS or self.lambda3}

    def _shapes(self, piece: Piece, depths: Sequence[int], inputs: Tensor) -> dict[str, torch.Size]:
        made = self._drafts(piece.reference.network(piece.view), _taps(piece), depths, inputs)
        return {name: t.shape[1:] for name, t in made.items()}


def _key(piece: Piece) -> tuple[str, bytes]:
    """Equal for tiers that train the same network."""
    return piece.reference.name, piece.view.key()


def _taps(piece: Piece) -> Taps:
    return taps_of(piece.reference, piece.view)


def _refuse_without_convolutions(world: World, pieces: Mapping[str, Piece]) -> None:
    for number, (tier, piece) in enumerate(pieces.items()):
        require(
            _taps(piece).depth > 0,
            f"DraftFed compares what convolutions put out, and the network of tier {tier!r} has none",
            f"fleet.tiers[{number}].model" if world.plans[tier].tier.model else "model.name",
            "take a convolutional network, e.g. tinycnn",
        )


def _refuse_unlike_maps(networks: Iterable[Network]) -> None:
    axes = {len(shape) for network in networks for name, shape in network.shapes.items() if name != LOGITS}
    require(len(axes) < 2, "DraftFed cannot align maps of one and of two axes", "fleet.tiers", "take networks of one kind")
