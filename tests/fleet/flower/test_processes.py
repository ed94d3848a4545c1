"""A server and devices as real processes on the loop, with TLS and keys: one story, told in order.

Who has only the authority's certificate gets nothing; nodes without a key, with a wrong one or with
a revoked one are refused, and the logs say so; two honest devices finish the run with the result of
the run in one process, bit for bit.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

from typer.testing import CliRunner

import nestling
from nestling import Evaluation, FleetConfig, Tier
from nestling.cli import app
from nestling.errors import InputError
from nestling.fleet.care import certs, logs
from nestling.fleet.care.audit import audit
from nestling.fleet.care.enclosure import NOWHERE, Enclosure
from nestling.fleet.care.health import fetch
from nestling.fleet.care.processes import flower_command, flower_env, free_port
from nestling.fleet.node import joining
from nestling.fleet.server import server as serving
from nestling.fleet.server.proxy import NO_KEY, REVOKED_KEY, UNKNOWN_KEY
from tests.fleet.loop import six
from tests.fleet.processes import SECONDS, ProcessFleet, Server, fleet, until

TIERS = (Tier(name="board", ratio=0.25, count=1), Tier(name="phone", ratio=0.5, count=1))
EXPERIMENT = six(fleet=FleetConfig(tiers=TIERS), rounds=1, evaluate=Evaluation(clients=2))


@dataclass
class Story:
    """The fleet under test, and an outsider who has the authority's certificate and nothing
    else."""

    fleet: ProcessFleet
    server: Server
    outsider: Path

    @property
    def inner(self) -> int:
        return int(json.loads((self.server.home / "proxy.json").read_text())["upstream"])

    def inside(self) -> Enclosure:
        """The network that Flower's processes are in, which root and the same user can enter."""
        superlink = self.server.children()["flower-superlink"]
        kinds = ("user", "net") if own(superlink, "user") else ("net",)
        return Enclosure(
            tuple(os.open(f"/proc/{superlink}/ns/{kind}", os.O_RDONLY) for kind in kinds)
        )

    def flwr(self, *calls: list[str], where: Enclosure = NOWHERE) -> list[dict[str, Any]]:
        """What the outsider hears from Flower's own commands."""
        env = flower_env(self.outsider / "flower")
        command = [sys.executable, "-m", "nestling.fleet.flower.commands"]
        made = where.run(
            command, input=json.dumps(calls), capture_output=True, env=env, timeout=SECONDS
        )
        return [json.loads(line) for line in made.stdout.splitlines()]

    def post(self, port: int, ca: Path, path: str) -> int:
        context = ssl.create_default_context(cafile=str(ca))
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
        connection.request("POST", path, b"", {"Content-Type": "application/protobuf"})
        status = connection.getresponse().status
        connection.close()
        return status

    def node(self, *words: str) -> tuple[int, str]:
        """Flower's own node, as an outsider would start it; it ends when it is refused. Its exit
        code, and what it said."""
        command = [
            flower_command("flower-supernode"),
            "--superlink",
            f"127.0.0.1:{self.fleet.port}",
            "--port",
            str(free_port()),
        ]
        command += [
            "--root-certificates",
            str(self.outsider / "ca.crt"),
            "--max-retries",
            "0",
            "--isolation",
            "process",
            *words,
        ]
        env = flower_env(self.outsider / "flower")
        said = self.outsider / "node.log"
        with open(said, "wb") as file:  # not a pipe, whose end its own child would hold open
            code = subprocess.run(
                command, stdout=file, stderr=file, env=env, timeout=SECONDS
            ).returncode
        return code, said.read_text()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("story")
    with fleet(root) as made:
        made.keys("d0", "d1", "d2", "d3")
        certs.issue(made.certs, revoke=["d3"])
        server = made.start_server(EXPERIMENT)
        outsider = root / "outsider"
        certs.issue(outsider / "own", devices=["mallory"])
        (outsider / "ca.crt").write_bytes((made.certs / "devices/d0/ca.crt").read_bytes())
        server.wait_for("listening on")
        told = Story(made, server, outsider)
        (outsider / "flower").mkdir()
        (outsider / "flower/config.toml").write_text(
            f'[superlink.public]\naddress = "127.0.0.1:{made.port}"\nroot-certificates = '
            f'"{outsider / "ca.crt"}"\n'
            f'[superlink.inner]\naddress = "127.0.0.1:{told.inner}"\nroot-certificates = '
            f'"{server.home / "inner/ca.crt"}"\n'
        )
        yield told


def own(pid: int, kind: str) -> bool:
    """Whether a process is in a namespace of another kind than this process."""
    return os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")


def task_of(home: Path) -> int:
    """The process of the run; 0 where there is none yet."""
    path = home / serving.PROCESS
    return int(json.loads(path.read_text())["pid"]) if path.exists() else 0


def own_log(folder: Path) -> str:
    """What a device's owner reads."""
    rows = logs.read(folder / "log" / logs.DEVICE_LOG)
    return "\n".join(str(row["text"]) for row in rows)


def test_with_the_authority_s_certificate_alone_there_is_nothing_to_be_had(story: Story) -> None:
    public = story.outsider / "own/server/devices/mallory.pub"
    app = Path(nestling.__file__).parent / "fleet" / "flower" / "app"
    attack = [
        ["supernode", "register", str(public)],
        ["list"],
        ["run", str(app)],
        ["supernode", "list"],
    ]
    said = story.flwr(*([*words, "public"] for words in attack))
    assert len(said) == 4
    for one in said:
        assert not one["success"] and "is not for devices" in str(one), one
    # The same commands get through where the proxy is not in the way: what is refused is what would
    # otherwise work.
    with story.inside() as inside:
        told = story.flwr(*([*words, "inner"] for words in attack[:2]), where=inside)
    assert len(told) == 2 and all(one["success"] for one in told), told

    for path in ("/v1/runtime/acquire-task", "/v1/control/list-runs", "/docs"):
        assert story.post(story.fleet.port, story.outsider / "ca.crt", path) == 403
    story.server.wait_for("'/v1/runtime/acquire-task' is not for devices")


def test_who_has_an_account_on_the_server_s_machine_cannot_reach_flower_either(
    story: Story,
) -> None:
    """Another process of this machine, with the inner certificate, the port and the task's token:
    on its 127.0.0.1 nobody listens."""
    superlink = story.server.children()["flower-superlink"]
    if not own(superlink, "net"):
        pytest.skip("no network of their own can be made here")
    inner = story.server.home / "inner/ca.crt"
    with pytest.raises(ConnectionRefusedError):
        story.post(story.inner, inner, "/v1/control/list-runs")
    assert not any(
        one["success"] for one in story.flwr(["list", "inner"], ["supernode", "list", "inner"])
    )
    until(lambda: task_of(story.server.home), what="Flower's task")
    assert own(task_of(story.server.home), "net")  # whose token everybody sees, and nobody can use
    ask = f"""
import http.client, ssl
context = ssl.create_default_context(cafile={str(inner)!r})
line = http.client.HTTPSConnection("127.0.0.1", {story.inner}, context=context, timeout=60)
line.request("POST", "/v1/runtime/acquire-task", b"", {{"Content-Type": "application/protobuf"}})
print(line.getresponse().status)
"""
    with story.inside() as inside:  # and there a secret is asked for
        said = inside.run([sys.executable, "-c", ask], capture_output=True, timeout=SECONDS)
    assert said.stdout == "401\n", said.stderr


def test_the_server_listens_for_others_at_the_proxy_only(story: Story) -> None:
    """Of all that belongs to the server, only the proxy's port is not on the loop by choice of the
    user; here all are on the loop."""
    config = json.loads((story.server.home / "proxy.json").read_text())
    assert config["port"] == story.fleet.port
    superlink = (
        Path(f"/proc/{story.server.children()['flower-superlink']}/cmdline")
        .read_bytes()
        .split(b"\0")
    )
    assert superlink[superlink.index(b"--host") + 1] == b"127.0.0.1"
    assert b"--superexec-auth-secret-file" in superlink and b"--enable-supernode-auth" in superlink


@pytest.mark.parametrize(
    ("key", "code", "words"),
    [
        (None, NO_KEY, "none registers itself"),  # Flower makes one up and tries to register it
        ("own/devices/mallory/device.key", UNKNOWN_KEY, "the key is not registered"),
        ("../keys/devices/d3/device.key", REVOKED_KEY, "the key of d3 is revoked"),
    ],
    ids=["without", "wrong", "revoked"],
)
def test_a_node_without_a_good_key_is_refused(
    story: Story, key: str | None, code: int, words: str
) -> None:
    before = story.server.text.count("joined")
    ended, said = story.node(
        *(["--auth-supernode-private-key", str(story.outsider / key)] if key else [])
    )
    assert ended != 0 and f"[code: {code}]" in said
    story.server.wait_for(words)
    assert story.server.text.count("joined") == before


def test_a_request_without_any_key_is_refused(story: Story) -> None:
    assert story.post(story.fleet.port, story.outsider / "ca.crt", "/v1/fleet/pull-messages") == 401
    story.server.wait_for("the device shows no key")


def test_a_second_use_of_a_key_is_a_cloned_key_and_the_newer_is_refused(story: Story) -> None:
    first = story.fleet.start_client("d2", "laptop")
    first.wait_for("SuperNode ID")
    clone = story.fleet.start_client("d2", "laptop", "--folder", str(story.fleet.root / "clone"))
    clone.wait_for("refused: a cloned key")
    assert "SuperNode ID" not in clone.text
    assert "refused: a cloned key" in own_log(story.fleet.root / "clone")
    story.server.wait_for("a cloned key: another device uses the key of d2 at this moment")
    url = re.search(r"health: (http://\S+)/health", story.server.text)
    assert url is not None  # it reads the log, which begins with the run's folder
    warned = until(lambda: fetch(url[1])["health"]["warnings"], what="a warning")
    assert warned == ["a cloned key: another device uses the key of d2 at this moment"]
    assert "ended" not in first.text  # the older one stays
    assert clone.stop() == 130 and first.stop() == 130


def test_a_device_whose_key_is_revoked_is_thrown_out(story: Story) -> None:
    device = story.fleet.start_client("d2", "laptop")
    device.wait_for("SuperNode ID")
    story.server.wait_for("joined: d2")
    certs.issue(story.fleet.certs, revoke=["d2"])
    device.wait_for("refused: this device's key is revoked")
    assert "refused: this device's key is revoked" in own_log(device.folder)
    story.server.wait_for("the key of d2 is revoked")
    story.server.wait_for("device d2 may not join any more")
    assert device.stop() == 130


def test_two_devices_finish_the_run_with_the_result_of_one_process(
    story: Story, tmp_path: Path
) -> None:
    devices = [story.fleet.start_client("d0", "board"), story.fleet.start_client("d1", "phone")]
    here = nestling.run(EXPERIMENT, out=tmp_path / "here")
    story.server.wait_done()
    assert (story.server.out / "global.safetensors").read_bytes() == (
        tmp_path / "here/global.safetensors"
    ).read_bytes()
    there = json.loads((story.server.out / "summary.json").read_text())
    assert (
        there["global_score"] == here.summary["global_score"]
        and there["refused"] == there["dropped"] == 0
    )
    told = "\n".join(audit(story.server.out))
    assert "is whole" in told and "joined: 2 (d0, d1)" in told and "accepted: 2" in told
    for device in devices:
        device.wait_for("the run is over: round 1 was its last; waiting for the next")
        assert "the run is over" in own_log(device.folder)
        assert device.process.poll() is None  # it waits for the next run
        assert device.stop() == 130


def test_nothing_is_left_and_nothing_secret_was_said(story: Story) -> None:
    until(lambda: not story.fleet.leftovers(), what="the processes to end")
    secrets = [
        path
        for path in story.fleet.root.rglob("*")
        if path.name in ("server.key", "device.key", "secret", "ca.key", "token")
    ]
    assert len(secrets) >= 8
    for path in secrets:
        assert path.stat().st_mode & 0o077 == 0, path
    said = [path for path in story.fleet.root.rglob("*.log*") if path.is_file()]
    assert len(said) >= 10
    for path in said:
        text = path.read_bytes()
        assert b"PRIVATE KEY" not in text
        for secret in secrets:
            for line in secret.read_bytes().splitlines():
                assert len(line) < 16 or line not in text, (path, secret)


def test_insecure_means_this_machine(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="only this machine"):
        serving.serve(serving.ServeOptions("", tmp_path / "run", None, host="0.0.0.0"))
    away = {"device": "phone", "data": "experiment", "name": "x", "folder": tmp_path, "certs": None}
    with pytest.raises(InputError, match="on its own machine"):
        joining.join(joining.JoinOptions(host="10.1.2.3", port=1, **away))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    asked = CliRunner().invoke(
        app, ["join", "10.1.2.3", "--device", "phone", "--data", "experiment"]
    )
    assert isinstance(asked.exception, InputError) and "--certs" in str(asked.exception)
