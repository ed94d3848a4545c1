"""Flower's FedAvg, with the clients of each round from the plan."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from contest import Stopwatch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from plan import Plan
from torch import Tensor


class PlannedFedAvg(FedAvg):
    """FedAvg that tells every node it samples which client of the round to act for."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(
            fraction_train=plan.participants / plan.clients,
            fraction_evaluate=0.0,
            min_train_nodes=plan.participants,
            min_available_nodes=plan.clients,
        )
        self.folder = folder

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message a sampled node."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for place, message in enumerate(messages):
            own = ConfigRecord(
                {"folder": str(self.folder), "round": server_round - 1, "place": place}
            )
            message.content = RecordDict({"arrays": arrays, "config": own})
        return messages


def server_app(plan: Plan, folder: Path, watch: Stopwatch, found: dict[str, Tensor]) -> ServerApp:
    """The server of the plan; it leaves the final weights in `found`."""
    app = ServerApp()

    def lap(round: int, arrays: ArrayRecord) -> None:
        if round:
            watch.lap()
        else:
            watch.start()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        result = PlannedFedAvg(plan, folder).start(
            grid=grid,
            initial_arrays=ArrayRecord(plan.start),
            num_rounds=plan.rounds,
            evaluate_fn=lap,
        )
        found.update(result.arrays.to_torch_state_dict())

    return app
