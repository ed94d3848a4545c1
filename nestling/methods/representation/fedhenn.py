"""FedHeNN: unlike networks that see the same likenesses between inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from nestling.methods.api import Client, Info, Message, Phases, Replies
from nestling.methods.part import Part
from nestling.methods.public import PublicExchange
from nestling.models.taps import logits_and_features
from nestling.settings import Bounds, NotNegative
from nestling.training.objectives import Batch, Given, Net, supervised

_KERNEL = Part(
    "kernel",
    lambda method, *_: method.known,
    lambda method, client, received: {"kernel": method.kernel(client, received)},
    lambda method, *_: {"kernel": torch.empty(method.asked, method.asked)},
)


@dataclass
class FedHeNN(PublicExchange):
    """FedHeNN (Makhija et al., "Architecture Agnostic Federated Learning for Neural Networks", ICML 2022).

    Idea: features of unlike networks cannot be compared, but what each finds alike among the same inputs can. Clients pull the kernel
    of their features on a set of public inputs, the RAD, towards the mean of all clients' kernels, and keep their networks.
    Loss: cross-entropy + η_t·(1 − CKA(K̄, K)), K = A·Aᵀ of what the last linear layer is given for the RAD, CKA with both kernels
    centred, η_t = η₀·√t. Every step passes the whole RAD through the network, which the device's memory budget does not count. In a
    client's rounds before there is a mean kernel: cross-entropy.
    Travels: a kernel up and the mean kernel down (N_rad × N_rad each). Merge: the mean kernel, plain. There is no global model.
    Differs from the paper: the RAD are public inputs, where the released code takes training images of all clients. It is drawn anew
    for every round, and clients send their kernels on it at the end of the round before (see `PublicExchange`). Running statistics,
    in networks that have them, are read on the RAD and not moved.
    We could not make it pay: clients' kernels become alike, and their accuracy stays where it is (docs/results.md).

    align: N_rad, the public inputs of the RAD (1000 in the released code, all where there are fewer).
    eta:   η₀ (0.01 in the released code; the paper's grid is 0.001 to 1, from memory).
    """

    align: Annotated[int, Bounds(2)] = 1000  # fewer make no kernel
    eta: NotNegative = 0.01

    info = Info.of_own_networks(
        "representation", "any: only kernels travel", "official code read", "D", "public inputs on every client, unlabelled"
    )
    parts = (_KERNEL,)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def merge(self, replies: Replies, round: int) -> None:
        """The plain mean of the clients' kernels."""
        if replies:
            first, *others = (reply.message["kernel"]["kernel"] for reply in replies)
            self.know({"kernel": sum(others, first) / len(replies)}, round)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Phases:
        """Local training, with the distance of kernels once there is a mean kernel."""
        if "kernel" not in received:
            return [client.train.phase(client.round)]
        assert client.public is not None
        given = {
            "kernel": received["kernel"]["kernel"],
            "public": client.public,
            "rad": self.rows(client, received),
            # A tensor, so that the same work is known as the same in every round.
            "eta": torch.tensor(self.eta * math.sqrt(client.round), device=client.place),
        }
        objective = partial(_alike, head=client.reference.taps.head)
        return [client.train.phase(client.round, objective=objective, given=given)]

    @torch.no_grad()
    def kernel(self, client: Client, received: Message) -> Tensor:
        """The client's kernel on the inputs of the next round."""
        module = client.reference.network(client.view, client.weights).eval()
        seen = [
            logits_and_features(module, client.reference.taps.head, part)[1] for part in self.inputs(client, received).split(256)
        ]
        return linear_kernel(torch.cat(seen))


def linear_kernel(seen: Tensor) -> Tensor:
    """How alike a network finds every two inputs: the scalar products of their features."""
    return seen @ seen.T


def cka(one: Tensor, other: Tensor) -> Tensor:
    """Centred kernel alignment: 1 for kernels that differ in scale and in what is common to all inputs only."""
    one, other = centred(one), centred(other)
    return (one * other).sum() / (_norm(one) * _norm(other))


def centred(kernel: Tensor) -> Tensor:
    """H·K·H: the kernel of features whose mean is taken off."""
    rows = kernel - kernel.mean(0, keepdim=True)
    return rows - rows.mean(1, keepdim=True)


def _norm(kernel: Tensor) -> Tensor:
    # A network that puts out the same for every input has a norm of 0, where a root has no gradient.
    return kernel.square().sum().clamp_min(1e-12).sqrt()


def _alike(net: Net, batch: Batch, given: Given, *, head: str) -> Tensor:
    loss = supervised(net, batch, given)
    net.module.eval()
    try:
        seen = logits_and_features(net.module, head, given["public"][given["rad"]])[1]
    finally:
        net.module.train()
    return loss + given["eta"] * (1 - cka(given["kernel"], linear_kernel(seen)))
