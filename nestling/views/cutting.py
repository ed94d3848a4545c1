"""What of a network can be cut, in words: nothing is left whole in silence."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.views.reference import Reference

MOSTLY = 0.95
"""The share of parameters from which on a network counts as cut everywhere: what is left are its
inputs and classes."""

_NAMED = 4


@dataclass(frozen=True)
class Cutting:
    """The share of a network's parameters that some view leaves out, the layers of which none are
    left out, and why."""

    share: float
    whole: tuple[str, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """What to tell before a run; nothing where the network is cut everywhere."""
        if self.share >= MOSTLY and not self.notes:
            return []
        first = f"{self.share:.0%} of the network's parameters can be cut"
        if self.share == 0:
            first = "the network cannot be cut: every device trains all of it"
        if self.whole and self.share:
            named = ", ".join(self.whole[:_NAMED])
            more = len(self.whole) - _NAMED
            first += f"; left whole: {named}" + (f" and {more} more" if more > 0 else "")
        return [first, *self.notes]


def cutting(reference: Reference) -> Cutting:
    """What of a network can be cut."""
    layers: dict[str, list[str]] = {}
    for name in reference.axes.shapes:
        if name in reference.parameters:
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    whole = [layer for layer, names in layers.items() if not reference.axes.share(names)]
    return Cutting(reference.axes.share(reference.parameters), tuple(whole), reference.axes.notes)
