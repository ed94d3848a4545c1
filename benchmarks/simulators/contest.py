"""What every contestant's script shares: its arguments, its stopwatch, and the line of JSON it ends
with."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

BEGAN = "NESTLING_BENCHMARK_BEGAN"
"""The environment variable that holds when the process was asked for, in seconds since the
epoch."""


def arguments() -> argparse.Namespace:
    """FOLDER (of the plan) --device --workers --precision, and for Nestling --engine and
    --compile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--engine", default="inline")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    # Everybody may round as Nestling's engine does; bf16 is for its engine alone, since autocast
    # makes eager loops slower.
    tf32 = options.precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    return options


@dataclass
class Stopwatch:
    """Notes when rounds end. `start` begins the first; start-up counts from the birth of the
    process, imports included.

    On a GPU it waits for the device at the end of a round, unless `waits` is off: for who reads
    results of a round before it ends.
    """

    device: str = "cpu"
    waits: bool = True
    began: float = field(default_factory=lambda: float(os.environ.get(BEGAN, time.time())))
    ends: list[float] = field(default_factory=list)

    def start(self) -> None:
        """The first round begins."""
        self.ends = [self._now()]

    def lap(self) -> None:
        """A round has ended."""
        self.ends.append(self._now())

    def seconds(self) -> list[float]:
        """How long each round took."""
        return [after - before for before, after in zip(self.ends[:-1], self.ends[1:], strict=True)]

    def start_up(self) -> float:
        """From the birth of the process to the end of the first round."""
        return self.ends[1] - self.began

    def whole(self) -> float:
        """From the birth of the process to now."""
        return self._now() - self.began

    def _now(self) -> float:
        if self.device == "cuda" and self.waits:
            torch.cuda.synchronize()
        return time.time()


def report(
    watch: Stopwatch,
    folder: Path,
    name: str,
    accuracy: float,
    state: Mapping[str, Tensor],
    seconds: list[float],
) -> None:
    """Prints the result of a contestant that has tested its final weights, and saves these beside
    the plan."""
    result: dict[str, object] = {
        "seconds": seconds,
        "start_up": watch.start_up(),
        "whole": watch.whole(),
        "accuracy": accuracy,
    }
    result["python"] = _interpreter()
    if watch.device == "cuda":
        result["gpu_megabytes"] = torch.cuda.max_memory_allocated() / 2**20
    torch.save({key: tensor.detach().cpu() for key, tensor in state.items()}, folder / f"{name}.pt")
    print(json.dumps(result), flush=True)


def _interpreter() -> str:
    """Its version, and whether its threads take turns."""
    turns = getattr(sys, "_is_gil_enabled", lambda: True)()
    return f"Python {platform.python_version()} {'with' if turns else 'without'} GIL"
