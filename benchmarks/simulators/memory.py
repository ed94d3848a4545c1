"""The peak memory of a process and all its descendants, sampled from outside."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

SHORTEST_PAUSE = 0.2


@dataclass
class Peak:
    """Megabytes at their highest. `rss` counts pages that processes share once for each of them,
    `pss` once in all (0: unknown)."""

    rss: float = 0.0
    pss: float = 0.0

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Samples the tree below a process until the process ends."""
        while process.poll() is None:
            began = time.monotonic()
            self._sample(process.pid)
            # Looking into large processes takes a while and stops them: it may cost them a fiftieth
            # of their time.
            time.sleep(max(SHORTEST_PAUSE, 50 * (time.monotonic() - began)))

    def _sample(self, root: int) -> None:
        sizes = [_sizes(process) for process in _tree(root)]
        self.rss = max(self.rss, sum(rss for rss, _ in sizes))
        self.pss = max(self.pss, sum(pss for _, pss in sizes))


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(int(entry))):
            children.setdefault(parent, []).append(int(entry))
    found = [root]
    for process in found:
        found.extend(children.get(process, []))
    return found


def _parent(process: int) -> int:
    try:
        # The name, in brackets, may hold blanks; the fields after it do not.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _sizes(process: int) -> tuple[float, float]:
    try:
        fields = dict(
            line.split(":")
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        )
        return _megabytes(fields["Rss"]), _megabytes(fields["Pss"])
    except (OSError, KeyError, ValueError):
        return _resident(process), 0.0


def _resident(process: int) -> float:
    try:
        return (
            int(Path(f"/proc/{process}/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 2**20
        )
    except (OSError, IndexError, ValueError):
        return 0.0


def _megabytes(text: str) -> float:
    return int(text.split()[0]) / 1024
