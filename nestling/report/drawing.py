"""The few SVG elements that charts are made of, as text."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

Rows = Sequence[Sequence[object]]
"""A chart's data: a line of headings, then the values."""


def frame(
    kind: str,
    width: float,
    height: float,
    title: str,
    desc: str,
    ident: str,
    body: Sequence[Markup],
    table: Rows,
    /,
    **extra: str,
) -> Markup:
    """A whole chart: its size, what it is called, what it shows in words, what is in it, and its
    data as rows, which the page saves as a table."""
    told = [tag("title", title, id=f"{ident}-title"), tag("desc", desc, id=f"{ident}-desc")]
    said_by = {"role": "img", "aria_labelledby": f"{ident}-title {ident}-desc"}
    return tag(
        "svg",
        *told,
        *body,
        class_=f"chart {kind}",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        **said_by,
        **extra,
        data_table="\n".join("\t".join(map(_entry, row)) for row in table),
    )


def _entry(value: object) -> str:
    """A value of the data on one line: numbers as they are, words without tabs and breaks."""
    if value is None:
        return ""
    return f"{value:.10g}" if isinstance(value, float) else " ".join(str(value).split())


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    *inside: Markup,
    class_: str,
    fill_opacity: str | None = None,
) -> Markup:
    """A rectangle."""
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    return tag("rect", *inside, class_=class_, **place, fill_opacity=fill_opacity)


def text_at(kind: str, x: float, y: float, text: str, **more: str) -> Markup:
    """A line of text."""
    return tag("text", text, class_=kind, x=f"{x:.1f}", y=f"{y:.1f}", **more)


def hover_text(note: str) -> Markup:
    """What the pointer is told."""
    return tag("title", note) if note else Markup("")


def cut_short(text: str) -> str:
    """A name, or its beginning where it is long."""
    return text if len(text) <= 16 else text[:15] + "…"


def clamp(value: float, low: float, high: float) -> float:
    """The value, or the bound that it is beyond."""
    return max(low, min(high, value))


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An SVG element: the one place where text and attributes become part of a chart, and are
    escaped unless they are Markup. `text_anchor` is `text-anchor`, `class_` is `class`; an
    attribute that is None is left out."""
    known = (
        (key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None
    )
    head = name + "".join(f' {key}="{escape(value)}"' for key, value in known)
    return Markup(f"<{head}>{''.join(map(escape, inside))}</{name}>" if inside else f"<{head}/>")
