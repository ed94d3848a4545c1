"""The configuration for nginx in a real nginx, where there is one: before our proxy, which stands
before an inner server."""

from __future__ import annotations

import http.client
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nestling.fleet.care.processes import free_port
from tests.fleet.processes import until
from tests.fleet.test_proxy import Inner, Setting, keys, setting

__all__ = ["keys", "setting"]  # fixtures

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@pytest.fixture
def door(setting: Setting, tmp_path: Path) -> Iterator[int]:
    assert NGINX is not None
    port, text = free_port(), CONFIG.read_text()
    for old, new in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("server 127.0.0.1:8443", f"server 127.0.0.1:{setting.port}"),
        ("/etc/nestling", str(setting.keys / "server")),
        ("/run/nestling-nginx.pid", str(tmp_path / "pid")),
        (
            "http {\n",
            f"http {{\n    client_body_temp_path {tmp_path}/body;\n"
            f"    proxy_temp_path {tmp_path}/proxy;\n",
        ),
    ):
        assert old in text
        text = text.replace(old, new)
    for name in ("fastcgi", "uwsgi", "scgi"):
        text = text.replace("http {\n", f"http {{\n    {name}_temp_path {tmp_path}/{name};\n", 1)
    if os.geteuid() == 0:
        text = "user root;\n" + text  # else its workers could not read the keys of this test
    file = tmp_path / "nginx.conf"
    file.write_text(text)
    command = [NGINX, "-p", str(tmp_path), "-c", str(file), "-g", "daemon off;"]
    process = subprocess.Popen(command, stderr=open(tmp_path / "said", "wb"))  # noqa: SIM115
    try:
        until(
            lambda: _status(setting, port, "GET", "/health") or process.poll() is not None,
            60,
            "nginx",
        )
        assert process.poll() is None, (tmp_path / "said").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(60)


def _status(
    setting: Setting, port: int, method: str, path: str, body: bytes = b"", **headers: str
) -> int:
    context = ssl.create_default_context(cafile=str(setting.keys / "devices/pi-1/ca.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    try:
        connection.request(
            method, path, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


def test_the_same_paths_pass_and_no_other(setting: Setting, door: int) -> None:
    key = setting.key("pi-1")
    assert _status(setting, door, "GET", "/health") == 200
    assert (
        _status(setting, door, "POST", "/v1/fleet/push-object", os.urandom(12 << 20), **key) == 200
    )
    assert Inner.seen[-1][1:] != () and Inner.seen[-1][3] == 12 << 20
    before = len(Inner.seen)
    for path in (
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/docs",
        "/",
    ):
        assert _status(setting, door, "POST", path, **key) == 403, path
    # no key: the proxy behind says so
    assert _status(setting, door, "POST", "/v1/fleet/pull-messages") == 401
    assert _status(setting, door, "POST", "/v1/fleet/pull-messages", **setting.key("pi-3")) == 401
    assert len(Inner.seen) == before
