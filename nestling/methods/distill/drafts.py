"""Drafts: what networks of any kind make of common inputs, and how drafts of unlike shapes are brought together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.methods.api import Reference, State, Tensors, View
from nestling.models.taps import Taps, find_taps, watching
from nestling.training.objectives import Batch, Given, Net

FIRST, LAST, LOGITS = "first", "last", "logits"
Weights = tuple[float, float, float]
"""How much the first maps, the last ones and the logits count."""

MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
"""How a map is resized, by the number of its axes."""


def supplement(place: int) -> str:
    """The name of the draft that a deeper network makes at a place where another one ends."""
    return f"conv {place}"


@lru_cache(maxsize=256)
def taps_of(reference: Reference, view: View) -> Taps:
    """The taps of a view's network: one that is cut in depth has fewer convolutions than its reference."""
    if not view.dropped:
        return reference.taps
    network = reference.network(view)
    there, named = dict(network.named_modules()), getattr(reference.module, "taps", {})
    convs = [name for name in named.get("convs", ()) if name in there]
    return find_taps(network, reference.shape, convs, named.get("head", ""))


@torch.no_grad()
def draw(module: nn.Module, layers: Mapping[str, str], x: Tensor, batch: int = 256) -> State:
    """The drafts of some inputs, in evaluation mode: what layers put out, by the drafts' names, and the logits."""
    module.eval()
    parts = []
    for some in x.split(batch):
        with watching(module, tuple(layers.values())) as seen:
            out = module(some)
        parts.append({**{name: seen[layer] for name, layer in layers.items()}, LOGITS: out})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def drafts_of(module: nn.Module, taps: Taps, depths: Sequence[int], x: Tensor, weights: Weights) -> State:
    """The drafts that a client sends: those that count, and its maps at each depth where another network ends."""
    layers = {FIRST: taps.first} if weights[0] else {}
    if weights[1]:
        layers |= {LAST: taps.last, **{supplement(d): taps.convs[d - 1] for d in depths if d < taps.depth}}
    return {name: t for name, t in draw(module, layers, x).items() if name != LOGITS or weights[2]}


def align(drafts: Tensor, shape: Sequence[int]) -> Tensor:
    """Maps (rows, channels, …) in another shape (channels, …): resized, and channels cut off or filled up with zeros."""
    channels, size = shape[0], tuple(shape[1:])
    maps = drafts[:, :channels]
    if tuple(maps.shape[2:]) != size:
        maps = F.interpolate(maps, size=size, mode=MODES[len(size)], align_corners=False)
    return F.pad(maps, (*[0] * (2 * len(size)), 0, channels - maps.shape[1]))


def aligned_mean(parts: Sequence[tuple[Tensor, int]], shape: Sequence[int], divisor: str) -> Tensor:
    """The mean over clients in one shape; `parts` are sums of equally shaped drafts, each with the number of its clients.

    Divided by "clients", a channel that some do not have shrinks towards 0; divided by "count", it is the mean over those that have
    it, and channels that nobody has are left out.
    """
    total = torch.stack([align(drafts, shape) for drafts, _ in parts]).sum(0)
    if divisor == "clients":
        return total / sum(many for _, many in parts)
    wide = min(shape[0], max(drafts.shape[1] for drafts, _ in parts))
    holders = [sum(many for drafts, many in parts if drafts.shape[1] > channel) for channel in range(wide)]
    counts = torch.tensor(holders, dtype=total.dtype, device=total.device)
    return total[:, :wide] / counts.reshape(1, -1, *[1] * (total.dim() - 2))


@dataclass(frozen=True)
class DraftPool:
    """The drafts of all clients with one network, added up: aligning is linear, so that it can wait until after the sum."""

    depth: int
    clients: int
    sums: State

    @staticmethod
    def of(depth: int, drafts: Sequence[Tensors]) -> DraftPool:
        """The sum, draft by draft, over clients with one network."""
        return DraftPool(depth, len(drafts), {name: torch.stack([d[name] for d in drafts]).sum(0) for name in drafts[0]})

    def at(self, depth: int) -> Tensor:
        """What the network's convolution at this depth put out."""
        return self.sums[LAST if depth == self.depth else supplement(depth)]


def targets(pools: Sequence[DraftPool], depth: int, shapes: Mapping[str, Sequence[int]], divisor: str) -> State:
    """What a network of some depth is to learn: means of all first maps, of the maps at its depth of those that are at least as deep,
    and of all logits, as far as `shapes` names these drafts."""
    found = {}
    if FIRST in shapes:
        found[FIRST] = aligned_mean([(pool.sums[FIRST], pool.clients) for pool in pools], shapes[FIRST], divisor)
    shadow = [(pool.at(depth), pool.clients) for pool in pools if pool.depth >= depth] if LAST in shapes else []
    if shadow:
        found[LAST] = aligned_mean(shadow, shapes[LAST], divisor)
    if LOGITS in shapes:
        found[LOGITS] = torch.stack([pool.sums[LOGITS] for pool in pools]).sum(0) / sum(pool.clients for pool in pools)
    return found


def draft_loss(net: Net, batch: Batch, given: Given, *, layers: tuple[str, str], weights: Weights) -> Tensor:
    """How far the network's drafts of a batch are from the given targets; a draft without a target does not count."""
    maps = [(name, layer, weight) for name, layer, weight in zip((FIRST, LAST), layers, weights, strict=False) if name in given]
    with watching(net.module, [layer for _, layer, _ in maps]) as seen:
        logits = net(batch.x)
    losses = []
    for name, layer, weight in maps:
        target = given[name][batch.rows]
        # Channels that nobody had are not in the target.
        losses.append(weight * batch.mean((seen[layer][:, : target.shape[1]] - target) ** 2))
    if LOGITS in given:
        wanted = F.softmax(given[LOGITS][batch.rows], dim=-1)
        losses.append(weights[2] * batch.mean(-(wanted * F.log_softmax(logits, dim=-1)).sum(-1)))
    return torch.stack(losses).sum()
