"""The run inside Flower's ServerApp: plays it from where its folder says it stands, and leaves its
end in a file for the server."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid

from nestling.errors import InputError
from nestling.files import read_summed
from nestling.fleet.care import logs
from nestling.fleet.care.certs import KeyHolder, write_private
from nestling.fleet.care.disk import MEGA, Room, is_full
from nestling.fleet.care.processes import LOG_BYTES, LOG_FILES, born
from nestling.fleet.server.server import ANEW, OUTCOME, PROCESS, RUN_LOG, SETTINGS
from nestling.runfiles import EXPERIMENT, score_word

if TYPE_CHECKING:
    from nestling.experiment import Experiment
    from nestling.runs.federation import Metrics
    from nestling.runs.run import Watcher

log = logging.getLogger("nestling.fleet.run")

LEAVE_SECONDS = 30.0
"""How long nodes have to hear that the run is over: they ask every 3 s and start a process."""


def host(grid: Grid, home: str) -> None:
    """Plays the run that `home` describes, and says there how it ended."""
    folder = Path(home)
    settings = json.loads((folder / SETTINGS).read_text())
    # The file that names this process also tells the server that it is alive.
    write_private(
        folder / PROCESS, json.dumps({"pid": os.getpid(), "born": born(os.getpid())}).encode()
    )
    _log_to(folder / "log" / RUN_LOG)
    lines = Path(settings["folder"]) / logs.SERVER_LOG
    with logs.written_to(lines, needs=lines.parent / EXPERIMENT):
        outcome = _played(grid, settings, folder)
    write_private(folder / OUTCOME, json.dumps(outcome).encode())
    if outcome["state"] != "done":
        raise RuntimeError(outcome["text"])  # so that Flower too counts the run as failed


def _played(grid: Grid, settings: dict[str, Any], home: Path) -> dict[str, Any]:
    from nestling.fleet.server.engine import NoQuorum

    try:
        # What is heavy is imported where a failure to import it is told as well.
        from nestling.experiment import Experiment
        from nestling.fleet.flower.grid import GridCourier
        from nestling.fleet.server.quota import QUOTA, Allowances
        from nestling.fleet.server.serving import play
        from nestling.runs.logged import logged

        keys = Registered(Path(settings["registered"])) if settings["registered"] else None
        with logged(_watcher(), settings.get("log", ()), Path(settings["folder"])) as watcher:
            result = play(
                GridCourier(grid),
                Experiment.read(Path(settings["experiment"])),
                Path(settings["folder"]),
                min_clients=settings["min_clients"],
                deadline=settings["deadline"],
                quorum=settings["quorum"],
                keys=keys,
                watcher=watcher,
                leave=LEAVE_SECONDS,
                allow=Allowances(home / QUOTA, {} if keys is None else keys),
                room=Room((home, Path(settings["folder"])), settings["disk_floor"] * MEGA),
            )
        return {"state": "done", "text": "", "summary": result.summary}
    except NoQuorum as error:
        return {"state": "quorum", "text": str(error)}
    except Exception as error:
        if is_full(error):
            return {"state": "disk", "text": f"disk full: {error}"}
        if isinstance(error, InputError):
            return {"state": "input", "text": str(error)}
        log.error("%s", traceback.format_exc())
        return {"state": "error", "text": f"{type(error).__name__}: {error}"}


class Registered(Mapping[int, KeyHolder]):
    """Node → whom its key stands for, as the server's file says now: devices may be added while the
    run goes on."""

    def __init__(self, path: Path) -> None:
        """Takes the path of the server's file, which is read when first asked."""
        self.path = path
        self._holders: dict[int, KeyHolder] = {}
        self._seen = 0

    def __getitem__(self, node: int) -> KeyHolder:
        """Whom a node's key stands for; a `KeyError` where its key is not registered."""
        return self._read()[node]

    def __iter__(self) -> Iterator[int]:
        """The numbers of the registered nodes."""
        return iter(self._read())

    def __len__(self) -> int:
        """How many nodes are registered now."""
        return len(self._read())

    def _read(self) -> dict[int, KeyHolder]:
        changed = self.path.stat().st_mtime_ns if self.path.exists() else 0
        if changed != self._seen:
            self._holders = {
                int(node): KeyHolder(**{name: row[name] for name in row if name != "key"})
                for node, row in read_summed(self.path, fix=ANEW).items()
            }
            self._seen = changed
        return self._holders


def _watcher() -> Watcher:
    """What happens, as lines of the log."""
    from nestling.runs.run import Watcher

    words = {"score": "score"}

    def started(experiment: Experiment, description: dict[str, Any], done: int) -> None:
        words["score"] = score_word(description)
        text = f"{experiment.method.name}: round {done + 1} of {experiment.rounds} is next"
        logs.tell(log, logs.Note(text, "started", round=done + 1, rounds=experiment.rounds))
        logs.tell(log, description["data"]["line"])

    def round(row: Metrics) -> None:
        score = row.get("global_score")
        tested = f", global {words['score']} {score:.2%}" if score is not None else ""
        missing = len(row["missed"])
        less = f", {missing} gave no reply" if missing else ""
        text = (
            f"round {row['round']}: {len(row['clients'])} clients{less}{tested}, "
            f"{row['seconds']:.1f} s"
        )
        facts = {
            name: row[name]
            for name in ("round", "dropped", "refused", "late", "seconds", "bytes_up", "bytes_down")
        }
        logs.tell(log, logs.Note(text, "round", clients=len(row["clients"]), score=score, **facts))

    def refusal(client: int, round: int, reason: str) -> None:
        text = f"round {round}: a reply of client {client} is refused: {reason}"
        logs.tell(
            log,
            logs.Note(text, "refused", round=round, client=client, reason=reason),
            logging.WARNING,
        )

    def clipped(client: int, round: int, reason: str) -> None:
        text = f"round {round}: the reply of client {client} is clipped: {reason}"
        facts = {"round": round, "client": client, "reason": reason}
        logs.tell(log, logs.Note(text, "clipped", **facts), logging.WARNING)

    def note(text: str) -> None:
        event = getattr(text, "facts", {}).get("event")
        logs.tell(log, text, logging.WARNING if event == logs.BELIEVING else logging.INFO)

    return Watcher(
        started=started,
        round=round,
        refusal=refusal,
        note=note,
        clipped=clipped,
    )


def _log_to(path: Path) -> None:
    handler = logs.PlainLines(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(logs.Discreet())
    root = logging.getLogger("nestling")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
