"""`nestling watch`: what a person sees of a fleet, from the folder and over HTTP."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nestling import cli
from nestling.errors import InputError
from nestling.fleet.care import health, status, watching
from nestling.fleet.care.metrics import exposition

NOW = 1_800_000_000.0


def run_folder(path: Path, **changes: Any) -> Path:
    """The folder of a run in its third round, as its process leaves it: client 1 works, client 2 is
    away."""
    path.mkdir()
    (path / "experiment.toml").write_text(
        'rounds = 9\n[method]\nname = "shared-average"\n[data]\nname = "mnist12k-8x8"\n'
    )
    tiers = [{"name": "board", "count": 2}, {"name": "phone", "count": 2}]
    (path / "federation.json").write_text(json.dumps({"tiers": tiers}))
    rows = [
        {
            "round": number,
            "clients": [0, 1, 2],
            "by_tier": {"board": {"clients": 2}, "phone": {"clients": 1 - number % 2}},
            "bytes_up": 1000,
            "bytes_down": 2000,
            "refused": 0,
            "late": 0,
            "dropped": number % 2,
            "seconds": 10.0 * number,
            "global_score": [0.5, None][number - 1],
            "personal_score": None,
        }
        for number in (1, 2)
    ]
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"round": 3, "cli'
    )
    members = [("one", "board", True), ("two", "board", True), ("three", "phone", False)]
    clients = [
        {
            "client": c,
            "name": n,
            "tier": t,
            "device": "",
            "here": h,
            "node": 5 + c if h else None,
            "seen": NOW - 200 * c,
        }
        | {"ram": 2**30, "free": 2**29}
        for c, (n, t, h) in enumerate(members)
    ]
    missing = [
        {"client": c, "name": members[c][0], "node": clients[c]["node"], "attempts": 2}
        for c in (1, 2)
    ]
    doing = {"round": 3, "chosen": [0, 1, 2], "answered": 1, "needed": 1, "missing": missing}
    doing |= {"seconds": 12.0, "silent": 2.0, "deadline": 600.0, "most": 3600.0}
    table = {
        "run": "abc",
        "round": 2,
        "phase": "round",
        "since": NOW - 12,
        "doing": doing,
        "letters": {"sent": 9},
    }
    table |= {
        "clients": clients,
        "refusals": [
            {"time": NOW - 5, "round": 2, "client": 2, "node": None, "reason": "NaN in it"}
        ],
    }
    (path / status.STATUS).write_text(json.dumps({**table, "written": NOW, "pid": 1, **changes}))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(status.time, "time", lambda: NOW)
    return run_folder(tmp_path / "run")


def shown(table: dict[str, Any], width: int = 120, height: int | None = None) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(watching.view(table, height))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_snapshot_as_text(folder: Path) -> None:
    made = CliRunner().invoke(cli.app, ["watch", str(folder), "--once"])
    assert made.exit_code == 0, made.output
    text = made.output
    assert (
        "ok: round 3 of 9: 1 of 3 replies" in text
        and "shared-average on mnist12k-8x8" in text
        and "round 2/9" in text
    )
    assert (
        "1/3 replies, 12 s" in text
        and "global accuracy 50.0% (best 50.0%, round 1)" in text
        and "personal" not in text
    )
    assert (
        "5 replies, 1 missed, 0 refused, 0 late; 2 kB up, 4 kB down" in text
        and "10.0 s a round" in text
    )
    lines = {
        line.split()[1]: line
        for line in text.splitlines()
        if line[:1].isdigit() and line.split()[0] in "012"
    }
    assert "answered" in lines["one"] and "now" in lines["one"] and "512 MB of 1 GB" in lines["one"]
    assert "working" in lines["two"] and "3 min ago" in lines["two"]
    assert "away" in lines["three"] and "phone" in lines["three"]
    assert (
        "not seen yet: 1 phone" in text
        and "round 2" in text
        and "three" in text
        and "NaN in it" in text
    )


def test_the_same_as_json(folder: Path) -> None:
    made = CliRunner().invoke(cli.app, ["watch", str(folder), "--json"])
    table = json.loads(made.output)
    assert [row["state"] for row in table["clients"]] == ["answered", "working", "away"]
    assert table["health"]["state"] == "ok" and [
        row["name"] for row in table["health"]["missing"]
    ] == ["two", "three"]
    assert table["tiers"] == {
        "board": {"expected": 2, "here": 2, "away": 0},
        "phone": {"expected": 2, "here": 0, "away": 1},
    }
    assert (
        table["refusals"][0]["name"] == "three"
        and table["round"] == 2
        and table["totals"]["replies"] == 5
    )


def test_over_http_it_is_the_same(folder: Path) -> None:
    with health.telling(folder, "0") as server:
        assert server is not None
        for url in (server.url, server.url + "/", server.url + "/status", server.url + "/health"):
            assert watching.status_reader(url)() == watching.status_reader(str(folder))()
        made = CliRunner().invoke(cli.app, ["watch", server.url, "--once"])
    assert made.exit_code == 0 and "1 of 3 replies" in made.output


def test_what_the_proxy_refused_is_seen_too(folder: Path) -> None:
    row = {
        "time": "2027-01-15T08:00:00.000+00:00",
        "event": "refused",
        "address": "10.0.0.9",
        "key": "SHA256:abc",
    }
    (folder / "server.log.jsonl").write_text(
        json.dumps({**row, "reason": "the key of d2 is revoked"}) + "\n"
    )
    table = health.run_status(folder)
    assert [found["reason"] for found in table["refusals"]] == [
        "NaN in it",
        "the key of d2 is revoked",
    ]
    assert "SHA256:abc" in shown(table) and not table["health"]["warnings"]
    clone = {**row, "reason": "a cloned key: another device uses the key of d2 at this moment"}
    (folder / "server.log.jsonl").write_text(2 * (json.dumps(clone) + "\n"))
    table = health.run_status(folder)
    assert table["health"]["warnings"] == [clone["reason"]]
    assert f"warning: {clone['reason']}" in shown(table)
    assert "nestling_warnings 1" in exposition(table)


def test_names_can_neither_draw_nor_command(folder: Path) -> None:
    table = health.run_status(folder)
    table["clients"][0]["name"] = "\x1b[2J\x1b]0;owned\x07[red]evil[/red]\nnew line"
    table["tiers"]["[bold]x\x1b"] = {"expected": 4, "here": 0, "away": 0}
    table["refusals"][0]["reason"] = "[link=http://x]\x9b31m"
    table["health"]["reason"] = "[blink]\x1b[5m"
    text = shown(table, 200)
    assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in text)
    assert (
        "[red]evil[/red]\\nnew line" in text
        and "[bold]x\\x1b" in text
        and "[link=http://x]\\x9b31m" in text
        and "[blink]" in text
    )


def test_with_many_clients_those_that_matter_are_shown(folder: Path) -> None:
    table = health.run_status(folder)
    table["clients"] = [
        {
            **table["clients"][0],
            "client": c,
            "name": f"c{c}",
            "state": "away" if c == 77 else "answered",
        }
        for c in range(200)
    ]
    text = shown(table, height=24)
    assert len(text.splitlines()) <= 24 and "c77 " in text and "more; not seen yet" in text
    assert "c77 " in shown(table) and "c199" in shown(table)  # without a height, all


def test_it_follows_until_the_run_is_over(folder: Path) -> None:
    console = Console(width=120, height=30, file=io.StringIO(), force_terminal=True)
    first = health.run_status(folder)
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    second["doing"]["answered"] = 2
    third |= {
        "phase": "done",
        "health": {**first["health"], "state": "ok", "reason": "done: 9 rounds"},
    }
    looks = iter([first, InputError("it does not tell"), second, third])

    def read() -> dict[str, Any]:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    slept: list[float] = []
    assert watching.follow(read, console, 3.0, slept.append) is third
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert slept == [3.0] * 3
    for words in ("1/3 replies", "it does not tell", "2/3 replies", "done: 9 rounds"):
        assert words in text


@pytest.mark.parametrize(
    ("target", "words"),
    [("nowhere", "is not a run folder"), ("http://127.0.0.1:1", "does not tell")],
)
def test_what_cannot_be_watched(
    target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(cli.app, ["watch", target, "--once"])
    assert isinstance(made.exception, InputError) and words in str(made.exception)


def test_another_server_is_not_taken_for_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with health.telling(tmp_path, "0") as server:
        assert server is not None
        monkeypatch.setattr(health, "run_status", lambda *_: {"health": {"state": "ok"}})
        with pytest.raises(InputError, match="not the health address"):
            health.fetch(server.url)
        monkeypatch.setattr(health, "run_status", lambda *_: 1 / 0)
        with pytest.raises(InputError, match="does not tell"):
            health.fetch(server.url)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "now"), (90, "90 s ago"), (150, "2 min ago"), (9000, "2 h ago"), (4e5, "5 d ago")],
)
def test_how_long_ago(seconds: float, words: str) -> None:
    assert watching._ago(seconds) == words
