"""A picture of bands: one for every layer of a network, its channels from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from nestling.report.drawing import Rows, box, frame, hover_text, tag, text_at
from nestling.report.words import percent, plural, whole

_WIDTH, _STEP, _TALL, _BELOW = 520, 42, 14, 22
_MOST_CELLS = 130
_MOST_LETTERS = 26


@dataclass(frozen=True)
class Layer:
    """One band: how many replies trained each channel, of `most`. `by` says whether channels are
    the layer's "outputs" or its "inputs", or that it is only ever used "whole"."""

    name: str
    by: str
    counts: Sequence[float]
    most: float

    @property
    def shares(self) -> list[float]:
        """The share of the replies that trained each channel."""
        return [min(1.0, count / self.most) if self.most else 0.0 for count in self.counts]


def band_map(layers: Sequence[Layer], *, title: str, desc: str, ident: str) -> Markup:
    """The bands; the stronger a channel's colour, the more replies trained it."""
    body: list[Markup] = []
    for at, layer in enumerate(layers):
        body += _band(layer, at * _STEP)
    rows = [
        [layer.name, layer.by, channel, count, share]
        for layer in layers
        for channel, (count, share) in enumerate(zip(layer.counts, layer.shares, strict=True))
    ]
    told: Rows = [["layer", "by", "channel", "replies", "share"], *rows]
    return frame("bands", _WIDTH, _STEP * len(layers) - 4, title, desc, ident, body, told)


def strength(share: float) -> float:
    """The opacity of a channel that this share of the replies trained."""
    return 0.07 + 0.93 * min(share, 1.0) if share > 0 else 0.0


def _band(layer: Layer, top: float) -> Iterator[Markup]:
    yield text_at("name", 0, top + 15, tail_of(layer.name))
    yield text_at("value", _WIDTH, top + 15, _range_of(layer), text_anchor="end")
    yield box(0.5, top + _BELOW, _WIDTH - 1, _TALL, class_="field")
    wide = _WIDTH / len(layer.counts)
    for first, last, share in stretches(layer.shares):
        note = f"{layer.name}, {_channels(layer, first, last)}: {percent(share)}"
        yield tag(
            "rect",
            hover_text(f"{note}{_replies(layer, first, last)}"),
            class_="cell mark",
            x=f"{first * wide:.1f}",
            y=top + _BELOW,
            width=f"{(last - first + 1) * wide:.1f}",
            height=_TALL,
            fill_opacity=f"{strength(share):.2f}",
        )


def stretches(shares: Sequence[float]) -> list[tuple[int, int, float]]:
    """Neighbouring channels with one share, as (first, last, share). Of very many channels some
    stand for their mean, so that a band has no more cells than can be told apart."""
    every = -(-len(shares) // _MOST_CELLS)
    bins = [shares[at : at + every] for at in range(0, len(shares), every)]
    means = [(at * every, len(some), sum(some) / len(some)) for at, some in enumerate(bins)]
    found = []
    for share, some in groupby(means, key=lambda entry: round(entry[2], 6)):
        cells = list(some)
        found.append((cells[0][0], cells[-1][0] + cells[-1][1] - 1, share))
    return found


def tail_of(name: str) -> str:
    """A layer's name, or its end where it is long: the beginning is what many have in common."""
    return name if len(name) <= _MOST_LETTERS else "…" + name[1 - _MOST_LETTERS :]


def _range_of(layer: Layer) -> str:
    low, high = percent(min(layer.shares), 0), percent(max(layer.shares), 0)
    size = "whole" if layer.by == "whole" else f"{whole(len(layer.counts))} {layer.by}"
    return f"{size}, {low}" if low == high else f"{size}, {low} to {high}"


def _channels(layer: Layer, first: int, last: int) -> str:
    if layer.by == "whole":
        return "the whole layer"
    kind = layer.by.removesuffix("s")
    return f"{kind} {first}" if first == last else f"{kind}s {first} to {last}"


def _replies(layer: Layer, first: int, last: int) -> str:
    counts = layer.counts[first : last + 1]
    if min(counts) < max(counts):
        return " on average"
    count = whole(counts[0]) if counts[0] == int(counts[0]) else f"{counts[0]:.1f}"
    return f", {count} of {plural(layer.most, 'reply', 'replies')}"
