"""The server's side of a run: its folder, going on after a crash, waiting for clients, and what it
says of models it does not have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nestling import InputError, Named, Server, Tier
from nestling.experiment import FleetConfig
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.wire import Member
from nestling.fleet.server.engine import NoQuorum, Patience
from nestling.fleet.server.serving import enliven, play
from nestling.runs.assemble import assemble
from nestling.runs.run import Watcher
from tests.fleet.loop import METHODS, memory_of, plain, same, six, state_of, workers_of

QUICK = Patience(poll=0.0, refresh=0.0)


def courier_of(workers: dict[int, Worker]) -> LoopCourier:
    return LoopCourier({100 + c: w.handle for c, w in workers.items()})


class Crash(BaseException):
    """The server's process dies."""


@pytest.mark.parametrize("method", ["fedproto", "flexfl"])
@pytest.mark.parametrize("moment", ["in a round", "after a checkpoint"])
def test_a_server_that_dies_goes_on_where_it_stood(
    method: str, moment: str, tmp_path: Path
) -> None:
    workers = workers_of(tmp_path / "devices")
    courier, seen = courier_of(workers), [0]

    def client(done: int, of: int) -> None:
        seen[0] += 1
        if moment == "in a round" and seen[0] == 9:  # the third answer of round 2
            raise Crash

    def round_(row: dict[str, Any]) -> None:
        if moment == "after a checkpoint" and row["round"] == 2:
            raise Crash

    with pytest.raises(Crash):
        play(
            courier,
            six(method),
            tmp_path / "run",
            min_clients=6,
            patience=QUICK,
            watcher=Watcher(client=client, round=round_),
        )
    # The devices know nothing of it; the nodes have new numbers.
    again = LoopCourier({200 + c: Worker(w.home, w.members).handle for c, w in workers.items()})
    result = play(again, six(method), tmp_path / "run", min_clients=6, patience=QUICK)
    here, rows = plain(method)
    assert same(state_of(result.federation), state_of(here))
    assert [row["loss"] for row in result.metrics] == [row["loss"] for row in rows]
    assert [row["bytes_up_total"] for row in result.metrics] == [
        row["bytes_up_total"] for row in rows
    ]
    assert all(same(memory_of(workers[c], c), here.world.store.get(c)) for c in range(6))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "summary.json",
        "report.html",
        "roster.json",
        "fleet.json",
        "metrics.jsonl",
        "checkpoint.bin",
    } <= names


@pytest.mark.parametrize(
    ("method", "tested"),
    [
        (Named("fedgen", {"iterations": 2}), True),  # parts of one network
        (Named("fedgen", {"iterations": 2, "share": "full"}), True),
        (Named("fedgen", {"iterations": 2, "share": "head"}), False),
        (Named("fedhkd", {"variant": "weights"}), True),
        (Named("fedhkd"), False),
        (Named("hafl-ghn"), True),
        (Named("hafl-ghn", {"fine_tune": 1}), False),
    ],
    ids=str,
)
def test_models_that_the_server_has_are_tested(method: Named, tested: bool, tmp_path: Path) -> None:
    """The same method may leave models on devices or not, as it is set."""
    live = enliven(*assemble(six(method)), courier_of(workers_of(tmp_path)))
    assert bool(live.panel) == tested


@pytest.mark.parametrize("method", METHODS)
def test_no_number_is_better_than_a_wrong_one(method: str, tmp_path: Path) -> None:
    """Models that stay on devices are not tested; those that the server has are, as in the
    simulator."""
    result = play(courier_of(workers_of(tmp_path)), six(method), min_clients=6, patience=QUICK)
    here, rows = plain(method)
    last = result.metrics[-1]
    if here.method.as_set.personal:
        assert last["global_score"] is None and last["personal_score"] is None
    else:
        for kind in ("global_score", "personal_score", "by_tier"):
            assert last[kind] == rows[-1][kind]


def test_it_waits_for_clients_and_says_so(tmp_path: Path) -> None:
    workers = workers_of(tmp_path)
    notes: list[str] = []
    with pytest.raises(NoQuorum, match="4 clients are there after 0 s, 6 are needed"):
        play(
            courier_of({c: workers[c] for c in range(4)}),
            six(),
            min_clients=6,
            wait=0.0,
            watcher=Watcher(note=notes.append),
        )
    assert any("client 3 (device 3, " in note for note in notes)

    courier = courier_of({0: workers[0]})
    looks = [0]

    class Slowly(LoopCourier):
        """Another client comes with every look."""

        def nodes(self) -> list[int]:
            looks[0] += 1
            if looks[0] < 6:
                self.workers[100 + looks[0]] = workers[looks[0]].handle
            return list(self.workers)

    slow = Slowly(courier.workers)
    result = play(
        slow, six(), min_clients=6, wait=60.0, patience=QUICK, watcher=Watcher(note=notes.append)
    )
    assert same(state_of(result.federation), state_of(plain("shared-average")[0]))
    assert any(note.startswith("waiting for clients: 2 of 6") for note in notes)


@pytest.mark.parametrize(
    ("method", "merge", "said"),
    [
        ("shared-average", "mean", 'server.merge = "aligned" bears some that lie'),
        ("fedproto", "mean", 'server.merge = "aligned" bears some that lie'),
        ("lg-fedavg", "mean", "LG-FedAvg has no merge that bears any"),
        ("shared-average", "aligned", ""),
    ],
)
def test_it_says_at_the_start_whom_it_believes(
    method: str, merge: str, said: str, tmp_path: Path
) -> None:
    notes: list[str] = []
    asked, watcher = six(method, server=Server(merge=merge)), Watcher(note=notes.append)
    with pytest.raises(NoQuorum):  # nobody comes: it is said before that
        play(courier_of({}), asked, tmp_path / "run", wait=0.0, watcher=watcher)
    told = [note for note in notes if "believes every device" in note]
    assert len(told) == bool(said) and all(said in note for note in told)


def test_what_fits_now_is_what_is_sent(tmp_path: Path) -> None:
    """A device whose memory runs short is given a smaller piece in the next round, and the whole
    again when it is free."""
    fleet = FleetConfig(
        tiers=(
            Tier(name="pi", device="raspberry-pi-zero-2w", count=1),
            Tier(name="box", device="gpu-box", count=1),
        )
    )
    free = {0: [0], 1: [0]}
    experiment = replace(six(rounds=4), fleet=fleet)
    workers = {
        c: Worker(tmp_path / str(c), [Member(f"d{c}", c)], free=lambda c=c: free[c][0])
        for c in (0, 1)
    }  # type: ignore[misc]
    sizes: list[int] = []
    pi = next(c for c in (0, 1) if _tier(experiment, c) == "pi")

    def round_(row: dict[str, Any]) -> None:
        sizes.append(row["bytes_down"])
        # 1: plenty (nothing said yet), 2: after this round next to nothing, 3: still, 4: plenty
        # again.
        free[pi][0] = (
            {1: 3_000_000, 2: 3_000_000, 3: 2**33}[row["round"]] if row["round"] < 4 else 0
        )

    free[pi][0] = 2**33
    result = play(
        courier_of(workers),
        experiment,
        min_clients=2,
        patience=QUICK,
        watcher=Watcher(round=round_),
    )
    # What is free is told with an answer and counts from the next round.
    assert sizes[0] == sizes[1] and sizes[2] < sizes[1] and sizes[3] == sizes[2]
    assert [row["dropped"] + row["refused"] for row in result.metrics] == [0] * 4


def _tier(experiment: Any, client: int) -> str:
    from nestling.devices import make_fleet

    return make_fleet(replace(experiment.fleet, size=2), experiment.seed).tier_of(client).name


def test_the_folder_says_how_the_fleet_is(tmp_path: Path) -> None:
    workers = workers_of(tmp_path / "devices")
    play(courier_of(workers), six(), tmp_path / "run", min_clients=6, patience=QUICK)
    status = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert status["round"] == 3 and [c["name"] for c in status["clients"]] == [
        f"device {c}" for c in range(6)
    ]
    assert status["letters"]["answers"] == 18
    done = play(
        courier_of(workers), None, tmp_path / "run", min_clients=6, patience=QUICK
    )  # it is finished: nothing is played again
    assert len(done.metrics) == 3 and done.summary["rounds_done"] == 3


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run in"):
        play(courier_of({}), None, tmp_path / "nothing")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match="exists already"):
        play(courier_of({}), six(), tmp_path / "full")
