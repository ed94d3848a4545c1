"""A fleet in one process: every client a worker of its own behind a node of its own, and all
letters real bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestling import Evaluation, Experiment, Named, SplitConfig, Tier
from nestling.experiment import FleetConfig
from nestling.fleet.node.worker import EXPERIMENT, Worker
from nestling.fleet.protocol.courier import Courier, LoopCourier
from nestling.fleet.protocol.wire import Member
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import enliven
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play
from nestling.store import ClientStore
from tests.small import small

TIERS = (
    Tier(name="board", ratio=0.25, count=2),
    Tier(name="phone", ratio=0.5, count=2),
    Tier(name="laptop", ratio=0.75, count=1),
    Tier(name="server", ratio=1.0, count=1),
)
METHODS = ("shared-average", "flexfl", "fedmd", "fedproto")


def six(method: Any = "shared-average", **changes: Any) -> Experiment:
    """Six clients of four tiers, three rounds, everybody in every round."""
    settings: dict[str, Any] = {
        "rounds": 3,
        "participants": 0,
        "data": "mnist12k-8x8",
        "model": Named("tinycnn", {"channels": [8, 8, 16]}),
        "fleet": FleetConfig(tiers=TIERS),
        "split": SplitConfig(kind="dirichlet", alpha=1.0, size=40, public=0.02),
        "evaluate": Evaluation(every=3, clients=6),
    }
    return small(method, **{**settings, **changes})


def workers_of(home: Path, clients: int = 6, data: Any = EXPERIMENT) -> dict[int, Worker]:
    """A worker for each client, by number; their nodes are numbered from 100 in another order."""
    return {
        c: Worker(
            home / str(c), [Member(f"device {c}", c)], data[c] if isinstance(data, dict) else data
        )
        for c in range(clients)
    }


def live(
    experiment: Experiment,
    courier: Courier,
    patience: Patience | None = None,
    store: ClientStore | None = None,
    notes: Callable[[str], None] | None = None,
    **engine: Any,
) -> tuple[Experiment, Federation]:
    """The federation whose clients are reached through a courier; the engine is open."""
    settled, federation = assemble(experiment, store)
    live = enliven(settled, federation, courier, patience=patience or Patience(poll=0.0))
    live.greeter.again = 0.0
    live.greeter.note = notes or live.greeter.note
    for name, value in engine.items():
        setattr(live.engine, name, value)
    live.engine.open(settled.make_method(), site_of(federation))
    live.gather(1, 0.0)
    return settled, federation


def over_the_loop(
    experiment: Experiment, home: Path, **settings: Any
) -> tuple[Federation, list[dict[str, Any]], dict[int, Worker]]:
    """The run of an experiment over a `LoopCourier`."""
    workers = workers_of(home, **settings)
    courier = LoopCourier({100 - c: worker.handle for c, worker in workers.items()})
    _, federation = live(experiment, courier)
    return federation, list(play(federation)), workers


def inline(experiment: Experiment) -> tuple[Federation, list[dict[str, Any]]]:
    """The same run in this process."""
    settled, federation = assemble(experiment)
    federation.engine.open(settled.make_method(), site_of(federation))
    return federation, list(play(federation))


@lru_cache(maxsize=8)
def plain(method: str) -> tuple[Federation, list[dict[str, Any]]]:
    """`six` of a method in this process, played once for all tests."""
    return inline(six(method))


def state_of(federation: Federation) -> dict[str, torch.Tensor]:
    """The server's state in one table."""
    return {
        f"{kind}/{name}": t
        for kind, part in federation.method.state().items()
        for name, t in part.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two tables hold the same bits."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and np.array_equal(bits(a[n]), bits(b[n]))
        for n in a
    )


def bits(tensor: torch.Tensor) -> np.ndarray:
    return np.frombuffer(tensor.detach().cpu().contiguous().numpy().tobytes(), np.uint8)


def memory_of(worker: Worker, client: int) -> dict[str, torch.Tensor]:
    """What a client keeps on its device."""
    folder = next((worker.home / "runs").iterdir()) / str(client) / "memory"
    store = ClientStore(folder)
    store.resume(2**30)
    return store.get(client)
