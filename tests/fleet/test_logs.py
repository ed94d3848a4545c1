"""Logs that programs read: every line whole, also with two processes writing and the file being put
aside; nothing secret in any."""

from __future__ import annotations

import base64
import json
import logging
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.fleet.care import certs, logs
from nestling.fleet.care.processes import Keeper, Program
from nestling.fleet.server import proxy
from tests.fleet.processes import until

LOG = logging.getLogger("nestling.test")


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_says_what_it_is_about(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with logs.written_to(path):
        logs.tell(
            LOG, logs.Note("client 3 (d1) is there", "joined", client=3, name="d1", node=2**63 + 1)
        )
        logs.tell(LOG, "plain words", logging.WARNING)
        LOG.info("with %s", "arguments")
        LOG.info("told by another process", extra={"echo": True})
    LOG.warning("afterwards")
    first, second, third = rows(path)
    assert {k: first[k] for k in ("level", "event", "client", "name", "node", "text", "from")} == {
        "level": "info",
        "event": "joined",
        "client": 3,
        "name": "d1",
        "node": str(2**63 + 1),  # as text: a number so large is rounded by many readers of JSON
        "text": "client 3 (d1) is there",
        "from": "nestling.test",
    }
    assert str(first["time"]).endswith("+00:00")
    assert (
        second["level"] == "warning"
        and second["event"] == "log"
        and third["text"] == "with arguments"
    )


def test_a_note_is_a_line_as_any_other() -> None:
    note = logs.Note("words", "event", round=2)
    assert (
        note == "words" and f"{note}!" == "words!" and note.facts == {"event": "event", "round": 2}
    )


def test_lines_wait_until_the_run_folder_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with logs.written_to(run / logs.SERVER_LOG, needs=run / "experiment.toml"):
        LOG.info("before")
        run.mkdir()
        LOG.info("still before")
        assert not any(run.iterdir())  # a new run wants an empty folder
        (run / "experiment.toml").write_text("")
        LOG.info("an echo", extra={"echo": True})
        assert [row["text"] for row in rows(run / logs.SERVER_LOG)] == ["before", "still before"]
        LOG.info("after")
    assert [row["text"] for row in rows(run / logs.SERVER_LOG)] == [
        "before",
        "still before",
        "after",
    ]


WRITER = """
import logging, sys
from pathlib import Path
from nestling.fleet.care.logs import JsonLines
sys.stdin.readline()
handler = JsonLines(Path(sys.argv[1]), limit=60_000)
for number in range(300):
    text = f"line {number} " + "x" * 50
    handler.emit(logging.LogRecord(sys.argv[2], logging.INFO, "", 0, text, (), None))
"""


def test_two_processes_write_whole_lines_and_put_the_full_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), name], stdin=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    for writer in writers:  # once both are there, at the same time
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.close()
    assert [writer.wait(120) for writer in writers] == [0, 0]
    aside = path.with_name(path.name + ".1")
    found = rows(aside) + rows(path)  # about 100 kB: put aside once
    for name in "ab":
        assert [int(str(row["text"]).split()[1]) for row in found if row["from"] == name] == list(
            range(300)
        )
    assert 60_000 <= aside.stat().st_size < 61_000 and path.stat().st_size < 60_000
    assert path.stat().st_mode & 0o007 == 0


def test_a_full_disk_loses_no_line_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "log.jsonl", logs.os.write

    def half(handle: int, data: bytes) -> int:
        return write(handle, data[: len(data) // 2])

    with logs.written_to(path):
        LOG.info("one")
        monkeypatch.setattr(logs.os, "write", half)
        LOG.info("two")
        assert [row["text"] for row in rows(path)] == ["one"]
        monkeypatch.setattr(logs.os, "write", write)
        LOG.info("three")
    assert [row["text"] for row in rows(path)] == ["one", "two", "three"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_plain_lines_on_a_full_disk_neither_end_nor_say_anything(
    capfd: pytest.CaptureFixture[str],
) -> None:
    full = logs.PlainLines("/dev/full")
    full.emit(logging.makeLogRecord({"msg": "words"}))
    full.close()
    assert capfd.readouterr() == ("", "")


def everything_secret(tmp_path: Path) -> dict[str, str]:
    certs.issue(tmp_path / "keys", hosts=["localhost"], devices=["d0"])
    device = tmp_path / "keys/devices/d0/device.key"
    public = (tmp_path / "keys/server/devices/d0.pub").read_bytes()
    return {
        "private key": device.read_text(),
        "half a private key": device.read_text()[:200],
        "server key": (tmp_path / "keys/server/server.key").read_text(),
        "certificate": (tmp_path / "keys/server/server.crt").read_text(),
        "public key": public.decode(),
        "key in a header": certs.wire_key(public),
        "token": secrets.token_hex(16),
        "secret": base64.b64encode(secrets.token_bytes(32) + b"\0\xff\x10").decode(),
    }


@pytest.mark.parametrize(
    "shape", ["{}", "something: {} and more", "flwr-signature: {}", "{{'token': '{}'}}"]
)
def test_no_secret_gets_into_a_log(tmp_path: Path, shape: str) -> None:
    path, text = tmp_path / "log.jsonl", tmp_path / "log.txt"
    plain = logging.FileHandler(text)
    plain.addFilter(logs.Discreet())
    found = everything_secret(tmp_path)
    LOG.addHandler(plain)
    try:
        with logs.written_to(path):
            for name, secret in found.items():
                LOG.info("%s: %s", name, shape.format(secret))
                logs.tell(
                    LOG, logs.Note(shape.format(secret), "refused", reason=shape.format(secret))
                )
                try:
                    raise ValueError(shape.format(secret))
                except ValueError:
                    LOG.exception("trouble")
    finally:
        LOG.removeHandler(plain)
        plain.close()
    said = path.read_text() + text.read_text()
    assert len(rows(path)) == 3 * len(found) and said.count(logs.HIDDEN) > 3 * len(found)
    for name, secret in found.items():
        for line in secret.splitlines():
            words = [word for word in line.split() if len(word) >= 16]
            assert not any(word in said or json.dumps(word)[1:-1] in said for word in words), name


@pytest.mark.parametrize(
    "text",
    [
        "round 3: 12 clients, global accuracy 93.10%, 4.2 s",
        "node 17009652372244268689 is refused: it answers for the run a6983b5e7342b0e3",
        "refused 127.0.0.1 SHA256:H2jUDEWxWW7kzngy: the key of d2 is revoked (403)",
        "cannot write the run folder /var/lib/nestling/fleets/of/the/whole/institute/run: No "
        "space left on device",
        "the key: see the runbook",
    ],
)
def test_what_people_need_is_not_hidden(text: str) -> None:
    assert logs.hide(text) == text


def test_known_values_of_secret_settings_are_hidden_however_short() -> None:
    said = logs.hide(
        'password=hunter22 Authorization: Bearer abc.def.ghi {"api_key": "0123456"} MQTT_TOKEN: '
        "s3cr3t!"
    )
    assert (
        said == f"password={logs.HIDDEN} Authorization: Bearer {logs.HIDDEN} "
        f'{{"api_key": "{logs.HIDDEN}"}} MQTT_TOKEN: {logs.HIDDEN}'
    )


def test_what_a_child_prints_is_told_with_what_it_is_about(tmp_path: Path) -> None:
    """The proxy's own words for a refusal, through a keeper, into the file."""
    token = secrets.token_hex(16)
    refusal = proxy.ClosedDoor(
        403, proxy.REVOKED_KEY, "the key of d2 is revoked", "SHA256:H2jUDEWxWW7kzngy"
    )
    words = (refusal.status, refusal.code, refusal.reason, refusal.who)
    code = (
        "import logging, sys; from nestling.fleet.server.proxy import ClosedDoor, Config, Proxy\n"
        "logging.basicConfig(level=logging.INFO, format='%(asctime)s %(levelname)s %(message)s')\n"
        f"Proxy(Config('127.0.0.1', 1, 2))._tell(ClosedDoor(*{words!r}), '10.0.0.9')\n"
        f"print('the token is {token}', file=sys.stderr); import time; time.sleep(600)"
    )
    path = tmp_path / "log.jsonl"
    with logs.written_to(path), Keeper() as keeper:
        keeper.add(
            Program(
                "proxy",
                [sys.executable, "-c", code],
                tmp_path / "proxy.log",
                show=lambda line: True,
            )
        )
        until(lambda: path.exists() and "the token is" in path.read_text(), 60)
    (row,) = [row for row in rows(path) if row["event"] == "refused"]
    assert (row["program"], row["address"], row["key"], row["reason"]) == (
        "proxy",
        "10.0.0.9",
        refusal.who,
        refusal.reason,
    )
    assert token not in path.read_text() and token not in (tmp_path / "proxy.log").read_text()
    assert logs.HIDDEN in (tmp_path / "proxy.log").read_text()


def test_the_end_of_a_log_is_read_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert logs.read(path) == []
    path.write_bytes(b'{"text": "one"}\nnot json\n[1]\n\xff\n{"text": "two"}\n{"text": "cut')
    assert [row["text"] for row in logs.read(path)] == ["one", "two"]
    assert [row["text"] for row in logs.read(path, last=2)] == ["two"]
