"""How a run comes along, in a few words: how good it is by now, and how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nestling.report.words import duration


class Pace:
    """The rounds that runs have before them, and how long rounds took since it was made."""

    def __init__(self, left: Mapping[str, int]) -> None:
        """Takes how many rounds each run has before it, by its name."""
        self.left, self.played = dict(left), 0
        self._since = time.monotonic()

    @property
    def more(self) -> int:
        """How many rounds are left."""
        return sum(self.left.values())

    def round(self, name: str) -> None:
        """A run has played a round."""
        self.left[name] -= 1
        self.played += 1

    def over(self, name: str) -> None:
        """A run has ended, or failed: what was left of it is not played."""
        self.left[name] = 0

    def took(self) -> str:
        """The time since it was made."""
        return duration(time.monotonic() - self._since)

    def time_left(self) -> str:
        """Such as "about 12 s left"; nothing where no round was played yet, or none is left."""
        if not self.played or not self.more:
            return ""
        seconds = (time.monotonic() - self._since) / self.played
        return f"about {duration(seconds * self.more)} left"


def scores(metrics: Mapping[str, Any]) -> str:
    """What a round measured, such as "global 81.2% personal 79.0%"."""
    words = ((kind, metrics.get(f"{kind}_score")) for kind in ("global", "personal"))
    return " ".join(f"{kind} {value:.1%}" for kind, value in words if value is not None)
