"""The lab: the emulated boards of a federation and the gateway that speaks to them, kept alive for
as long as it is open.

Boards and gateway are processes of their own. Whoever of them dies is started again, as if power
had come back, and goes on where it was: a board from the gateway's last checkpoint, the gateway
from its journal. When the lab closes, or its process dies in whatever way, they all end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any

import numpy as np

from nestling.devices import FleetConfig, Tier
from nestling.devices.units import show_bytes
from nestling.errors import InputError
from nestling.files import write_atomic
from nestling.tiny.boards import children
from nestling.tiny.boards import table as boards
from nestling.tiny.link import timing
from nestling.tiny.link.gateway import GatewayClient
from nestling.tiny.runtime import native, toolchain
from nestling.tiny.runtime.job import Done, Job

if TYPE_CHECKING:
    from nestling.tiny.boards.emulator import Emulator

HOST = "host"
"""Not a board: the C runtime compiled for this machine."""

MOST_BOARDS = 64
"""How many boards may be emulated at a time; each is a process of some 40 MB."""

WATCH_SECONDS = 0.2
"""How often to look who is still alive."""

PATIENCE = 120.0
"""Seconds that a gateway which is gone is waited for."""

TOLD = (
    "ticks",
    "stack",
    "frames",
    "resent",
    "damaged",
    "restarts",
    "restored",
    "seconds",
    "from_journal",
)
"""What is written down of what the gateway tells of a job."""

GATEWAY, PIDS = "gateway.sock", "pids.json"
MOST_DEATHS = 50
"""Of one board or of the gateway: then it is not bad luck."""


def with_devices(fleet: FleetConfig) -> FleetConfig:
    """The fleet with all its boards checked; a tier that names only a board has the catalogue's
    device of it."""
    tiers = tuple(
        _with_device(tier, f"fleet.tiers[{number}]") for number, tier in enumerate(fleet.tiers)
    )
    return replace(fleet, tiers=tiers)


def _with_device(tier: Tier, where: str) -> Tier:
    if not isinstance(tier.board, str) or tier.board in ("", HOST):
        return tier
    try:
        board = boards.board(tier.board)
    except InputError as error:
        raise InputError(
            error.message, field=f"{where}.board", fix=f'{error.fix}; or "{HOST}"'
        ) from None
    if tier.device or tier.ratio or tier.model:
        return tier
    if board.machine is None:
        fix = "give the device whose figures hold for it, or ratio, or model"
        raise InputError(f"nothing says what {tier.board} trains", field=f"{where}.device", fix=fix)
    return replace(tier, device=board.device)


@dataclass(frozen=True, eq=False)
class Report:
    """What a job gave, and facts on how it was done."""

    done: Done
    facts: dict[str, Any] = field(default_factory=dict)


class Mismatch(RuntimeError):
    """A board's answer differs from that of the same C on this machine."""


@dataclass
class LabSettings:
    """How the lab works. verify: compare every answer with this machine's. every: steps between
    checkpoints. noise: the share of frames that is spoilt on purpose. shift: an instruction is
    2^shift nanoseconds of QEMU's clock (None: they are not counted)."""

    verify: bool = True
    every: int = 20
    noise: float = 0.0
    shift: int | None = 0


class Lab:
    """`names` says which client has which board. `home` is a folder for the gateway's journal
    (None: a temporary one)."""

    def __init__(
        self,
        names: Mapping[int, str],
        settings: LabSettings | None = None,
        home: Path | None = None,
    ) -> None:
        """Only notes who has which board: nothing is built or started before `open`."""
        self.names, self.settings, self.home = dict(names), settings or LabSettings(), home
        self.folder: Path | None = None
        self.boards: dict[int, Emulator] = {}
        self.gateway: Popen[bytes] | None = None
        self.deaths: dict[str, int] = {}
        self._images: dict[str, boards.Firmware] = {}
        self._lock, self._closing, self.failure = threading.Lock(), threading.Event(), ""
        self._watch: threading.Thread | None = None

    def open(self) -> None:
        """Builds the firmware and starts the gateway; boards are switched on when they are first
        needed."""
        for name in self.names.values():
            toolchain.need("unicorn" if boards.board(name).machine is None else "qemu-system-arm")
        self._images = {name: boards.firmware(name) for name in sorted(set(self.names.values()))}
        self._closing.clear()
        # Socket paths must be short, which a run folder's need not be.
        self.folder = Path(tempfile.mkdtemp(prefix="nst"))
        config = {str(client): self._link(client) for client in self.names}
        (self.folder / "boards.json").write_text(json.dumps(config))
        self._start_gateway()
        self._watch = threading.Thread(target=self._keep_alive, name="nestling-lab", daemon=True)
        self._watch.start()

    def close(self) -> None:
        """Switches everything off."""
        self._closing.set()
        if self._watch is not None:
            self._watch.join()
        with self._lock:
            for board in self.boards.values():
                board.kill()
            if self.gateway is not None:
                children.kill(self.gateway)
            self.boards, self.gateway, self._watch = {}, None, None
        if self.home is not None:
            (self.home / PIDS).unlink(missing_ok=True)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def describe(self) -> str:
        """Which boards there are."""
        kinds = sorted(set(self.names.values()), key=lambda name: boards.board(name).ram_bytes)
        told = [
            f"{list(self.names.values()).count(k)} {k} ({show_bytes(boards.board(k).ram_bytes)})"
            for k in kinds
        ]
        return f"{len(self.names)} emulated boards: {', '.join(told)}"

    def check_fits(self, client: int, job: Job, blob: bytes) -> None:
        """Refuses a job that does not fit the client's board."""
        image = self._images[self.names[client]]
        needed, there = self._ram(client, job), image.board.ram_bytes
        if needed > there:
            parts = ", ".join(f"{name} {size}" for name, size in job.plan.parts.items())
            raise InputError(
                f"the plan needs {needed} of {there} bytes of RAM ({parts})",
                fix="give the tier a smaller ratio, or train with momentum = 0",
            )
        if len(blob) > image.blob_bytes:
            raise InputError(
                f"{len(blob)} bytes of data do not fit the {image.blob_bytes} bytes of flash "
                "behind the firmware",
                field="split.size",
                fix="give clients fewer samples, or the tier another board",
            )

    def _ram(self, client: int, job: Job) -> int:
        return (
            self._images[self.names[client]].static_bytes
            + len(job.plan.descriptor)
            + job.plan.arena
        )

    def run(self, client: int, job: Job, blob: bytes) -> Report:
        """Has the client's board do a job. Called from a thread of its own."""
        self._switch_on(client, blob)
        assert self.folder is not None
        before = self._deaths_of(client)
        done, notes = GatewayClient(self.folder / GATEWAY, PATIENCE).ask(str(client), job)
        if self.settings.verify:
            _compare(done, native.run_job(job, blob))
        whole = before == self._deaths_of(client) and not notes["from_journal"]
        return Report(
            done,
            {
                **self._facts(client, job, done, notes),
                **(self._estimates(client, job, notes) if whole else {}),
            },
        )

    def _deaths_of(self, client: int) -> tuple[int, int]:
        return self.deaths.get(str(client), 0), self.deaths.get("gateway", 0)

    def _estimates(self, client: int, job: Job, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Instructions that the job took, and what they would take on the device: estimates, and
        named so."""
        board = boards.board(self.names[client])
        if self.settings.shift is None or board.machine is None:
            return {}
        count = timing.counted(board, notes["ticks"], self.settings.shift)
        extra = [
            block.nbytes for block in (job.anchor, job.present, job.targets) if block is not None
        ]
        down = len(job.plan.descriptor) + job.weights.nbytes + sum(extra)
        cost = timing.round_cost(board, count, down, job.weights.nbytes)
        seconds = float(cost.compute_s) + float(cost.link_s)
        return {
            "instructions": count,
            "estimated_seconds": seconds,
            "estimated_joules": float(cost.energy_j),
        }

    def _facts(self, client: int, job: Job, done: Done, notes: Mapping[str, Any]) -> dict[str, Any]:
        name = self.names[client]
        return {
            **{key: notes[key] for key in TOLD if key in notes},
            "client": client,
            "board": name,
            "steps": done.steps,
            "samples": done.samples,
            "parameters": job.plan.params,
            "ram": self._ram(client, job),
            "ram_there": boards.board(name).ram_bytes,
            "verified": self.settings.verify,
        }

    # -- boards and gateway as processes -----------------------------------------------------------

    def _link(self, client: int) -> dict[str, Any]:
        link: dict[str, Any] = {
            "transport": f"unix:{self._socket(client)}",
            "every": self.settings.every,
        }
        return (
            {**link, "noise": {"rate": self.settings.noise, "seed": client}}
            if self.settings.noise
            else link
        )

    def _socket(self, client: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client}.sock"

    def _switch_on(self, client: int, blob: bytes) -> None:
        """The client's board with its data in flash, if it is not on yet."""
        from nestling.tiny.boards.emulator import emulator

        if client not in self.boards:
            board = emulator(
                self._images[self.names[client]], blob, self._socket(client), self.settings.shift
            ).start()
            with self._lock:
                self.boards[client] = board
                if self._closing.is_set():
                    board.kill()  # the lab was closed while it started
            self._write_pids()

    def _write_pids(self) -> None:
        """Who is which process, for people and for tests."""
        if self.home is None or self._closing.is_set():
            return
        self.home.mkdir(parents=True, exist_ok=True)
        # boards are switched on by several threads: the last one to write must know them all
        with self._lock:
            found = {"gateway": self.gateway.pid} if self.gateway is not None else {}
            found.update({str(client): board.pid for client, board in sorted(self.boards.items())})
            write_atomic(self.home / PIDS, json.dumps(found))

    def _start_gateway(self) -> None:
        assert self.folder is not None
        told = {
            "config": self.folder / "boards.json",
            "socket": self.folder / GATEWAY,
            "journal": (self.home or self.folder) / "journal",
            "parent": os.getpid(),
        }
        words = [word for name, value in told.items() for word in (f"--{name}", str(value))]
        self.gateway = children.start(
            [sys.executable, "-m", "nestling.tiny.link.gateway", *words],
            self.folder / "gateway.log",
        )
        self._write_pids()

    def _keep_alive(self) -> None:
        """Starts again whoever died, until the lab closes or one keeps dying."""
        while not self._closing.wait(WATCH_SECONDS):
            with self._lock:
                dead = {
                    str(client): board.restart
                    for client, board in self.boards.items()
                    if not board.alive
                }
                if self.gateway is not None and self.gateway.poll() is not None:
                    dead["gateway"] = self._start_gateway  # type: ignore[assignment]
            for name, restart in dead.items():
                self._revive(name, restart)

    def _revive(self, name: str, restart: Callable[[], object]) -> None:
        self.deaths[name] = self.deaths.get(name, 0) + 1
        if self.deaths[name] > MOST_DEATHS:
            who = "the gateway" if name == "gateway" else f"the board of client {name}"
            self.failure = f"{who} died {MOST_DEATHS} times"
            return
        try:
            restart()
            self._write_pids()
        except InputError as error:  # it is tried again at the next look
            self.failure = error.message if self.deaths[name] == MOST_DEATHS else ""


def _compare(done: Done, host: Done) -> None:
    if done.weights.tobytes() != host.weights.tobytes():
        apart = int((done.weights.view(np.uint32) != host.weights.view(np.uint32)).sum())
        raise Mismatch(
            f"{apart} of {done.weights.size} weights differ from what the same C gives on this "
            "machine"
        )
    if np.float64(done.loss).tobytes() != np.float64(host.loss).tobytes():
        raise Mismatch(
            f"the loss {done.loss!r} differs from {host.loss!r}, what the same C gives on this "
            "machine"
        )
