"""Engines: where the clients' work of a round runs."""

from __future__ import annotations

import torch

from nestling.engines.cohort import Cohort
from nestling.engines.cuda_cohort import CudaCohort
from nestling.engines.engine import ClientError, Engine
from nestling.engines.inline import Inline
from nestling.engines.pool import Pool, cores
from nestling.engines.programs import Settings
from nestling.errors import InputError, unknown

ENGINES = ("auto", "inline", "pool", "cohort", "ray")
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("float32", "tf32", "bf16")


def choose_device(name: str, device: str) -> str:
    """The device an engine computes on: a GPU where one is asked for, or is there and the engine can use it well."""
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise InputError("there is no CUDA device here", field="engine.device", fix='leave it out, or use "cpu"')
    if device == "cuda" and name in ("pool", "ray"):
        raise InputError(f"the engine {name!r} works on CPU cores", field="engine.device", fix='use engine.name = "cohort"')
    if device == "auto":
        return "cuda" if there and name in ("auto", "cohort") else "cpu"
    return device


def make_engine(
    name: str,
    workers: int,
    work_items: int,
    portable: bool = True,
    device: str = "cpu",
    settings: Settings | None = None,
    address: str = "",
) -> Engine:
    """The engine of a name on a device ("cpu" or "cuda").

    `auto` takes the cohort on a GPU; on a CPU a pool where there is more than one core and enough to do, else this process.
    `portable` says whether the method and its networks can be sent to another process.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES, field="engine.name")
    if device == "cuda":
        return Inline((settings or Settings()).precision) if name == "inline" else CudaCohort(settings)
    if name == "auto":
        name = "pool" if portable and (workers or cores()) > 1 and work_items >= 40 else "inline"
    if name == "ray":
        from nestling.engines.ray import Ray  # an extra

        return Ray(workers, address)
    if name == "cohort":
        return Cohort((workers or cores()) if portable else 1)
    return Pool(workers) if name == "pool" else Inline()


__all__ = [
    "DEVICES",
    "ENGINES",
    "PRECISIONS",
    "ClientError",
    "Cohort",
    "CudaCohort",
    "Engine",
    "Inline",
    "Pool",
    "Settings",
    "choose_device",
    "make_engine",
]
