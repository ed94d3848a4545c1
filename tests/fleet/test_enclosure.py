"""A network of their own: what listens in it is reached from inside, and by nobody else."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.fleet.care import enclosure as enclosures
from nestling.fleet.care.enclosure import NOWHERE, Enclosure, enclosure
from nestling.fleet.care.processes import Keeper, Program, free_port
from tests.fleet.processes import until

LISTEN = """
import socket, sys
door = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True: door.accept()
"""
CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 30)"


def made() -> Enclosure:
    try:
        return enclosure()
    except OSError as error:
        pytest.skip(f"no network of its own can be made here: {error}")


def reached(port: int, where: Enclosure) -> bool:
    command = [sys.executable, "-I", "-S", "-c", CONNECT, str(port)]
    return where.run(command, capture_output=True, timeout=120).returncode == 0


def test_what_listens_inside_is_reached_from_inside_only(tmp_path: Path) -> None:
    port, outside = free_port(), free_port()
    listen = [sys.executable, "-I", "-S", "-c", LISTEN]
    with made() as network, Keeper() as keeper:
        keeper.add(Program("in", [*listen, str(port)], tmp_path / "in.log", network=network))
        keeper.add(Program("out", [*listen, str(outside)], tmp_path / "out.log"))
        until(lambda: reached(port, network), what="the one inside")
        until(lambda: reached(outside, NOWHERE), what="the one outside")
        assert not reached(port, NOWHERE) and not reached(outside, network)
        child = keeper.children["in"]
        subprocess.run(["kill", "-9", str(child.pid)], check=True)
        until(lambda: (keeper.tick(), reached(port, network))[1], what="it to come back inside")
        assert not reached(port, NOWHERE)


def test_who_has_its_port_first_listens_outside_and_reaches_what_is_inside() -> None:
    """As the proxy does."""
    port = free_port()
    script = f"""
import socket, sys
from nestling.fleet.care.enclosure import Enclosure
outer = socket.create_server(("127.0.0.1", {port}))
Enclosure(tuple(map(int, sys.argv[1].split(",")))).enter()
inner = socket.create_server(("127.0.0.1", {port}))  # which is taken where it was
socket.create_connection(("127.0.0.1", {port})).sendall(b"hello")
line = inner.accept()[0]
outer.accept()[0].sendall(line.recv(5))
"""
    with made() as network:
        command = [sys.executable, "-c", script, network.words]
        with subprocess.Popen(command, pass_fds=network.descriptors) as process:

            def answer() -> bytes:
                try:
                    with socket.create_connection(("127.0.0.1", port), 60) as line:
                        return line.recv(5)
                except ConnectionRefusedError:
                    return b""

            assert until(answer) == b"hello"
            assert process.wait(60) == 0


def test_where_none_can_be_made_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enclosures, "_MAKE", "import sys; sys.exit('Operation not permitted')")
    with pytest.raises(OSError, match="Operation not permitted"):
        enclosure()
