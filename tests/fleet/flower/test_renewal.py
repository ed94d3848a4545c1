"""The authority and the server's certificate are renewed while a fleet runs: nobody is locked out,
and the run ends."""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

from nestling import Evaluation, FleetConfig, Tier
from nestling.fleet.care import certs
from nestling.fleet.care.health import fetch
from nestling.fleet.node import joining
from tests.fleet.loop import six
from tests.fleet.processes import fleet, until

TIERS = (Tier(name="board", ratio=0.25, count=1), Tier(name="phone", ratio=0.5, count=1))
EXPERIMENT = six(fleet=FleetConfig(tiers=TIERS), rounds=1, evaluate=Evaluation(clients=2))


def serial(port: int, ca: Path) -> str:
    """Of the certificate that a server shows to one who trusts this authority."""
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as line,
    ):
        return str(line.getpeercert()["serialNumber"])  # type: ignore[index]


def test_authority_and_certificate_are_renewed_on_a_running_fleet(tmp_path: Path) -> None:
    with fleet(tmp_path) as made:
        certs.issue(made.certs, hosts=["127.0.0.1"], devices=["d0", "d1"], days=10)
        made.secure, trusted = True, made.certs / "devices/d0/ca.crt"
        old = tmp_path / "old.crt"
        old.write_bytes(trusted.read_bytes())
        server = made.start_server(EXPERIMENT)
        server.wait_for("the server's certificate ends in 9 days")
        server.wait_for("listening on")
        url = re.search(r"health: (http://\S+)/health", server.text)
        assert url is not None
        (warning,) = fetch(url[1])["health"]["warnings"]
        assert "the server's certificate ends in 9 days" in warning
        proxy, before = server.children()["nestling.fleet.server.proxy"], serial(made.port, old)
        first = made.start_client("d0", "board")
        first.wait_for("SuperNode ID")

        certs.issue(made.certs, renew_ca=True)
        first.wait_for("the authority's certificate was renewed")
        until(lambda: first.text.count("SuperNode ID") == 2, what="the device to be back")
        # who has not been brought the new authority yet can still come
        assert serial(made.port, old) == serial(made.port, trusted) == before

        certs.issue(made.certs, hosts=["127.0.0.1"], days=365, force=True)
        server.wait_for("the server's certificate was renewed")
        assert serial(made.port, trusted) != before
        assert fetch(url[1])["health"]["warnings"] == []
        late = certs.DeviceFiles(tmp_path / "late", "late")
        certs.private_folder(late.root).joinpath("ca.crt").write_bytes(old.read_bytes())
        options = joining.JoinOptions(
            "127.0.0.1", made.port, "board", "experiment", "late", tmp_path, late
        )
        assert "does not trust" in str(joining.obstacle(options))
        ready = replace(options, certs=certs.device_files(made.certs, "d1"))
        assert joining.obstacle(ready) is None

        made.start_client("d1", "phone")
        server.wait_done()
        assert server.text.count("proxy started") == 1
        assert f"proxy started (process {proxy})" in server.text
