"""Nestling on Flower (`pip install nestling[fleet]`).

    from nestling.flower import Strategy     # in a ServerApp: Strategy("heterofl").start(grid)
    from nestling.flower import client_app   # in a ClientApp: app = client_app()

Only Flower's public modules are used: `flwr.app`, `flwr.serverapp` and `flwr.clientapp`. Names are loaded when first used, since the
process that Flower starts on a device for every message must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestling.flower.client import client_app, client_fn
    from nestling.flower.grid import GridCourier
    from nestling.flower.in_process import InProcessGrid
    from nestling.flower.strategy import Strategy

_HOME = {
    "GridCourier": "nestling.flower.grid",
    "InProcessGrid": "nestling.flower.in_process",
    "Strategy": "nestling.flower.strategy",
    "client_app": "nestling.flower.client",
    "client_fn": "nestling.flower.client",
}

__all__ = ["GridCourier", "InProcessGrid", "Strategy", "client_app", "client_fn"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nestling.flower' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
