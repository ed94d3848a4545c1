"""Real servers and devices for tests: `nestling serve` and `nestling join` as processes on the
loop, all ended by number afterwards.

with fleet(tmp_path) as f:
    f.keys("d0", "d1")                                   # TLS and keys; without it: --insecure
    server = f.start_server(experiment)                  # pid, port, out, home, log
    client = f.start_client("d0", "phone")               # pid, folder, log
    client.kill()                                        # kill -9, as a power cut
    server.wait_done()
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestling import Experiment
from nestling.fleet.care import certs
from nestling.fleet.care.processes import born, free_port

SECONDS = 600.0
"""The most that anything here is waited for; the machine may be busy."""


def until(
    true: Callable[[], Any], seconds: float = SECONDS, what: str = "it", step: float = 0.1
) -> Any:
    """Waits for something to be true; what it was."""
    end = time.monotonic() + seconds
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(step)


@dataclass
class Running:
    """A command that runs, and what it has said."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float = SECONDS) -> None:
        """Until it has said something; fails at once when it has ended without."""

        def said() -> bool:
            ended = self.process.poll() is not None  # looked at first: what it said last counts
            assert words in self.text or not ended, (
                f"ended without saying {words!r}:\n{self.text[-4000:]}"
            )
            return words in self.text

        until(said, seconds, f"{words!r}; so far:\n{self.text[-4000:]}")

    def children(self) -> dict[str, int]:
        """The processes it started, by the name of what they run."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                words = (path / "cmdline").read_bytes().decode().split("\0")
            except (OSError, IndexError):
                continue
            if parent == self.pid:
                found[
                    next(
                        (
                            Path(w).name
                            for w in words
                            if "flower-" in w or w.startswith("nestling.")
                        ),
                        words[0],
                    )
                ] = int(path.name)
        return found

    def kill(self) -> None:
        """Power off: kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(SECONDS)

    def stop(self) -> int:
        """The friendly way; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)


@dataclass
class Server(Running):
    """`nestling serve`."""

    port: int
    out: Path

    @property
    def home(self) -> Path:
        """What only the server reads; logs of its parts are in `home/log`."""
        return self.out.with_name(self.out.name + ".server")

    def wait_done(self, seconds: float = SECONDS) -> None:
        """Until the run is finished and the server gone."""
        until(
            lambda: self.process.poll() is not None,
            seconds,
            f"the end of the run; so far:\n{self.text[-4000:]}",
        )
        assert self.process.returncode == 0, self.text[-4000:]


@dataclass
class Client(Running):
    """`nestling join`."""

    name: str
    folder: Path
    device: str = ""


@dataclass
class ProcessFleet:
    """A server and its devices in one folder."""

    root: Path
    secure: bool = False
    port: int = field(default_factory=free_port)
    started: list[Running] = field(default_factory=list)

    @property
    def certs(self) -> Path:
        return self.root / "keys"

    def keys(self, *devices: str) -> None:
        """Makes certificates, and keys for these devices."""
        certs.issue(self.certs, hosts=["127.0.0.1"], devices=devices)
        self.secure = True

    def start_server(self, experiment: Experiment | Path, out: str = "run", *more: str) -> Server:
        """Starts `nestling serve`; again with the same `out` goes on with the same run."""
        file = experiment if isinstance(experiment, Path) else self.root / f"{out}.toml"
        if isinstance(experiment, Experiment):
            file.write_text(experiment.to_toml())
        words = [
            "serve",
            str(file),
            "--out",
            str(self.root / out),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *more,
        ]
        words += ["--certs", str(self.certs)] if self.secure else ["--insecure"]
        process, log = self._start(words, f"{out}.log")
        server = Server(process, log, self.port, self.root / out)
        self.started.append(server)
        return server

    def start_client(self, name: str, device: str, *more: str, data: str = "experiment") -> Client:
        """Starts `nestling join` for a device of this fleet; again with the same name is the same
        device after a restart."""
        folder = self.root / f"device-{name}"
        words = [
            "join",
            f"127.0.0.1:{self.port}",
            "--name",
            name,
            "--device",
            device,
            "--data",
            data,
            "--folder",
            str(folder),
            *more,
        ]
        words += ["--certs", str(self.certs)] if self.secure else ["--insecure"]
        process, log = self._start(words, f"{name}.log")
        client = Client(process, log, name, folder, device)
        self.started.append(client)
        return client

    def _start(self, words: list[str], name: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.root / name
        number = 2
        while log.exists():
            log = self.root / f"{name}.{number}"
            number += 1
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(log, "wb") as file:
            command = [sys.executable, "-m", "nestling.cli", *words]
            return subprocess.Popen(
                command, cwd=self.root, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            ), log

    def end(self) -> None:
        """Ends everything, and then whatever still names this folder."""
        for one in self.started:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGTERM)
        for one in self.started:
            try:
                one.process.wait(60)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait(60)
        for pid in self.leftovers():
            os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[int]:
        """Processes that belong to this fleet: Flower's know its folder from their environment,
        ours from their arguments."""
        found, mark = [], os.fsencode(str(self.root))
        for path in Path("/proc").glob("[0-9]*"):
            try:
                known = (
                    (path / "environ").read_bytes().split(b"\0"),
                    (path / "cmdline").read_bytes(),
                )
            except OSError:
                continue
            ours = any(word.startswith(b"FLWR_HOME=" + mark) for word in known[0]) or (
                b"nestling.fleet" in known[1] and mark in known[1]
            )
            if ours and born(int(path.name)):
                found.append(int(path.name))
        return found


@contextmanager
def fleet(root: Path) -> Iterator[ProcessFleet]:
    """A fleet whose processes all end with the block."""
    made = ProcessFleet(root)
    try:
        yield made
    finally:
        made.end()
