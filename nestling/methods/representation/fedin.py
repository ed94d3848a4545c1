"""FedIN: clients learn from each other's pairs of intermediate features."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.methods.api import Client, Device, Info, Message, Phases, Piece, Replies, State, Tensors, World, made, require
from nestling.methods.baselines.averaged import Averaged, parameters_of
from nestling.methods.part import WEIGHTS, Part
from nestling.methods.representation.feature_noise import FeatureNoise, noise_key, noisy
from nestling.seeds import stream
from nestling.settings import Count, NotNegative
from nestling.training.objectives import Batch, Given, Net, Objective, proximal, supervised
from nestling.views.middle import Middle, features, middle_of, through

_PAIRS = Part(
    "pairs",
    lambda method, device, piece, round: method.drawn(device, piece, round),
    lambda method, client, _: method.own_pairs(client),
    lambda method, piece, _: method.pairs_like(piece),
    lambda method: method.exchange,
)


@dataclass
class FedIN(Averaged):
    """FedIN (Chan et al., "FedIN: Federated Intermediate Layers Learning for Model Heterogeneity").

    Idea: networks of unequal depth agree on what enters their stages (s_in, behind the stem) and what leaves them (s_out, what the
    classifier is given). A client sends one batch of such pairs of its own, gets one of somebody else, and also learns to turn that
    s_in into that s_out: it learns of foreign data without seeing any.
    Loss: G_local = ∇[cross-entropy + μ·‖w − w_received‖²]; G_IN = ∇ mean squared error of f_middle(s_in) against s_out, which only
    the layers in the middle have. These move along Z (`rule`), all others along G_local. Travels: the client's piece and one batch
    of pairs, both ways; in the first round nobody has any yet. The server keeps the newest batch of each of the clients heard last.
    Merge: as HeteroAvg; without exchange and with mu = 0 it is HeteroAvg.
    Differs from the paper: no code was released; how pairs are pooled and drawn, the granularity of σ (here per tensor) and how
    features for sending are normalised (here by their own batch, as in training) are our choice. The middle's second pass normalises
    by the batch of pairs and moves no running statistics; a device's memory budget does not count it.

    averaging, cut, weighting: see HeteroAvg. Pairs go only to networks of the same shapes; a cut in width changes these, so it needs
              averaging = "group".
    exchange: whether pairs are sent and learned from ("w/o IN" when false).
    mu:       the pull towards the received weights; it multiplies the squared norm (FedProx's is half of that).
    rule:     "simplified": Z = G_IN + λ/2·G_local; "exact" (eq. 12): Z = G_IN where ⟨G_IN, G_local⟩ ≥ 0, else G_IN less its part
              along G_local, which drops the local loss where both agree; "sum": Z = G_IN + G_local ("w/o Opt", as we read it).
    lam:      λ of the simplified rule.
    batch:    pairs in a batch.
    pool:     the most batches that the server keeps.
    noise:    the standard deviation of what is added to s_in and s_out, as a multiple of theirs (published: 0.8); 0 for none.
    noise_in: where: "training" (in the client's forward passes, and so in what it sends) or only in the "message".
    entry:    the layer whose input is s_in (empty: the first stage, or the first repeated block).
    """

    cut: Literal["width", "depth"] = "depth"
    exchange: bool = True
    mu: NotNegative = 0.05
    rule: Literal["simplified", "exact", "sum"] = "simplified"
    lam: NotNegative = 1.0
    batch: Count = 16
    pool: Count = 100
    noise: NotNegative = 0.0
    noise_in: Literal["training", "message"] = "training"
    entry: str = ""

    pairs: list[tuple[int, State]] = made()

    info = Info(
        "representation", "depth: averaged by name, or among equals", "from paper", "B", model="tinyresnet", any_task=True
    )
    parts = (WEIGHTS, _PAIRS)

    def __post_init__(self) -> None:
        """Checks the settings; pairs cannot pass between unequal widths."""
        super().__post_init__()
        fix = 'use cut = "depth", or averaging = "group"'
        shared = self.cut == "depth" or self.averaging == "group" or not self.exchange
        require(shared, "networks of unequal width have features of unequal size", "method.cut", fix)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """HeteroAvg's state and an empty pool of pairs, whose features must have one shape unless averaged by group."""
        super().setup(world)
        self.pairs = []
        if not self.exchange:
            return
        pieces = self._ladder.pieces if self._ladder else [plan.piece for plan in world.plans.values()]
        shapes = {(middle.before, middle.after) for middle in map(self._middle, pieces)}
        require(
            self.averaging == "group" or len(shapes) < 2,
            f"FedIN exchanges features, and {self.reference.name} has others in every depth: {sorted(shapes)}",
            "model.name",
            'take a residual network (tinyresnet, resnet18, …), or method.averaging = "group"',
        )

    def _middle(self, of: Piece | Client) -> Middle:
        return middle_of(of.reference, of.view, self.entry)

    def alike(self, device: Device, piece: Piece) -> Hashable | None:
        """Once there are pairs, every device draws its own."""
        return None if self.pairs else super().alike(device, piece)

    def drawn(self, device: Device, piece: Piece, round: int) -> State:
        """Pairs that fit the piece, of another client if there are any."""
        wanted = self.pairs_like(piece)
        fitting = [(owner, pair) for owner, pair in self.pairs if all(pair[n].shape == t.shape for n, t in wanted.items())]
        chosen = [pair for owner, pair in fitting if owner != device.id] or [pair for _, pair in fitting]
        return chosen[stream(self.world.seed, "pairs", device.id, round).integers(len(chosen))] if chosen else {}

    def pairs_like(self, piece: Piece) -> State:
        """What pairs of a piece look like."""
        middle = self._middle(piece)
        return {n: torch.empty(self.batch, *s, device="meta") for n, s in (("in", middle.before), ("out", middle.after))}

    def merge(self, replies: Replies, round: int) -> None:
        """HeteroAvg's merge; the newest pairs of each client that answered go to the end of the pool."""
        super().merge(replies, round)
        if self.exchange:
            heard = {reply.device.id: {n: t.clone() for n, t in reply.message["pairs"].items()} for reply in replies}
            older = [(owner, pair) for owner, pair in self.pairs if owner not in heard]
            self.pairs = [*older, *heard.items()][-self.pool :]

    def state(self) -> dict[str, State]:
        """HeteroAvg's state, and the pool of pairs."""
        # By number: pairs are drawn by their order, and a checkpoint does not keep that of names.
        return {**super().state(), **{f"pairs {number} {owner}": pair for number, (owner, pair) in enumerate(self.pairs)}}

    def restore(self, state: Mapping[str, State]) -> None:
        """Puts HeteroAvg's state back, and the pool of pairs in its order."""
        super().restore(state)
        found = {name: [int(n) for n in name.split()[1:]] for name in state if name.startswith("pairs ")}
        self.pairs = [(found[name][1], dict(state[name])) for name in sorted(found, key=found.__getitem__)]

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Phases:
        """Local training, with proximal term and noise as set, and the term of the received pairs if there are any."""
        objective: Objective = partial(proximal, mu=2 * self.mu) if self.mu else supervised
        given = parameters_of(client, received["weights"]) if self.mu else {}
        changes: dict[str, object] = {}
        if self.noise and self.noise_in == "training":
            middle = self._middle(client)
            objective = partial(noisy, objective=objective, entry=middle.entry, head=middle.head, amount=self.noise)
            given = {**given, "noise": noise_key(client, "features")}
        if "pairs" in received:
            middle = self._middle(client)
            given = {**given, **{f"pairs/{n}": t for n, t in received["pairs"].items()}}
            along = 1.0 if self.rule == "sum" else self.lam / 2 if self.rule == "simplified" else None
            changes["also"] = partial(_matching, entry=middle.entry, head=middle.head, shape=client.reference.shape)
            changes["rule"] = partial(_joined, along=along, middle=middle.parameters)
        return [client.train.phase(client.round, objective=objective, given=given, **changes)]

    @torch.no_grad()
    def own_pairs(self, client: Client) -> State:
        """One batch of what enters and leaves the middle of the client's network; rows repeat where it has too few."""
        if not client.samples:
            return {}
        order = stream(client.site.seed, "rows of pairs", client.id, client.round).permutation(client.samples)
        rows = torch.from_numpy(client.rows[np.resize(order, self.batch)]).to(client.place)
        middle, module = self._middle(client), client.reference.network(client.view, client.weights).train()
        change = FeatureNoise(noise_key(client, "pairs"), 0, self.noise) if self.noise else None
        within = change if self.noise_in == "training" else None
        pair = features(module, middle.entry, middle.head, client.site.x[rows], within)
        if change is not None and within is None:
            pair = change(pair[0]), change(pair[1])
        return {"in": pair[0].clone(), "out": pair[1].clone()}


def _matching(net: Net, _batch: Batch, given: Given, *, entry: str, head: str, shape: tuple[int, ...]) -> Tensor:
    """How far the middle is from turning the given s_in into the given s_out."""
    return F.mse_loss(through(net.module, entry, head, given["pairs/in"], shape), given["pairs/out"])


def _joined(_params: Tensors, grads: Tensors, given: Given, *, along: float | None, middle: tuple[str, ...]) -> Tensors:
    """Z = G_IN + along·G_local for the middle's parameters; without `along` it is found as eq. 12 says."""
    inner = {name: given[f"also/{name}"] for name in middle if name in grads}
    share: Tensor | float = _against(inner, grads) if along is None else along
    return {name: inner[name] + share * grad if name in inner else grad for name, grad in grads.items()}


def _against(inner: Tensors, grads: Tensors) -> Tensor:
    """−b/a where b = ⟨G_IN, G_local⟩ is negative, else 0; a = ‖G_local‖²."""
    b = torch.stack([(grad * grads[name]).sum() for name, grad in inner.items()]).sum()
    a = torch.stack([grads[name].square().sum() for name in inner]).sum()
    return torch.where(b < 0, -b / torch.where(a > 0, a, 1.0), torch.zeros_like(b))
