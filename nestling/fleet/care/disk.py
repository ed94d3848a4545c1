"""Room on the disk: how much there is, and whether it is enough to go on."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path

from nestling.report.words import traffic

FLOOR = 256
"""Megabytes that must be free, unless somebody says otherwise."""
MEGA = 10**6


@dataclass(frozen=True)
class Room:
    """What is free where some folders are, or will be; `floor` is what must be, in bytes."""

    folders: tuple[Path, ...]
    floor: int

    def free(self) -> int:
        """Bytes that are free, where there are fewest."""
        there = (next(p for p in (one, *one.parents) if p.exists()) for one in self.folders)
        return min(shutil.disk_usage(path).free for path in there)

    def trouble(self) -> str:
        """What there is to say where too little is free; else nothing."""
        free = self.free()
        if free >= self.floor:
            return ""
        return f"disk full: {traffic(free)} free, {traffic(self.floor)} needed (--disk-floor)"


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind an error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False
