"""Nestling on Flower (`pip install nestling[fleet]`).

    from nestling.fleet.flower import Strategy    # in a ServerApp: Strategy("heterofl").start(grid)
    from nestling.fleet.flower import client_app  # in a ClientApp: app = client_app()

Only Flower's public modules are used: `flwr.app`, `flwr.serverapp` and `flwr.clientapp`. Names are
loaded when first used, since the process that Flower starts on a device for every message must not
wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestling.fleet.flower.client import client_app, client_fn
    from nestling.fleet.flower.grid import GridCourier
    from nestling.fleet.flower.in_process import InProcessGrid
    from nestling.fleet.flower.strategy import Strategy

_HOME = {
    "GridCourier": "nestling.fleet.flower.grid",
    "InProcessGrid": "nestling.fleet.flower.in_process",
    "Strategy": "nestling.fleet.flower.strategy",
    "client_app": "nestling.fleet.flower.client",
    "client_fn": "nestling.fleet.flower.client",
}

__all__ = ["GridCourier", "InProcessGrid", "Strategy", "client_app", "client_fn"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nestling.fleet.flower' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
