"""What a method is: what travels down, what a client does with it, how the server merges what comes up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from nestling.errors import InputError
from nestling.message import Message
from nestling.methods.info import Info, with_title
from nestling.methods.kept import kept, made, put_back, state_of
from nestling.methods.part import WEIGHTS, Facts, Part, Parts
from nestling.settings import check_settings
from nestling.tasks import Task
from nestling.training.client import Client
from nestling.training.phase import Phase
from nestling.trust.robust import Robust
from nestling.trust.weighing import Lowered, merge_within
from nestling.views import Contribution, State, Tensors, merge
from nestling.world import Device, Model, Piece, World

T = TypeVar("T")

Phases = Sequence[Phase]


@dataclass(eq=False)
class Reply:
    """A client's reply as the server sees it: from whom, for which piece, to what message. `most` is what its number of samples may
    weigh at most (0: what the client says)."""

    device: Device
    piece: Piece
    sent: Message
    message: Message
    most: int = 0

    @property
    def samples(self) -> int:
        """How many samples the reply counts for: as many as the client says it has, but no more than `most`."""
        told = int(self.message.facts["samples"])
        return min(told, self.most) if self.most else told

    def by_class(self, counts: Tensor) -> Tensor:
        """What a client counted by class, brought down in proportion where its samples count for fewer than it says."""
        told = int(self.message.facts["samples"])
        return counts if self.samples == told else -(-counts.long() * self.samples // told)


Replies = Sequence[Reply]


@dataclass(eq=False)
class Share:
    """Weights that the server keeps for several clients: what they are before a merge, which of them are trained, and what is given to
    them in the merge."""

    weights: State
    trained: frozenset[str]
    given: list[Contribution]


class Method:
    """Base of all methods: a dataclass whose fields are its settings. Server state is made in `setup`; the client's part (`start`,
    `phases`, `reply`) uses settings, the client and what it received, nothing else."""

    info: ClassVar[Info]
    parts: ClassVar[Parts] = (WEIGHTS,)  # what travels
    said: ClassVar[Facts] = ()  # what a reply says beside that and the number of samples
    shares_weights: ClassVar[bool] = False  # whether clients train from weights that the server keeps for all of them
    by_rule: ClassVar[bool] = False  # whether what else clients say is merged by the server's rule, where it has one
    robust: Robust | None = None  # how weights are merged where the server does not take their mean
    most_share: float = 0.0  # of an entry's weight that one reply may have in a mean (0 or 1: any)
    most_of_class: float = 0.0  # the same of what is said of a class
    lowered: dict[int, Lowered] | None = None  # whose weight that brought down in this round; None: nobody asks
    world: World
    _made: tuple[int, dict[Any, Any]] = (-1, {})

    def __init_subclass__(cls) -> None:
        """Fills in title and paper of `info` from the docstring; a class whose docstring has no title is called by its name."""
        if "info" in vars(cls):
            told = with_title(cls.info, cls.__doc__ or "")
            cls.info = told if told.title else replace(told, title=cls.__name__)

    def __post_init__(self) -> None:
        """Checks the settings against the bounds that their types declare."""
        check_settings(self, "method")

    @property
    def as_set(self) -> Info:
        """What it is as it is set, and after `setup` with these networks: what the class says, unless settings change that."""
        return self.info

    @property
    def blocks(self) -> tuple[str, ...]:
        """What a microcontroller must have room for beside weights, gradients and momentum: "mask" (a flag for every weight), "anchor"
        (a second copy of the weights), "present" or "target" (a number for every class)."""
        return ()

    def settings_for(self, task: Task) -> Mapping[str, Any]:
        """Settings that change where something else than classes is learned; an `InputError` where it cannot be."""
        if not (task.has_classes or self.as_set.any_task):
            message = f"{self.as_set.title} serves classification only, and {task.name} is to be learned"
            raise InputError(message, field="method.name", fix='take one that serves any task ("nestling methods" lists them)')
        return {}

    # -- on the server ---------------------------------------------------------------------------------------------------------

    @property
    def nests(self) -> bool:
        """Whether the models of all devices are parts of the global one, each of which reads nothing outside itself. One pass through
        the global model may then test them all."""
        return False

    def zeros(self, piece: Piece) -> int:
        """How many of a piece's parameters are zero whatever happens: they are stored and travel, but nothing is in them."""
        return 0

    def setup(self, world: World) -> None:
        """Makes the server's state for a new run."""
        raise NotImplementedError

    def choose(self, round: int, clients: int) -> list[int]:
        """Who takes part in a round; unless the method decides otherwise, reachable devices at random."""
        return self.world.fleet.choose(round, clients)

    def piece(self, device: Device, round: int) -> Piece:
        """What a device trains in a round; unless the method decides otherwise, what fits it."""
        return device.piece

    def travelling(self) -> list[Part]:
        """The parts that travel with its settings."""
        return [part for part in self.parts if part.when is None or part.when(self)]

    def weights_for(self, piece: Piece) -> Tensors:
        """The weights of a piece as they are now, for methods that send some."""
        raise NotImplementedError

    def weights_once(self, piece: Piece, round: int) -> Tensors:
        """The weights of a piece, the same ones for all its holders."""
        if piece.view.masks:
            return self.weights_for(piece)
        return self.once(round, ("weights", piece.reference.name, piece.view.key()), lambda: self.weights_for(piece))

    def facts(self, device: Device, piece: Piece, round: int) -> Mapping[str, Any]:
        """What the message to a device says beside its parts: plain values."""
        return {}

    def message(self, device: Device, piece: Piece, round: int) -> Message:
        """The message to a device, and to all that are alike."""
        sent = {
            part.name: tensors for part in self.travelling() if part.down and (tensors := part.down(self, device, piece, round))
        }
        return Message(sent, self.facts(device, piece, round))

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        """The message to a device; devices that are alike get the same one."""
        key = self.alike(device, piece)
        if key is None:
            return self.message(device, piece, round)
        return self.once(round, ("message", key), lambda: self.message(device, piece, round))

    def alike(self, device: Device, piece: Piece) -> Hashable | None:
        """What devices that get the same message have in common: the same piece. None: each gets a message of its own."""
        return None if piece.view.masks else (piece.reference.name, piece.view.key())

    def returned(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        """The piece that a reply with these facts is of; an `InputError` says what in them cannot be true."""
        for fact in self.said:
            value = facts.get(fact.name)
            if not fact.can(self, sent, value):
                raise InputError(f"{fact.what} cannot be {repr(value)[:60]}")
        return self.cut_to(piece, sent, facts)

    def cut_to(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        """The piece that a client trained, for methods whose clients may cut what was sent further: checked facts tell how."""
        return piece

    def expects(self, piece: Piece, sent: Message) -> Mapping[str, Tensors]:
        """Tensors like those a reply must hold; a reply that differs is refused."""
        up = {p.name: p.like(self, piece, sent) if p.like else sent.parts.get(p.name, {}) for p in self.travelling() if p.up}
        return {name: tensors for name, tensors in up.items() if tensors}

    def largest(self, piece: Piece, sent: Message) -> Mapping[str, Tensors]:
        """Tensors like those of the largest reply that could be; for methods whose replies say themselves what they are of."""
        return self.expects(piece, sent)

    def merge(self, replies: Replies, round: int) -> None:
        """Fuses the replies of a round into the server's state."""
        raise NotImplementedError

    def fuse(self, weights: Tensors, given: Iterable[Contribution]) -> State:
        """Shared weights after a merge: the mean over views, or what the server's robust rule makes of the contributions. A method
        with `shares_weights` merges them by this, so that the server may choose."""
        return self.mean(weights, given) if self.robust is None else self.robust.merge(weights, given)

    def mean(self, weights: Tensors, given: Iterable[Contribution]) -> State:
        """The weighted mean over views; no reply has more than the server's `most_share` of an entry's weight."""
        if not 0 < self.most_share < 1:
            return merge(weights, given)
        return merge_within(weights, given, self.most_share, self.lowered)

    def shares(self, replies: Replies) -> Mapping[str, Share]:
        """By group (most methods have one), the shared weights that a merge of these replies would change."""
        return {}

    def shared_weights(self) -> dict[str, State]:
        """The shared weights by group, as they are now."""
        return {}

    def take_weights(self, weights: Mapping[str, State]) -> None:
        """Takes other shared weights, of some groups or all, in place of its own."""
        raise NotImplementedError

    def model_for(self, device: Device) -> Model:
        """The model a device would use now."""
        raise NotImplementedError

    def other_models(self, device: Device) -> Mapping[str, Model]:
        """What a device could use instead, by name: tested beside it, where a method has several ways to decide."""
        return {}

    def global_model(self) -> Model | None:
        """The one global model, for methods that have one."""
        return None

    def once(self, round: int, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` makes, made once per round: devices with the same key get the same object."""
        if self._made[0] != round:
            self._made = (round, {})
        known = self._made[1]
        if key not in known:
            known[key] = make()
        found: T = known[key]
        return found

    def state(self) -> dict[str, State]:
        """The server's state by name, for checkpoints: the fields that are `kept`."""
        return state_of(self)

    def restore(self, state: Mapping[str, State]) -> None:
        """Puts a checkpoint's state back (after `setup`)."""
        self._made = (-1, {})
        put_back(self, state)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The weights a client starts its round with; they are read, never written to."""
        return received["weights"]

    def phases(self, client: Client, received: Message) -> Iterable[Phase]:
        """What the client does; unless the method decides otherwise, plain local training."""
        return [client.train.phase(client.round)]

    def keep(self, client: Client, received: Message) -> None:
        """Puts into `client.memory` what the client keeps for its next round, once its reply is made."""

    def reply(self, client: Client, received: Message) -> Message:
        """What goes back: the parts that come up, the number of samples, and what else is said."""
        parts = {part.name: tensors for part in self.travelling() if part.up and (tensors := part.up(self, client, received))}
        facts = {"samples": client.samples, **{fact.name: fact.say(self, client, received) for fact in self.said}}
        self.keep(client, received)
        return Message(parts, facts)


@dataclass
class SharedWeights(Method):
    """Base of the methods that send views of one global state and merge what returns by the weighted mean over views."""

    shares_weights: ClassVar[bool] = True
    world: World = made()
    weights: State = kept()

    def setup(self, world: World) -> None:
        """Starts from the initial weights of the main network; tiers may bring no networks of their own."""
        world.refuse_own_networks(self.info.title)
        self.world = world
        self.weights = world.main.initial.copy()

    def weights_for(self, piece: Piece) -> Tensors:
        """The piece, cut out of the global weights; for the whole network these themselves."""
        whole = not piece.view.masks and piece.view.key() == self.world.main.full.key()
        return self.weights if whole else piece.view.extract(self.weights)

    def merge(self, replies: Replies, round: int) -> None:
        """The weighted mean over views; entries that no reply holds keep their value."""
        self.weights = self.fuse(self.weights, [self.contribution(reply) for reply in replies])

    def contribution(self, reply: Reply) -> Contribution:
        """How much a reply counts: by its number of samples, unless the method decides otherwise."""
        return Contribution(reply.piece.view, reply.message["weights"], float(reply.samples), client=reply.device.id)

    def shares(self, replies: Replies) -> Mapping[str, Share]:
        """The global weights as the only group, with what every reply gives to their mean."""
        return {"": Share(self.weights, self.world.main.parameters, [self.contribution(reply) for reply in replies])}

    def shared_weights(self) -> dict[str, State]:
        """The global weights, as the only group."""
        return {"": self.weights}

    def take_weights(self, weights: Mapping[str, State]) -> None:
        """Replaces the global weights."""
        self.weights = weights[""]

    def model_for(self, device: Device) -> Model:
        """The device's piece at rest, cut out of the global weights."""
        view = self.piece(device, 0).view
        return Model(self.world.main, view, view.extract(self.weights))

    def global_model(self) -> Model:
        """The whole main network with the global weights."""
        return Model(self.world.main, self.world.main.full, self.weights)
