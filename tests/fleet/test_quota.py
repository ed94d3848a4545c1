"""What a device may send: as much as its answers need, counted against the key that signed."""

from __future__ import annotations

import base64
import datetime
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="comes with nestling[fleet]")

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from nestling.files import summed
from nestling.fleet.care import certs
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.server import proxy
from nestling.fleet.server.quota import DEVICES, ROOM, SAVED, TIMES, Allowances, Quotas
from nestling.runs.loop import play
from tests.fleet.loop import METHODS, live, six, workers_of
from tests.fleet.processes import until
from tests.fleet.test_proxy import Inner, Setting, keys, running, setting

__all__ = ["keys", "setting"]


@pytest.mark.parametrize("method", METHODS)
def test_an_order_allows_its_answer_and_little_more(method: str, tmp_path: Path) -> None:
    allowed, answered = dict[int, int](), dict[int, int]()
    workers = workers_of(tmp_path)

    class Measuring(LoopCourier):
        def _answer(self, node: int, letter: bytes) -> object:  # type: ignore[override]
            answer = super()._answer(node, letter)
            assert isinstance(answer, bytes)
            answered[node] = max(answered.get(node, 0), len(answer))
            return answer

    courier = Measuring({100 + c: worker.handle for c, worker in workers.items()})
    _, federation = live(six(method), courier)

    def allow(expected: Mapping[int, int]) -> None:
        for node, size in expected.items():
            allowed[node] = max(allowed.get(node, 0), size)

    federation.engine.allow = allow  # type: ignore[attr-defined]
    list(play(federation))
    assert answered.keys() == allowed.keys() == set(courier.workers)
    for node, size in answered.items():
        assert size <= allowed[node] < size + 2**19, node


def test_each_letter_allows_so_much_and_not_all_of_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "quota.json"
    keys = {1: certs.KeyHolder("a"), 2: certs.KeyHolder("b")}
    allow, quotas = Allowances(path, keys), Quotas(path)
    each = TIMES * 1000 + ROOM
    assert not quotas.take("a", 1)  # nobody has written to it
    allow({1: 1000, 3: 10**9})  # node 3 is nobody's
    assert quotas.take("a", each) and not quotas.take("a", 1) and not quotas.take("b", 1)
    quotas.give_back("a", 10)
    assert not quotas.take("a", 11) and quotas.take("a", 10)
    allow({2: 10**9})
    allow({2: 0})  # a small letter takes nothing away from what a large one allowed
    assert quotas.take("b", TIMES * 10**9 + 2 * ROOM) and not quotas.take("b", 1)
    for _ in range(20):
        allow({1: 1000, 2: 0})
    assert quotas.allowed("a") == each
    assert not quotas.take("a", SAVED * each + 1) and quotas.take("a", SAVED * each)
    Allowances(path, {1: certs.KeyHolder("a")})({1: 1000})  # the run began again
    assert quotas.take("a", each) and not quotas.take("a", 1)
    assert Quotas(path).take("b", ROOM)  # and so did the proxy: what was allowed stands


@pytest.fixture
def small(setting: Setting, tmp_path: Path) -> Iterator[Setting]:
    """The proxy, with room for 1000 bytes of pi-1's and nobody else's."""
    path = tmp_path / "quota.json"
    path.write_text(summed({DEVICES: {"pi-1": [1000, 1000]}}))
    with running(replace(setting.running.config, quota=str(path))) as (port, one):
        found = Setting(setting.keys, port, setting.upstream, one)
        yield found
        for connection in found.connections:
            connection.close()


def signed(keys: Path, name: str = "pi-1", by: str = "") -> dict[str, str]:
    """The headers of a device's request, its signature made with the key of `by`."""
    public = certs.wire_key((keys / "server" / "devices" / f"{name}.pub").read_bytes())
    key = load_ssh_private_key((keys / "devices" / (by or name) / "device.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat()
    made = base64.b64encode(key.sign(now.encode(), ec.ECDSA(hashes.SHA256()))).decode()
    return {proxy.KEY: public, proxy.SIGNED: now, proxy.SIGNATURE: made}


def half_an_upload(keys: Path, port: int, name: str = "pi-1") -> ssl.SSLSocket:
    """A connection over which 450 bytes of 900 were sent, and no more come."""
    trust = ssl.create_default_context(cafile=str(keys / "server" / "ca.crt"))
    plain = socket.create_connection(("127.0.0.1", port), timeout=60)
    line = trust.wrap_socket(plain, server_hostname="127.0.0.1")
    headers = {"Host": "x", "Content-Length": "900", **signed(keys, name)}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    line.sendall(f"POST /v1/fleet/push-object HTTP/1.1\r\n{head}\r\n".encode() + b"x" * 450)
    return line


def test_a_key_sends_no_more_than_its_quota(small: Setting) -> None:
    sent = [
        small.ask("POST", "/v1/fleet/push-object", b"x" * 400, signed(small.keys))[0]
        for _ in range(4)
    ]
    assert sent == [200, 200, 413, 413]
    assert small.ask("POST", "/v1/fleet/push-messages", b"x" * 300, signed(small.keys))[0] == 413
    assert small.ask("POST", "/v1/fleet/push-messages", b"x" * 200, signed(small.keys))[0] == 200
    assert sum(size for _, _, _, size in Inner.seen) == 1000
    assert small.ask("POST", "/v1/fleet/pull-messages", b"x" * 400, signed(small.keys))[0] == 200
    assert small.ask("POST", "/v1/fleet/pull-messages", b"x" * 70_000, signed(small.keys))[0] == 413


def test_who_only_knows_a_key_spends_nothing_of_its_quota(small: Setting) -> None:
    for forged in (
        signed(small.keys, by="pi-2"),
        small.key("pi-1"),
        {**signed(small.keys), proxy.SIGNED: "x"},
    ):
        assert small.ask("POST", "/v1/fleet/push-object", b"x" * 900, forged)[0] == 401
    assert not Inner.seen
    assert small.ask("POST", "/v1/fleet/push-object", b"x" * 1000, signed(small.keys))[0] == 200


def test_an_upload_that_broke_off_may_be_sent_again(small: Setting) -> None:
    quotas = small.running.quotas
    assert quotas is not None
    with half_an_upload(small.keys, small.port):
        until(lambda: quotas._left.get("pi-1") == 100, 60, "the bytes to be taken")
        assert small.ask("POST", "/v1/fleet/push-object", b"x" * 900, signed(small.keys))[0] == 413

    def again() -> bool:
        return small.ask("POST", "/v1/fleet/push-object", b"x" * 900, signed(small.keys))[0] == 200

    until(again, 60, "the bytes to be given back")
