"""The proxy with a real upstream behind TLS: what devices need passes unharmed, everything else is
refused with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="comes with nestling[fleet]")

from nestling.fleet.care import certs
from nestling.fleet.server import proxy


class Inner(BaseHTTPRequestHandler):
    """Stands for the SuperLink: sends back what it got, and remembers."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, dict[str, str], int]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append(
            (self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, len(body))
        )
        if self.path.endswith("get-run"):
            self.chunks([b"one", b"two" * 1000])
        else:
            self.whole(body)

    def do_GET(self) -> None:
        self.seen.append((self.command, self.path, {}, 0))
        self.whole(b'{"status": "ok"}')

    def whole(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def chunks(self, parts: list[bytes]) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in [*parts, b""]:
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Setting:
    """A running proxy and what surrounds it."""

    keys: Path
    port: int
    upstream: int
    running: proxy.Proxy
    connections: list[http.client.HTTPSConnection] = field(default_factory=list)

    def key(self, name: str) -> dict[str, str]:
        place = self.keys / "server" / "devices" / f"{name}.pub"
        gone = self.keys / "server" / "revoked" / f"{name}.pub"
        return {proxy.KEY: certs.wire_key((place if place.exists() else gone).read_bytes())}

    def connect(self) -> http.client.HTTPSConnection:
        trust = ssl.create_default_context(cafile=str(self.keys / "devices/pi-1/ca.crt"))
        made = http.client.HTTPSConnection("127.0.0.1", self.port, context=trust, timeout=60)
        self.connections.append(made)
        return made

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        connection = self.connect()
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def raw(self, data: bytes) -> bytes:
        """What comes back for bytes that no library would send."""
        trust = ssl.create_default_context(cafile=str(self.keys / "devices/pi-1/ca.crt"))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        with trust.wrap_socket(plain, server_hostname="127.0.0.1") as line:
            line.sendall(data)
            got = b""
            with contextlib.suppress(OSError):
                while piece := line.recv(65536):
                    got += piece
            return got


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    certs.issue(folder, hosts=["127.0.0.1"], devices=["pi-1", "pi-2", "pi-3"])
    certs.issue(folder, revoke=["pi-3"])
    return folder


@pytest.fixture
def setting(keys: Path, tmp_path: Path) -> Iterator[Setting]:
    inner = certs.make_loopback_authority(tmp_path / "inner")
    Inner.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Inner)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(inner.certificate, inner.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = proxy.Config(
        host="127.0.0.1",
        port=0,
        upstream=server.server_address[1],
        certificate=str(keys / "server/server.crt"),
        key=str(keys / "server/server.key"),
        upstream_ca=str(inner.ca),
        devices=str(keys / "server/devices"),
        revoked=str(keys / "server/revoked"),
        body_limit=13 << 20,
    )
    with running(config) as (port, one):
        found = Setting(keys, port, server.server_address[1], one)
        yield found
        for connection in found.connections:
            connection.close()
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def running(config: proxy.Config) -> Iterator[tuple[int, proxy.Proxy]]:
    """A proxy in a thread."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), {}

    async def run() -> None:
        one = proxy.Proxy(config)
        server = await one.start()
        watcher = asyncio.ensure_future(one.watch_keys(0.05))
        found.update(port=server.sockets[0].getsockname()[1], proxy=one, stop=asyncio.Event())
        ready.set()
        await found["stop"].wait()
        watcher.cancel()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield found["port"], found["proxy"]
    finally:
        loop.call_soon_threadsafe(found["stop"].set)
        thread.join(30)


def test_a_device_gets_through_with_its_headers_and_its_body(setting: Setting) -> None:
    body = os.urandom(12 << 20)
    sent = {
        **setting.key("pi-1"),
        "flwr-signature": "abc",
        "Content-Type": "application/x-protobuf",
        "X-Forwarded-For": "6.6.6.6",
    }
    assert setting.ask("POST", "/v1/fleet/push-object", body, sent) == (200, body)
    method, path, headers, size = Inner.seen[-1]
    assert (method, path, size) == ("POST", "/v1/fleet/push-object", len(body))
    assert (
        headers["flwr-signature"] == "abc" and headers["content-type"] == "application/x-protobuf"
    )
    assert headers[proxy.KEY] == setting.key("pi-1")[proxy.KEY]
    assert headers["x-forwarded-for"] == "127.0.0.1"


def test_health_needs_no_key(setting: Setting) -> None:
    assert setting.ask("GET", "/health") == (200, b'{"status": "ok"}')


def test_a_connection_serves_many_requests_and_answers_in_chunks(setting: Setting) -> None:
    connection = setting.connect()
    for number in range(20):
        call = "get-run" if number % 2 else "pull-messages"
        connection.request("POST", f"/v1/fleet/{call}", b"x" * number, setting.key("pi-1"))
        got = connection.getresponse().read()
        assert got == (b"one" + b"two" * 1000 if number % 2 else b"x" * number)
    assert len(Inner.seen) == 20


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/register-node"),
        ("POST", "/v1/runtime/acquire-task"),
        ("POST", "/v1/fleet/../control/start-run"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1/fleet//pull-messages"),
        ("POST", "/v1/fleet/pull-messages?x=1"),
        ("POST", "/V1/fleet/pull-messages"),
        ("POST", "https://127.0.0.1/v1/fleet/pull-messages"),
        ("GET", "/v1/fleet/pull-messages"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/"),
        ("POST", "/health"),
        ("GET", "/health/"),
    ],
)
def test_no_other_path_passes(setting: Setting, method: str, path: str) -> None:
    status, body = setting.ask(
        method, path, b"x" if method == "POST" else None, setting.key("pi-1")
    )
    assert status == 403 and "not for devices" in json.loads(body)["detail"]
    assert not Inner.seen


def test_keys(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nestling.fleet.server.proxy"):
        for headers, code, words in (
            ({}, proxy.NO_KEY, "shows no key"),
            ({proxy.KEY: "QUFB"}, proxy.UNKNOWN_KEY, "not registered"),
            (setting.key("pi-3"), proxy.REVOKED_KEY, "the key of pi-3 is revoked"),
        ):
            for call, status in (("activate-node", 400), ("pull-messages", 401)):
                got, body = setting.ask("POST", f"/v1/fleet/{call}", b"", headers)
                assert (got, json.loads(body)["code"]) == (status, code)
                assert words in json.loads(body)["detail"] and words in caplog.text
        for call, status in (("register-node", 400), ("unregister-node", 401)):
            got, body = setting.ask("POST", f"/v1/fleet/{call}", b"", setting.key("pi-1"))
            assert got == status and "none registers itself" in json.loads(body)["detail"]
    assert not Inner.seen
    assert setting.key("pi-3")[proxy.KEY] not in caplog.text


def test_a_key_revoked_now_is_refused_on_the_next_request_of_an_open_connection(
    setting: Setting,
) -> None:
    connection, key = setting.connect(), setting.key("pi-2")
    connection.request("POST", "/v1/fleet/pull-messages", b"", key)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"")
    certs.issue(setting.keys, revoke=["pi-2"])
    try:
        for _ in range(200):  # the proxy looks at the folder now and then
            connection.request("POST", "/v1/fleet/pull-messages", b"", key)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                break
            threading.Event().wait(0.05)
        assert answer.status == 401 and json.loads(body)["code"] == proxy.REVOKED_KEY
        assert setting.ask("POST", "/v1/fleet/pull-messages", b"", setting.key("pi-1"))[0] == 200
    finally:
        os.replace(
            setting.keys / "server/revoked/pi-2.pub", setting.keys / "server/devices/pi-2.pub"
        )


def test_a_renewed_certificate_is_taken_while_the_proxy_runs(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    def shown() -> int:
        connection = setting.connect()
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        return int(connection.sock.getpeercert()["serialNumber"], 16)

    open_before, first = setting.connect(), shown()
    open_before.request("GET", "/health")
    open_before.getresponse().read()
    files = certs.server_files(setting.keys)
    certificate = files.certificate.read_bytes()
    with caplog.at_level(logging.INFO, "nestling.fleet.server.proxy"):
        files.certificate.write_bytes(certificate[:200])  # half of it has been copied
        wait_until(lambda: "cannot take the new certificate" in caplog.text)
        assert shown() == first
        certs.issue(setting.keys, hosts=["127.0.0.1"], force=True)
        wait_until(lambda: "was renewed, and is in use" in caplog.text)
    assert shown() != first
    open_before.request("GET", "/health")  # who is in stays in
    assert open_before.getresponse().status == 200


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(600):
        if true():
            return
        threading.Event().wait(0.05)
    pytest.fail("waited in vain")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("Content-Length: 5\r\nContent-Length: 50", 400),
        ("Transfer-Encoding: chunked", 411),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", 411),
        ("Content-Length: +5", 400),
        ("Content-Length: 5, 5", 400),
        ("Content-Length: 99999999999", 413),
        (f"Content-Length: {(13 << 20) + 1}", 413),
        ("X-Odd : 1", 400),
        ("X-Odd: a\nX-More: b", 400),
        (" folded", 400),
        ("X-Long: " + "a" * 20_000, 431),
        (f"{proxy.KEY}: twice", 400),
    ],
)
def test_what_two_readers_may_understand_differently_is_refused(
    setting: Setting, lines: str, status: int
) -> None:
    key = setting.key("pi-1")[proxy.KEY]
    head = (
        f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n{proxy.KEY}: "
        f"{key}\r\n{lines}\r\n\r\nhello"
    )
    answer = setting.raw(head.encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
    assert not Inner.seen


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x16\x03\x01",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET  /health HTTP/1.1\r\n\r\n",
        b"\r\n\r\n",
    ],
)
def test_odd_first_bytes_do_no_harm(setting: Setting, data: bytes) -> None:
    trust = ssl.create_default_context(cafile=str(setting.keys / "devices/pi-1/ca.crt"))
    plain = socket.create_connection(("127.0.0.1", setting.port), timeout=60)
    with trust.wrap_socket(plain, server_hostname="127.0.0.1") as line:
        line.sendall(data)
    assert setting.ask("GET", "/health")[0] == 200


def test_no_tls_no_entry(setting: Setting) -> None:
    with socket.create_connection(("127.0.0.1", setting.port), timeout=60) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(OSError):
            assert not plain.recv(100).startswith(b"HTTP")
    assert not Inner.seen


def test_a_server_that_is_away_is_said_to_be_and_nodes_try_again(keys: Path) -> None:
    config = proxy.Config(
        host="127.0.0.1",
        port=0,
        upstream=1,  # nobody listens there
        certificate=str(keys / "server/server.crt"),
        key=str(keys / "server/server.key"),
        devices=str(keys / "server/devices"),
        revoked=str(keys / "server/revoked"),
    )
    with running(config) as (port, one):
        found = Setting(keys, port, 1, one)
        status, body = found.ask("POST", "/v1/fleet/pull-messages", b"", found.key("pi-1"))
        assert status == 503 and "try again" in json.loads(body)["detail"]
        found.connections[0].close()


def served(setting: Setting) -> http.client.HTTPSConnection:
    """A connection of a device, over which it was let in."""
    connection = setting.connect()
    connection.request("POST", "/v1/fleet/pull-messages", b"", setting.key("pi-1"))
    assert connection.getresponse().read() == b""
    return connection


def test_connections_of_one_address_are_bounded(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "PER_ADDRESS", 2)
    devices = [served(setting) for _ in range(2)]
    assert setting.ask("GET", "/health")[0] == 503
    for connection in devices:  # these stay
        connection.request("GET", "/health")
        assert connection.getresponse().read()
    for connection in setting.connections:
        connection.close()
    for _ in range(200):
        if setting.ask("GET", "/health")[0] == 200:
            break
        setting.connections[-1].close()
        threading.Event().wait(0.05)
    else:
        pytest.fail("closed connections still count")


@pytest.mark.parametrize("bound", ["PER_ADDRESS", "CONNECTIONS"])
def test_who_holds_connections_without_a_key_keeps_nobody_out(
    bound: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the device's own address, and from several others: some say nothing, some trickle."""
    monkeypatch.setattr(proxy, bound, 8)
    device = served(setting)
    held: list[ssl.SSLSocket] = []
    trust = ssl.create_default_context(cafile=str(setting.keys / "devices/pi-1/ca.crt"))
    for k in range(24):
        host = "127.0.0.1" if bound == "PER_ADDRESS" else f"127.0.0.{3 + k % 3}"
        plain = socket.create_connection(("127.0.0.1", setting.port), 60, (host, 0))
        held.append(trust.wrap_socket(plain, server_hostname="127.0.0.1"))
        if k % 2:
            held[-1].sendall(b"GET /health HTTP/1.1\r\nX: ")
    for _ in range(5):
        assert setting.ask("GET", "/health")[0] == 200
        device.request("POST", "/v1/fleet/pull-messages", b"", setting.key("pi-1"))
        answer = device.getresponse()
        assert answer.read() == b"" and answer.status == 200
        assert sum(map(len, setting.running._open.values())) <= 9
    for line in held:
        line.close()


def test_a_request_cannot_draw_on_the_terminal(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even one without a key, whose refusal quotes it."""
    with caplog.at_level(logging.WARNING, "nestling.fleet.server.proxy"):
        setting.raw(b"GET / HTTP/1.1\r\nHost: x\r\n" + 2 * b"\x1b[2J\x9bX: 1\r\n" + b"\r\n")
    (line,) = caplog.messages
    assert r"the header \x1b[2j\x9bx comes twice" in line and line.isprintable()


def test_the_log_says_a_thing_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    quiet = proxy.Quiet(60, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, "nestling.fleet.server.proxy"):
        for second in range(130):
            now[0] = second
            quiet.say("refused 1.2.3.4: no")
    assert [record.getMessage() for record in caplog.records] == [
        "refused 1.2.3.4: no",
        "refused 1.2.3.4: no (59 more like it)",
        "refused 1.2.3.4: no (59 more like it)",
    ]
