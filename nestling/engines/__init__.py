"""Engines: where the clients' work of a round runs."""

from __future__ import annotations

from nestling.engines.engine import ClientError, Engine
from nestling.engines.inline import Inline
from nestling.engines.pool import Pool, cores
from nestling.errors import unknown

ENGINES = ("auto", "inline", "pool")


def make_engine(name: str, workers: int, work_items: int, portable: bool = True) -> Engine:
    """The engine of a name. `auto` takes a pool where there is more than one core and enough to do; `portable` says whether the
    method and its networks can be sent to another process."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES, field="engine.name")
    if name == "auto":
        name = "pool" if portable and (workers or cores()) > 1 and work_items >= 40 else "inline"
    return Pool(workers) if name == "pool" else Inline()


__all__ = ["ENGINES", "ClientError", "Engine", "Inline", "Pool", "make_engine"]
