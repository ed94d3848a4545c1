"""A network that travels in few factors: the singular components of its matrices that hold most of their energy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestling.methods.api import InputError, Message, Piece, State, Tensors
from nestling.methods.distill.pair import MEME

LEFT, RIGHT = "left", "right"


@dataclass(frozen=True)
class Ranked(Piece):
    """A piece, and in how many components a reply has each tensor of the shared network (0: as it is)."""

    ranks: tuple[int, ...] = ()


@torch.no_grad()
def factored(state: Tensors, energy: float, facts: Mapping[str, Any]) -> Message:
    """A state as it travels: matrices by the components that hold a share of their energy, where these are fewer numbers. The facts
    also say in how many, one number per tensor in the order of names (0: as it is)."""
    parts: dict[str, dict[str, Tensor]] = {}
    ranks: list[int] = []
    for name, tensor in sorted(state.items()):
        factors = _components(tensor.flatten(1), energy) if tensor.dim() > 1 and energy < 1 else None
        ranks.append(factors[0].shape[1] if factors else 0)
        for kind, part in zip((LEFT, RIGHT), factors, strict=True) if factors else [(MEME, tensor)]:
            parts.setdefault(kind, {})[name] = part
    return Message(parts, {**facts, "ranks": ranks})


def _components(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    left, values, right = torch.linalg.svd(matrix.to(torch.float64), full_matrices=False)
    held = values.square().cumsum(0)
    rank = int((held < energy * held[-1]).sum()) + 1
    if rank * sum(matrix.shape) >= matrix.numel():
        return None
    return (left[:, :rank] * values[:rank]).to(matrix.dtype), right[:rank].to(matrix.dtype).contiguous()


def whole(message: Message, like: Tensors) -> State:
    """The state that a message's factors make, in the shapes of another one."""
    left, right = message.parts.get(LEFT, {}), message.parts.get(RIGHT, {})
    return {n: (left[n] @ right[n]).reshape(t.shape) if n in left else message[MEME][n] for n, t in like.items()}


def ranks_of(facts: Mapping[str, Any], state: Tensors) -> tuple[int, ...]:
    """In how many components a client says that it sends each tensor of a state; refuses what the tensors cannot have."""
    told: Any = facts.get("ranks")
    most = [min(tensor.flatten(1).shape) if tensor.dim() > 1 else 0 for _, tensor in sorted(state.items())]
    counted = isinstance(told, list) and len(told) == len(most)
    if not counted or not all(type(rank) is int and 0 <= rank <= limit for rank, limit in zip(told, most, strict=True)):
        raise InputError(f"the ranks told of are {str(told)[:60]!r}, none that the shared network's matrices have")
    return tuple(told)


def factors_like(state: Tensors, ranks: Sequence[int]) -> dict[str, dict[str, Tensor]]:
    """Tensors like those that a state travels in, with this many components for each."""
    like: dict[str, dict[str, Tensor]] = {}
    for rank, (name, tensor) in zip(ranks, sorted(state.items()), strict=True):
        if rank:
            rows, columns = tensor.flatten(1).shape
            like.setdefault(LEFT, {})[name] = tensor.new_empty(rows, rank, device="meta")
            like.setdefault(RIGHT, {})[name] = tensor.new_empty(rank, columns, device="meta")
        else:
            like.setdefault(MEME, {})[name] = tensor
    return like
