"""Instructions that a board executes, counted in emulation, and what they would take on silicon.

The count is exact and repeatable. Everything made from it is an estimate: QEMU models no pipeline,
wait states or cache.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from nestling.devices.catalogue import Figure, device
from nestling.errors import InputError
from nestling.tiny.boards.emulator import emulator
from nestling.tiny.boards.table import Board, board
from nestling.tiny.link.line import BoardLine
from nestling.tiny.link.session import Session, connect
from nestling.tiny.runtime.job import Job

PLAIN = 1.82
"""Cycles per instruction of the training loops on a Cortex-M4F: 1.76 to 1.87 over three networks,
by the costs of ARM's manual for each class of instruction. The same is taken for the cores without
an FPU."""

CYCLES_PER_INSTRUCTION = {
    "cortex-m0": PLAIN,
    "cortex-m3": PLAIN,
    "cortex-m4": PLAIN,
    # Two instructions at a time where possible: MLPerf Tiny measured 0.36 fp32 MACs per cycle on a
    # Cortex-M7, 0.17 on an M4F.
    "cortex-m7": PLAIN * 0.17 / 0.36,
}
NANOSECOND = 1e-9


@dataclass(frozen=True)
class RoundCost:
    """A round on a device; every figure is an estimate."""

    instructions: int
    compute_s: Figure
    link_s: Figure
    energy_j: Figure


def instructions(name: str | Board, job: Job, blob: bytes, shift: int = 0) -> int:
    """How many instructions a board executes to train a job (not to receive and send it).

    A tick of the board's clock is 1/clock_hz seconds and an instruction 2^shift nanoseconds; each
    frame of samples may be out by a tick. With a `shift` at which an instruction is more than two
    ticks the count of one frame is exact, but a sample must stay under 2^24 ticks.
    """
    wanted = board(name) if isinstance(name, str) else name
    if wanted.machine is None:
        raise InputError(
            f"{wanted.name} has no clock that counts instructions",
            field="board",
            fix="take a board of QEMU's",
        )
    with (
        tempfile.TemporaryDirectory(prefix="nst") as folder,
        emulator(wanted, blob, Path(folder) / "board", shift) as running,
    ):
        session = Session(BoardLine(connect(running.transport)))
        try:
            session.run(job)
        finally:
            session.close()
    return counted(wanted, session.notes.ticks, shift)


def counted(wanted: Board, ticks: int, shift: int = 0) -> int:
    """The instructions that so many ticks of a board's clock stand for."""
    return round(ticks / (wanted.clock_hz * NANOSECOND * 2**shift))


def round_cost(
    name: str | Board, count: int, bytes_down: int = 0, bytes_up: int = 0, slowdown: float = 1.0
) -> RoundCost:
    """What a round of `count` instructions takes on the catalogue's device of a board, with what it
    receives and sends."""
    wanted = board(name) if isinstance(name, str) else name
    profile = device(wanted.device)
    each = CYCLES_PER_INSTRUCTION[wanted.core]
    compute = count * each / float(profile.clock_hz) * slowdown
    link = 8 * (bytes_down / float(profile.down_bps) + bytes_up / float(profile.up_bps)) * slowdown
    energy = compute * float(profile.power_w) + link * float(profile.radio_w)
    basis = (
        f"{count} instructions x {each:.2f} cycles at {float(profile.clock_hz) / 1e6:g} MHz "
        f"({profile.title})"
    )
    line = f"{bytes_down} bytes down, {bytes_up} up"
    power = (
        f"{float(profile.power_w) * 1e3:g} mW at work, {float(profile.radio_w) * 1e3:g} mW "
        "on the link"
    )
    return RoundCost(
        count, _estimate(compute, basis), _estimate(link, line), _estimate(energy, power)
    )


def _estimate(value: float, note: str) -> Figure:
    return Figure(value, "estimate", note)
