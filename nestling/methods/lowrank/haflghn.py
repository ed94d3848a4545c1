"""HAFL-GHN: clients with any architecture share the hyper-network that makes their weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch

from nestling.methods.allocation import Ladder
from nestling.methods.api import Client, Device, Info, Message, Method, Model, Phases, Piece, Replies, World, pack, require
from nestling.methods.kept import kept, made
from nestling.methods.lowrank.factored import able_tiers, choose_among, key_of
from nestling.models.hypernetwork import Generated, HyperNetwork
from nestling.models.record import words_of
from nestling.seeds import torch_seeded
from nestling.settings import Count, Whole
from nestling.views import Contribution, Reference, State, Tensors, keep_private


@dataclass
class HAFLGHN(Method):
    """HAFL-GHN (Litany et al., "Federated Learning with Heterogeneous Architectures using Graph HyperNetworks", 2022).

    Idea: no weights are shared but those of a graph hyper-network φ that makes every client's weights from the graph of its layers; a
    client trains φ through its own network. The graph stays with the client, and architectures need have nothing in common.
    Loss: cross-entropy of the network that φ makes. Travels: φ down and up, whatever the client's size. Merge: mean of φ by n_k.
    Differs from the paper: φ is an implementation of our own after the abstract and the published GHN-2 code (one pass forward and one
    back, one decoder per kind of layer, weights scaled by fan-in); its sizes are from memory. A device trains φ and its network
    at once, which a microcontroller cannot: such devices do not take part and are handed what φ makes for them. Running statistics
    are not made: batch norms use the batch at hand, also when tested. A device keeps its piece when its free memory changes.

    hidden:     width of a layer's state.
    basis:      how many patterns a decoder mixes.
    max_shape:  outputs, inputs and kernel of the largest convolution that is made without tiling.
    max_inputs: the same for the inputs of linear layers.
    fine_tune:  epochs that a client then trains its own network for, φ fixed; the result stays with it and is what it uses.
    leave_out:  devices that cannot train φ do not take part (false: they are an error).
    """

    hidden: Count = 32
    basis: Count = 16
    max_shape: tuple[Count, Count, Count] = (64, 64, 5)
    max_inputs: Count = 1024
    fine_tune: Whole = 0
    leave_out: bool = True

    world: World = made()
    weights: State = kept()
    pieces: dict[str, Piece] = made()
    able: frozenset[str] = made()

    info = Info(
        "hyper-network", "any: unlike networks and parts", "from paper (abstract)", "G", global_model=False, own_networks=True
    )

    def __post_init__(self) -> None:
        """Refuses a `max_shape` that is not three numbers."""
        super().__post_init__()
        require(len(self.max_shape) == 3, "outputs, inputs and kernel", "method.max_shape")

    @property
    def as_set(self) -> Info:
        """Personal where clients fine-tune networks of their own."""
        return replace(self.info, personal=self.fine_tune > 0)

    def setup(self, world: World) -> None:
        """Makes φ and, for every unlike piece, the network that φ generates; finds the tiers that can train theirs."""
        self.world = world
        fix = "take a network without an embedding"
        require(not words_of(world.main.module), "no vectors of words are generated", "model.name", fix)
        with torch_seeded(world.seed, "hypernetwork"):
            generator = HyperNetwork(world.classes, self.hidden, self.basis, self.max_shape, self.max_inputs)
        unlike: dict[tuple[str, bytes], Piece] = {}
        self.pieces = {}
        for tier, plan in world.plans.items():
            if (key := key_of(plan.piece)) not in unlike:
                unlike[key] = self._generated(f"hypernetwork/{len(unlike)}", generator, plan.piece)
            self.pieces[tier] = unlike[key]
        first = next(iter(self.pieces.values()))
        self.weights = pack(first.view.extract(first.reference.initial))
        self.able = able_tiers({tier: Ladder(world, [piece]) for tier, piece in self.pieces.items()}, self.leave_out)

    def _generated(self, name: str, generator: HyperNetwork, piece: Piece) -> Piece:
        network = piece.reference.network(piece.view)
        reference = Reference(name, Generated(copy.deepcopy(generator), network, tuned=self.fine_tune > 0), piece.reference.shape)
        reference.to(self.world.place)
        self.world.references[name] = reference
        return Piece(reference, keep_private(reference.full, ["added"] if self.fine_tune else []))

    def choose(self, round: int, clients: int) -> list[int]:
        """Reachable devices at random, of the tiers that can train φ."""
        return choose_among(self.world, self.able, round, clients)

    def piece(self, device: Device, round: int) -> Piece:
        """The generated network of the device's tier, whatever memory is free."""
        return self.pieces[device.tier]

    def weights_for(self, piece: Piece) -> State:
        """φ, the same for every piece."""
        return self.weights

    def merge(self, replies: Replies, round: int) -> None:
        """The mean of φ, weighted by samples."""
        # φ is the same for everybody, so that any of its views stands for all.
        view = next(iter(self.pieces.values())).view
        given = [Contribution(view, r.message["weights"], float(r.samples), client=r.device.id) for r in replies]
        self.weights = pack(self.mean(self.weights, given))

    def model_for(self, device: Device) -> Model:
        """The device's network with the weights that it fine-tuned, or else with those that φ makes."""
        own = self.world.plans[device.tier].piece
        tuned = {name: t.to(self.world.place) for name, t in self.world.store.get(device.id).items()} if self.fine_tune else {}
        piece = self.pieces[device.tier]
        whole = {**piece.reference.initial, **self.weights}
        weights = tuned or weights_of(piece, whole)
        if weights.keys() != own.reference.network(own.view).state_dict().keys():
            # The network has running statistics, which nobody makes: it is used in the form in which it was trained.
            return Model(piece.reference, piece.view, whole)
        return Model(own.reference, own.view, weights)

    def start(self, client: Client, received: Message) -> Tensors:
        """φ as received; where clients fine-tune, together with additions to the generated weights that are zero."""
        return pack({**client.reference.initial, **received["weights"]}) if self.fine_tune else received["weights"]

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase of φ; where clients fine-tune, another of the additions alone."""
        if not self.fine_tune:
            return [client.train.phase(client.round)]
        shared = client.train.phase(client.round, freeze=("added",))
        return [shared, client.train.phase(client.round, freeze=("generator",), epochs=self.fine_tune)]

    def keep(self, client: Client, received: Message) -> None:
        """Keeps the fine-tuned weights, where there are any."""
        if self.fine_tune:
            client.memory = weights_of(Piece(client.reference, client.view), client.weights)


@torch.no_grad()
def weights_of(piece: Piece, state: Tensors) -> State:
    """The weights that a hyper-network's state makes for the piece's network."""
    network = piece.reference.network(piece.view, state)
    assert isinstance(network, Generated)
    return {name: tensor.clone() for name, tensor in network.weights().items()}
