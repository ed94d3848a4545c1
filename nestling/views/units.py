"""The units of a network, as a person counts them: its layers and blocks in order."""

from __future__ import annotations

from torch import nn

from nestling.views.reference import Reference


def units(reference: Reference) -> list[str]:
    """The network's layers and blocks with weights, by name, in order."""
    return [
        name
        for name in _units(reference.module)
        if any(n.startswith(f"{name}.") for n in reference.axes.shapes)
    ]


def _units(module: nn.Module, prefix: str = "") -> list[str]:
    found = []
    for name, part in module.named_children():
        series = isinstance(part, (nn.Sequential, nn.ModuleList)) and any(
            list(child.children()) for child in part.children()
        )
        found += _units(part, f"{prefix}{name}.") if series else [f"{prefix}{name}"]
    return found
