"""FedProx: a pull towards what was received."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from nestling.methods.api import Client, Info, Message, Phases
from nestling.methods.baselines.averaged import Averaged, parameters_of
from nestling.settings import NotNegative
from nestling.training.objectives import proximal


@dataclass
class FedProx(Averaged):
    """FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020), averaged by name.

    Idea: the distance to the received weights is part of the loss, so that a client with unusual data does not run away.
    Loss: cross-entropy + μ/2·‖w − w_received‖² over parameters (no buffers); of a piece, the distance to the received piece.
    Travels: the client's piece down and up. Merge: as HeteroAvg, weighted by n_k; with mu = 0 and equal networks it is FedAvg.
    Differs from the released code: all clients take their full number of steps; the share of unfinished ones is a matter of the
    fleet here. FedIN prints its coefficient as the multiplier of the squared norm: its 0.05 is mu = 0.1.

    mu: the pull.
    averaging, cut: see HeteroAvg.
    weighting: "samples" (n_k, as FedAvg), or "uniform" as in the published tables of layer-wise averaging.
    """

    weighting: Literal["uniform", "samples"] = "samples"
    mu: NotNegative = 0.01

    info = Info("baseline", "width or depth: averaged by name, or among equals", "official code read", "B", any_task=True)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Room for the received weights, unless the pull is 0."""
        return ("anchor",) if self.mu else ()

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase with the pull towards the received parameters."""
        given = parameters_of(client, received["weights"])
        return [client.train.phase(client.round, objective=partial(proximal, mu=self.mu), given=given)]
