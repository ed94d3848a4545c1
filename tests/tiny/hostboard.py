"""Boards that are processes of this machine, and small jobs for them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nestling.planning.descriptor import DescriptorSettings
from nestling.planning.plan import MemoryPlan, plan
from nestling.tiny.link.line import BoardLine, LineTiming
from nestling.tiny.link.session import Session, connect
from nestling.tiny.link.transport import Noise
from nestling.tiny.runtime import data, native
from nestling.tiny.runtime.job import Done, Job, Step
from nestling.tiny.runtime.toolchain import FLAGS, RUNTIME, build, host_compiler

QUICK = LineTiming(answer=0.05, longest=0.4, sample=0.01, patience=10.0, revival=30.0)
ROWS, CLASSES = 40, 5
SOURCES = (*native.SOURCES, "link.c", "node.c", "host.c")


def host_program(*more: str) -> Path:
    """The node for this machine; `more`: flags, for instance a sanitiser's."""
    if host_compiler() is None:
        pytest.skip("there is no C compiler: apt-get install gcc")
    return build("host-board", [RUNTIME / name for name in SOURCES], (*FLAGS, *more))


@contextmanager
def folder() -> Iterator[Path]:
    """A folder with a short path: that of a socket must be short."""
    path = Path(tempfile.mkdtemp(prefix="nst"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class HostBoard:
    """A board of so many bytes of RAM, with data, on a Unix socket."""

    def __init__(self, home: Path, region: int, blob: bytes | None, name: str = "board") -> None:
        self.socket, self._blob = home / f"{name}.sock", home / f"{name}.blob"
        self._command = [str(host_program()), "--arena", str(region), "--socket", str(self.socket)]
        if blob is not None:
            self._blob.write_bytes(blob)
            self._command += ["--blob", str(self._blob)]
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    @property
    def transport(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> HostBoard:
        self.kill()
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command)
        self.starts += 1
        wait_for(self.socket.exists)
        return self

    def kill(self) -> None:
        """As a power cut: no warning (SIGKILL)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    restart = start

    def __enter__(self) -> HostBoard:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def session_with(
    board: Any, noise: Noise | None = None, every: int = 0, timing: LineTiming = QUICK
) -> Session:
    return Session(BoardLine(connect(board.transport, noise), timing), every)


def network(seed: int = 0, width: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(width * 16, CLASSES),
    )


def client_data(seed: int = 0) -> bytes:
    source = np.random.default_rng(seed)
    return data.pack(
        source.standard_normal((ROWS, 1, 8, 8)).astype(np.float32),
        source.integers(0, CLASSES, ROWS),
    )


def job(
    steps: int = 12,
    size: int = 6,
    seed: int = 0,
    *,
    shifts: bool = False,
    inner: int = 0,
    width: int = 3,
    **given: Any,
) -> Job:
    """A job of the small network with momentum, and whatever `given` of a job is."""
    settings = given.pop("settings", DescriptorSettings(lr=0.05, momentum=0.9, decay=1e-3))
    net = network(seed, width)
    made: MemoryPlan = plan(
        net,
        (1, 8, 8),
        momentum=settings.momentum > 0,
        anchor="anchor" in given,
        mask="mask" in given,
        present="present" in given,
        target="targets" in given,
    )
    source = np.random.default_rng(seed)
    moves = [source.integers(-2, 3, (size, 2)) if shifts else None for _ in range(steps)]
    told = [Step(source.integers(0, ROWS, size), move, inner) for move in moves]
    extras = {name: value(made, source) for name, value in given.items()}
    return Job(made, made.pack(net.state_dict()), settings, told, **extras)


def room(job: Job) -> int:
    """RAM for a job's plan, to the byte."""
    return len(job.plan.descriptor) + job.plan.arena


def assert_same(found: Done, wanted: Done) -> None:
    """To the last bit."""
    assert found.weights.tobytes() == wanted.weights.tobytes()
    assert (found.loss, found.steps, found.samples) == (wanted.loss, wanted.steps, wanted.samples)
