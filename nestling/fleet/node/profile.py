"""What this machine is and has free now: memory, as a container may see it too, and how fast it
multiplies.

No torch here: a device says who it is before anything heavy is loaded.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nestling.errors import InputError

ROOT = Path("/")
UNITS = {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}
SIZE = 192
"""The side of the matrices that are multiplied: three of them stay in any cache from 512 KB."""


@dataclass(frozen=True)
class Memory:
    """Bytes: what there is, and what a new process may take without pushing others out."""

    total: int
    available: int


@dataclass(frozen=True)
class Measured:
    """A device as it found itself."""

    ram: int
    available: int
    macs_per_second: float  # fp32 on one core: an upper bound on what training reaches
    cores: int


@dataclass(frozen=True)
class Allowance:
    """How much of the free memory training may take: a share of what is free at the time, or a
    fixed size."""

    share: float = 1.0
    size: int | None = None

    @staticmethod
    def parse(text: str, field: str = "--memory") -> Allowance:
        """From "100%", "50 %", "300 MB"."""
        if text.strip().endswith("%"):
            try:
                share = float(text.strip()[:-1]) / 100
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise InputError(
                    f"{text!r} is not a share",
                    field=field,
                    fix='write "50%" (of what is free) or "300 MB"',
                )
            return Allowance(share=share)
        written = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(B|KB|MB|GB)\s*", text)
        size = int(float(written[1]) * UNITS[written[2]]) if written else 0
        if size < 1:
            raise InputError(
                f"{text!r} is not an amount of memory",
                field=field,
                fix='write "50%" (of what is free) or "300 MB"',
            )
        return Allowance(size=size)

    def available(self) -> int:
        """Bytes that training may take now."""
        return self.size if self.size is not None else int(memory().available * self.share)


def measure(seconds: float = 0.2) -> Measured:
    """Measures this machine; takes about `seconds`."""
    found = memory()
    return Measured(found.total, found.available, macs_per_second(seconds), cores())


def memory(root: Path = ROOT) -> Memory:
    """The machine's memory, or less where a control group grants this process less."""
    total, available = _meminfo(root / "proc/meminfo")
    for limit, used in _limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return Memory(total, available)


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def macs_per_second(seconds: float = 0.2) -> float:
    """Multiply-adds per second of a product of two small matrices, the best of several tries: other
    work only slows one down."""
    import numpy as np

    one = np.random.default_rng(0).standard_normal((SIZE, SIZE), dtype=np.float32)
    out = one @ one  # the first product also loads the library
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        np.matmul(one, one, out=out)
        now = time.perf_counter()
        best = min(best, max(now - start, 1e-9))
        if now >= end:
            return SIZE**3 / best


def _meminfo(path: Path) -> tuple[int, int]:
    """Total and available bytes; where there is no such file (not Linux) all physical memory counts
    as both."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return whole, whole
    rows = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in lines)
        if rest.split()
    }
    # Kernels before 3.14 do not say what is available.
    spare = rows.get("MemAvailable", rows.get("MemFree", 0) + rows.get("Cached", 0))
    return rows["MemTotal"], spare


def _limits(root: Path) -> Iterable[tuple[int, int]]:
    """(limit, used) of every control group this process is in, version 2 or 1, from the innermost
    outwards."""
    for base, group, limit_name, used_name in _groups(root):
        folder = base / group.lstrip("/")
        while True:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                # What the group only caches can be had back.
                yield limit, max(0, used - _reclaimable(folder / "memory.stat"))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _groups(root: Path) -> Iterable[tuple[Path, str, str, str]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if kinds == "":
            yield root / "sys/fs/cgroup", group, "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            yield (
                root / "sys/fs/cgroup/memory",
                group,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )


def _number(path: Path) -> int | None:
    """A number in a file; None where there is none, or "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path) -> int:
    try:
        rows = dict(line.split(" ", 1) for line in path.read_text().splitlines())
        return int(rows.get("inactive_file", rows.get("total_inactive_file", 0)))
    except (OSError, ValueError):
        return 0
