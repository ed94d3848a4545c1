"""What the server does with weights: how it merges them, an optimiser of its own, and the mean of its last models.

Whatever a method makes of a round, the difference between its weights before and after is a gradient to the server's optimiser
(Reddi et al., "Adaptive Federated Optimization", ICLR 2021). It moves what counted in the round and nothing else: an entry that
nobody held keeps its value and its moments, so that momentum never carries a weight on which nobody has trained since. Buffers
(batch statistics) are no weights: they are merged and left at that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
from torch import Tensor

from nestling.errors import InputError
from nestling.methods import METHODS, method_class
from nestling.methods.method import Method, Replies, Share
from nestling.schema import require
from nestling.settings import Bounds, NotNegative, OneOf, Positive, ShareBelowOne, UnitShare, Whole
from nestling.trust.robust import RULES, Robust
from nestling.views import State
from nestling.views.flat import Layout, Packed, flat_of, layout_of
from nestling.views.merge import counted

RATES = {"momentum": 1.0, "adam": 0.01, "yogi": 0.01, "adagrad": 0.1}
"""The optimisers, each with its own learning rate."""

KEPT = "server:"
"""How the names of what is kept begin, among those of a method's state."""

Kept = dict[str, State]
"""Moments ("server:first:", "server:second:") and last models ("server:0:", the newest, "server:1:", …) of every group of weights."""


@dataclass(frozen=True)
class Server:
    """What the server does with merged weights, for methods that keep shared ones.

    merge:     how weights are merged: "mean" (as the method has it), or by a rule that bears some clients that lie: "clipped",
               "median", "trimmed", "krum" or "aligned" (docs/trust.md). Under a rule every reply counts alike, whatever rows it claims.
    trim:      the share of clients that "trimmed" leaves out at each end, and "krum" altogether: rounded down, at least one.
    optimizer: "none" (the merged weights are the new ones), "momentum" (FedAvgM), "adam", "yogi" or "adagrad" (FedAdam, FedYogi,
               FedAdagrad, as published without bias correction).
    lr:        its learning rate (0: 1 for momentum, 0.01 for adam and yogi, 0.1 for adagrad).
    momentum:  of "momentum".
    betas:     of "adam" and "yogi": how much of the first and of the second moment stays; "adagrad" keeps no first one.
    tau:       how adaptive "adam", "yogi" and "adagrad" are: less, the larger it is. The second moment starts at its square.
    average:   what is tested, reported and exported is the mean of the models of so many last rounds (0 or 1: the last one alone).
               Training goes on from the last one in any case.
    gate:      how many times its smallest loss so far the global model's loss on the public rows may be (0: no gate): beyond that the
               server goes back to the state that had the smallest. Needs labelled public rows (`split.public`).
    most_rows: a client counts as at most so many rows in a merge, whatever it says it has (0: no cap, but on a fleet of real devices
               2**20, see `MOST_DECLARED`).
    most_share: of the weight of an entry, or of a round's rows, that one client may have in a mean, if enough clients hold it (0: any,
               but on a fleet of real devices 0.5; 1: any). Where too few do, they count alike. Of what is said of a class only if set.
    most_step: how many times the median step of the last replies a client's step may be long (0: any length, but on a fleet of real
               devices 10, which 1e9 undoes). Longer ones are scaled down to that, and said by name.
    good:      how many of the last states that passed the gate are kept in the run folder, under `good/` (0: none).
    """

    optimizer: Annotated[str, OneOf(("none", *RATES))] = "none"
    lr: NotNegative = 0.0
    momentum: ShareBelowOne = 0.9
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.99)
    tau: Positive = 1e-3
    average: Whole = 0
    merge: Annotated[str, OneOf(("mean", *RULES))] = "mean"
    trim: Annotated[float, Bounds(0, 0.5, open_low=True, open_high=True)] = 0.2
    most_rows: Whole = 0
    gate: Annotated[float, Bounds(1, open_low=True, zero="no gate")] = 0.0
    most_share: UnitShare = 0.0
    most_step: Annotated[float, Bounds(1, zero="any length, or the fleet's own bound")] = 0.0
    good: Annotated[int, Bounds(0, zero="none")] = 0

    def __post_init__(self) -> None:
        """Refuses unknown optimisers and numbers out of range."""
        ways = f"allowed: mean, {', '.join(RULES)}"
        require(self.merge in ("mean", *RULES), f"unknown way to merge {self.merge!r}", "server.merge", ways)
        require(0 < self.trim < 0.5, "must be above 0 and below 0.5", "server.trim")
        allowed = f"allowed: none, {', '.join(RATES)}"
        require(self.optimizer in ("none", *RATES), f"unknown optimiser {self.optimizer!r}", "server.optimizer", allowed)
        require(self.lr >= 0, "must not be negative (0: the optimiser's own)", "server.lr")
        require(0 <= self.momentum < 1, "must be in [0, 1)", "server.momentum")
        require(all(0 <= beta < 1 for beta in self.betas), "must be in [0, 1)", "server.betas")
        require(self.tau > 0, "must be above 0", "server.tau")
        require(self.average >= 0, "must not be negative (0: the last model alone)", "server.average")
        require(self.most_rows >= 0, "must not be negative (0: no cap)", "server.most_rows")
        require(not self.gate or self.gate > 1, "must be above 1 (0: no gate)", "server.gate")
        require(0 <= self.most_share <= 1, "must be in [0, 1] (1: no bound)", "server.most_share")
        free = "must be 0 (no bound, or the fleet's own), or at least 1"
        require(self.most_step == 0 or self.most_step >= 1, free, "server.most_step")
        require(self.good >= 0, "must not be negative (0: none is kept)", "server.good")
        require(not self.good or self.gate > 0, "no state is good without a gate", "server.good", "set server.gate too")

    @property
    def optimises(self) -> bool:
        """Whether an optimiser moves the weights after a merge."""
        return self.optimizer != "none"

    @property
    def averages(self) -> bool:
        """Whether the mean of several last models is tested."""
        return self.average > 1

    @property
    def robust(self) -> Robust | None:
        """The rule that takes the place of the mean, if any."""
        return None if self.merge == "mean" else Robust(self.merge, self.trim)

    def check(self, method: Method) -> None:
        """Refuses methods of which the server keeps no shared weights."""
        if self.merge != "mean" and not (method.shares_weights or method.by_rule):
            sharing = [
                name for name, own in ((name, method_class(name)) for name in METHODS) if own.shares_weights or own.by_rule
            ]
            raise InputError(
                f"{method.as_set.title} keeps no shared weights on the server, nor statistics that a rule could merge",
                field="server.merge",
                fix=f'set server.merge = "mean", or take a method that does: {", ".join(sharing)}',
            )
        require(
            not self.gate or method.as_set.global_model,
            f"{method.as_set.title} has no global model that could be tested",
            "server.gate",
            "set server.gate = 0, or take a method with a global model",
        )
        for on, field, off in ((self.optimises, "optimizer", '"none"'), (self.averages, "average", "0")):
            require(
                method.shares_weights or not on,
                f"{method.as_set.title} keeps no shared weights on the server",
                f"server.{field}",
                f"set server.{field} = {off}, or take a method that does: fedavg, heterofl, shared-average, …",
            )


def merge_round(server: Server, method: Method, replies: Replies, round: int, kept: Kept) -> Kept:
    """Has the method merge a round, and the server do its own part; gives what the server keeps from now on."""
    shares = method.shares(replies) if server.optimises else {}
    merges = method.robust.merges if method.robust else 0
    method.merge(replies, round)
    if method.robust and replies and method.robust.merges == merges:
        said = f"{method.as_set.title} merges weights in a way of its own"
        raise InputError(said, field="server.merge", fix='let its merge use `self.fuse`, or set server.merge = "mean"')
    if shares:
        kept = _optimise(server, method, shares, kept)
    return _remember(server.average, method, kept) if server.averages else kept


def shown(server: Server, method: Method, kept: Kept) -> Method:
    """The method as it is to be tested: with the mean of its last models, where that is wanted."""
    ages = [_of(kept, str(age)) for age in range(server.average if server.averages else 0)]
    if not any(ages):
        return method
    seen = copy.copy(method)
    seen.take_weights({group: _mean([models[group] for models in ages if group in models]) for group in ages[0]})
    return seen


def step(
    server: Server, old: Tensor, new: Tensor, first: Tensor, second: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights and both moments after a step from `old`, where the merge led to `new`. Where nothing `counts` the weights are the
    merged ones and the moments wait."""
    gradient = old - new
    if server.optimizer == "momentum":
        way = first_new = server.momentum * first + gradient
        second_new = second
    else:
        one, two = (0.0, 0.0) if server.optimizer == "adagrad" else server.betas
        first_new = one * first + (1 - one) * gradient
        second_new = _second(server.optimizer, second, gradient.square(), two)
        way = first_new / (second_new.sqrt() + server.tau)
    moved = old - (server.lr or RATES[server.optimizer]) * way
    return (
        torch.where(counts, moved, new),
        torch.where(counts, first_new, first),
        torch.where(counts, second_new, second),
    )


def _second(optimizer: str, second: Tensor, square: Tensor, beta: float) -> Tensor:
    if optimizer == "adagrad":
        return second + square
    if optimizer == "yogi":
        return second - (1 - beta) * square * torch.sign(second - square)
    return beta * second + (1 - beta) * square


def _optimise(server: Server, method: Method, shares: Mapping[str, Share], kept: Kept) -> Kept:
    merged, moved, moments = method.shared_weights(), {}, {}
    for group, share in shares.items():
        new, layout = merged[group], layout_of(merged[group])
        flat = flat_of(new, layout)
        names = (f"{KEPT}first:{group}", f"{KEPT}second:{group}")
        before = [
            flat_of(kept[name], layout) if name in kept else torch.full_like(flat, start)
            for name, start in zip(names, (0.0, server.tau**2), strict=True)
        ]
        counts = counted(share.weights, share.given) & _flags(layout, share.trained, flat.device)
        weights, *after = step(server, flat_of(share.weights, layout), flat, before[0], before[1], counts)
        moved[group] = Packed(layout, weights, {name: new[name] for name in layout.others})
        moments.update({name: Packed(layout, moment) for name, moment in zip(names, after, strict=True)})
    method.take_weights(moved)
    return {**kept, **moments}


@lru_cache(maxsize=64)
def _flags(layout: Layout, trained: frozenset[str], device: torch.device) -> Tensor:
    """Which entries of a flat state belong to parameters."""
    flags = torch.tensor([name in trained for name in layout.names], dtype=torch.bool)
    return flags.repeat_interleave(torch.tensor(layout.sizes)).to(device)


def _remember(count: int, method: Method, kept: Kept) -> Kept:
    older = {f"{KEPT}{age + 1}:{group}": s for age in range(count - 1) for group, s in _of(kept, str(age)).items()}
    return {**kept, **older, **{f"{KEPT}0:{group}": state for group, state in method.shared_weights().items()}}


def _of(kept: Kept, kind: str) -> dict[str, State]:
    """What is kept of one kind, by group."""
    start = f"{KEPT}{kind}:"
    return {name.removeprefix(start): state for name, state in kept.items() if name.startswith(start)}


def _mean(states: Sequence[State]) -> State:
    """The mean of some states; what is no float32 (counters) is that of the first, the newest."""
    layout = layout_of(states[0])
    total = sum((flat_of(state, layout).double() for state in states[1:]), flat_of(states[0], layout).double())
    return Packed(layout, (total / len(states)).float(), {name: states[0][name] for name in layout.others})
