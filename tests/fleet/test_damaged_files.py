"""What a fleet's server goes on from is what was written, or refused by the file's name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="comes with nestling[fleet]")

from nestling.errors import InputError
from nestling.fleet.care import certs
from nestling.fleet.protocol.wire import Member
from nestling.fleet.server.quota import ROOM, Allowances, Quotas
from nestling.fleet.server.roster import Roster, blank
from nestling.fleet.server.server import _Registry
from tests.fleet.test_roster import OURS, THEIRS, fleet
from tests.runs.test_damage import damaged

FLEET = fleet()
Read = Callable[[], object]


def roster(home: Path) -> tuple[Path, Read]:
    path = home / "roster.json"
    made = Roster(FLEET, path)
    made.admit(7, OURS, Member("Küche", device="esp32", rows=3, counts=(1, 2)))
    made.admit(8, THEIRS, Member("sum"))
    made.count(0, 3)
    made.save()
    return path, lambda: Roster(FLEET, path).entries


def quota(home: Path) -> tuple[Path, Read]:
    path, keys = home / "quota.json", {1: certs.KeyHolder("sum"), 2: certs.KeyHolder("pi")}
    Allowances(path, keys)({1: 1000, 2: 10**9})
    return path, lambda: Allowances(path, keys)._table


def registered(home: Path) -> tuple[Path, Read]:
    files = registry(home)
    return home / "registered.json", lambda: _Registry(home, files, None).nodes


def registered_for_the_run(home: Path) -> tuple[Path, Read]:
    pytest.importorskip("flwr", reason="flwr is not installed: pip install nestling[fleet]")
    from nestling.fleet.flower.hosting import Registered

    registry(home)
    path = home / "registered.json"
    return path, lambda: dict(Registered(path))


def registry(home: Path) -> certs.ServerFiles:
    certs.issue(home / "keys", devices=["d0=phone"], gateways=["hall=2"])
    files = certs.server_files(home / "keys")

    def flwr(calls: Any) -> Any:
        return [{"success": True, "node-id": 7 + place} for place, _ in enumerate(calls)]

    _Registry(home, files, flwr).follow()
    return files


@pytest.mark.parametrize("made", [roster, quota, registered, registered_for_the_run])
def test_a_changed_byte_and_a_cut_are_always_refused(
    made: Callable[[Path], tuple[Path, Read]], tmp_path: Path
) -> None:
    path, read = made(tmp_path)
    good = path.read_bytes()
    assert read()
    for data in damaged(good):
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"{path} (is damaged|cannot be read)"):
            read()
    path.write_bytes(good)
    assert read()


def test_a_roster_may_be_changed_by_hand(tmp_path: Path) -> None:
    """As the runbook says: a name is taken out, and the sum."""
    path, _ = roster(tmp_path)
    table = json.loads(path.read_text())
    table["clients"] = [row for row in table["clients"] if row["member"]["name"] != "sum"]
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match="take the 'sum' out of it"):
        Roster(FLEET, path)
    del table["sum"]
    path.write_text(json.dumps(table))
    assert [entry.member.name for entry in Roster(FLEET, path).entries] == ["Küche"]
    Roster(FLEET, path).save()
    assert "sum" in json.loads(path.read_text())


def test_the_roster_of_a_run_that_nobody_joined_has_a_sum(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    path.write_text(blank())
    assert not Roster(FLEET, path).entries
    path.write_text(blank().replace('"start": 0', '"start": 1'))
    with pytest.raises(InputError, match=f"{path} is damaged"):
        Roster(FLEET, path)


def test_what_was_allowed_stands_until_the_file_is_whole_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, keys = tmp_path / "quota.json", {1: certs.KeyHolder("pi")}
    allow, quotas = Allowances(path, keys), Quotas(path)
    allow({1: 0})
    assert quotas.take("pi", ROOM)
    path.write_bytes(path.read_bytes().replace(str(ROOM).encode(), b"9999999"))
    with caplog.at_level(logging.WARNING, "nestling.fleet"):
        assert not quotas.take("pi", 1)
    assert f"{path} is damaged" in caplog.text
    allow({1: 0})
    assert quotas.take("pi", ROOM) and not quotas.take("pi", 1)
