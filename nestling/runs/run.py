"""Running an experiment: assemble, play, write."""

from __future__ import annotations

import errno
import gc
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from nestling.engines import ENGINES
from nestling.engines.engine import account
from nestling.errors import InputError, seen
from nestling.experiment import Data, Experiment, experiment_of
from nestling.files import path_in
from nestling.methods import Method
from nestling.named_code import only
from nestling.report.folder import read_run
from nestling.report.folder import summarise as summary_of
from nestling.report.notebook import frame_of, plot_of, result_html, result_line
from nestling.report.notebook_line import RunLine, in_notebook
from nestling.report.page import write_report
from nestling.runfiles import (
    COVERAGE,
    EXPERIMENT,
    FEDERATION,
    METRICS,
    ROSTER,
    SUMMARY,
    counted,
    how_to_go_on,
    object_in,
    score_word,
)
from nestling.runs import checkpoint, fingerprint, folder, gate, good, model_file
from nestling.runs.assemble import assemble, site_of
from nestling.runs.data_file import found_again, way_there, with_whole_path
from nestling.runs.describe import describe, norm_of, told_task
from nestling.runs.federation import Federation, Metrics
from nestling.runs.folder import RunFolder
from nestling.runs.loop import play
from nestling.schema import one_or_more
from nestling.store import ClientStore
from nestling.training.client import Errand
from nestling.training.terms import shares, weak
from nestling.version import __version__
from nestling.world import Model

CHECKPOINT_SECONDS = 1.0
"""Rounds that take longer are checkpointed one by one; of shorter ones at most this much work is
done again after a crash."""

W = TypeVar("W")

COVERAGE_SECONDS = 10.0
"""How old the picture of who trained which channel may be while a run goes on."""


@dataclass
class Watcher:
    """What wants to hear of a run: each may be replaced. `started` is told the experiment, what is
    known of the federation (what was read is in its "data"), and the rounds that are done."""

    started: Callable[[Experiment, dict[str, Any], int], None] = lambda *_: None
    client: Callable[[int, int], None] = lambda *_: None
    round: Callable[[Metrics], None] = lambda _: None
    refusal: Callable[[int, int, str], None] = lambda *_: None
    note: Callable[[str], None] = lambda _: None
    clipped: Callable[[int, int, str], None] = lambda *_: None
    # asked after every round: whether the run is to end there, with a checkpoint and its result
    stop: Callable[[], bool] = lambda: False


@contextmanager
def heard(watcher: Watcher | None) -> Iterator[Watcher]:
    """The watcher that was given; in a notebook, where none was, one that shows in a line how the
    run stands; elsewhere one that says nothing."""
    if watcher is not None:
        yield watcher_in(watcher, Watcher)
    elif in_notebook():
        line = RunLine()
        try:
            yield Watcher(
                started=lambda experiment, _, done: line.started(experiment.rounds, done),
                client=line.client,
                round=line.round,
            )
        finally:
            line.ended()
    else:
        yield Watcher()


def watcher_in(given: Any, kind: type[W]) -> W:
    """The watcher that a caller gave."""
    if isinstance(given, kind):
        return given
    name = getattr(given, "__name__", "...") if callable(given) else "..."
    raise InputError(
        f"expected a nestling.{kind.__name__}, got {seen(given)}",
        field="watcher",
        fix=f"write watcher=nestling.{kind.__name__}(round={name})",
    )


@dataclass(repr=False)
class Result:
    """What a run gives: its summary, its metrics by round, where its files are, and the models
    themselves."""

    summary: dict[str, Any]
    metrics: list[Metrics]
    folder: Path | None
    made: Federation | Callable[[], Federation]

    def __repr__(self) -> str:
        """What it was and how good it became, on one line."""
        return f"<Result: {result_line(self.summary, self.folder)}>"

    @property
    def federation(self) -> Federation:
        """The federation as the run left it; that of a loaded run is put together when it is first
        asked for."""
        if not isinstance(self.made, Federation):
            self.made = self.made()
        return self.made

    @property
    def model(self) -> nn.Module | None:
        """The trained global model, where the method has one."""
        return _module(self.federation.shown.global_model())

    def model_for(self, client: int) -> nn.Module | None:
        """The model of one client's device."""
        return _module(self.federation.shown.model_for(self.federation.world.device(client)))

    def to_pandas(self) -> Any:
        """A data frame with a line for every round; needs pandas (`nestling[notebook]`)."""
        return frame_of(self.metrics)

    def plot(self, over: str = "rounds", ax: Any = None) -> Any:
        """Plots the scores over rounds, bytes, seconds (virtual time) or joules, and gives
        matplotlib's axes; needs matplotlib (`nestling[notebook]`)."""
        title = str(self.summary.get("title") or "a run")
        return plot_of(self.metrics, title, score_word(self.summary), over, ax)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return result_html(self.summary, self.tiers)

    @property
    def tiers(self) -> dict[str, Any]:
        """What each tier trains and why it fits: the content of `federation.json`, where the run
        has a folder."""
        return object_in(self.folder / FEDERATION) if self.folder is not None else {}


def run(
    experiment: Experiment | None = None,
    *,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Runs an experiment from its first round. With `out` it writes a run folder there; without, it
    only gives the result. In a notebook one line shows how it stands, unless a watcher is given;
    `Watcher()` shows nothing."""
    asked = experiment_of(experiment)
    path = path_in(out, "out") if out is not None else None
    if path is not None:
        folder.check_new(path)
    with heard(watcher) as told, one_thread():
        store = ClientStore(path / "clients" if path else None)
        settled, federation = assemble(asked, store)
        description = describe(settled, federation)
        home = (
            folder.create(path, _first_files(settled, federation, description, path)).take()
            if path
            else None
        )
        return play_rounds(settled, federation, description, home, told, fresh=True)


def resume(
    path: str | Path,
    *,
    watcher: Watcher | None = None,
    overrides: tuple[str, ...] = (),
    trust: Iterable[str] = (),
    model: nn.Module | None = None,
    method: Method | None = None,
    data: Data | None = None,
) -> Result:
    """Goes on with the run in a folder, from its last checkpoint. Only `rounds`, `engine` and
    `data.path` may be overridden. Code that the folder names, "package.module:callable", is
    imported where `trust` names it too. A network, a method or rows that the run was given as
    objects must be given again, and be the same. It is shown as `run` is."""
    overrides, trust = one_or_more(overrides, "overrides"), one_or_more(trust, "trust")
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key.split(".")[0] not in ("rounds", "engine") and key != "data.path":
            raise InputError(
                "a resumed run keeps its experiment",
                field=override.partition("=")[0],
                fix="only rounds, engine.* and data.path may change",
            )
    home = folder.reopen(path_in(path, "path"))
    if (home.path / ROSTER).exists():
        raise InputError(
            f"the run in {home.path} is that of a fleet: its clients and their rows are on devices",
            field="--resume",
            fix=f"go on with it as it began: {how_to_go_on(home.path)}",
        )
    home.take()
    try:
        with heard(watcher) as told, one_thread():
            settled, federation = restored(
                home, overrides, trust=trust, model=model, method=method, data=data
            )
            if overrides:
                home.write(EXPERIMENT, with_whole_path(settled).to_toml())
                _refresh_fingerprint(home, settled, federation)
            return play_rounds(
                settled,
                federation,
                describe(settled, federation),
                home,
                told,
                fresh=False,
            )
    finally:
        home.close()


def load(
    path: str | Path,
    *,
    trust: Iterable[str] = (),
    model: nn.Module | None = None,
    method: Method | None = None,
    data: Data | None = None,
) -> Result:
    """The result of the run in a folder, finished or not: its summary and metrics at once, its
    models when they are asked for. `trust`, `model`, `method` and `data` are those of `resume`."""
    home, trusted = path_in(path, "path"), one_or_more(trust, "trust")
    run = read_run(home)

    def federation() -> Federation:
        with opened(home, trusted, model, method, data) as result:
            return result.federation

    return Result(summary_of(run), run.metrics, home, federation)


@contextmanager
def opened(
    path: str | Path,
    trust: Iterable[str] = (),
    model: nn.Module | None = None,
    method: Method | None = None,
    data: Data | None = None,
) -> Iterator[Result]:
    """The result of the run in a folder as of its last checkpoint, for looking at its models; no
    round is played. The folder is this process's while the block lasts; `trust`, `model`, `method`
    and `data` are those of `resume`."""
    home = folder.reopen(Path(path), field="RUN").take(field="RUN")
    try:
        if not checkpoint.exists(home.path):
            raise InputError(
                f"the run in {home.path} has not finished a round",
                field="RUN",
                fix=f"go on with it: {how_to_go_on(home.path)}",
            )
        # How the clients were trained does not matter here, and what trained them may be missing on
        # this machine.
        overrides = ("engine.name=auto", "engine.device=auto", "evaluate.metrics=[]")
        federation = restored(home, overrides, trust=trust, model=model, method=method, data=data)[
            1
        ]
        summary = home.read_json(SUMMARY) or {}
        model_file.check(home.path, summary, federation.totals.round)
        yield Result(summary, home.metrics(), home.path, federation)
    finally:
        home.close()


def need_models(result: Result) -> None:
    """Refuses the run of a fleet whose clients keep their models to themselves: the server's
    networks in their place are untrained."""
    federation, home = result.federation, result.folder
    real = federation.world.fleet.live or (home is not None and (home / ROSTER).exists())
    if real and federation.method.as_set.personal:
        raise InputError(
            f"a client of {federation.method.as_set.title} has a model of its own, and in the run "
            "of a fleet these are on the devices, not on the server",
            field="RUN",
            fix="export it on the device: nestling export FOLDER --data DATA, with the folder that "
            "`nestling join` keeps there",
        )


def restored(
    home: RunFolder,
    overrides: tuple[str, ...],
    own: Experiment | None = None,
    trust: Iterable[str] = (),
    model: nn.Module | None = None,
    method: Method | None = None,
    data: Data | None = None,
) -> tuple[Experiment, Federation]:
    """The federation of a folder's run, as of its last checkpoint. What no file can hold is that of
    `own`, or `model`, `method` and `data`: what was given as an object, and must be what the run
    began with. A folder is data: the code that it names is imported where `own`, `method` or
    `trust` names it too."""
    trusted = [*trust, *(own.named_code() if own is not None else ())]
    trusted += [f"{type(method).__module__}:{type(method).__qualname__}"] if method else []
    said = home.read_json(FEDERATION)
    before = fingerprint.stored(said)
    with only(trusted):
        experiment = _described(home, overrides, before, method).with_objects_of(own)
        given = {"model": model, "method": method}
        experiment = experiment.with_data(data).with_changes(
            **{name: value for name, value in given.items() if value is not None}
        )
        experiment = found_again(
            experiment, home.path, said.get("data_file") if isinstance(said, dict) else None
        )
        fingerprint.check_given(before, experiment, home.path)
        saved = checkpoint.load(home.path)
        store = ClientStore(home.path / "clients")
        store.resume(saved[1].round if saved else 0)
        settled, federation = assemble(experiment, store)
    fingerprint.check_same(before, settled, federation.world.fingerprint, home.path)
    federation.notes += fingerprint.believed(before, settled)
    federation.notes += fingerprint.edited(before, home.path / EXPERIMENT)
    if not before and settled.seed and settled.data.path:
        federation.notes.append(_EARLIER)
    if saved:
        place = federation.world.place
        federation.restore(
            {k: {n: t.to(place) for n, t in part.items()} for k, part in saved[0].items()}
        )
        federation.totals = saved[1]
    return settled, federation


def _described(
    home: RunFolder, overrides: tuple[str, ...], before: fingerprint.Fingerprint, method: object
) -> Experiment:
    """The experiment of a folder. Its method's class is imported, which is refused where the method
    was an object and is not given again: that has a way out of its own."""
    try:
        return Experiment.read(home.path / EXPERIMENT, overrides)
    except InputError as error:
        if method is None and error.field == "method.name":
            fingerprint.check_method_given(before, error, home.path)
        raise


_EARLIER = (
    "this run was begun by an earlier version, which drew the test rows of a file that names none "
    "by the seed: the rows it trains and tests on may not be those it began with"
)


def _refresh_fingerprint(home: RunFolder, experiment: Experiment, federation: Federation) -> None:
    """Says in the folder what settings the run goes on with."""
    said = home.read_json(FEDERATION)
    if fingerprint.stored(said):
        now = fingerprint.of_run(experiment, federation.world.fingerprint)
        home.write(FEDERATION, json.dumps({**said, "fingerprint": now}, indent=1))


def play_rounds(
    experiment: Experiment,
    federation: Federation,
    description: dict[str, Any],
    home: RunFolder | None,
    watcher: Watcher,
    fresh: bool,
    every: float = CHECKPOINT_SECONDS,
) -> Result:
    """Plays the rounds that are left and writes what comes of them, with a checkpoint as soon as
    `every` seconds have passed since the last one. A `fresh` folder that has none yet is taken away
    again when the run fails."""
    boards: list[Mapping[str, Any]] = []
    federation.on_client, federation.on_board = watcher.client, boards.append
    federation.on_refusal, federation.on_clipped = watcher.refusal, watcher.clipped
    done = federation.totals.round
    metrics: list[Metrics] = []
    try:
        with _disk_errors(home.path if home else None):
            if home:
                home.start(done)
                metrics = home.metrics()
                federation.notes += _lost_rounds(metrics, done)
            federation.coverage.restore(federation.totals.coverage, federation.world.references)
            watcher.started(experiment, {**description, "engine": account(federation.engine)}, done)
            for note in federation.notes:
                watcher.note(note)
            federation.engine.open(experiment.make_method(), site_of(federation))
            saver, told = _Saver(home, federation, every), 0
            # What exists by now stays: the collector need not walk through it again and again.
            gc.freeze()
            for row in play(federation, saver.waits):
                metrics.append(row)
                passed = not row.get("gate", {}).get("returned", True)
                if home:
                    home.log(row)
                    home.log_boards(boards)
                    saver.save_if_due(passed)
                boards.clear()
                _note_refusal(federation)
                for note in federation.engine.notes[told:]:
                    watcher.note(note)
                told = len(federation.engine.notes)
                watcher.round(row)
                rule = federation.method.robust
                for note in [
                    *_weak_terms(experiment, federation, row["round"]),
                    *(rule.news() if rule else ()),
                    *gate.news(row["round"], row.get("gate")),
                ]:
                    federation.notes.append(note)
                    watcher.note(note)
                saver.ending = saver.ending or watcher.stop()
                if saver.ending and not federation.ahead:
                    saver.save_if_due(passed)
                    break
            summary = summarise(experiment, federation, metrics)
            if home:
                _finish(home, federation, summary)
    except BaseException:
        if home and fresh and not checkpoint.exists(home.path):
            home.remove()
        raise
    finally:
        gc.unfreeze()
        federation.engine.close()
        if home:
            home.close()
    return Result(summary, metrics, home.path if home else None, federation)


def _lost_rounds(metrics: list[Metrics], done: int) -> list[str]:
    """Says which rounds that were played are not in the log: a line was damaged, or never reached
    the disk. The run itself does not need them."""
    lost = sorted(set(range(1, done + 1)) - {row["round"] for row in metrics})
    return [f"{METRICS} has lost the rounds {', '.join(map(str, lost))}"] if lost else []


def _note_refusal(federation: Federation) -> None:
    """Says so, once, where the server's own training cannot be recorded."""
    refusal = federation.world.recorder.refusal
    note = f"NOT RECORDED, the server's own training: {refusal}"
    if refusal and note not in federation.engine.notes:
        federation.engine.notes.append(note)


def _weak_terms(experiment: Experiment, federation: Federation, number: int) -> list[str]:
    """Half-way, a note where what a method adds to cross-entropy hardly moves a client."""
    world, method = federation.world, federation.method
    if number != max(2, experiment.rounds // 2) or federation.engine.name not in ENGINES:
        return []
    for client in method.choose(number, federation.participants)[:1]:
        device = world.device(client, number)
        piece = method.piece(device, number)
        sent = method.send(device, piece, number)
        errand = Errand(
            client, number, piece.reference.name, piece.spec(), sent, world.store.get(client)
        )
        # A look must not end a run: where a client does not fit beside the others, nothing is said.
        with suppress(torch.OutOfMemoryError):
            found = shares(experiment.make_method(), errand, site_of(federation))
            if weak(found):
                said = (
                    f"WEAK TERM: in round {number} what {method.as_set.title} adds to the "
                    f"loss of client {client} is"
                )
                return [
                    f"{said} {max(found):.2%} of cross-entropy's gradient; a larger weight would "
                    "make it count"
                ]
    return []


class _Saver:
    """Writes checkpoints, `every` seconds after the last one and after the last round, as soon as
    no round is under way."""

    def __init__(self, home: RunFolder | None, federation: Federation, every: float) -> None:
        self.home, self.federation, self.every = home, federation, every
        self.last, self.due, self.ending = -math.inf, False, False
        self.pictured = -math.inf

    def waits(self) -> bool:
        """Whether the rounds under way are to be done before another begins: for a checkpoint, or
        because the run is to end."""
        return self.due or self.ending

    def save_if_due(self, passed: bool) -> None:
        """`passed`: whether the gate, if there is one, let the last round pass."""
        federation, totals = self.federation, self.federation.totals
        last = self.ending or totals.round == federation.rounds
        self.due = last or time.monotonic() - self.last >= self.every
        if self.due and not federation.ahead and self.home is not None:
            federation.world.store.sync()
            totals.coverage = federation.coverage.told()
            checkpoint.save(self.home.path, federation.state(), totals)
            federation.world.store.covered(totals.round)
            if passed and federation.server.good:
                good.keep(self.home.path, federation.state(), totals, federation.server.good)
            self.last, self.due = time.monotonic(), False
            if last or self.last - self.pictured >= COVERAGE_SECONDS:
                _write_coverage(self.home, federation)
                self.pictured = self.last


def _write_coverage(home: RunFolder, federation: Federation) -> None:
    """Who trained which channel, where weights are shared; nobody goes on from this file."""
    if federation.coverage.rounds:
        home.write(COVERAGE, json.dumps(federation.coverage.page(federation.totals.round)))


def _finish(home: RunFolder, federation: Federation, summary: dict[str, Any]) -> None:
    model = federation.shown.global_model()
    if model is not None:
        summary[model_file.SHA256] = model_file.write(home, model.state)
    home.write(SUMMARY, json.dumps(summary, indent=1))
    write_report(home.path)


def summarise(
    experiment: Experiment, federation: Federation, metrics: list[Metrics]
) -> dict[str, Any]:
    """The content of `summary.json`."""
    rows = [m for m in metrics if m["global_score"] is not None]
    empty = sum(not _merged(row) for row in metrics)
    found: dict[str, Any] = {
        "method": experiment.method.name,
        "title": federation.method.as_set.title,
        "seed": experiment.seed,
        "rounds": experiment.rounds,
        "data": experiment.data.name,
        "data_read": federation.reading.get("line"),
        "task": told_task(federation.world),
        "model": experiment.model.name,
        "norm": norm_of(experiment),
        "global_model": federation.method.as_set.global_model,
        "group": federation.method.as_set.group,
        **counted(metrics, federation.world.plans),
        **({"others": rows[-1]["others"]} if rows and "others" in rows[-1] else {}),
        "empty_rounds": empty,
        "nothing_merged": bool(metrics) and empty == len(metrics),
        "engine": {
            **account(federation.engine),
            "not_recorded": [n for n in federation.engine.notes if n.startswith("NOT RECORDED")],
        },
        "notes": list(federation.notes),
        "commit": _commit(),
        "versions": {
            "nestling": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    found["notes"] += filter(None, [emptiness(found)])
    return found


def _merged(row: Metrics) -> int:
    """How many replies a round merged; rounds of earlier versions do not say it."""
    lost = row["refused"] + row["late"] + row["dropped"]
    return int(row.get("merged", max(0, len(row["clients"]) - lost)))


def emptiness(summary: Mapping[str, Any]) -> str:
    """What must be said of a run in which rounds merged nothing; nothing where every round merged
    something."""
    rounds, empty = summary["rounds_done"], summary["empty_rounds"]
    lost = (
        f"{summary['refused']} replies refused, {summary['late']} late, {summary['dropped']} "
        "clients dropped out"
    )
    if summary["nothing_merged"]:
        return (
            f"NOTHING WAS MERGED in any of {rounds} rounds ({lost}): the models are as they "
            "were before the first"
        )
    return f"{empty} of {rounds} rounds merged nothing ({lost})" if empty else ""


def _first_files(
    experiment: Experiment, federation: Federation, description: dict[str, Any], path: Path
) -> dict[str, str]:
    """What a run folder holds before the first round: all that is known by then, should the run
    never come to its summary."""
    made = {
        **description,
        "engine": account(federation.engine),
        "commit": _commit(),
        "fingerprint": fingerprint.of_run(experiment, federation.world.fingerprint),
        "data_file": way_there(experiment, path),
    }
    written = with_whole_path(experiment)
    return {EXPERIMENT: written.to_toml(), FEDERATION: json.dumps(made, indent=1)}


def _module(model: Model | None) -> nn.Module | None:
    return model.reference.network(model.view, model.state).eval() if model is not None else None


def _commit() -> str | None:
    """The commit of this source tree, when it is one."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
        return found.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread, as in every worker process: sums then run in the same order everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _disk_errors(path: Path | None) -> Iterator[None]:
    """What the disk refuses is the user's to mend."""
    try:
        yield
    except OSError as error:
        if path is None or error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EFBIG,
            errno.EROFS,
            errno.EACCES,
            errno.ENOTDIR,
        ):
            raise
        fix = f"make room; a run that finished a round can go on: {how_to_go_on(path)}"
        raise InputError(
            f"cannot write the run folder {path}: {error.strerror}", field="--out", fix=fix
        ) from error
