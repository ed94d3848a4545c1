"""A device that ruins one round of a fleet: the gate takes the round back, and says so."""

from __future__ import annotations

from pathlib import Path

from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import play
from nestling.message import Message
from nestling.runs.run import Watcher
from tests.fleet import lying
from tests.fleet.loop import inline
from tests.fleet.lying import Handle
from tests.fleet.test_claims import Liar, claiming

ROUNDS, RUINED = 6, 3


def ruining(worker: Worker) -> Handle:
    """One that declares so many rows that it has half of the weight, and turns its weights round in
    one round, a hundred times as large."""
    rounds = [0]

    def reply(told: Message) -> Message:
        rounds[0] += 1
        weights = lying.times(-100.0)(told) if rounds[0] == RUINED else told
        return claiming(lying.ROWS)(weights)

    return Liar(worker, lying.ROWS, reply).handle


def test_a_round_that_a_device_ruins_is_taken_back(tmp_path: Path) -> None:
    def lie(name: str, worker: Worker) -> Handle:
        return ruining(worker) if name == "rows" else worker.handle

    devices = lying.handles(tmp_path / "devices", lie, flipped=())
    courier = LoopCourier({100 + c: handle for c, handle in enumerate(devices.values())})
    notes: list[str] = []
    asked, run = lying.asked("mean", rounds=ROUNDS, gate=2.0), tmp_path / "run"
    quick, watcher = Patience(poll=0.0, refresh=0.0), Watcher(note=notes.append)
    result = play(courier, asked, run, min_clients=8, patience=quick, watcher=watcher)
    gates = [row["gate"] for row in result.metrics]
    assert [gate["returned"] for gate in gates] == [n == RUINED for n in range(1, ROUNDS + 1)]
    (said,) = [note for note in notes if "went back to its best state" in note]
    assert said.startswith(f"round {RUINED}: ") and said in result.summary["notes"]
    honest = inline(lying.asked("mean", rounds=ROUNDS))[1][-1]["global_score"]
    assert honest > 0.75
    assert result.metrics[-1]["global_score"] > honest - 0.05
