"""A key stands for what the operator said: one device of its tier, or a gateway for so many. A
device with a good key that says it is more is played over real letters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="comes with nestling[fleet]")

from nestling.errors import InputError
from nestling.fleet.care import certs
from nestling.fleet.care.certs import KeyHolder
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.wire import Member
from nestling.fleet.server.server import _Registry
from nestling.fleet.server.serving import Live, enliven
from nestling.fleet.server.sessions import SECONDS, Sessions
from nestling.runs.assemble import assemble
from tests.fleet.loop import six

HONEST, MALLORY = 100, 66


def joined(
    home: Path,
    keys: dict[int, KeyHolder],
    nodes: dict[int, list[Member]],
    notes: Callable[[str], None] = lambda _: None,
) -> Live:
    """A server with six places, and who is behind which node; the first node is the first heard."""
    settled, federation = assemble(six())
    courier = LoopCourier(
        {node: Worker(home / str(node), members).handle for node, members in nodes.items()}
    )
    live = enliven(settled, federation, courier, keys=keys)
    live.greeter.again, live.greeter.note = 0.0, notes
    live.greeter.refresh()
    return live


def names(live: Live) -> list[str]:
    return [entry.member.name for entry in live.roster.entries]


def test_a_device_s_key_takes_one_place_whatever_it_says(tmp_path: Path) -> None:
    many = [Member("mallory"), *(Member(f"mallory/{n}") for n in range(5)), Member("garage")]
    honest = {100 + n: [Member(f"d{n}")] for n in range(5)}
    keys = {node: KeyHolder(members[0].name) for node, members in honest.items()}
    keys[MALLORY] = KeyHolder("mallory")  # heard before the others
    notes: list[str] = []
    live = joined(tmp_path, keys, {MALLORY: many, **honest}, notes.append)
    assert sorted(names(live)) == ["d0", "d1", "d2", "d3", "d4", "mallory"]
    assert any(
        "registered as the device 'mallory' and calls itself 'mallory/0'" in n for n in notes
    )
    assert any("--gateway mallory=" in note for note in notes)


def test_a_gateway_speaks_for_as_many_as_it_may(tmp_path: Path) -> None:
    keys = {MALLORY: KeyHolder("hall", devices=2), HONEST: KeyHolder("d0")}
    behind = [Member("hall"), Member("d0"), *(Member(f"hall/{n}") for n in range(4))]
    notes: list[str] = []
    live = joined(tmp_path, keys, {MALLORY: behind}, notes.append)
    assert sorted(names(live)) == ["hall/0", "hall/1"]
    assert any("'hall' may speak for 2 devices, and 'hall/2' is one more" in n for n in notes)
    assert any("the gateway 'hall' and names 'd0'" in note for note in notes)
    # those it named once keep their places, and others do not get in in their stead
    live.greeter.courier.workers[MALLORY] = Worker(  # type: ignore[attr-defined]
        tmp_path / str(MALLORY), [Member("hall/1"), Member("hall/3")]
    ).handle
    live.greeter.forget(MALLORY)
    live.greeter.refresh()
    assert sorted(names(live)) == ["hall/0", "hall/1"]


@pytest.mark.parametrize("says", ["", "phone", "server"])
def test_a_key_is_for_its_tier(says: str, tmp_path: Path) -> None:
    notes: list[str] = []
    member = Member("d0", device=says)
    live = joined(tmp_path, {HONEST: KeyHolder("d0", "phone")}, {HONEST: [member]}, notes.append)
    tiers = [live.roster.fleet.tier_of(entry.client).name for entry in live.roster.entries]
    assert tiers == ([] if says == "server" else ["phone"])
    assert any("is for a 'phone', and it calls itself a 'server'" in n for n in notes) == (
        says == "server"
    )


def test_a_place_of_another_tier_cannot_be_asked_for(tmp_path: Path) -> None:
    notes: list[str] = []
    member = Member("d0", client=5)  # the only one of tier "server"
    live = joined(tmp_path, {HONEST: KeyHolder("d0", "phone")}, {HONEST: [member]}, notes.append)
    assert not names(live) and any("client 5 of the experiment is of tier" in n for n in notes)


def test_what_a_key_is_for_is_said_when_it_is_issued(tmp_path: Path) -> None:
    certs.issue(tmp_path, devices=["d0", "d1=phone"], gateways=["hall=40"])
    found = set(certs.public_keys(tmp_path / "server/devices").values())
    assert found == {KeyHolder("d0"), KeyHolder("d1", "phone"), KeyHolder("hall", devices=40)}
    for wrong in ({"devices": ["d2="]}, {"gateways": ["g"]}, {"gateways": ["g=0"]}):
        with pytest.raises(InputError, match="write"):
            certs.issue(tmp_path, **wrong)  # type: ignore[arg-type]
    assert len(list((tmp_path / "server/devices").iterdir())) == 3


def test_a_running_server_follows_what_stands_behind_a_key(tmp_path: Path) -> None:
    certs.issue(tmp_path / "keys", gateways=["hall=2"])
    files = certs.server_files(tmp_path / "keys")
    calls: list[Any] = []

    def flwr(asked: Any) -> Any:
        calls.extend(asked)
        return [{"success": True, "node-id": 7} for _ in asked]

    registry = _Registry(tmp_path, files, flwr)
    registry.follow()
    public = files.devices / "hall.pub"
    public.write_text(public.read_text().replace("gateway=2", "gateway=3"))
    registry.follow()
    assert len(calls) == 1  # to Flower it is the same key
    kept = json.loads((tmp_path / "registered.json").read_text())["7"]
    assert (kept["name"], kept["devices"]) == ("hall", 3)


def test_one_who_comes_back_is_no_clone_and_a_second_one_is() -> None:
    now = [0.0]
    door = Sessions(lambda: now[0])

    def at(second: float) -> None:
        now[0] = second

    door.entering("d0", 200)
    at(3)
    door.inside("d0", 2.9)
    # its power fails, and it is back before Flower lets go of its session
    for second in (8, 12, 20, 40):
        at(second)
        door.entering("d0", 412)
        assert not door.cloned("d0")
    at(70)
    door.entering("d0", 200)
    at(71)
    door.inside("d0", 70.5)
    assert not door.cloned("d0")
    # a second one: turned away, while the one inside goes on
    at(80)
    door.entering("d0", 412)
    door.inside("d0", 79.9)  # asked before
    assert not door.cloned("d0")
    at(83)
    door.inside("d0", 82.9)
    assert door.cloned("d0") and not door.cloned("d1")
    at(83 + SECONDS)  # the one inside is gone
    assert not door.cloned("d0")


def test_when_the_one_inside_takes_leave_the_next_may_enter() -> None:
    door = Sessions(iter(range(100)).__next__)
    door.entering("d0", 412)
    door.inside("d0", 50)
    assert door.cloned("d0")
    door.left("d0")
    assert not door.cloned("d0")


def test_who_cannot_sign_does_not_make_a_key_look_cloned() -> None:
    now = [0.0]
    door = Sessions(lambda: now[0])
    for status in (401, 400, 503):
        door.entering("d0", status)
        now[0] += 3
        door.inside("d0", now[0])
    assert not door.cloned("d0")


def test_a_holder_is_what_its_comment_says() -> None:
    for holder in (KeyHolder("a"), KeyHolder("a", "phone"), KeyHolder("a", devices=3)):
        assert KeyHolder.of_comment("a", f" {holder.comment}") == holder
    assert KeyHolder.of_comment("a", " me@box") == KeyHolder("a")  # as ssh-keygen writes
    assert replace(KeyHolder("a"), devices=1).comment == "a gateway=1"
