"""One server and six devices of four kinds, each of several processes, over TLS and with keys: four
methods end as in one process.

Nodes without a key, with a wrong one and with a revoked one are in `test_processes`, clients and
servers that are killed in `test_faults`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

import nestling
from nestling import Experiment, FleetConfig, Named, Tier
from nestling.experiment import Data
from nestling.methods.server import KEPT
from nestling.runs import checkpoint
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation
from nestling.views import State
from tests.fleet.loop import METHODS, same, six
from tests.fleet.processes import Client, ProcessFleet, Server, fleet
from tests.fleet.storm import memory_at

TIERS = tuple(
    Tier(device=kind, count=count)
    for kind, count in {
        "lm3s6965": 2,
        "stm32f405": 2,
        "esp32": 1,
        "raspberry-pi-zero-2w": 1,
    }.items()
)
SIX = 6


def small_boards(method: str, **changes: Any) -> Experiment:
    """Six clients of four kinds of devices, on which different parts of a network fit."""
    settings: dict[str, Any] = {
        "data": Data("mnist12k-8x8"),
        "model": Named("tinycnn", {"channels": [16, 32, 64]}),
        "fleet": FleetConfig(tiers=TIERS),
        "engine": nestling.EngineConfig("inline"),
    }
    return six(method, **{**settings, **changes})


def flat(state: dict[str, State]) -> State:
    """What a method keeps; the server's own notes (how long steps were) only fleets have."""
    return {
        f"{kind}/{name}": tensor
        for kind, part in state.items()
        if not kind.startswith(KEPT)
        for name, tensor in part.items()
    }


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_end(server: Server, federation: Federation, here: Path, made: ProcessFleet) -> None:
    """The server's state, the model it gives away and what devices keep are those of the run in
    this process, bit for bit."""
    there, plainly = checkpoint.load(server.out), checkpoint.load(here)
    assert there is not None and plainly is not None and len(flat(there[0])) > 0
    assert same(flat(there[0]), flat(plainly[0]))
    assert (server.out / "global.safetensors").exists() == (here / "global.safetensors").exists()
    if (here / "global.safetensors").exists():
        assert (server.out / "global.safetensors").read_bytes() == (
            here / "global.safetensors"
        ).read_bytes()
    run = json.loads((server.out / "roster.json").read_text())["run"]
    rows = rows_of(server.out)
    for client in range(SIX):
        counted = [
            row["round"] for row in rows if client in row["clients"] and client not in row["missed"]
        ]
        if counted:
            kept = memory_at(made.root / f"device-c{client}" / "worker", client, counted[-1], run)
            assert same(kept, federation.world.store.get(client)), client


def start_devices(made: ProcessFleet, experiment: Experiment) -> list[Client]:
    """A device for each client, of the kind that the experiment says."""
    fleet = assemble(experiment)[1].world.fleet
    return [
        made.start_client(f"c{n}", fleet.tier_of(n).device, "--client", str(n))
        for n in range(len(fleet))
    ]


def as_in_one_process(root: Path, methods: tuple[str, ...], rounds: int) -> None:
    with fleet(root) as made:
        made.keys(*(f"c{number}" for number in range(SIX)))
        devices: list[Client] = []
        for method in methods:
            experiment = small_boards(method, rounds=rounds)
            server = made.start_server(experiment, method, "--min-clients", "6", "--health", "off")
            # once: they stay for the runs that come
            devices = devices or start_devices(made, experiment)
            here = nestling.run(experiment, out=root / "here" / method)
            sizes = {here.federation.world.device(client).piece for client in range(SIX)}
            assert len(sizes) >= 3
            server.wait_done()
            assert all(
                row["clients"] == list(range(SIX)) and not row["missed"]
                for row in rows_of(server.out)
            )
            same_end(server, here.federation, root / "here" / method, made)
            assert all(device.process.poll() is None for device in devices)


@pytest.mark.minutes
def test_six_devices_end_as_one_process(tmp_path: Path) -> None:
    """The short one, for every day."""
    as_in_one_process(tmp_path, ("fedproto",), 2)


@pytest.mark.minutes
def test_four_methods_on_six_devices_end_as_in_one_process(tmp_path: Path) -> None:
    as_in_one_process(tmp_path, METHODS, 5)
