"""What contestants did: a score a turn, the turn that counts, the table and the ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from memory import Peak

TOLERANCE = 0.005
HEAD = (
    "s a round, median | mean | start-up s | first three s | whole run s | peak RSS MB | peak "
    "PSS MB | GPU MB | accuracy"
    " | weights differ"
)


@dataclass(frozen=True)
class Score:
    """What a contestant did in a turn: seconds a round over the steady rounds; seconds since its
    birth to the end of the first round, of the third, and to the test of the final weights; peak
    megabytes; accuracy; how far its weights are from Nestling's (None: unknown).
    """

    name: str
    python: str
    median: float
    mean: float
    start_up: float
    three: float
    whole: float
    peak: Peak
    gpu: float
    accuracy: float
    distance: float | None

    def __str__(self) -> str:
        speed = f"{self.median:.4f} s a round (mean {self.mean:.4f})"
        memory = f"{self.peak.rss:.0f} MB" + (f", {self.gpu:.0f} MB on the GPU" if self.gpu else "")
        return (
            f"{self.name}: {speed}, {memory}, accuracy {100 * self.accuracy:.2f} %, {self.python}"
        )


def middle(scores: Sequence[Score]) -> Score:
    """The turn whose rounds are neither fast nor slow; of an even number the slower of the two in
    the middle.

    A whole turn, so that its seconds, memory and weights belong together.
    """
    return sorted(scores, key=lambda score: score.median)[len(scores) // 2]


def print_table(scores: Sequence[Score]) -> None:
    """A row for every contestant."""
    print(f"| | {HEAD} |")
    print("|" + "---|" * (2 + HEAD.count("|")))
    for s in scores:
        cells = [
            s.name,
            f"{s.median:.4f}",
            f"{s.mean:.4f}",
            f"{s.start_up:.1f}",
            f"{s.three:.1f}",
            f"{s.whole:.1f}",
            f"{s.peak.rss:.0f}",
            f"{s.peak.pss:.0f}" if s.peak.pss else "",
            f"{s.gpu:.0f}" if s.gpu else "",
            f"{100 * s.accuracy:.2f} %",
            "" if s.distance is None else f"{s.distance:.1e}",
        ]
        print(f"| {' | '.join(cells)} |")


def verdict(turns: Sequence[Sequence[Score]]) -> int:
    """Prints how many times the first's time and memory the others take; 1 where somebody did not
    do the same work in a turn."""
    accuracies = [score.accuracy for turn in turns for score in turn]
    spread = max(accuracies) - min(accuracies)
    agree = spread <= TOLERANCE
    print(
        f"\naccuracies {'agree' if agree else 'DO NOT agree'}: they differ by {100 * spread:.2f} "
        "points"
    )
    first, *others = zip(*turns, strict=True)
    for other in others:
        _print_ratio(other, first)
    return 0 if agree else 1


def _print_ratio(other: Sequence[Score], first: Sequence[Score]) -> None:
    ours, theirs = middle(first), middle(other)
    memory = f", {theirs.peak.rss / ours.peak.rss:.2f} times the memory"
    print(
        f"{theirs.name} takes {theirs.median / ours.median:.2f} times the seconds of {ours.name} "
        f"a round{memory}"
    )
    if len(first) > 1:
        # Who shares a turn shares what else the machine did meanwhile.
        ratios = [b.median / a.median for a, b in zip(first, other, strict=True)]
        print(
            f"    turn by turn: {', '.join(f'{ratio:.2f}' for ratio in ratios)}; median "
            f"{statistics.median(ratios):.2f}"
        )
