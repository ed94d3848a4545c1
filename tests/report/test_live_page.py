"""`nestling watch` of a simulation: a page that keeps up with the run, and nothing else."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import nestling
from nestling import cli
from nestling.cli.live import LiveServer, is_simulation, showing
from tests.report.made_up_run import write_run
from tests.small import small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rounds=6, done=2)


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    with showing(folder) as found:
        yield found


def ask(
    server: LiveServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, str]:
    """The answer's code and text."""
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        line.request(method, path, headers={"Host": host} if host is not None else {})
        answer = line.getresponse()
        return answer.status, answer.read().decode()
    finally:
        line.close()


def test_the_page_is_that_of_the_report_and_may_ask_its_own_server_only(server: LiveServer) -> None:
    code, text = ask(server, "/")
    assert code == 200
    assert "2 of 6 rounds, not finished" in text
    assert "default-src 'none'" in text
    assert "connect-src 'self'" in text
    assert 'data-live="' in text


def test_what_has_changed_is_told_once(server: LiveServer, folder: Path) -> None:
    first = json.loads(ask(server, "/parts")[1])
    assert ["rounds", "Rounds"] in first["sections"]
    assert ask(server, f"/parts?seen={first['stamp']}") == (204, "")
    write_run(folder, rounds=6, done=3)
    code, text = ask(server, f"/parts?seen={first['stamp']}")
    assert code == 200
    assert "3 of 6 rounds, not finished" in json.loads(text)["body"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"])
def test_nothing_but_looking_is_allowed(server: LiveServer, method: str) -> None:
    assert ask(server, "/", method)[0] in (405, 501)


@pytest.mark.parametrize(
    "path",
    ["/experiment.toml", "/../experiment.toml", "/%2e%2e/metrics.jsonl", "//etc/passwd", "x"],
)
def test_no_file_can_be_asked_for(server: LiveServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.1", "", "[::2]:80"])
def test_another_name_of_this_machine_is_refused(server: LiveServer, host: str) -> None:
    assert ask(server, "/", host=host)[0] == 403
    assert ask(server, "/parts", host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1234", "[::1]:80"])
def test_its_own_names_are_known(server: LiveServer, host: str) -> None:
    assert ask(server, "/", host=host)[0] == 200


def test_a_run_that_has_not_begun_or_is_damaged_says_so(server: LiveServer, folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    assert "it appears with the first round" in json.loads(ask(server, "/parts")[1])["body"]
    (folder / "metrics.jsonl").write_text("{\n")
    assert "not valid JSON" in json.loads(ask(server, "/parts")[1])["body"]


def test_a_fleet_and_an_address_are_no_simulation(folder: Path) -> None:
    assert is_simulation(str(folder))
    (folder / "roster.json").write_text("{}")
    assert not is_simulation(str(folder))
    assert not is_simulation("http://127.0.0.1:8444")
    assert not is_simulation(str(folder / "nowhere"))


def test_once_stays_a_text_on_the_terminal(folder: Path) -> None:
    made = CliRunner().invoke(cli.app, ["watch", str(folder), "--once"])
    assert made.exit_code == 0
    assert "round 2/6" in made.output


def test_the_command_ends_with_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "nestling", "watch", str(folder), "--port", "0"]
    root = str(Path(nestling.__file__).parent.parent)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        # Tests that run in the background have inherited that ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_run_is_seen_while_it_runs(tmp_path: Path) -> None:
    path, begun, go_on = tmp_path / "run", threading.Event(), threading.Event()

    def pause(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            begun.set()
            assert go_on.wait(timeout=300)

    run = threading.Thread(
        target=nestling.run,
        args=(small("heterofl", rounds=2),),
        kwargs={"out": path, "watcher": nestling.Watcher(round=pause)},
        daemon=True,
    )
    run.start()
    try:
        assert begun.wait(timeout=300)
        with showing(path) as server:
            first = json.loads(ask(server, "/parts")[1])
            assert "1 of 2 rounds, not finished" in first["body"]
            assert "<h1>HeteroFL</h1>" in first["body"] and first["title"].startswith("HeteroFL ")
            assert ["coverage", "Coverage"] in first["sections"]
            go_on.set()
            run.join(timeout=300)
            text = ask(server, f"/parts?seen={first['stamp']}")[1]
            assert "2 rounds, finished" in json.loads(text)["body"]
    finally:
        go_on.set()
        run.join(timeout=300)
