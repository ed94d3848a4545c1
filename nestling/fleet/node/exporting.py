"""The export of a model that stays on its device: of a client's model, from the folder that
`nestling join` keeps there.

The welcome says what was trained, and the client's memory what it keeps. From these the device puts
together what a simulation would have of this client, and asks the method for the client's model, as
everybody does who wants one. What the clients of a method share is on the server: it comes from
there, in the run folder or a copy of its files, and of the other clients nothing is needed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nestling.errors import InputError, unknown
from nestling.experiment import Experiment
from nestling.files import read_sealed
from nestling.fleet.node.data_files import EXPERIMENT
from nestling.fleet.node.own_data import read_rows
from nestling.fleet.node.worker import OwnRows, experiment_of, form_of
from nestling.fleet.protocol.wire import Answer, Welcome
from nestling.fleet.server.roster import Roster
from nestling.methods import Method
from nestling.methods.server import KEPT, shown
from nestling.named_code import only
from nestling.runfiles import ROSTER
from nestling.runs import checkpoint
from nestling.runs.assemble import assemble, make_world
from nestling.runs.evaluation import Bench
from nestling.runs.export import (
    CALIBRATION,
    FORMATS,
    ClientModel,
    ExportOptions,
    find_tier,
    ship,
)
from nestling.runs.run import one_thread
from nestling.store import ClientStore, Records, memory_at, record_at
from nestling.views import State
from nestling.world import World

_SHARED_FIX = (
    f"copy {checkpoint.NAME}, {ROSTER} and, where it has them, clients/ from the server's run "
    "folder and name the copy with --shared"
)


@dataclass(frozen=True)
class _ClientRun:
    """What a device keeps of a run for one of its clients. `round` is that of its last result."""

    folder: Path
    welcome: Welcome
    client: int
    round: int


@dataclass(frozen=True)
class _ServerSide:
    """What the server kept after `round`; of the client the last result that counted was that of
    round `counted`, and `record` is what the server wrote down of it."""

    state: Mapping[str, State]
    round: int
    counted: int
    record: State


def is_device_folder(folder: str | Path) -> bool:
    """Whether a folder is one that `nestling join` keeps, or the worker's in it."""
    return (_worker_folder(Path(folder)) / "token").is_file()


def export_device(
    folder: str | Path,
    *,
    data: str = "",
    shared: str | Path | None = None,
    run: str = "",
    client: int | None = None,
    device: str = "",
    out: str | Path | None = None,
    formats: tuple[str, ...] = FORMATS,
    calibration: int = CALIBRATION,
    name: str = "model",
    trust: Iterable[str] = (),
    sign: str | Path | None = None,
) -> dict[str, Any]:
    """Writes the model that a device's client has on it, and gives back the report.

    `data` are the rows to calibrate with, as `join` was given them. `shared` is the server's run
    folder, or a copy, for methods whose clients share a part of their models. Of several runs the
    one that came last is taken unless `run` names another, and of several clients the one with the
    number `client`. `device` may say which tier it must be of. The rest is that of
    `runs.export.export`; `trust` names the code that the server's experiment may have imported.
    """
    options = ExportOptions(formats, calibration, name, sign)
    kept = _client_run(Path(folder), run, client)
    if not data:
        raise InputError(
            "the model is calibrated with rows of the device's own, and none are named",
            field="--data",
            fix="name what `nestling join` was given: an .npz file, a folder of them, or "
            "`experiment`",
        )
    with only(trust), one_thread():
        whose = _client_model(kept, data, Path(shared) if shared is not None else None)
        if device and find_tier(whose.world, device) is not whose.plan:
            raise InputError(
                f"client {kept.client} is of tier {whose.plan.tier.name!r}, not {device!r}",
                field="--device",
                fix="leave it out",
            )
        place = Path(out) if out is not None else Path(folder) / f"export-{whose.plan.tier.name}"
        return ship(whose, place, options)


# -- what is on the device -------------------------------------------------------------------------


def _worker_folder(folder: Path) -> Path:
    return folder / "worker" if (folder / "worker").is_dir() else folder


def _client_run(folder: Path, run: str, client: int | None) -> _ClientRun:
    if not is_device_folder(folder):
        raise InputError(
            f"{folder} is not a device's folder",
            field="RUN",
            fix="name the one that `nestling join` keeps (--folder)",
        )
    runs = _runs(_worker_folder(folder) / "runs")
    if run and run not in runs:
        raise unknown("run of this device", run, runs, field="--run")
    finished = {name: found for name, path in runs.items() if (found := _clients(path))}
    name = run or next(reversed(runs), "")
    if name not in finished:
        raise InputError(
            f"no training is finished yet in {f'the run {name} of ' if name else ''}{folder}",
            field="--run" if run else "RUN",
            fix=f"wait for the first round, or name another run: --run {' or '.join(finished)}"
            if finished
            else "wait for the first round",
        )
    number = _chosen(finished[name], client)
    welcome = Welcome.from_bytes(read_sealed(runs[name] / "welcome", "RUN"))
    home = runs[name] / str(number)
    last = Answer.from_bytes(read_sealed(home / "result", "RUN"))
    return _ClientRun(home, welcome, number, last.round)


def _runs(folder: Path) -> dict[str, Path]:
    """The runs that a device was welcomed to, by name, the newest last."""
    welcomed = [path for path in folder.glob("*/welcome") if not path.parent.name.startswith(".")]
    welcomed.sort(key=lambda path: path.stat().st_mtime_ns)
    return {path.parent.name: path.parent for path in welcomed}


def _clients(run: Path) -> list[int]:
    """The clients that have finished a round of a run."""
    return sorted(int(path.parent.name) for path in run.glob("[0-9]*/result"))


def _chosen(clients: list[int], client: int | None) -> int:
    told = ", ".join(map(str, clients))
    if client is None and len(clients) > 1:
        raise InputError(
            f"several clients have trained here: {told}", field="--client", fix="name one of them"
        )
    if client is not None and client not in clients:
        raise InputError(f"client {client} has not trained here, but {told}", field="--client")
    return clients[0] if client is None else client


# -- the client's model ----------------------------------------------------------------------------


def _client_model(kept: _ClientRun, data: str, shared: Path | None) -> ClientModel:
    store = ClientStore()
    experiment = experiment_of(kept.welcome)
    _need_personal(experiment.make_method())  # before the method makes its networks
    # What measured the run does not matter here, and may be missing on this machine.
    experiment = experiment.with_changes(evaluate=replace(experiment.evaluate, metrics=()))
    world, method, bench = (
        _with_experiment_data(experiment, store)
        if data == EXPERIMENT
        else _with_own_data(experiment, kept, data, store)
    )
    _need_personal(method)
    server = _server_side(shared, kept, world) if shared is not None else None
    counted = server.counted if server else kept.round
    memory = memory_at(kept.folder / "memory", kept.client, counted)
    store.put(kept.client, memory, counted)
    if server is None:
        method = _without_server(method, world, kept.client)
    else:
        Records(store).put(kept.client, server.record, counted)
        method = _with_server(method, experiment, server.state)
    place = kept.folder / "memory"
    # With some methods a client keeps nothing, or not yet: it has no such folder.
    if not memory and (server is None or place.is_dir()):
        raise InputError(
            f"what client {kept.client} kept after round {counted} is not in {place}",
            field="RUN",
            fix="name the server's folder as it is now with --shared" if server else None,
        )
    tested_on = "test rows" if data == EXPERIMENT else "rows that it trained on"
    return ClientModel(
        method, world, bench, kept.client, server.round if server else kept.round, tested_on
    )


def _need_personal(method: Method) -> None:
    if not method.as_set.personal:
        raise InputError(
            f"the models of {method.as_set.title} are on the server",
            field="RUN",
            fix="export them there: nestling export RUN --device TIER",
        )


def _with_experiment_data(
    experiment: Experiment, store: ClientStore
) -> tuple[World, Method, Bench]:
    """Where the client takes its share of the experiment's own data: as in a simulation."""
    _, federation = assemble(experiment, store)
    return federation.world, federation.method, federation.bench


def _with_own_data(
    experiment: Experiment, kept: _ClientRun, data: str, store: ClientStore
) -> tuple[World, Method, Bench]:
    """Where the client brought its rows: there are no others, neither to calibrate with nor to test
    on."""
    rows = read_rows(data, kept.welcome)
    own = OwnRows(rows.kinds, kept.welcome.classes)
    given = replace(form_of(kept.welcome), split=own)
    settled, _, world = make_world(experiment, store, given)
    if world.public is not None:
        # Labels stay on the server and nothing here reads them, but methods look whether there are.
        world.public_labels = torch.zeros(len(world.public), dtype=torch.int64)
    method = settled.make_method()
    method.setup(world)
    evaluate, order = settled.evaluate, torch.arange(len(rows.y))
    some = order[: evaluate.calibration or len(order)]
    bench = Bench(rows.x, rows.y, rows.x, rows.y, evaluate.batch, some, [kept.client])
    return world, method, bench


# -- what is on the server -------------------------------------------------------------------------


def _server_side(folder: Path, kept: _ClientRun, world: World) -> _ServerSide:
    roster = _roster(folder, world)
    if roster.run != kept.welcome.run:
        raise InputError(
            f"{folder} is of the run {roster.run}, and the device's is {kept.welcome.run}",
            field="--shared",
            fix="name that run's folder, or another run of the device with --run",
        )
    saved = checkpoint.load(folder, "--shared")
    if saved is None:
        raise InputError(
            f"there is no {checkpoint.NAME} in {folder}", field="--shared", fix=_SHARED_FIX
        )
    state, totals = saved
    entry = next((e for e in roster.entries if e.client == kept.client), None)
    counted = [r for r in (entry.counted if entry else ()) if r <= totals.round]
    if not counted:
        raise InputError(
            f"nothing that client {kept.client} has done counted in the run of {folder}",
            field="--shared",
        )
    if counted[-1] > kept.round:
        raise InputError(
            f"round {counted[-1]} of client {kept.client} counted on the server, and the device's "
            f"folder ends with round {kept.round}",
            field="RUN",
            fix="name the device's folder as it is now",
        )
    record = record_at(folder / "clients", kept.client, totals.round)
    return _ServerSide(state, totals.round, counted[-1], record)


def _roster(folder: Path, world: World) -> Roster:
    if not (folder / ROSTER).is_file():
        raise InputError(
            f"{folder} is not the run folder of a fleet", field="--shared", fix=_SHARED_FIX
        )
    try:
        return Roster(world.fleet, folder / ROSTER)
    except InputError as error:
        raise InputError(error.message, field="--shared", fix="copy the file again") from None


def _with_server(method: Method, experiment: Experiment, state: Mapping[str, State]) -> Method:
    """The method with what the server keeps, as its models are shown."""
    own = {name: part for name, part in state.items() if name.startswith(KEPT)}
    method.restore({name: part for name, part in state.items() if name not in own})
    return shown(experiment.server, method, own)


def _without_server(method: Method, world: World, client: int) -> Method:
    """The method without what the server keeps; refused where it cannot tell the client's model
    then."""
    blind = copy.copy(method)
    for one in dataclasses.fields(method):  # type: ignore[arg-type]
        if one.metadata.get("kept"):
            vars(blind).pop(one.name, None)
    try:
        blind.model_for(world.device(client))
    except AttributeError:
        raise InputError(
            f"a part of the model of a client of {method.as_set.title} is on the server",
            field="--shared",
            fix=_SHARED_FIX,
        ) from None
    return blind
