"""The line charts of both pages: which axes they have, and a chart with its legend as one
figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from nestling.report.markup import empty, figure
from nestling.report.svg import Axis, Series, is_bent, line_chart
from nestling.report.words import decimal, duration, energy, percent, traffic, whole

ROUNDS = Axis("round", whole, lambda value: f"round {whole(value)}", integers=True)
BYTES = Axis("bytes sent up and down since the start", traffic, traffic, floor=0, from_zero=True)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
SECONDS = Axis(
    "virtual time since the start",
    duration,
    duration,
    floor=0,
    from_zero=True,
    steps=(
        *(10, 20, 30),
        *(n * _MINUTE for n in (1, 2, 5, 10, 20, 30)),
        *(n * _HOUR for n in (1, 2, 3, 6, 12)),
        *(n * _DAY for n in (1, 2, 5, 10, 20, 50, 100)),
    ),
)
JOULES = Axis("the fleet's energy since the start", energy, energy, floor=0, from_zero=True)
SCORE = Axis(
    "score",
    lambda value: f"{100 * value:.4g}%",
    lambda value: percent(value, 2),
    floor=0,
    ceiling=1,
    # by the share of rows that are still wrong: from 96% to 98% is as far as from 60% to 80%
    places=lambda value: -math.log(max(1 - value, 0.0005)),
    marks=(0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1),
)


def score_axis(word: str) -> Axis:
    """The axis of what ranks models, under its name."""
    return replace(SCORE, label=word)


BENT = "Up the axis, every equal step takes away the same share of the errors."
LOSS = Axis("loss", decimal, decimal, floor=0)


def chart(
    series: Sequence[Series], *, title: str, note: str, x: Axis, y: Axis, ident: str, nothing: str
) -> Markup:
    """A figure of the series that have points, or the sentence `nothing` where none has."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return empty(f"{title}: {nothing}")
    legend = [(one.style, one.label, y.tell(one.points[-1][1])) for one in drawn]
    last = "; ".join(f"{label} {value}" for _, label, value in legend)
    desc = f"Line chart of {y.label} against {x.label}. Last values: {last}."
    note = f"{note} {BENT}".strip() if is_bent(drawn, y) else note
    return figure(
        title, note, legend, line_chart(drawn, title=title, desc=desc, x=x, y=y, ident=ident)
    )
