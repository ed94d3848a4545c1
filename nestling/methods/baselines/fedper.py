"""FedPer: a shared base under personal last layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nestling.methods.api import Client, Device, Info, Message, Model, Piece, World, made, require
from nestling.methods.baselines.averaged import Averaged
from nestling.training.memory import keep, recall
from nestling.views import Reference, State, Tensors, View, keep_private
from nestling.views.units import units


@dataclass
class FedPer(Averaged):
    """FedPer (Arivazhagan et al., "Federated Learning with Personalization Layers", 2019), averaged by name.

    Idea: all clients share the base of the network, and each has a classifier (and last blocks) of its own, which learns what is
    particular about its data. Both are trained together.
    Loss: cross-entropy. Travels: the base of the client's piece down and up; the personal part never does. Merge: per entry of the
    base, mean weighted by n_k over the clients that own it.
    Differs from the paper: bases may be of unequal width or depth. A client that has not taken part yet uses the base with the
    initial personal part. There is no global model: its column is the mean of the clients' models on the global test set.

    personal: how many units are personal, counted from the last (1: the classifier; 2: the last block too, …), or the units
              themselves by the beginning of their names, e.g. ["stages.2", "head"].
    averaging, cut, weighting: see HeteroAvg; the mean is by samples as published.
    """

    weighting: Literal["uniform", "samples"] = "samples"
    personal: int | tuple[str, ...] = 1

    _names: frozenset[str] = made()
    _pieces: dict[tuple[str, bytes], Piece] = made()

    info = Info(
        "baseline",
        "width or depth: bases averaged by name, heads of one's own",
        "from paper",
        "C",
        global_model=False,
        personal=True,
        any_task=True,
    )

    def __post_init__(self) -> None:
        """Refuses settings by which nothing would be personal."""
        super().__post_init__()
        fix = "give the number of last units, or the beginnings of names"
        some = self.personal > 0 if isinstance(self.personal, int) else bool(self.personal)
        require(some, "nothing would be personal", "method.personal", fix)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Finds the personal units, which must be some of the network but not all of it."""
        super().setup(world)
        found, names = units(self.reference), self.reference.axes.shapes
        chosen = found[-self.personal :] if isinstance(self.personal, int) else self.personal
        base = [name for name in names if not any(name.startswith(f"{unit}.") for unit in chosen)]
        require(
            0 < len(base) < len(names),
            f"{'nothing' if base else 'everything'} would be personal with {self.personal!r}",
            "method.personal",
            f"at most {len(found) - 1}, or some of: {', '.join(found)}",
        )
        self._names, self._pieces = frozenset(chosen), {}

    def piece(self, device: Device, round: int) -> Piece:
        """The device's piece with the personal units private; one object for all equal pieces."""
        whole = super().piece(device, round)
        key = (whole.reference.name, whole.view.key())
        if key not in self._pieces:
            self._pieces[key] = Piece(whole.reference, keep_private(whole.view, self._names))
        return self._pieces[key]

    def model_for(self, device: Device) -> Model:
        """The shared base with the personal part that the device has kept, or with the initial one."""
        base = super().model_for(device)
        memory = {name: t.to(self.world.place) for name, t in self.world.store.get(device.id).items()}
        return replace(base, state={**base.state, **_personal(memory, base.reference, base.view)})

    def global_model(self) -> None:
        """None, since every client has last layers of its own."""

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The received base with the client's own personal part."""
        return {**received["weights"], **_personal(client.memory, client.reference, client.view)}

    def keep(self, client: Client, received: Message) -> None:
        """Keeps the personal part as it was trained."""
        own = {name: client.weights[name] for name in _private(client.view)}
        client.memory = keep(client.memory, "personal", client.reference, client.view, own)


def _private(view: View) -> list[str]:
    travelling = set(view.names)
    return [name for name in view.members if name not in travelling]


def _personal(memory: State, reference: Reference, view: View) -> State:
    """The personal part as it was kept, or as the network was made."""
    initial = {name: view.cut(name, reference.initial[name]) for name in _private(view)}
    return recall(memory, "personal", reference, view, initial)
