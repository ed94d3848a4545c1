"""`nestling serve`: the processes of a server, kept alive until the run is done.

    RUN            the run folder, as any other
    RUN.server     what only the server itself reads (0700): Flower's database, an inner
                   certificate, a secret, logs

A SuperLink (on the loop of a network of its own, where the system allows one, since some of its
interfaces ask nobody who they are), a SuperExec that it trusts by a shared secret, the proxy, which
is all that others can reach, and the run: a ServerApp, started through Flower and started again
from our checkpoint when it dies. Running the same command again goes on where the run stands.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nestling.errors import InputError
from nestling.files import read_summed, summed, writing
from nestling.fleet.care import certs, logs
from nestling.fleet.care.disk import FLOOR, MEGA, Room, is_full
from nestling.fleet.care.enclosure import NOWHERE, Enclosure, enclosure
from nestling.fleet.care.expiry import ending_soon
from nestling.fleet.care.health import telling
from nestling.fleet.care.processes import (
    Keeper,
    Program,
    born,
    flower_command,
    flower_env,
    free_port,
    need_flower,
    stopped_by_signals,
)
from nestling.fleet.protocol.addresses import PORT, is_loopback
from nestling.fleet.server.proxy import Config
from nestling.fleet.server.quota import QUOTA
from nestling.report.words import traffic
from nestling.runfiles import EXPERIMENT, METRICS

log = logging.getLogger("nestling.fleet")

TICK, KEYS_SECONDS, WARN_SECONDS = 0.2, 2.0, 86400.0
HEALTHY_SECONDS, APPEAR_SECONDS = 300.0, 300.0
COMMAND_SECONDS = 300.0
GIVE_UP = 5
"""So many failures in a row, without a round between them, end the server."""
SETTINGS, PROCESS, OUTCOME, RUN_LOG = "serve.json", "process.json", "outcome.json", "run.log"
REGISTERED = "registered.json"
ANEW = "stop the server and take the file away: it makes a new list of the keys as it starts"
HEALTHY = """
import http.client, ssl, sys
where, ca = ("127.0.0.1", int(sys.argv[1])), sys.argv[2]
trust = ssl.create_default_context(cafile=ca) if ca else None
kind = http.client.HTTPSConnection if ca else http.client.HTTPConnection
line = kind(*where, timeout=5, **({"context": trust} if ca else {}))
line.request("GET", "/health")
sys.exit(line.getresponse().status != 200)
"""
"""Asks the SuperLink whether it is there, where it is."""


@dataclass(frozen=True)
class ServeOptions:
    """What was asked for. `certs` None: neither TLS nor keys, on loopback only."""

    experiment: str  # complete, as TOML
    out: Path
    certs: Path | None
    host: str = "0.0.0.0"  # noqa: S104 (devices come from elsewhere; without keys it is refused)
    port: int = PORT
    min_clients: int = 0
    deadline: float = 600.0
    quorum: int = 0
    health: str = "off"  # HOST:PORT to tell at how the run is
    disk_floor: int = FLOOR  # megabytes that must be free
    enclose: bool = True  # Flower's processes in a network of their own, where that can be had
    log: tuple[str, ...] = ()  # where rounds are logged beside the run folder


def home_of(out: Path) -> Path:
    """The folder beside a run folder that only the server reads."""
    return out.with_name(out.name + ".server")


def serve(options: ServeOptions) -> dict[str, Any]:
    """Serves until the run is done; gives its outcome. `InputError` where the run cannot go on."""
    need_flower()
    files = certs.server_files(options.certs) if options.certs else None
    if files is None and not is_loopback(options.host):
        raise InputError(
            f"without TLS and keys only this machine may reach the server, not {options.host}",
            field="--insecure",
            fix="make keys with `nestling certs` and leave --insecure out",
        )
    with writing(home_of(options.out)):
        home = certs.private_folder(home_of(options.out.absolute()))
    out = options.out.absolute()
    lines = logs.written_to(out / logs.SERVER_LOG, needs=out / EXPERIMENT)
    with (
        _alone(home),
        lines,
        _network(options.enclose) as network,
        Keeper() as keeper,
        stopped_by_signals(),
    ):
        server = _Server(options, home, files, keeper, network)
        with telling(out, options.health, server.parts):
            return server.run()


class _Server:
    """The parts of a running server."""

    def __init__(
        self,
        options: ServeOptions,
        home: Path,
        files: certs.ServerFiles | None,
        keeper: Keeper,
        network: Enclosure,
    ) -> None:
        self.options, self.home, self.files, self.keeper = options, home, files, keeper
        self.network = network
        self.inner, self.env = free_port(), flower_env(certs.private_folder(home / "flower"))
        self.logs = certs.private_folder(home / "log")
        self.secret, self.pair = home / "secret", home / "inner"
        self.keys = _Registry(home, files, self._flwr) if files else None
        self.play = _Run(options.out, home, self._flwr)
        self.greedy: dict[str, dict[str, Any]] = {}  # devices that sent more than they may
        self.room = Room((home, options.out.absolute()), options.disk_floor * MEGA)
        log.info("disk: %s free", traffic(self.room.free()))

    def run(self) -> dict[str, Any]:
        """From nothing to the end of the run."""
        while self._look_at_disk():
            time.sleep(TICK)
        self._write_files()
        end_leftover(self.home / PROCESS)
        self._start_superlink()
        if self.keys:
            try:
                self.keys.follow()
            except _Unknown:
                self._start_over()
        self.keeper.add(self._superexec())
        self.keeper.add(self._proxy())
        log.info("devices can join at %s:%d", self.options.host, self.options.port)
        look = warn = 0.0
        while True:
            self.keeper.tick()
            self._look_at_disk()
            if self.files and time.monotonic() >= warn:
                for line in ending_soon(self.files):
                    logs.tell(log, logs.Note(line, "expiry"), logging.WARNING)
                warn = time.monotonic() + WARN_SECONDS
            try:
                outcome = self.play.tick()
                if outcome is not None:
                    return outcome
                if self.keys and time.monotonic() >= look:
                    look = time.monotonic() + KEYS_SECONDS
                    self.keys.follow()
            except OSError as error:
                if not is_full(error):
                    raise
                log.debug("disk full", exc_info=True)  # tried again when there is room
            time.sleep(TICK)

    def _look_at_disk(self) -> str:
        """Why nothing new is begun now, where the disk is too full; said when that changes."""
        before, self.play.held = self.play.held, self.room.trouble()
        if self.play.held and not before:
            log.warning("%s; no round begins until there is room", self.play.held)
        elif before and not self.play.held:
            log.info("there is room on the disk again: %s free", traffic(self.room.free()))
        return self.play.held

    def parts(self) -> dict[str, Any]:
        """How the processes are; asked from another thread."""
        programs = {
            child.program.name: {"running": child.running}
            for child in list(self.keeper.children.values())
        }
        return {
            "trouble": self.play.held or self.play.trouble,
            "programs": programs,
            "warnings": ending_soon(self.files) if self.files else [],
            "greedy": dict(self.greedy),
            "disk": {"free": self.room.free(), "floor": self.room.floor},
        }

    def _write_files(self) -> None:
        if not self.secret.exists():
            certs.write_private(self.secret, secrets.token_bytes(32))
        if self.files and not (self.pair / "server.key").exists():
            certs.make_loopback_authority(self.pair, days=3650)
        self._write(EXPERIMENT, self.options.experiment)
        settings = {
            "experiment": str(self.home / EXPERIMENT),
            "folder": str(self.options.out.absolute()),
            "min_clients": self.options.min_clients,
            "deadline": self.options.deadline,
            "quorum": self.options.quorum,
            "disk_floor": self.options.disk_floor,
            "log": list(self.options.log),
            "registered": str(self.home / REGISTERED) if self.files else None,
        }
        self._write(SETTINGS, json.dumps(settings, indent=1))
        trust = f'root-certificates = "{self.pair / "ca.crt"}"' if self.files else "insecure = true"
        address = f'address = "127.0.0.1:{self.inner}"'
        self._write(
            "flower/config.toml",
            f'[superlink]\ndefault = "inner"\n\n[superlink.inner]\n{address}\n{trust}\n',
        )
        self._write("run.toml", f'home = "{self.home}"\n')
        self._write("proxy.json", self._proxy_config().to_json())

    def _write(self, name: str, text: str) -> None:
        certs.write_private(self.home / name, text.encode())

    def _proxy_config(self) -> Config:
        place = {
            "host": self.options.host,
            "port": self.options.port,
            "upstream": self.inner,
            "network": self.network.descriptors,
        }
        if self.files is None:
            return Config(**place)  # type: ignore[arg-type]
        return Config(
            **place,  # type: ignore[arg-type]
            certificate=str(self.files.certificate.absolute()),
            key=str(self.files.key.absolute()),
            upstream_ca=str(self.pair / "ca.crt"),
            devices=str(self.files.devices.absolute()),
            revoked=str(self.files.revoked.absolute()),
            quota=str(self.home / QUOTA),
            disk=str(self.home),
            disk_floor=self.room.floor,
        )

    def _start_superlink(self) -> None:
        command = [
            flower_command("flower-superlink"),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.inner),
        ]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str(self.secret)]
        command += [
            "--database",
            str(self.home / "state.db"),
            "--disable-runtime-dependency-installation",
        ]
        if self.files:
            command += [
                "--ssl-ca-certfile",
                str(self.pair / "ca.crt"),
                "--ssl-certfile",
                str(self.pair / "server.crt"),
            ]
            command += ["--ssl-keyfile", str(self.pair / "server.key"), "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        self.keeper.add(self._inner_program("superlink", command))
        self._wait_healthy()

    def _superexec(self) -> Program:
        command = [
            flower_command("flower-superexec"),
            "--runtime-api-address",
            f"127.0.0.1:{self.inner}",
        ]
        command += ["--superexec-auth-secret-file", str(self.secret)]
        command += (
            ["--root-certificates", str(self.pair / "ca.crt")] if self.files else ["--insecure"]
        )
        return self._inner_program("superexec", command)

    def _inner_program(self, name: str, command: Sequence[str]) -> Program:
        return Program(name, command, self.logs / f"{name}.log", self.env, network=self.network)

    def _proxy(self) -> Program:
        command = [
            sys.executable,
            "-m",
            "nestling.fleet.server.proxy",
            str(self.home / "proxy.json"),
        ]
        return Program(
            "proxy",
            command,
            self.logs / "proxy.log",
            self.env,
            show=self._hear_proxy,
            advice=_port_taken,
            hands=self.network.descriptors,  # it enters when it has its port
        )

    def _hear_proxy(self, line: str) -> bool:
        """Counts refusals for too many bytes by device; the proxy says the same one once a minute.
        Says which lines a person should see."""
        said = logs.facts_of_line("proxy", line)
        if said.get("status") == 413 and said["key"]:
            before = self.greedy.get(said["key"], {"times": 0})
            self.greedy[said["key"]] = {"times": before["times"] + 1, "reason": said["reason"]}
        return "DEBUG" not in line

    def _wait_healthy(self) -> None:
        until = time.monotonic() + HEALTHY_SECONDS
        while not self._healthy():
            self.keeper.tick()
            if time.monotonic() > until:
                tail = self.keeper.children["superlink"].tail()
                raise InputError(
                    f"Flower's SuperLink does not come up:\n{tail[-1500:]}",
                    field="serve",
                    fix=f"see {self.logs}",
                )
            time.sleep(TICK)

    def _healthy(self) -> bool:
        ca = str(self.pair / "ca.crt") if self.files else ""
        ask = [sys.executable, "-I", "-S", "-c", HEALTHY, str(self.inner), ca]
        return self.network.run(ask, capture_output=True).returncode == 0

    def _start_over(self) -> None:
        """Flower's database knows keys that we cannot name: a new one. Nothing of the run is in
        it."""
        log.warning("Flower's database does not fit the list of devices; making a new one")
        self.keeper.stop()
        for path in self.home.glob("state.db*"):
            path.unlink()
        (self.home / REGISTERED).unlink(missing_ok=True)
        self._start_superlink()
        assert self.keys is not None  # noqa: S101 (only `follow` of the keys leads here)
        self.keys.forget()
        self.keys.follow()

    def _flwr(self, calls: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Runs Flower's command line with each list of arguments, in one process; what each said,
        in order."""
        made = self.network.run(
            [sys.executable, "-m", "nestling.fleet.flower.commands"],
            input=json.dumps([list(one) for one in calls]),
            capture_output=True,
            env=self.env,
            timeout=COMMAND_SECONDS + 5 * len(calls),
        )
        lines = [line for line in made.stdout.splitlines() if line.startswith("{")]
        for place in range(len(calls)):
            if place < len(lines):
                yield json.loads(lines[place])
            else:
                yield {
                    "success": False,
                    "error-message": made.stderr[-500:] or f"exit code {made.returncode}",
                }


class _Unknown(Exception):
    """Flower knows a key whose node's number we do not."""


class _Registry:
    """Keeps Flower's list of keys the same as the folder's, and remembers which node each key
    is and whom it stands for."""

    def __init__(self, home: Path, files: certs.ServerFiles, flwr: Any) -> None:
        self.path, self.files, self.flwr = home / REGISTERED, files, flwr
        self.nodes: dict[str, dict[str, Any]] = (
            read_summed(self.path, fix=ANEW) if self.path.exists() else {}
        )
        self._refused: set[str] = set()
        self._saved = self.nodes.copy()

    def forget(self) -> None:
        """Nothing is registered."""
        self.nodes = {}

    def follow(self) -> None:
        """Registers new keys, and takes out those that are gone or revoked."""
        gone = certs.public_keys(self.files.revoked)
        wanted = {
            certs.fingerprint(key): holder
            for key, holder in certs.public_keys(self.files.devices).items()
            if key not in gone
        }
        have = {row["key"]: node for node, row in self.nodes.items()}
        self._add(
            {
                key: holder
                for key, holder in wanted.items()
                if key not in have and key not in self._refused
            }
        )
        self._remove(
            {node: self.nodes[node]["name"] for key, node in have.items() if key not in wanted}
        )
        self._change({have[key]: holder for key, holder in wanted.items() if key in have})
        if self.nodes != self._saved:  # the disk was full
            self._save()

    def _save(self) -> None:
        certs.write_private(self.path, summed(self.nodes).encode())
        self._saved = self.nodes.copy()

    def _add(self, keys: Mapping[str, certs.KeyHolder]) -> None:
        names = [holder.name for holder in keys.values()]
        calls = [
            ["supernode", "register", str(self.files.devices / f"{n}.pub"), "inner", "--name", n]
            for n in names
        ]
        for (key, holder), said in zip(
            keys.items(), self.flwr(calls) if calls else (), strict=True
        ):
            name = holder.name
            if said["success"]:
                self.nodes[str(said["node-id"])] = {"key": key, **asdict(holder)}
                self._save()
                log.info("%s may join", _described(holder))
            elif "already in use" in str(said).lower():
                raise _Unknown(name)
            else:
                self._refused.add(key)
                log.warning("device %s cannot be registered: %s", name, said.get("error-message"))

    def _change(self, nodes: Mapping[str, certs.KeyHolder]) -> None:
        """Follows what the operator wrote behind a key that is registered already."""
        for node, holder in nodes.items():
            row = {"key": self.nodes[node]["key"], **asdict(holder)}
            if row != self.nodes[node]:
                self.nodes[node] = row
                self._save()
                log.info("%s may join", _described(holder))

    def _remove(self, nodes: Mapping[str, str]) -> None:
        calls = [["supernode", "unregister", node, "inner"] for node in nodes]
        for (node, name), said in zip(
            nodes.items(), self.flwr(calls) if calls else (), strict=True
        ):
            del self.nodes[node]
            self._save()
            log.info(
                "device %s may not join any more%s",
                name,
                "" if said["success"] else " (Flower did not know it)",
            )


def _described(holder: certs.KeyHolder) -> str:
    if holder.devices:
        return f"gateway {holder.name}, for {holder.devices} devices at most,"
    return f"device {holder.name}" + (f", as {holder.tier!r} only," if holder.tier else "")


class _Run:
    """The ServerApp: starts it, sees it die, starts it again."""

    def __init__(self, out: Path, home: Path, flwr: Any) -> None:
        self.out, self.home, self.flwr = out, home, flwr
        self.failures, self.rounds = 0, self._rounds()
        self.due: float | None = 0.0  # when to start it; None: it was started
        self.until = 0.0  # when it must be there
        self.trouble = ""  # why it does not run, where it should
        self.held = ""  # why it is not started now
        self._log = _Follower(home / "log" / RUN_LOG)

    def tick(self) -> dict[str, Any] | None:
        """Goes on; the outcome, once there is one."""
        for line in self._log.new():
            log.info(line, extra={"echo": True})
        if self.due is not None:
            if time.monotonic() >= self.due and not self.held:
                self._begin()
            return None
        outcome, process = _read(self.home / OUTCOME), _read(self.home / PROCESS)
        if outcome is not None:
            return self._ended(outcome)
        if process is not None and born(process["pid"]) == process["born"]:
            self.trouble = ""
        elif process is not None:
            self._again("the run's process died")
        elif process is None and time.monotonic() > self.until:
            self._again("the run's process did not start")
        return None

    def _begin(self) -> None:
        for name in (OUTCOME, PROCESS):
            (self.home / name).unlink(missing_ok=True)
        app = Path(__file__).resolve().parent.parent / "flower" / "app"
        (said,) = self.flwr(
            [["run", str(app), "inner", "--run-config", str(self.home / "run.toml")]]
        )
        if not said["success"]:
            self._again(f"Flower does not start the run: {said.get('error-message')}")
            return
        self.due, self.until = None, time.monotonic() + APPEAR_SECONDS
        log.info("run %s started", said["run-id"])

    def _ended(self, outcome: dict[str, Any]) -> dict[str, Any] | None:
        if outcome["state"] == "done":
            return outcome
        if outcome["state"] == "input":
            raise InputError(outcome["text"])
        self._again(outcome["text"], patient=outcome["state"] in ("quorum", "disk"))
        return None

    def _again(self, why: str, patient: bool = False) -> None:
        """Plans the next try; a person must look where tries bring no round."""
        for name in (OUTCOME, PROCESS):
            (self.home / name).unlink(missing_ok=True)
        rounds = self._rounds()
        patient = patient or bool(self.held)
        self.failures = 0 if rounds > self.rounds or patient else self.failures + 1
        self.rounds = rounds
        if self.failures >= GIVE_UP:
            raise RuntimeError(
                f"the run failed {self.failures} times without finishing a round; last: {why}"
            )
        delay = min(30.0, 2.0 ** max(1, self.failures))
        self.due, self.trouble = time.monotonic() + delay, why
        log.warning("%s; going on from round %d in %.0f s", why, rounds, delay)

    def _rounds(self) -> int:
        path = self.out / METRICS
        return len(path.read_bytes().splitlines()) if path.exists() else 0


class _Follower:
    """The lines that a file has gained."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, path.stat().st_size if path.exists() else 0

    def new(self) -> list[str]:
        """Whole lines only."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self.place:
            self.place = 0  # the file was begun again
        if size == self.place:
            return []
        with open(self.path, "rb") as file:
            file.seek(self.place)
            whole = file.read(1 << 20).rpartition(b"\n")[0]
        self.place += len(whole) + 1 if whole else 0
        return whole.decode(errors="replace").splitlines()


def end_leftover(path: Path, seconds: float = 10.0) -> None:
    """Ends the run's process of a server that was killed: named by number and birth, so that it
    cannot be another."""
    found = _read(path)
    if found is None or born(found["pid"]) != found["born"]:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(found["pid"], number)
        except ProcessLookupError:
            return
        until = time.monotonic() + seconds
        while time.monotonic() < until and born(found["pid"]) == found["born"]:
            time.sleep(0.1)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def _port_taken(tail: str) -> str | None:
    return "its port is taken, or not allowed" if "Errno 98" in tail or "Errno 13" in tail else None


@contextmanager
def _network(wanted: bool) -> Iterator[Enclosure]:
    """Where Flower's own processes are; who else reaches them is said."""
    open_ = "every user of this machine reaches Flower's own interfaces on 127.0.0.1"
    made = NOWHERE
    try:
        made = enclosure() if wanted else NOWHERE
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s: no network of their own can be made for them (%s)", open_, error)
    else:
        if not wanted:
            log.warning("%s (--no-enclose)", open_)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """At most one server per folder."""
    handle = os.open(home, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise InputError(
            f"another server runs with {home}", field="--out", fix="stop it, or name another folder"
        ) from None
    try:
        yield
    finally:
        os.close(handle)
