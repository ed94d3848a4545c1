"""The part of a run's page that tells how often each channel of the shared networks was trained:
what tells methods apart that cut a network differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nestling.report.bands import Layer, band_map, strength
from nestling.report.folder import Run, listed, mapping
from nestling.report.markup import fill, joined, note, section
from nestling.report.words import number, percent, plural, whole

_SHADES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
COVERAGE_LEAD = (
    "Every band is a layer of the global model, its channels from left to right. The stronger the "
    "colour, the larger the share of the merged replies that trained the channel; what nobody "
    "trains keeps its first value."
)


def coverage_part(run: Run) -> Markup:
    """The section; nothing where the run has no shared weights, or was played before they were
    counted."""
    pictures, masked = coverage_pictures(run), masked_note(run)
    if not pictures and not masked:
        return Markup("")
    lead = COVERAGE_LEAD if pictures else ""
    return section("coverage", "Who trained which channels", lead, pictures + masked)


def masked_note(run: Run, heading: str = "") -> Markup:
    """What is to be said of replies that are not counted; nothing where all are."""
    masked = number(run.coverage.get("masked"))
    if not masked or masked < 0:
        return Markup("")
    said = plural(masked, "merged reply is", "merged replies are")
    return note(
        f"{heading + ': ' if heading else ''}{said} not counted: masks say which single weights "
        "those clients trained, and masks are not looked at while a run goes on."
    )


def coverage_pictures(run: Run, heading: str = "", ident: str = "c-coverage") -> Markup:
    """A figure for every shared network of a run; nothing where it has none."""
    networks = {name: _layers(told) for name, told in mapping(run.coverage, "networks").items()}
    drawn = {name: layers for name, layers in networks.items() if layers}
    return joined(
        _picture(run, heading or ("" if len(drawn) == 1 else name), layers, f"{ident}-{at}")
        for at, (name, layers) in enumerate(drawn.items())
    )


def _picture(run: Run, name: str, layers: Sequence[Layer], ident: str) -> Markup:
    title = "How often each channel was trained" + (f": {name}" if name else "")
    shares = [share for layer in layers for share in layer.shares]
    never = sum(not share for share in shares)
    desc = (
        f"{plural(len(layers), 'layer')}, each a band of its channels; from "
        f"{percent(min(shares))} to {percent(max(shares))} of the replies trained a channel."
    )
    return fill(
        "coverage.html",
        title=title,
        said=_since(run, layers[0].most),
        image=band_map(layers, title=title, desc=desc, ident=ident),
        facts=[
            ("On average", percent(sum(shares) / len(shares))),
            ("The least trained", percent(min(shares))),
            ("Trained by nobody", f"{whole(never)} of {plural(len(shares), 'channel')}"),
        ],
        shades=[(percent(share, 0), f"{strength(share):.2f}") for share in _SHADES],
    )


def _since(run: Run, replies: float) -> str:
    """How much was counted."""
    rounds, last = number(run.coverage.get("rounds")), number(run.coverage.get("round"))
    said = f"{plural(replies, 'merged reply', 'merged replies')}"
    if rounds is None or last is None:
        return f"{said}."
    late = f" (not counted before round {whole(last - rounds + 1)})" if rounds < last else ""
    return f"{said} of {plural(rounds, 'round')}{late}."


def _layers(told: object) -> list[Layer]:
    """The layers of one network; those that cannot be read are left out."""
    most = number(told.get("client_rounds")) if isinstance(told, Mapping) else None
    if not most or most < 0:
        return []
    return [
        Layer(_name(block), _by(block), counts, most)
        for block in listed(told, "layers")
        if (counts := _counts(block.get("counts")))
    ]


def _counts(told: object) -> list[float]:
    found = [number(count) for count in told] if isinstance(told, list) else []
    return [count for count in found if count is not None and count >= 0]


def _name(block: Mapping[str, Any]) -> str:
    return str(block.get("name") or "a layer").removesuffix(".weight")


def _by(block: Mapping[str, Any]) -> str:
    told = block.get("by")
    return told if told in ("outputs", "inputs", "whole") else "outputs"
