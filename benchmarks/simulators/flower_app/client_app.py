"""Flower's side of a client. Any virtual node acts for any client: the message says for which."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from local_training import train
from networks import NETWORKS
from plan import Plan, read
from torch import nn

app = ClientApp()


@app.train()
def train_client(message: Message, context: Context) -> Message:
    """The weights of the message, trained on the rows of its client."""
    config = message.content["config"]
    plan, network, optimiser = _kept(str(config["folder"]))
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(network, optimiser, plan, int(config["round"]), int(config["place"]))
    metrics = MetricRecord({"num-examples": plan.rows.shape[1]})
    return Message(
        RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


@cache
def _kept(folder: str) -> tuple[Plan, nn.Module, torch.optim.Optimizer]:
    """What an actor keeps between messages."""
    torch.set_num_threads(1)
    plan = read(Path(folder), mapped=True)
    network = NETWORKS[plan.network]()
    return plan, network, torch.optim.SGD(network.parameters(), lr=plan.lr, foreach=True)
