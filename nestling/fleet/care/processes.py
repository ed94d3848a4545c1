"""Keeping processes alive: each is started again when it ends, later and later while it keeps
ending, and all end with their keeper.

What they print goes to a file of bounded size; lines that a person should see go to the log as
well.
"""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO

from nestling.errors import InputError
from nestling.fleet.care.enclosure import ENTER, NOWHERE, Enclosure
from nestling.fleet.care.logs import Discreet, PlainLines, facts_of_line

log = logging.getLogger("nestling.fleet")

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0
SETTLED = 60.0
"""A process that lived this long is started again at once when it ends."""
SICK_SECONDS = 15.0
LOG_BYTES, LOG_FILES, TAIL = 5_000_000, 3, 60
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FLOWER = (1, 40)
"""The first version whose nodes speak HTTP, which the proxy understands."""

# The kernel ends the child with the thread that started it (Linux; elsewhere it outlives a keeper
# that was killed). It enters a network first: who changes what it may do is untied.
TETHER = f"""{ENTER}
import signal
try: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except Exception: pass
if os.getppid() != int(sys.argv[1]): sys.exit("the keeper is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Program:
    """A process to keep alive."""

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    show: Callable[[str], bool] = lambda _: False
    """Which lines of its output a person should see."""
    advice: Callable[[str], str | None] = lambda _: None
    """What the last lines before its end mean, in words."""
    sick: Callable[[str], bool] = lambda _: False
    """After which line of its output it is of no use any more, though it may not end by itself."""
    network: Enclosure = NOWHERE
    """Where it runs."""
    hands: Sequence[int] = ()
    """Descriptors that it inherits beside."""


class KeptProcess:
    """A program and its process, if it has one now."""

    def __init__(self, program: Program) -> None:
        """Takes a program; its process begins with `start`."""
        self.program = program
        self.failures = 0
        self.due = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._pump: threading.Thread | None = None
        self._began = 0.0
        self._sick = 0.0  # when a line said so
        self._tail: deque[str] = deque(maxlen=TAIL)

    @property
    def pid(self) -> int | None:
        """The process now."""
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        """Whether there is one."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it; call this from the thread that lives longest, since the process ends with
        it."""
        self._tail.clear()
        self._sick = 0.0
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            TETHER,
            self.program.network.words,
            str(os.getpid()),
            *self.program.command,
        ]
        self._process = subprocess.Popen(  # noqa: S603 (a list of our own words, no shell)
            command,
            env=dict(self.program.env) or None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(*self.program.network.descriptors, *self.program.hands),
            start_new_session=True,  # ctrl-C is for the keeper, which ends the others in order
        )
        assert self._process.stdout is not None  # noqa: S101 (a pipe was asked for)
        self._pump = threading.Thread(target=self._copy, args=(self._process.stdout,), daemon=True)
        self._pump.start()
        self._began = time.monotonic()

    def ended(self) -> str:
        """After its end: plans the next start, and says what happened."""
        assert self._process is not None  # noqa: S101 (it was started)
        code, lived = self._process.wait(), time.monotonic() - self._began
        if self._pump:
            self._pump.join(timeout=2)
        kill_group(self._process.pid)
        self._process = None
        self.failures = 0 if lived >= SETTLED else self.failures + 1
        delay = (
            0.0 if not self.failures else min(LONGEST_DELAY, FIRST_DELAY * 2 ** (self.failures - 1))
        )
        delay *= random.uniform(0.8, 1.2)  # noqa: S311 (no secret: many devices must not come back in step)
        self.due = time.monotonic() + delay
        why = self.program.advice(self.tail()) or _exit_words(code)
        return f"{self.program.name} ended: {why}; again in {delay:.0f} s"

    def tail(self) -> str:
        """Its last lines."""
        return "\n".join(self._tail)

    def ask_to_stop(self) -> None:
        """The friendly signal."""
        if self.running and self._process:
            self._process.send_signal(signal.SIGTERM)

    def heal(self) -> None:
        """Ends what said that it is of no use, so that it is started again: asked first, later made
        to."""
        if self._sick and self.running and self._process:
            self.ask_to_stop()
            if time.monotonic() - self._sick > SICK_SECONDS:
                kill_group(self._process.pid)

    def stop(self, until: float) -> None:
        """Waits until then, and ends it and everything it started."""
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        kill_group(self._process.pid)
        self._process.wait()
        if self._pump:
            self._pump.join(timeout=2)
        self._process = None

    def _copy(self, stream: IO[bytes]) -> None:
        sink = PlainLines(self.program.log, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1)
        discreet = Discreet()
        try:
            for raw in stream:
                line = COLOURS.sub("", raw.decode(errors="replace").rstrip())
                if not line:
                    continue
                self._tail.append(line)
                record = logging.makeLogRecord({"msg": line})
                discreet.filter(record)
                sink.emit(record)
                if self.program.sick(line) and not self._sick:
                    self._sick = time.monotonic()
                if self.program.show(line):
                    log.info(
                        "%s: %s",
                        self.program.name,
                        record.msg,
                        extra={"facts": facts_of_line(self.program.name, line)},
                    )
        finally:
            sink.close()
            stream.close()


class Keeper:
    """Keeps children alive. Use it as a context: they all end with it."""

    def __init__(self) -> None:
        """Begins without children."""
        self.children: dict[str, KeptProcess] = {}

    def __enter__(self) -> Keeper:
        """Starts nothing yet: children come with `add`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all children, however the block ended."""
        self.stop()

    def add(self, program: Program) -> KeptProcess:
        """Starts a program and keeps it."""
        child = self.children[program.name] = KeptProcess(program)
        child.start()
        log.info("%s started (process %s)", program.name, child.pid)
        return child

    def tick(self) -> None:
        """Starts what ended and is due again."""
        for child in self.children.values():
            child.heal()
            if child.pid is not None and not child.running:
                log.warning(child.ended())
            if child.pid is None and time.monotonic() >= child.due:
                child.start()
                log.info("%s started again (process %s)", child.program.name, child.pid)

    def stop(self, grace: float = 10.0) -> None:
        """Ends all, the last one first."""
        children = list(reversed(self.children.values()))
        for child in children:
            child.ask_to_stop()
        until = time.monotonic() + grace
        for child in children:
            child.stop(until)
        self.children.clear()


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """A service manager's signal ends the keeper, and with it the kept, as ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def kill_group(pid: int) -> None:
    """Ends what is left of a process group that `KeptProcess` began."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def born(pid: int) -> str:
    """When a process began, as the kernel counts; with its number this names it for ever. Empty:
    there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state == "Z" else rest[18]


def flower_command(name: str) -> str:
    """A command of Flower beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise InputError(
            f"there is no command {name}", field="nestling", fix="pip install 'nestling[fleet]'"
        )
    return found


def need_flower() -> None:
    """Refuses to go on without Flower, or with one whose nodes speak another protocol."""
    try:
        text = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise InputError(
            "this needs Flower",
            field="nestling",
            fix="pip install 'nestling[fleet]' (Python 3.11 or newer)",
        ) from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    if numbers < FLOWER:
        raise InputError(
            f"Flower {text} is too old",
            field="nestling",
            fix="pip install -U 'nestling[fleet]' (1.40 or newer)",
        )


def flower_env(home: Path) -> dict[str, str]:
    """The environment of Flower's commands: they call nobody, install nothing, and keep their files
    in `home`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env |= {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return env


def free_port() -> int:
    """A port on loopback that nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _exit_words(code: int) -> str:
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"
