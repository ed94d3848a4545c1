"""FedRolex: a rolling window over the channels of one network."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.methods.api import Device, Info, Model, Piece, Replies, World, kept, made
from nestling.methods.submodel.heterofl import HeteroFL
from nestling.settings import Compat
from nestling.views import rolled


@dataclass
class FedRolex(HeteroFL):
    """FedRolex (Alam, Liu, Yan, Zhang, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
    NeurIPS 2022).

    Idea: a client of ratio r trains a window of ⌈r·K⌉ channels of every hidden layer, and the window moves on by one channel per round,
    around the end. All channels are trained equally often, so that the server's network may be larger than every client's.
    Loss, Travels, Merge: those of HeteroFL, for the window of the round. Round 1 is HeteroFL's: the first channels.
    Differs from the paper: where a group norm has groups the window moves by whole groups. Differs from the released code: its options
    that weight a layer's entries by width or by number of updates are left out (they change nothing in its default mode). As published:
    `model.norm = "batch"`, `train.clip = 1`, and many rounds at a small rate (lr 2e-4, 2500 rounds and more).
    What is evaluated is the whole network. A device's own model is the window that its ratio was last trained at: the channels in it
    have just been trained with one another, those of another window against other neighbours.

    dynamic, mask_labels, scaler: as in HeteroFL.
    compat: "paper" moves the window up; "code" moves it down, as the released code does (the same by symmetry).
    """

    compat: Compat = "paper"

    steps: int = kept()
    _windows: tuple[int, dict[bytes, Piece]] = made()

    info = Info("width", "width: rolling windows", "official code read", "A", any_task=True)

    def setup(self, world: World) -> None:
        """Starts with windows that have not moved."""
        super().setup(world)
        self.steps, self._windows = 0, (0, {})

    def piece(self, device: Device, round: int) -> Piece:
        """HeteroFL's piece, moved on by one step for every round after the first."""
        return self._window(super().piece(device, round), max(round - 1, 0))

    def merge(self, replies: Replies, round: int) -> None:
        """HeteroFL's merge; remembers how far the windows of the round had moved."""
        super().merge(replies, round)
        self.steps = max(round - 1, 0)

    def model_for(self, device: Device) -> Model:
        """The window that was trained last, with HeteroFL's scaler."""
        view = self._window(super().piece(device, 0), self.steps).view
        return self.as_trained(Model(self.world.main, view, view.extract(self.weights)))

    def _window(self, piece: Piece, steps: int) -> Piece:
        """The piece moved on; one object for all clients of a round, so that what is known of it is looked up by it."""
        if self._windows[0] != steps:
            self._windows = (steps, {})
        known, key = self._windows[1], piece.view.key()
        if key not in known:
            known[key] = Piece(piece.reference, rolled(piece.view, -steps if self.compat == "code" else steps))
        return known[key]
