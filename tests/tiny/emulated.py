"""Emulated boards in tests: what is missing for them, small jobs that fit them, and a session with
one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nestling.planning.descriptor import DescriptorSettings
from nestling.planning.plan import plan
from nestling.tiny.boards import table as boards
from nestling.tiny.boards.emulator import Emulator, emulator
from nestling.tiny.link.line import BoardLine, LineTiming
from nestling.tiny.link.session import Session, connect
from nestling.tiny.runtime import toolchain
from nestling.tiny.runtime.data import pack
from nestling.tiny.runtime.job import Job, Step

WIDTHS = {"stm32vldiscovery": 0.25, "microbit": 0.5}
"""How much of the 8x8 network a board trains; the others take all of it."""

PATIENT = LineTiming(patience=120.0, revival=120.0)


def need(*tools: str) -> None:
    """Skips, saying how to get it, what needs a tool that is not there."""
    for tool in tools:
        if tool in toolchain.missing_tools():
            pytest.skip(f"{tool} is not installed: {toolchain.HOW_TO_GET[tool]}")
    if "gcc for ARM" in tools and not shutil.which(toolchain.GCC_ARM):
        pytest.skip(f"{toolchain.GCC_ARM} is not installed: apt-get install gcc-arm-none-eabi")
    if "ziglang" in tools and toolchain.zig() is None:
        pytest.skip("ziglang is not installed: pip install nestling[tiny]")


def compiler(name: str) -> list[str]:
    if name == "zig":
        need("ziglang")
        return toolchain.zig() or []
    need("gcc for ARM")
    return [toolchain.GCC_ARM]


def network(width: float) -> nn.Module:
    torch.manual_seed(0)
    a, b = round(8 * width), round(16 * width)
    layers = [
        nn.Conv2d(1, a, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * b, 10))


def job(width: float, steps: int = 5, batch: int = 8, rows: int = 40) -> tuple[Job, bytes]:
    """Training on 8x8 images with momentum, and the data."""
    random = np.random.default_rng(0)
    net = network(width)
    planned = plan(net, (1, 8, 8), momentum=True)
    images = torch.from_numpy(random.random((rows, 1, 8, 8), dtype=np.float32))
    blob = pack(images, torch.from_numpy(random.integers(0, 10, rows)))
    batches = [Step(random.integers(0, rows, batch)) for _ in range(steps)]
    return Job(
        planned, planned.pack(net.state_dict()), DescriptorSettings(lr=0.05, momentum=0.9), batches
    ), blob


def job_for(board: str) -> tuple[Job, bytes]:
    return job(WIDTHS.get(board, 1.0))


@contextmanager
def running(
    image: boards.Firmware, blob: bytes, timing: LineTiming = PATIENT
) -> Iterator[tuple[Emulator, Session]]:
    """The board at work, and a session with it."""
    with (
        tempfile.TemporaryDirectory(prefix="nst") as folder,
        emulator(image, blob, Path(folder) / "board") as board,
    ):
        session = Session(BoardLine(connect(board.transport), timing))
        try:
            yield board, session
        finally:
            session.close()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Waits for something that happens in another process."""
    import time

    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
