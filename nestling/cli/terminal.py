"""A terminal on which text of others is text: what stands in a run folder neither moves the cursor
nor gives the terminal an order."""

from __future__ import annotations

from collections.abc import Iterable

from rich import console as rich
from rich.segment import Segment

from nestling.harmless import harmless_lines


class Console(rich.Console):
    """Rich's own, but what cannot be printed stands there as Python would write it. The codes that
    Rich makes itself, for colours and the cursor, are no part of the text."""

    def render(
        self, renderable: rich.RenderableType, options: rich.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """What Rich makes of it, with its text made safe."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else harmless_lines(text), style, control)
