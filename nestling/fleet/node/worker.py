"""The client's side of a fleet: a node's worker, which knows the node's data and does what it is
ordered.

`handle` takes a letter and gives the answer; whoever carries letters calls it. What a client keeps
between rounds, and its last result, lie on the device's disk and never travel. A result is written
before it is sent, so that an order that comes again is answered again without working twice, also
by a worker that was killed in between. Should the server go back to an earlier round (it was killed
before its checkpoint), the client goes back to what it had then.
"""

from __future__ import annotations

import argparse
import errno
import logging
import re
import secrets
import shutil
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from nestling.data import Dataset, Split
from nestling.errors import InputError
from nestling.experiment import EngineConfig, Experiment
from nestling.files import parse_toml, read_sealed, sealed, write_atomic
from nestling.fleet.node.data_files import EXPERIMENT
from nestling.fleet.node.own_data import Rows, read_rows
from nestling.fleet.node.own_targets import form_of_targets, task_name
from nestling.fleet.node.profile import Allowance, measure
from nestling.fleet.protocol import wire
from nestling.fleet.protocol.local import serve
from nestling.fleet.protocol.wire import (
    Answer,
    Failed,
    Hello,
    JobDone,
    JobOrder,
    Member,
    Order,
    Parcel,
    Welcome,
)
from nestling.harmless import harmless
from nestling.runs.assemble import Given, make_world
from nestling.store import ClientStore
from nestling.tasks import Classification
from nestling.training.client import Errand, Outcome, Site, work
from nestling.world import World

log = logging.getLogger("nestling.fleet")

KEPT_RUNS = 4
KEPT_WORLDS = 4

_ONE_AT_A_TIME = threading.RLock()  # workers of one process share networks
_worlds: OrderedDict[tuple[object, ...], tuple[World, Dataset, Experiment | None]] = OrderedDict()

_TOKEN = re.compile(r"[0-9a-f]{32}")


class Worker:
    """Works for the clients behind one node.

    home:       the folder that is the worker's alone.
    members:    its clients.
    data:       where their rows are: EXPERIMENT, or a path (see `own_data.read_rows`); one for all,
                or by name.
    free:       says the bytes of memory that are free now; asked with every answer.
    tell_classes: whether the server is told how many rows of each class there are. Without, it
                  cannot say how well a client's model
                does on the client's own mix of classes; nothing else depends on it.
    experiment: the node's own copy, for networks and methods that only its own code has.
    """

    def __init__(
        self,
        home: Path | str,
        members: Sequence[Member],
        data: str | Mapping[str, str] = EXPERIMENT,
        free: Callable[[], int] = lambda: 0,
        experiment: Experiment | None = None,
        tell_classes: bool = False,
    ) -> None:
        """Makes the folder and the node's token where they are missing; refuses an empty list of
        clients."""
        if not members:
            raise InputError("a worker without clients", field="members", fix="name at least one")
        self.home, self.members, self.free, self.own = Path(home), tuple(members), free, experiment
        self.tell_classes = tell_classes
        self.data = {m.name: data if isinstance(data, str) else data[m.name] for m in members}
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.token = _token(self.home / "token")
        self._runs: dict[str, _Run] = {}
        self._refused = ""  # why it was refused last, as its owner knows

    def handle(self, letter: bytes) -> bytes:
        """The answer to a letter. A letter that cannot be read is an `InputError`."""
        with _ONE_AT_A_TIME:
            if wire.kind_of(letter) == "welcome":
                return self._welcome(letter).to_bytes()
            return self._order(Order.from_bytes(letter)).to_bytes()

    def _welcome(self, letter: bytes) -> Hello:
        welcome = Welcome.from_bytes(letter)
        if welcome.refused not in ("", self._refused):
            log.warning("the server refuses this device: %s", welcome.refused)
        self._refused = welcome.refused
        try:
            members = tuple(self._reported(member, welcome) for member in self.members)
            folder = self._folder(welcome.run)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / "welcome", sealed(letter))
        except (InputError, OSError) as error:
            self._refused = _told("cannot take part", error)
            return Hello(welcome.run, self.token, (), self._refused)
        self._forget_old(folder)
        return Hello(welcome.run, self.token, members)

    def _reported(self, member: Member, welcome: Welcome) -> Member:
        free = self.free() or member.free
        member = replace(member, free=free, ram=member.ram or free)
        if self.data[member.name] == EXPERIMENT:
            return member
        rows = read_rows(self.data[member.name], welcome)
        counts = None
        if self.tell_classes and task_name(welcome) == Classification.name:
            counts = tuple(np.bincount(rows.kinds, minlength=welcome.classes).tolist())
        return replace(member, rows=len(rows.y), counts=counts)

    def _order(self, order: Order) -> Answer:
        answer = Answer(order.run, order.round)
        try:
            run = self._run(order.run)
        except Exception as error:  # whatever it is, the server must hear of it
            answer.error = _told(f"round {order.round}", error)
            return answer
        if run is None:
            answer.unknown = True
            return answer
        if not order.jobs:
            log.info("the run is over: round %d was its last; waiting for the next", order.round)
        answer.results = [self._job(run, order, job) for job in order.jobs]
        free = self.free()
        answer.free = {m.name: free for m in self.members} if free else {}
        return answer

    def _job(self, run: _Run, order: Order, job: JobOrder) -> JobDone | Failed:
        if job.name not in self.data:
            return Failed(job.client, job.key, f"there is no {job.name!r} behind this node")
        try:
            return run.work(order, job, self.data[job.name])
        except Exception as error:
            why = _told(f"{job.name}: round {order.round}", error)
            return Failed(job.client, job.key, why)

    def _folder(self, run: str) -> Path:
        return self.home / "runs" / run

    def _run(self, run: str) -> _Run | None:
        if run not in self._runs:
            path = self._folder(run) / "welcome"
            if not path.exists():
                return None
            self._runs.clear()  # one run at a time is held in memory
            self._runs[run] = _Run(path.parent, Welcome.from_bytes(read_sealed(path)), self.own)
        return self._runs[run]

    def _forget_old(self, current: Path) -> None:
        """Of earlier runs only the last few are kept."""
        others = sorted(
            (p for p in current.parent.iterdir() if p != current), key=lambda p: p.stat().st_mtime
        )
        for path in others[: -KEPT_RUNS + 1]:
            shutil.rmtree(path, ignore_errors=True)


@dataclass(eq=False)
class Begun:
    """A client's job that is under way."""

    order: Order
    job: JobOrder
    errand: Errand


class _Run:
    """One run, as far as this node has to do with it."""

    def __init__(self, folder: Path, welcome: Welcome, own: Experiment | None) -> None:
        torch.set_num_threads(1)  # as in every engine: sums then run in the same order everywhere
        self.folder, self.welcome = folder, welcome
        self.experiment = experiment_of(welcome, own)
        self.method = self.experiment.make_method()
        self._own = own
        self._sites: dict[int, Site] = {}
        self._clients: dict[int, _Desk] = {}

    @cached_property
    def target_form(self) -> tuple[int, torch.dtype]:
        """How many dimensions targets have, and their type: asked for every job of a gateway."""
        y = form_of_targets(self.welcome)[1]
        return y.dim(), y.dtype

    def work(self, order: Order, job: JobOrder, data: str) -> JobDone | Failed:
        """One client's job: done, or taken from the desk where it is done already."""
        begun = self.begin(order, job)
        if not isinstance(begun, Begun):
            return begun
        return self.finish(
            begun, work(self.method, begun.errand, self._site(job.client, data, job.network))
        )

    def begin(self, order: Order, job: JobOrder) -> JobDone | Begun:
        """A client's job as an errand, or its result where it is done already."""
        if job.client not in self._clients:
            self._clients[job.client] = _Desk(self.folder / str(job.client), job.client)
        desk = self._clients[job.client]
        desk.refresh()
        known = desk.result(job.key)
        if known is not None:
            return known
        memory = desk.memory(order, job.base)
        return Begun(
            order,
            job,
            Errand(job.client, order.round, job.network, job.spec, job.parcel.open(), memory),
        )

    def finish(self, begun: Begun, outcome: Outcome) -> JobDone:
        """Keeps what came of an errand, and gives it."""
        job, order = begun.job, begun.order
        parcel = Parcel.of(outcome.reply, order.transport)
        done = JobDone(
            job.client, job.key, parcel, float(outcome.loss), outcome.steps, outcome.samples
        )
        self._clients[job.client].put(order, done, outcome.memory)
        return done

    def world(self, data: str, network: str) -> tuple[World, Dataset]:
        """The networks, one of this name among them, and the data that clients take their shares
        of."""
        world, whole = self._built(data)
        if network not in world.references:
            # A network that the method makes itself; it needs no more of the server's side.
            self.experiment.make_method().setup(world)
        if network not in world.references:
            raise InputError(f"the experiment has no network {network!r}")
        return world, whole

    def _site(self, client: int, data: str, network: str) -> Site:
        world, whole = self.world(data, network)
        if client not in self._sites:
            rows = (
                _share(whole, world.split, client)
                if data == EXPERIMENT
                else read_rows(data, self.welcome)
            )
            own, e = OwnRows(rows.kinds, world.classes), world
            self._sites[client] = Site(
                rows.x, rows.y, own, e.references, e.classes, e.train, e.seed, e.public, real=True
            )
        return self._sites[client]

    def _built(self, data: str) -> tuple[World, Dataset]:
        """The networks, and the experiment's data where a client takes its share of them; else data
        of their form only. Workers of one process that have the same experiment share them."""
        told, own = self.welcome, self._own
        public = told.public.digest if told.public is not None and data != EXPERIMENT else ""
        key = (
            told.experiment,
            told.shape,
            told.classes,
            told.rows,
            (told.tokens, told.mean, told.scale),
            public,
            data == EXPERIMENT,
            id(own) if own is not None else 0,
        )
        if key not in _worlds:
            given = None if data == EXPERIMENT else form_of(told)
            _, whole, world = make_world(self.experiment, given=given)
            # holding `own` keeps its id from being given to another
            _worlds[key] = world, whole, own
            while len(_worlds) > KEPT_WORLDS:
                _worlds.popitem(last=False)
        return _worlds[key][:2]


class _Desk:
    """What one client has on the disk: its memory after each round that the server may yet go back
    to, and its last result."""

    def __init__(self, folder: Path, client: int) -> None:
        self.folder, self.client = folder, client
        self.folder.mkdir(parents=True, exist_ok=True)
        for half in self.folder.glob(".*"):  # what was being written when the worker was killed
            half.unlink(missing_ok=True)
        self._stamp: tuple[int, int] | None = None
        self._read()

    def _read(self) -> None:
        self._last: Answer | None = None
        # the server will not go back behind that round; its start that gave the last order
        self._floor = self._start = 0
        self._stamp = self._now()
        if self._stamp is not None:
            self._last = Answer.from_bytes(read_sealed(self.folder / "result"))
            self._floor, self._start = (
                int(word) for word in read_sealed(self.folder / "floor").split()
            )
        self._store = ClientStore(self.folder / "memory")
        # What was written after the last result belongs to work that was not finished.
        self._store.resume(self._last.round if self._last else 0)

    def _now(self) -> tuple[int, int] | None:
        """Which result is on the disk: in Flower's simulation another process may have worked for
        the client since."""
        path = self.folder / "result"
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None

    def refresh(self) -> None:
        """Looks whether what is known is what is on the disk."""
        if self._now() != self._stamp:
            self._read()

    def result(self, key: str) -> JobDone | None:
        """The last result, if it is of this work."""
        found = self._last.results[0] if self._last is not None else None
        return found if isinstance(found, JobDone) and found.key == key else None

    def memory(self, order: Order, base: int) -> dict[str, torch.Tensor]:
        """What the client had after the round that counted last, whatever it did since."""
        last = self._last.round if self._last is not None else 0
        if (order.start, order.round) < (self._start, last):
            # It was on its way for long. To follow it would be to lose what was done since.
            raise InputError(f"an order of round {order.round} that came after one of round {last}")
        if order.round <= last and order.round - 1 < self._floor and self._store.get(self.client):
            raise InputError(
                f"the server went back to round {order.round}, and what the client had then is "
                "gone",
                fix="start a new run",
            )
        if base < last:
            self._store.resume(base)
        return self._store.get(self.client)

    def put(self, order: Order, done: JobDone, memory: dict[str, torch.Tensor]) -> None:
        """Keeps a result: first what belongs to it, then the result itself, which makes all of it
        count."""
        self._store.covered(order.covered)
        self._store.put(self.client, memory, order.round)
        self._store.sync()
        self._floor, self._start = max(self._floor, order.covered), order.start
        write_atomic(self.folder / "floor", sealed(b"%d %d" % (self._floor, self._start)))
        result = Answer(order.run, order.round, [done])
        write_atomic(self.folder / "result", sealed(result.to_bytes()))
        self._last, self._stamp = result, self._now()


class OwnRows(Split):
    """The rows of one client, all of which are there."""

    def __init__(self, y: np.ndarray, classes: int) -> None:
        """Takes the rows' classes; none of the rows is held out."""
        super().__init__(1, y, classes, 0.0)

    def _known(self, client: int) -> int:
        return client

    def _rows(self, _client: int) -> np.ndarray:
        return np.arange(len(self._y))


def experiment_of(welcome: Welcome, own: Experiment | None = None) -> Experiment:
    """The experiment as this node carries it out: on its CPU, with its own copies of what only code
    can say."""
    experiment = Experiment.from_table(parse_toml(welcome.experiment, "the experiment"))
    return experiment.with_changes(engine=EngineConfig("inline", device="cpu")).with_objects_of(own)


def _share(whole: Dataset, split: Split, client: int) -> Rows:
    """A client's rows of the experiment's data."""
    rows = torch.from_numpy(split.indices(client))
    return Rows(whole.x[rows], whole.y[rows])


def form_of(welcome: Welcome) -> Given:
    """Data of the form of the experiment's, which take no memory: the networks, and what fits a
    device, depend on the form and the task only."""
    x = torch.zeros(1, *welcome.shape, dtype=torch.int64 if welcome.tokens else torch.float32)
    task, y = form_of_targets(welcome)
    many, two = x.expand(welcome.rows, *welcome.shape), x.expand(2, *welcome.shape)
    kinds = None if task is None else torch.zeros(1, dtype=torch.int64)
    blank = Dataset(
        "form",
        many,
        y,
        two,
        y[:1].expand(2, *y.shape[1:]),
        welcome.classes,
        None,
        welcome.class_names,
        task=task,
        kinds=None if kinds is None else kinds.expand(welcome.rows),
        kinds_test=None if kinds is None else kinds.expand(2),
    )
    public = welcome.public.open()["public"]["x"] if welcome.public is not None else None
    return Given(blank, public, OwnRows(np.zeros(1, np.int64), welcome.classes))


def _token(path: Path) -> str:
    """The node's secret, made once."""
    if not path.exists():
        write_atomic(path, secrets.token_hex(16))
        path.chmod(0o600)
    found = path.read_text()
    if not _TOKEN.fullmatch(found):
        raise InputError(
            f"{path} is damaged",
            fix="remove it; the names of this node must then be freed on the server",
        )
    return found


def _told(where: str, error: Exception) -> str:
    """What the server is told of an error, and one line of the device's own log for its owner."""
    log.warning("%s: %s", where, harmless(_said(error)))
    return _said(error)


def _said(error: Exception) -> str:
    text = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = f"this device's disk is full ({error.strerror}); make room"
    return text[:2000]


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m nestling.fleet.node.worker`: a worker that stays, with torch loaded once, and
    answers letters at a socket; exit code 2 where it cannot begin."""
    parser = argparse.ArgumentParser(
        prog="python -m nestling.fleet.node.worker", description=main.__doc__
    )
    parser.add_argument("--socket", required=True, help="the socket to answer at")
    parser.add_argument(
        "--folder", required=True, help="where the worker keeps what its client keeps"
    )
    parser.add_argument("--name", required=True, help="what the client is called")
    parser.add_argument(
        "--device", default="", help="the kind of device, or the tier of the experiment"
    )
    parser.add_argument(
        "--data", default=EXPERIMENT, help="an .npz file, a folder of them, or 'experiment'"
    )
    parser.add_argument("--client", type=int, default=None, help="the number it would like to have")
    parser.add_argument(
        "--memory", default="100%", help="what of the free memory may be used: 50%%, or 300 MB"
    )
    given = parser.parse_args(arguments)
    allowance, found = Allowance.parse(given.memory), measure()
    member = Member(
        given.name,
        given.client,
        given.device,
        ram=found.ram,
        free=allowance.available(),
        macs=found.macs_per_second,
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        worker = Worker(given.folder, [member], given.data, allowance.available)
    except (InputError, OSError) as error:
        _told("the worker cannot begin", error)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    serve(
        given.socket, worker.handle, lambda: print(f"{given.name}: the worker is ready", flush=True)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
