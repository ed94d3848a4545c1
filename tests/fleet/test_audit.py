"""The audit log: it tells whom a run took in and what it merged, goes on over crashes, and shows
where somebody laid hands on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nestling import cli
from nestling.errors import InputError
from nestling.fleet.care.audit import Audit, BrokenChain, audit, check, digest_of
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import Handle, LoopCourier
from nestling.fleet.protocol.wire import Order, kind_of
from nestling.fleet.server import serving
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import play
from nestling.methods.server import Server
from nestling.runfiles import AUDIT
from nestling.runs import checkpoint
from nestling.runs.run import Result
from tests.fleet.loop import six, workers_of

QUICK = Patience(poll=0.0, refresh=0.0)


class Crash(BaseException):
    """The server's process dies."""


def damaging(handle: Handle) -> Handle:
    """A line that changes a byte of an answer in round 2."""

    def handled(letter: bytes) -> bytes:
        answer = bytearray(handle(letter))
        if kind_of(letter) == "order" and Order.from_bytes(letter).round == 2:
            answer[-10] ^= 1
        return bytes(answer)

    return handled


def played(home: Path, workers: dict[int, Worker], **changes: Any) -> Result:
    handles = {100 + c: damaging(w.handle) if c == 5 else w.handle for c, w in workers.items()}
    return play(
        LoopCourier(handles),
        six("fedproto", server=Server(most_rows=25), **changes),
        home,
        min_clients=6,
        patience=QUICK,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    home = tmp_path_factory.mktemp("audited")
    return played(home / "run", workers_of(home / "devices"))


def copied(run: Result, to: Path) -> Path:
    assert run.folder is not None
    return Path(shutil.copytree(run.folder, to / "run"))


def test_it_tells_who_joined_and_what_was_accepted_clipped_refused_and_made(run: Result) -> None:
    assert run.folder is not None
    lines = check(run.folder)
    events = [(line["event"], line.get("round"), line.get("client")) for line in lines]
    joined = [("joined", None, c) for c in range(6)]
    assert events[0] == ("started", 0, None) and set(joined) <= set(events)
    accepted = {(r, c) for event, r, c in events if event == "accepted"}
    assert accepted == {(r, c) for r in (1, 2, 3) for c in range(6)} - {(2, 5)}
    (refused,) = [line for line in lines if line["event"] == "refused"]
    assert (refused["round"], refused["client"], refused["name"]) == (2, 5, "device 5")
    assert "damaged on its way" in refused["reason"]
    size = run.federation.world.split.size
    rows = [(x["rows"], x["counts_as"]) for x in lines if x["event"] == "accepted"]
    assert sorted(rows) == sorted((size(c), min(size(c), 25)) for _, c in accepted)
    assert any(all_of > counted for all_of, counted in rows)
    merged = [line for line in lines if line["event"] == "merged"]
    assert [(m["round"], m["accepted"], m["refused"]) for m in merged] == [
        (1, 6, 0), (2, 5, 1), (3, 6, 0),
    ]  # fmt: skip
    assert merged[-1]["state"] == digest_of(run.federation.state())
    assert len({line["state"] for line in merged}) == 3


@pytest.mark.parametrize("harm", ["edited", "deleted", "inserted", "truncated", "swapped"])
def test_a_line_that_was_touched_is_found(harm: str, run: Result, tmp_path: Path) -> None:
    home = copied(run, tmp_path)
    good = (home / AUDIT).read_bytes().splitlines(keepends=True)
    for place, line in enumerate(good):
        spoilt = {
            "edited": [line.replace(b'"event":"', b'"event":"x', 1)],
            "deleted": [],
            "inserted": [line, line],
            "truncated": [line[: len(line) // 2]],
            "swapped": [*good[place + 1 : place + 2], line],
        }[harm]
        if harm == "swapped" and place == len(good) - 1:
            continue
        skipped = place + (2 if harm == "swapped" else 1)
        (home / AUDIT).write_bytes(b"".join([*good[:place], *spoilt, *good[skipped:]]))
        with pytest.raises(BrokenChain) as found:
            check(home)
        number = place + 2 if harm == "inserted" else place + 1
        # Without its last line the log looks whole; the checkpoint tells.
        end = harm == "deleted" and place == len(good) - 1
        assert ("the end of" if end else f"line {number} of") in str(found.value)
    (home / AUDIT).write_bytes(b"".join(good))
    assert "is whole" in audit(home)[0]


def test_the_checkpoint_is_the_state_that_the_log_tells(run: Result, tmp_path: Path) -> None:
    home = copied(run, tmp_path)
    state, totals = checkpoint.load(home) or ({}, None)
    assert totals is not None
    next(iter(next(iter(state.values())).values())).flatten()[0] += 1
    checkpoint.save(home, state, totals)
    with pytest.raises(BrokenChain, match="not the one that was merged"):
        check(home)


@pytest.mark.parametrize("moment", ["before the checkpoint", "in a line"])
def test_a_resumed_runs_log_is_whole(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, home, save = workers_of(tmp_path / "devices"), tmp_path / "run", checkpoint.save

    def dies(path: Path, state: Any, totals: Any) -> None:
        if totals.round == 2:
            raise Crash
        save(path, state, totals)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", dies)
        with pytest.raises(Crash):
            played(home, workers)
    before = (home / AUDIT).read_bytes()
    if moment == "in a line":
        with open(home / AUDIT, "ab") as file:
            file.write(before.splitlines()[-1][:50])
    played(home, workers)
    lines = check(home)
    assert (home / AUDIT).read_bytes().startswith(before)  # nothing that was written is lost
    assert [x["round"] for x in lines if x["event"] == "merged"] == [1, 2, 2, 3]
    first, second = [x for x in lines if x["event"] == "started"]
    assert (first["round"], second["round"], second["start"]) == (0, 1, 2)
    assert second["cut"] == (50 if moment == "in a line" else 0)
    assert first["experiment"] == second["experiment"]


def test_a_log_that_cannot_be_gone_on_with_is_refused_by_name(tmp_path: Path) -> None:
    log = Audit(tmp_path / AUDIT)
    log.add("started", round=0, state="")
    (tmp_path / AUDIT).write_bytes((tmp_path / AUDIT).read_bytes() + b"\0\0\0\n")
    with pytest.raises(InputError, match=f"last line of .*{AUDIT} is damaged"):
        Audit(tmp_path / AUDIT)


def test_lines_taken_off_the_end_are_found_after_the_run_went_on(tmp_path: Path) -> None:
    workers, home = workers_of(tmp_path / "devices"), tmp_path / "run"
    played(home, workers, rounds=1)
    good = (home / AUDIT).read_bytes().splitlines(keepends=True)
    (home / AUDIT).write_bytes(b"".join(good[:-1]))
    text = (home / "experiment.toml").read_text()
    (home / "experiment.toml").write_text(text.replace("rounds = 1", "rounds = 2", 1))
    played(home, workers)
    with pytest.raises(BrokenChain, match=f"line {len(good)} of .* lines are missing"):
        check(home)


def test_refusals_without_end_do_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_REFUSALS", 0)
    played(tmp_path / "run", workers_of(tmp_path / "devices"), rounds=2)
    lines = check(tmp_path / "run")
    assert not [line for line in lines if line["event"] == "refused"]
    assert lines[-1]["refused"] == 1


def test_a_return_to_an_earlier_state_is_told(tmp_path: Path) -> None:
    home = tmp_path / "run"
    handles = {100 + c: w.handle for c, w in workers_of(tmp_path / "devices").items()}
    asked = six(rounds=2, server=Server(gate=1e9, good=2))
    play(LoopCourier(handles), asked, home, min_clients=6, patience=QUICK)
    saved = checkpoint.load(home)
    assert saved is not None
    made = CliRunner().invoke(cli.app, ["back", str(home), "--to", "1"])
    assert made.exit_code == 0, made.output
    last = check(home)[-1]
    assert (last["event"], last["round"], last["to"]) == ("returned", 2, 1)
    assert "returns to an earlier state: 1" in audit(home)
    first = checkpoint.load(home / "good", name="000001.bin")
    assert first is not None and last["state"] == digest_of(first[0])
    checkpoint.save(home, {"weights": {}}, saved[1])  # a return that nobody told of
    with pytest.raises(BrokenChain, match="is not the one that was merged"):
        check(home)


def test_the_command_says_what_it_holds_or_where_it_is_broken(run: Result, tmp_path: Path) -> None:
    home = copied(run, tmp_path)
    made = CliRunner().invoke(cli.app, ["audit", str(home)])
    last = json.loads((home / AUDIT).read_bytes().splitlines()[-1])["hash"]
    assert made.exit_code == 0 and last in made.output
    assert "merges: 3, the last of round 3" in made.output
    assert "replies accepted: 17, of these clipped: 17" in made.output
    assert "refusals: 1" in made.output
    (home / AUDIT).write_bytes((home / AUDIT).read_bytes().replace(b'"round":2', b'"round":3', 1))
    broken = CliRunner().invoke(cli.app, ["audit", str(home)])
    assert broken.exit_code == 1 and "is broken" in broken.output
    (home / AUDIT).unlink()
    assert "no audit.jsonl" in str(CliRunner().invoke(cli.app, ["audit", str(home)]).exception)
