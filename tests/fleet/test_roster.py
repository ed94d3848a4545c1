"""Who is there: names and numbers stay, nodes change, and nobody takes another's name."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from nestling import FleetConfig, Tier
from nestling.devices import Fleet, make_fleet
from nestling.errors import InputError
from nestling.fleet.care.certs import KeyHolder
from nestling.fleet.node.worker import OwnRows
from nestling.fleet.protocol.courier import Failure, LoopCourier
from nestling.fleet.protocol.wire import Hello, Member, Welcome
from nestling.fleet.server.greeter import Greeter
from nestling.fleet.server.roster import LiveFleet, LiveSplit, Roster

OURS, THEIRS = "1" * 32, "2" * 32
WELCOME = Welcome("ab" * 8, "", (1, 8, 8), 2, ("0", "1"), 5).to_bytes()


def fleet() -> Fleet:
    tiers = (
        Tier(device="esp32", count=2),
        Tier(device="raspberry-pi-zero-2w", count=1),
        Tier(name="any", ratio=0.5, count=1),
    )
    return make_fleet(FleetConfig(tiers=tiers), 0)


def of_kind(kind: str) -> list[int]:
    return [
        client
        for client in range(4)
        if kind in (fleet().tier_of(client).name, fleet().tier_of(client).device)
    ]


def test_a_name_keeps_its_number_through_nodes_and_restarts(tmp_path: Path) -> None:
    roster = Roster(fleet(), tmp_path / "roster.json")
    first = roster.admit(7, OURS, Member("kitchen", device="esp32")).client
    second = roster.admit(8, THEIRS, Member("garden", device="esp32")).client
    assert [first, second] == of_kind("esp32")
    roster.present({8})
    assert roster.here() == [second] and roster.node_of(first) is None
    assert (
        roster.admit(99, OURS, Member("kitchen", device="esp32")).client == first
        and roster.node_of(first) == 99
    )
    roster.save()
    again = Roster(fleet(), tmp_path / "roster.json")
    assert again.run == roster.run and again.here() == []  # who is there must be seen anew
    assert again.admit(5, THEIRS, Member("garden", device="esp32")).client == second
    assert OURS not in (tmp_path / "roster.json").read_text()  # a secret is not written down


def test_who_is_refused_and_why() -> None:
    roster = Roster(fleet())
    own = roster.admit(1, OURS, Member("kitchen", device="esp32")).client
    with pytest.raises(InputError, match="belongs to another device"):
        roster.admit(2, THEIRS, Member("kitchen", device="esp32"))
    with pytest.raises(InputError, match=r"is client \d of this run, not"):
        roster.admit(1, OURS, Member("kitchen", client=(own + 1) % 4, device="esp32"))
    with pytest.raises(InputError, match="already"):
        roster.admit(2, THEIRS, Member("hall", client=own))
    with pytest.raises(InputError, match="of tier"):
        roster.admit(2, THEIRS, Member("hall", client=of_kind("any")[0], device="esp32"))
    with pytest.raises(InputError, match="fleet of 4"):
        roster.admit(2, THEIRS, Member("hall", client=4))
    roster.admit(2, THEIRS, Member("hall", device="esp32"))
    with pytest.raises(InputError, match="no place left"):
        roster.admit(3, THEIRS, Member("attic", device="esp32"))
    assert sorted(entry.member.name for entry in roster.entries) == ["hall", "kitchen"]


def test_a_damaged_file_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "roster.json").write_text('{"run": "00')
    with pytest.raises(InputError, match=r"roster\.json is damaged"):
        Roster(fleet(), tmp_path / "roster.json")


def test_the_fleet_is_what_devices_say() -> None:
    roster = Roster(fleet())
    live, client = LiveFleet(fleet(), roster), of_kind("esp32")[0]
    assert not any(live.available(c, 1) for c in range(4)) and live.choose(1, 4) == []
    ram = float(fleet().profile_of(client).ram_bytes)
    roster.admit(1, OURS, Member("kitchen", client=client, free=int(ram / 2)))
    assert live.choose(1, 4) == [client] and live.free_memory(client, 1) == pytest.approx(
        50, abs=0.01
    )
    roster.report("kitchen", int(10 * ram))
    assert live.free_memory(client, 2) == 100
    any_ = of_kind("any")[0]
    roster.admit(2, THEIRS, Member("hall", client=any_, free=10))
    assert live.free_memory(any_, 1) == 100  # its tier says what it trains, not its memory
    assert not live.drops(client, 1) and live.slowdown(client, 1) == 1 and live.deadline == 0


def test_rows_are_told_or_the_experiments_own() -> None:
    roster, base = Roster(fleet()), OwnRows(np.array([0, 1, 1, 2]), 3)
    split = LiveSplit(base, roster, 3)
    roster.admit(1, OURS, Member("own", client=0, rows=7, counts=(1, 2, 4)))
    roster.admit(2, OURS, Member("silent", client=1, rows=9))
    roster.admit(3, OURS, Member("share", client=2))
    assert [split.size(c) for c in range(4)] == [7, 9, 4, 4]
    assert [split.counts(c).tolist() for c in range(3)] == [[1, 2, 4], [0, 0, 0], [1, 2, 1]]
    assert split.indices(2).tolist() == [0, 1, 2, 3] and len(split.holdout(0)) == 0
    with pytest.raises(InputError, match="stay there"):
        split.indices(0)


def greeter(
    nodes: dict[int, Hello], keys: dict[int, KeyHolder] | None = None
) -> tuple[Greeter, LoopCourier, list[str]]:
    notes: list[str] = []
    courier = LoopCourier(
        {node: lambda letter, hello=hello: hello.to_bytes() for node, hello in nodes.items()}
    )  # type: ignore[misc]
    return (
        Greeter(
            courier, Roster(fleet(), run="ab" * 8), WELCOME, notes.append, again=0.0, keys=keys
        ),
        courier,
        notes,
    )


def hello(*members: Member, token: str = OURS, run: str = "ab" * 8, error: str = "") -> Hello:
    return Hello(run, token, members, error)


def test_nodes_are_greeted_as_they_come_and_go() -> None:
    found, courier, notes = greeter({1: hello(Member("a"), Member("b"))})
    assert found.refresh() and len(found.roster.here()) == 2 and not found.refresh()
    courier.workers[50] = courier.workers.pop(1)
    assert not found.refresh()  # the same clients behind another node
    assert {found.roster.node_of(c) for c in found.roster.here()} == {50}
    courier.workers.clear()
    assert found.refresh() and found.roster.here() == []
    assert sum("cannot be reached any more" in note for note in notes) == 2


def test_refused_nodes_are_named_once() -> None:
    nodes = {
        1: hello(Member("a"), run="cd" * 8),
        2: hello(error="no data"),
        3: hello(Member("x", client=9)),
        4: hello(Member("good")),
    }
    found, courier, notes = greeter(nodes)
    courier.workers[5] = lambda letter: b"junk"

    def fails(letter: bytes) -> bytes:
        raise RuntimeError("it broke")

    courier.workers[6] = fails
    for _ in range(3):
        found.refresh()
    assert [found.roster.name_of(c) for c in found.roster.here()] == ["good"]
    refused = {
        number: [n for n in notes if n.startswith(f"node {number} is refused")]
        for number in (1, 2, 3, 5, 6)
    }
    assert all(len(said) == 1 for said in refused.values())
    reasons = ("answers for the run", "no data", "fleet of 4", "too short", "it broke")
    assert all(reason in said[0] for reason, said in zip(reasons, refused.values(), strict=True))


def test_registered_nodes_speak_for_their_name_only() -> None:
    nodes = {
        1: hello(Member("pi")),
        2: hello(Member("pi/1"), Member("pi/2"), token=THEIRS),
        3: hello(Member("other")),
    }
    found, _, notes = greeter(nodes, {1: KeyHolder("phone"), 2: KeyHolder("pi", devices=2)})
    found.refresh()
    assert [found.roster.name_of(c) for c in found.roster.here()] == ["pi/1", "pi/2"]
    assert any("registered as the device 'phone' and calls itself 'pi'" in note for note in notes)
    assert any("not registered" in note for note in notes)


def test_waiting_is_bounded_and_says_what_for() -> None:
    found, _, notes = greeter({1: hello(Member("a"))})
    time = [0.0]
    found.clock = lambda: time[0]

    def sleep(seconds: float) -> None:
        time[0] += seconds

    assert found.wait(3, 10.0, 0.5, sleep) == 1 and time[0] >= 10
    assert "waiting for clients: 1 of 3 are there" in notes
    assert found.wait(1, 10.0, 0.5, sleep) == 1


def test_the_loop_reports_what_fails() -> None:
    courier = LoopCourier({1: lambda letter: letter.upper()})
    tickets = courier.push({1: b"a", 2: b"b"})
    found = dict(courier.pull(list(tickets.values())))
    assert found[tickets[1]] == b"A" and isinstance(found[tickets[2]], Failure)
    assert courier.pull(list(tickets.values())) == []


def test_files_are_readable_json(tmp_path: Path) -> None:
    roster = Roster(fleet(), tmp_path / "roster.json")
    roster.admit(7, OURS, Member("kitchen", device="esp32", ram=5, free=3, macs=1e6))
    roster.save()
    table = json.loads((tmp_path / "roster.json").read_text())
    assert table["run"] == roster.run and table["clients"][0]["member"]["name"] == "kitchen"
    assert stat.S_ISREG((tmp_path / "roster.json").stat().st_mode)
