"""Nestling's methods as a Flower strategy, for ServerApps that are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result as FlowerResult
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from nestling.errors import InputError
from nestling.experiment import Experiment
from nestling.fleet.flower.grid import GridCourier
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import play
from nestling.methods import Method
from nestling.runs.federation import Metrics
from nestling.runs.run import Result, Watcher

Evaluate = Callable[[int, ArrayRecord], "MetricRecord | None"]

log = getLogger("nestling.fleet.flower")


class Strategy(FlowerStrategy):
    """Runs an experiment, or a method with the other settings of `Experiment`, on the nodes of a
    grid.

        Strategy("heterofl", fleet=..., rounds=20).start(grid)

    folder:      the run folder, which a run also goes on from; None: none is written, and a run
                 that dies starts again.
    min_clients: how many must be there before a round starts, waited for at most `wait` seconds (0:
                 as many as take part in a round).
    deadline, quorum: when a round goes on without those that have not answered (see
                      `nestling.fleet.server.engine.Patience`).
    result:      after `start`: nestling's own result, with the models.
    """

    def __init__(
        self,
        method: Experiment | Method | str,
        *,
        folder: str | Path | None = None,
        min_clients: int = 0,
        deadline: float = 600.0,
        quorum: int = 0,
        wait: float = 600.0,
        patience: Patience | None = None,
        **settings: Any,
    ) -> None:
        """Takes an experiment, which `settings` change, or a method, to which they are the rest of
        its experiment."""
        if isinstance(method, Experiment):
            self.experiment = method.with_changes(**settings)
        else:
            self.experiment = Experiment(method=method, **settings)
        self.folder, self.min_clients, self.wait = folder, min_clients, wait
        self.deadline, self.quorum, self.patience = deadline, quorum, patience
        self.result: Result | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> FlowerResult:
        """Runs the experiment. `num_rounds` and `timeout` take the place of its rounds and of the
        deadline; its weights come from its seed, and its settings from itself, so that arrays and
        configurations are refused."""
        for name, given in (
            ("initial_arrays", initial_arrays),
            ("train_config", train_config),
            ("evaluate_config", evaluate_config),
        ):
            if given:
                raise InputError("the experiment says all of that", field=name, fix="leave it out")
        experiment = (
            self.experiment
            if num_rounds is None
            else self.experiment.with_changes(rounds=num_rounds)
        )
        found = FlowerResult()
        self.result = play(
            GridCourier(grid),
            experiment,
            self.folder,
            min_clients=self.min_clients or experiment.participants,
            deadline=self.deadline if timeout is None else timeout,
            quorum=self.quorum,
            wait=self.wait,
            patience=self.patience,
            watcher=_watcher(found),
        )
        found.arrays = arrays_of(self.result)
        if evaluate_fn is not None:
            told = evaluate_fn(experiment.rounds, found.arrays)
            if told is not None:
                found.evaluate_metrics_serverapp[experiment.rounds] = told
        return found

    def summary(self) -> None:
        """Says what would be run."""
        log.info("%s, %d rounds", self.experiment.method.name, self.experiment.rounds)

    def configure_train(self, *_: Any, **__: Any) -> Iterable[Message]:
        """Not used: see `start`."""
        _whole_only()

    def aggregate_train(self, *_: Any, **__: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Not used: see `start`."""
        _whole_only()

    def configure_evaluate(self, *_: Any, **__: Any) -> Iterable[Message]:
        """Not used: see `start`."""
        _whole_only()

    def aggregate_evaluate(self, *_: Any, **__: Any) -> MetricRecord | None:
        """Not used: see `start`."""
        _whole_only()


def arrays_of(result: Result) -> ArrayRecord:
    """The global model's state, or where a method has none, all of the server's state, under names
    with its parts in front."""
    method = result.federation.shown
    model = method.global_model()
    state: Mapping[str, Any] = model.state if model is not None else _joined(method.state())
    return ArrayRecord({name: t.detach().cpu() for name, t in state.items()})


def _joined(state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{kind}/{name}": tensor for kind, part in state.items() for name, tensor in part.items()
    }


def _watcher(found: FlowerResult) -> Watcher:
    def after_round(row: Metrics) -> None:
        number = row["round"]
        names = ("loss", "bytes_up", "bytes_down", "refused", "dropped")
        found.train_metrics_clientapp[number] = MetricRecord(
            {n: row[n] for n in names if row[n] is not None}
        )
        tested = {n: row[n] for n in ("global_score", "personal_score") if row[n] is not None}
        if tested:
            found.evaluate_metrics_serverapp[number] = MetricRecord(tested)
        log.info(
            "round %d: %s",
            number,
            {n: row[n] for n in ("loss", "global_score", "refused", "dropped")},
        )

    def refusal(client: int, round: int, reason: str) -> None:
        log.warning("round %d: the reply of client %d was refused: %s", round, client, reason)

    def clipped(client: int, round: int, reason: str) -> None:
        log.warning("round %d: the reply of client %d was clipped: %s", round, client, reason)

    def note(text: str) -> None:
        log.info("%s", text)

    return Watcher(round=after_round, refusal=refusal, note=note, clipped=clipped)


def _whole_only() -> NoReturn:
    raise NotImplementedError(
        "a nestling strategy runs its rounds itself, with deadlines and checkpoints: call "
        "start(grid)"
    )
