"""How many bytes a device may send: each letter to it allows what its answer needs, and no more.

The run writes down what it allows before a letter leaves. The proxy, which knows whose key speaks,
takes it off before anything is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from nestling.errors import InputError
from nestling.files import read_summed, summed, write_atomic
from nestling.fleet.care.certs import KeyHolder

log = logging.getLogger("nestling.fleet")

QUOTA = "quota.json"
TIMES, ROOM = 2, 2**20
"""A device may send what is expected so often, since lines break and it begins again, and so many
bytes besides: names, shapes, and what Flower puts around them."""
SAVED = 8
"""So many times what the largest letter allows is kept, at most: a slow device answers several
orders of a round at once."""

DEVICES = "devices"
"""Where the file has its table, beside its sum: devices are called what people like."""

Allow = Callable[[Mapping[int, int]], None]
"""Told before letters leave how many bytes each node is expected to answer."""


class Allowances:
    """The run's side. `keys` says whom nodes' keys stand for."""

    def __init__(self, path: Path, keys: Mapping[int, KeyHolder]) -> None:
        """Goes on from what the file says: devices may still be answering the letters of a run that
        died."""
        self.path, self.keys = path, keys
        # name → bytes allowed so far, and by one letter at most
        self._table = _read(path) if path.exists() else {}

    def __call__(self, expected: Mapping[int, int]) -> None:
        """One letter more to each of these nodes."""
        for node, size in expected.items():
            holder = self.keys.get(node)
            if holder is not None:
                so_far, largest = self._table.get(holder.name, (0, 0))
                more = TIMES * size + ROOM
                self._table[holder.name] = so_far + more, max(largest, more)
        if self._table:
            text = summed({DEVICES: self._table})
            write_atomic(self.path, text, mode=0o600, flush=False)


class Quotas:
    """The proxy's side: what each device may still send."""

    def __init__(self, path: Path) -> None:
        """Reads the file when first asked, and again whenever it has changed."""
        self.path = path
        self._seen: object = None
        self._table: dict[str, tuple[int, int]] = {}
        self._left: dict[str, int] = {}

    def take(self, name: str, size: int) -> bool:
        """Takes so many bytes off what a device may send; False, and nothing taken, where they are
        more than it has left."""
        self._refresh()
        left = self._left.get(name, 0)
        if size > left:
            return False
        self._left[name] = left - size
        return True

    def give_back(self, name: str, size: int) -> None:
        """Bytes that were taken off and did not come."""
        self._left[name] = self._left.get(name, 0) + size

    def allowed(self, name: str) -> int:
        """What the largest letter to a device allowed it."""
        return self._table.get(name, (0, 0))[1]

    def _refresh(self) -> None:
        if not self.path.exists():
            return
        seen = self.path.stat()
        if (seen.st_mtime_ns, seen.st_ino) == self._seen:
            return
        self._seen = seen.st_mtime_ns, seen.st_ino
        try:
            table = _read(self.path)
        except InputError as error:  # what was allowed stands; the next letter writes it anew
            log.warning("%s", error)
            return
        for name, (so_far, largest) in table.items():
            before = self._table.get(name, (0, 0))[0]
            self._left[name] = min(self._left.get(name, 0) + so_far - before, SAVED * largest)
            self._table[name] = so_far, largest


def _read(path: Path) -> dict[str, tuple[int, int]]:
    """What the file allows; an `InputError` where it is not what was written."""
    fix = "take it away while the server is stopped: the next letters write it anew"
    table = read_summed(path, fix=fix).get(DEVICES, {})
    return {name: (so_far, largest) for name, (so_far, largest) in table.items()}
