"""Whoever answers on 127.0.0.1 gives a device's executor the code that it runs: it must be the
device's own node."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

from nestling.fleet.care import certs
from nestling.fleet.care.processes import Keeper
from nestling.fleet.node import joining
from tests.fleet.processes import until


@contextmanager
def listening(shown: certs.ServerFiles) -> Iterator[tuple[int, list[bytes | ssl.SSLError]]]:
    """A port with a certificate, and what came of each that connected: what it asked for first, or
    why it went away."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.certificate, shown.key)
    found: list[bytes | ssl.SSLError] = []

    def serve(door: socket.socket) -> None:
        while True:
            try:
                line = door.accept()[0]
            except OSError:
                return
            with line:
                line.settimeout(60.0)
                try:
                    with context.wrap_socket(line, server_side=True) as safe:
                        found.append(safe.recv(4096))
                except ssl.SSLError as error:
                    found.append(error)
                except OSError:
                    continue

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=serve, args=(door,), daemon=True)
        thread.start()
        try:
            yield door.getsockname()[1], found
        finally:
            door.shutdown(socket.SHUT_RDWR)
            thread.join(60.0)


@pytest.mark.parametrize("whose", ["its node's", "somebody's"])
def test_an_executor_asks_its_own_node_for_work_and_nobody_else(whose: str, tmp_path: Path) -> None:
    asked = joining.JoinOptions("127.0.0.1", 1, "board", "experiment", "d0", tmp_path, None)
    (tmp_path / "log").mkdir()
    shown = joining._own_loop(asked)
    if whose == "somebody's":
        shown = certs.make_loopback_authority(tmp_path / "other")
    with listening(shown) as (port, found), Keeper() as keeper:
        keeper.add(joining._executor(asked, port))
        first = until(lambda: list(found), what="somebody to connect")[0]
    if whose == "its node's":
        assert isinstance(first, bytes) and first.startswith(b"POST ")
    else:
        assert all(isinstance(one, ssl.SSLError) for one in found)
        assert "UNKNOWN_CA" in str(first)


def test_the_certificate_of_the_loop_is_made_once_and_whole(tmp_path: Path) -> None:
    asked = joining.JoinOptions("127.0.0.1", 1, "board", "experiment", "d0", tmp_path, None)
    made = joining._own_loop(asked)
    before = made.certificate.read_bytes()
    assert joining._own_loop(asked).certificate.read_bytes() == before
    made.certificate.unlink()  # as where the power went in between
    assert joining._own_loop(asked).certificate.read_bytes() != before
    assert all(path.stat().st_mode & 0o077 == 0 for path in made.root.iterdir())
