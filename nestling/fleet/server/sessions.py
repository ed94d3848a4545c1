"""Telling a device that comes back from a second one with the same key."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 60.0
"""After so long a node that is not heard from has left."""
ENTERED, TURNED_AWAY = 200, 412
"""What Flower answers to who enters: come in, or that the key's last session has not run out."""


class Sessions:
    """Flower lets nobody enter while a key's last session has not run out: neither a device that
    lost its power and is back, nor a second one with the same key. But where one is turned away and
    the one inside goes on asking, two hold the key: a cloned key. Whoever comes then is the newer
    one, and is told so as long as the one inside is heard from.

    Only what Flower has answered counts: by then it has checked the signature.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows of nobody; `clock` tells seconds."""
        self.clock = clock
        self._heard: dict[str, float] = {}
        self._turned_away: dict[str, float] = {}
        self._cloned: set[str] = set()

    def inside(self, name: str, asked: float) -> None:
        """One who is in was answered what it asked at that time."""
        self._heard[name] = self.clock()
        if asked > self._turned_away.get(name, asked):
            del self._turned_away[name]
            self._cloned.add(name)

    def entering(self, name: str, status: int) -> None:
        """What Flower answered to one who enters."""
        if status == ENTERED:
            self._turned_away.pop(name, None)
        elif status == TURNED_AWAY:
            self._turned_away[name] = self.clock()

    def left(self, name: str) -> None:
        """The one inside took leave."""
        self._heard.pop(name, None)

    def cloned(self, name: str) -> bool:
        """Whether one of this name is inside, and another was there at the same time."""
        if self.clock() - self._heard.get(name, -SECONDS) >= SECONDS:
            self._cloned.discard(name)
        return name in self._cloned
