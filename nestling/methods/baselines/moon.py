"""MOON: features close to the global model's, away from the client's last one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from nestling.methods.api import Client, Info, Message, Phases, Reference, World
from nestling.methods.baselines.averaged import Averaged
from nestling.models.projection import projected
from nestling.settings import NotNegative, Positive, Whole
from nestling.tasks import losses
from nestling.training.memory import keep, recall
from nestling.training.objectives import Batch, Given, Net, forward_with_features


@dataclass
class Moon(Averaged):
    """MOON (Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021), averaged by name.

    Idea: the global model sees more data than any client, so a client's features z should be like those of the received model and
    unlike those of its own previous one.
    Loss: cross-entropy + μ·(−log [e^{cos(z, z_global)/τ} / (e^{cos(z, z_global)/τ} + e^{cos(z, z_previous)/τ})]); z is what the last
    linear layer sees. Three networks and three forward passes on the client, which its memory budget does not count. Travels: the
    client's piece down and up; the previous network stays. Merge: as HeteroAvg, weighted by n_k; with mu = 0 and equal
    networks it is FedAvg.
    Differs from the paper: without `projection` z are the network's own features, since the published head would outweigh a small
    network. In a client's first round its previous model is the received one, for which the term has no gradient.

    mu:          the weight of the contrast (the published code's default; tuned per dataset in the paper, from memory).
    temperature: τ.
    projection:  the size of z behind a 2-layer head between features and classifier (256 as published); 0 leaves it out. Devices
                 then get the largest piece of this larger network that fits their budget.
    averaging, cut: see HeteroAvg.
    weighting:   "samples" (n_k, as published and as FedAvg), or "uniform" as in the published tables of layer-wise averaging.
    """

    weighting: Literal["uniform", "samples"] = "samples"
    mu: NotNegative = 1.0
    temperature: Positive = 0.5
    projection: Whole = 0

    info = Info("baseline", "width or depth: averaged by name, or among equals", "from paper", "B", any_task=True)

    def network(self, world: World) -> Reference:
        """The main network, with a projection head in it where one is set."""
        return (
            world.add_network("moon", projected(world.main.module, self.projection, world.seed))
            if self.projection
            else world.main
        )

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase with the contrast between the received model and the client's previous one."""
        glob = received["weights"]
        both = {"global": glob, "previous": recall(client.memory, "previous", client.reference, client.view, glob)}
        given = {f"{of}/{name}": t for of, weights in both.items() for name, t in weights.items()}
        objective = partial(_contrastive, mu=self.mu, temperature=self.temperature, head=client.reference.taps.head)
        return [client.train.phase(client.round, objective=objective, given=given)]

    def keep(self, client: Client, received: Message) -> None:
        """Keeps the trained network as the previous one of the next round."""
        client.memory = keep(client.memory, "previous", client.reference, client.view, dict(client.weights))


def _contrastive(net: Net, batch: Batch, given: Given, *, mu: float, temperature: float, head: str) -> Tensor:
    logits, z = forward_with_features(net, batch.x, head)
    loss = batch.mean(losses(logits, batch.y))
    near, far = (
        F.cosine_similarity(z, _features(net, batch.x, given, of, head), dim=-1) / temperature for of in ("global", "previous")
    )
    # −log(eⁿ/(eⁿ + eᶠ)) without overflow.
    return loss + mu * batch.mean(F.softplus(far - near))


def _features(net: Net, x: Tensor, given: Given, of: str, head: str) -> Tensor:
    """z under other weights; running statistics are read, not moved."""
    weights = {name.removeprefix(f"{of}/"): t for name, t in given.items() if name.startswith(f"{of}/")}
    net.module.eval()
    try:
        return forward_with_features(net, x, head, weights)[1].detach()
    finally:
        net.module.train()
