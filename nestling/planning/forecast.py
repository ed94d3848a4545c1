"""What a plan takes on a board: RAM by what it is for, and flash. The forecast is the plan; only
the firmware's own part is added."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nestling.errors import unknown
from nestling.planning.arena import aligned
from nestling.planning.descriptor import HEADER_BYTES, OP_BYTES
from nestling.planning.firmware import FIRMWARE, FirmwareSizes
from nestling.planning.lives import FLOAT
from nestling.planning.plan import MemoryPlan

BLOCKS = ("momentum", "anchor", "mask", "target", "present")
"""What a job may need beside weights, gradients and activations; see `plan`."""


@dataclass(frozen=True)
class Footprint:
    """What a plan is made of, so that it can be forecast with other blocks without planning again:
    they only move it along."""

    params: int
    trained: int
    classes: int
    activations: int  # bytes, for one sample
    ops: int


def footprint(plan: MemoryPlan) -> Footprint:
    """The sizes of a plan."""
    header = plan.header
    return Footprint(
        header.params, header.trained, header.classes, plan.parts.get("activations", 0), header.ops
    )


def ram(
    what: MemoryPlan | Footprint, blocks: Iterable[str] = (), firmware: FirmwareSizes = FIRMWARE
) -> dict[str, int]:
    """Where the RAM of a board goes: what the linker hands out when the arena is exactly the
    plan's.

    A plan says itself which blocks it has; to a footprint they are given.
    """
    if isinstance(what, MemoryPlan):
        parts, ops = dict(what.parts), what.header.ops
    else:
        parts, ops = arena_parts(what, blocks), what.ops
    return {
        **parts,
        "descriptor": HEADER_BYTES + OP_BYTES * ops,
        "node": firmware.data,
        "stack": firmware.stack,
    }


def flash(firmware: FirmwareSizes = FIRMWARE) -> int:
    """The flash a board needs beside its data: weights and plan arrive over the link and stay in
    RAM."""
    return firmware.flash


def arena_parts(size: Footprint, blocks: Iterable[str] = ()) -> dict[str, int]:
    """The arena's bytes by what they are for."""
    trained, wanted = FLOAT * size.trained, set(blocks)
    if wanted - set(BLOCKS):
        raise unknown("block", sorted(wanted - set(BLOCKS))[0], BLOCKS, field="blocks")
    extra = {
        "momentum": trained,
        "anchor": trained,
        "mask": aligned(-(-size.trained // 8)),
        "target": FLOAT * size.classes,
        "present": FLOAT * size.classes,
    }
    sizes = {
        "weights": FLOAT * size.params,
        "gradients": trained,
        **{name: extra[name] for name in BLOCKS if name in wanted},
    }
    sizes["activations"] = size.activations
    return {name: count for name, count in sizes.items() if count}
