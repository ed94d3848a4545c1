"""Devices and the server lose their power in the middle of rounds: the run goes on, and ends as the
run in one process in which the same clients missed the same rounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

from nestling import Experiment, FleetConfig
from nestling.files import read_sealed
from nestling.fleet.protocol.wire import Answer
from nestling.runs import checkpoint
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play
from tests.fleet.flower.test_fleet import TIERS, flat, rows_of, small_boards, start_devices
from tests.fleet.loop import same
from tests.fleet.processes import SECONDS, fleet, until
from tests.fleet.storm import memory_at, missed_in

FOUR, ROUNDS = 4, 5
SERVE = ("--min-clients", "3", "--deadline", "100", "--health", "off")


def in_one_process(experiment: Experiment, missed: frozenset[tuple[int, int]]) -> Federation:
    """The run in which these clients vanish in these rounds."""
    settled, federation = assemble(experiment)
    federation.world.fleet.drops = lambda i, round: (i, round) in missed  # type: ignore[method-assign]
    federation.engine.open(settled.make_method(), site_of(federation))
    list(play(federation))
    return federation


def worked_for(device: Path, client: int) -> int:
    """The round of the last result on a device's disk."""
    found = list(device.glob(f"worker/runs/*/{client}/result"))
    return Answer.from_bytes(read_sealed(found[0])).round if found else 0


@pytest.mark.minutes
def test_power_cuts_cost_the_rounds_that_were_missed_and_nothing_else(tmp_path: Path) -> None:
    # A method whose clients keep networks of their own: what a device did in a round that then did
    # not count must be forgotten.
    tiers = tuple(replace(tier, count=1) for tier in TIERS)
    experiment = small_boards("fedproto", fleet=FleetConfig(tiers=tiers), rounds=ROUNDS)
    with fleet(tmp_path) as made:
        made.keys("c0", "c1", "c2", "c3")
        server = made.start_server(experiment, "run", *SERVE)
        devices = start_devices(made, experiment)
        server.wait_for("round 1: ")
        for number in (1, 2):
            devices[number].kill()
        # The other one is never seen again.
        devices[2] = made.start_client("c2", devices[2].device, "--client", "2")
        done = max(row["round"] for row in rows_of(server.out))
        # In the middle of a later round: a device has worked, and the server has not closed the
        # round.
        until(
            lambda: (
                worked_for(devices[0].folder, 0) > done + 1
                or len(rows_of(server.out)) >= ROUNDS - 1
            ),
            SECONDS,
            "a round",
        )
        server.kill()
        stood = len(rows_of(server.out))
        assert 1 <= stood < ROUNDS and not (server.out / "summary.json").exists()

        again = made.start_server(experiment, "run", *SERVE)
        again.wait_done()
        rows = rows_of(again.out)
        assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
        missed = missed_in(rows, FOUR)
        assert (1, ROUNDS) in missed and (0, ROUNDS) not in missed, missed
        # it has come back
        assert any((2, r) not in missed for r in range(stood + 1, ROUNDS + 1)), missed
        roster = json.loads((again.out / "roster.json").read_text())
        assert roster["start"] == 2

        there, federation = checkpoint.load(again.out), in_one_process(experiment, missed)
        assert there is not None and same(flat(there[0]), flat(federation.method.state()))
        for client in range(FOUR):
            counted = [r for r in range(1, ROUNDS + 1) if (client, r) not in missed]
            if counted:
                kept = memory_at(
                    tmp_path / f"device-c{client}" / "worker", client, counted[-1], roster["run"]
                )
                assert kept and same(kept, federation.world.store.get(client)), client
