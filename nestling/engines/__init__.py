"""Engines: where the clients' work of a round runs."""

from __future__ import annotations

import torch

from nestling.engines.cohort import Cohort
from nestling.engines.cuda import CudaCohort, CudaSettings
from nestling.engines.engine import BoardReport, ClientError, Engine, Event, Refusal
from nestling.engines.inline import Inline
from nestling.engines.pool import Pool, cores
from nestling.errors import InputError, unknown
from nestling.where import CPU, Where

ENGINES = ("auto", "inline", "pool", "cohort", "ray")
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("float32", "tf32", "bf16")


def choose_where(name: str, device: str, precision: str = "float32") -> Where:
    """Where an engine computes: on a GPU where one is asked for, or is there and the engine can use
    it well."""
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise InputError(
            "there is no CUDA device here", field="engine.device", fix='leave it out, or use "cpu"'
        )
    if device == "cuda" and name in ("pool", "ray"):
        raise InputError(
            f"the engine {name!r} works on CPU cores",
            field="engine.device",
            fix='use engine.name = "cohort"',
        )
    if device == "cuda" or (device == "auto" and there and name in ("auto", "cohort")):
        return Where(
            torch.device("cuda", torch.cuda.current_device()), precision, recorded=name != "inline"
        )
    return CPU


def make_engine(
    name: str,
    workers: int,
    work_items: int,
    portable: bool = True,
    where: Where = CPU,
    compile: bool = False,
    address: str = "",
) -> Engine:
    """The engine of a name, for a device.

    `auto` takes the cohort on a GPU; on a CPU a pool where there is more than one core and enough
    to do, else this process. `portable` says whether the method and its networks can be sent to
    another process.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES, field="engine.name")
    if where.device.type == "cuda":
        return (
            Inline(where)
            if name == "inline"
            else CudaCohort(where, CudaSettings(where.precision, compile))
        )
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
    "BoardReport",
    "ClientError",
    "Cohort",
    "CudaCohort",
    "CudaSettings",
    "Engine",
    "Event",
    "Inline",
    "Pool",
    "Refusal",
    "choose_where",
    "make_engine",
]
