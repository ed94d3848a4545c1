"""Flower's own FedAvg on one array, with the moments at which its rounds begin and end."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    """FedAvg that writes down when it sends, when nodes were done, and when it has all replies."""

    def __init__(self, out: Path, nodes: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        self.out, self.rows = out, []

    def configure_train(self, *given, **named):
        messages = list(super().configure_train(*given, **named))  # waits for the nodes
        self.begin = time.time()
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        end = time.time()
        done = [reply.content["metrics"]["at"] for reply in replies if reply.has_content()]
        self.rows.append({"begin": self.begin, "done": done, "end": end})
        self.out.write_text(json.dumps(self.rows))
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds."""
    config = context.run_config
    arrays = ArrayRecord([np.zeros(max(1, int(config["bytes"]) // 4), np.float32)])
    strategy = Timed(Path(str(config["out"])), int(config["nodes"]))
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=int(config["rounds"]))
