"""Views of a network from shallow to deep.

Two kinds of network can be cut in depth. One with early exits keeps its first stages and their
heads. A residual one keeps the first blocks of every stage: a block that is left out hands its
input on, which is what it would do with all its weights at zero, and that is also how such blocks
are found, in any network.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.exits import ExitNet
from nestling.models.record import input_dtype
from nestling.views.reference import Reference
from nestling.views.view import View, without


def depth_views(
    reference: Reference, family: Sequence[Sequence[int]] = (), *, exits: str = "all"
) -> list[View]:
    """The depths of a network as views, the shallowest first; the last one is the deepest.

    family: how many units each view keeps in every column (see `columns`); empty for the usual one:
            every depth of a network with exits; for a residual one a block more in the later half
            of the stages, then in all of them, and so on: [1,1,1,1], [1,1,2,2], [2,2,2,2], …
    exits:  which heads a view of a network with exits has: "all" up to its depth, or only its
            "last".
    """
    found = columns(reference)
    chosen = [_checked(counts, found) for counts in family] or _usual(found)
    return [
        without(reference.full, _left_out(reference, found, counts, exits)) for counts in chosen
    ]


def columns(reference: Reference) -> list[list[str]]:
    """The units that depth is counted in, by name: one column of all stages for a network with
    exits, a column of blocks for every stage of a residual one. Cutting a column short leaves a
    network that works."""
    if isinstance(reference.module, ExitNet):
        return [[f"stages.{number}" for number in range(len(reference.module.stages))]]
    found = residual_stages(reference)
    if not any(len(blocks) > 1 for blocks in found):
        raise InputError(
            "the network cannot be cut in depth: it has neither early exits nor a stage of "
            "several residual blocks",
            field="model.name",
            fix="use one with exits (tinyexits, exitcnn, exitresnet) or a residual one "
            "(tinyresnet, resnet14, resnet18, …)",
        )
    return found


def kept(view: View, column: Sequence[str]) -> int:
    """How many units of a column a view has."""
    return sum(unit not in view.dropped for unit in column)


def residual_stages(reference: Reference) -> list[list[str]]:
    """The blocks of every residual stage, by name. A stage begins where a block is no plain
    addition to what came before it."""
    module = copy.deepcopy(reference.module).to("cpu").eval()
    inputs = _inputs(module, reference.shape)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    adds = {part for part, x in inputs.items() if _hands_on(part, x)}
    kinds = {type(part) for part in adds}
    stages: list[list[str]] = []
    for name, container in module.named_modules():
        parts = dict(container.named_children())
        if (
            not isinstance(container, (nn.Sequential, nn.ModuleList))
            or not {type(part) for part in parts.values()} <= kinds
        ):
            continue
        for number, (child, part) in enumerate(parts.items()):
            if number == 0 or part not in adds:
                stages.append([])
            stages[-1].append(f"{name}.{child}" if name else child)
    return stages


def _inputs(module: nn.Module, shape: tuple[int, ...]) -> dict[nn.Module, Tensor]:
    """What every part of the network is given."""
    seen: dict[nn.Module, Tensor] = {}

    def hook(part: nn.Module, given: tuple[object, ...]) -> None:
        if len(given) == 1 and isinstance(given[0], Tensor):
            # A block behind an activation function sees no negative values.
            seen[part] = given[0].detach().abs()

    handles = [part.register_forward_pre_hook(hook) for part in module.modules()]
    x = torch.linspace(0.1, 1.0, 2 * int(torch.Size(shape).numel())).reshape(2, *shape)
    if not input_dtype(module).is_floating_point:
        x = torch.zeros(2, *shape, dtype=input_dtype(module))  # a token id that there always is
    with torch.no_grad():
        module(x)
    for handle in handles:
        handle.remove()
    return seen


def _hands_on(block: nn.Module, x: Tensor) -> bool:
    """Whether the block, its weights at zero, is the identity."""
    if (
        isinstance(block, nn.Sequential)
        or not list(block.children())
        or not list(block.parameters())
    ):
        return False
    with torch.no_grad():
        out = block(x)
    return isinstance(out, Tensor) and out.shape == x.shape and torch.equal(out, x)


def _usual(found: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    sizes = [len(column) for column in found]
    if len(sizes) == 1:
        return [(depth,) for depth in range(1, sizes[0] + 1)]
    later = len(sizes) // 2
    steps = [(depth, depth) for depth in range(1, max(sizes) + 1)]
    halves = [pair for first, second in steps for pair in ((first - 1, second), (first, second))][
        1:
    ]
    family = [
        tuple(min(b if n >= later else a, size) for n, size in enumerate(sizes)) for a, b in halves
    ]
    return list(dict.fromkeys(family))


def _checked(counts: Sequence[int], found: Sequence[Sequence[str]]) -> tuple[int, ...]:
    sizes = [len(column) for column in found]
    if len(counts) != len(sizes) or any(
        not 1 <= count <= size for count, size in zip(counts, sizes, strict=False)
    ):
        raise InputError(
            f"{list(counts)} is no depth of the network",
            field="model.name",
            fix=f"give 1 to {sizes}, one number for every stage",
        )
    return tuple(counts)


def _left_out(
    reference: Reference, found: Sequence[Sequence[str]], counts: Sequence[int], exits: str
) -> list[str]:
    units = [unit for column, count in zip(found, counts, strict=True) for unit in column[count:]]
    if not isinstance(reference.module, ExitNet):
        return units
    depth, most = counts[0], len(reference.module.heads)
    heads = [n for n in range(most) if n >= depth or (exits == "last" and n < depth - 1)]
    return units + [f"heads.{number}" for number in heads]
