"""Devices whose own files have the wrong labels: nothing they send is malformed, and the mean
believes it. A rule that bears liars does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nestling import Evaluation, Experiment, FleetConfig, Server, SplitConfig, Tier, Train
from nestling.fleet.protocol.courier import LoopCourier
from nestling.runs.assemble import assemble
from nestling.runs.loop import play
from tests.fleet.loop import inline, live, six, workers_of

LIARS = (0, 5)
ROUNDS, DEVICES = 12, 8


def asked(merge: str) -> Experiment:
    tiers = (Tier(name="a", ratio=0.5, count=4), Tier(name="b", ratio=1.0, count=4))
    return six(
        fleet=FleetConfig(tiers=tiers),
        rounds=ROUNDS,
        train=Train(epochs=4, batch=10, lr=0.1),
        split=SplitConfig(kind="iid", size=60, public=0.0),
        evaluate=Evaluation(every=ROUNDS, clients=1),
        server=Server(merge=merge),
    )


def files(home: Path) -> dict[int, str]:
    """Each device's rows, those of liars with the label 9 − y."""
    _, federation = assemble(asked("mean"))
    found = {}
    for client in range(DEVICES):
        rows = federation.world.split.indices(client)
        y = federation.bench.y[rows].numpy()
        found[client] = str(home / f"{client}.npz")
        x = federation.bench.x[rows].numpy()
        np.savez(found[client], x=x, y=9 - y if client in LIARS else y)
    return found


def accuracy(merge: str, home: Path) -> float:
    """How a fleet ends of whose devices two of eight have such files."""
    home.mkdir()
    workers = workers_of(home, DEVICES, files(home))
    courier = LoopCourier({100 + c: w.handle for c, w in workers.items()})
    _, federation = live(asked(merge), courier)
    *_, last = list(play(federation))
    assert last["merged"] == DEVICES  # nobody can be refused
    return float(last["global_score"])


def test_flipped_labels_ruin_the_mean_and_not_a_rule(tmp_path: Path) -> None:
    clean = {merge: inline(asked(merge))[1][-1]["global_score"] for merge in ("mean", "aligned")}
    lost = {merge: clean[merge] - accuracy(merge, tmp_path / merge) for merge in clean}
    assert lost["mean"] > 0.1 > 0.05 > lost["aligned"], (clean, lost)
