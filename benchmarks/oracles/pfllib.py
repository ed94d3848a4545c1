"""Nestling beside PFLlib's own code: the same clients, network, initial weights, order of batches
and learning rate.

    python benchmarks/oracles/pfllib.py FOLDER [--methods fedavg,fedprox] [--rounds 3]

FOLDER is a checkout of PFLlib; nothing of it is changed. What clients and server keep is their own
on both sides, but for the global weights: every round begins with ours, or a difference in rounding
would grow wherever it decides a maximum. Prints, for every method, how far the global models
(FedPer: the clients' models) are apart after each round; ends with 1 where that is more than 1e-5.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lockstep import (
    CLIENTS,
    Oracle,
    Split,
    apart,
    lay_out_as_they_do,
    our_batches,
    six_clients,
    split_of,
    stub,
    verdict,
)
from torch import Tensor

from nestling import Named
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play


@dataclass
class Compared(Oracle):
    """A method whose global models are compared, or those of its clients."""

    personal: bool = False


ORACLES = {
    "fedavg": Compared(Named("fedavg"), "serveravg", "FedAvg", "clientAVG"),
    "fedprox": Compared(
        Named("fedprox", {"mu": 0.1}), "serverprox", "FedProx", "clientProx", {"mu": 0.1}
    ),
    "scaffold": Compared(
        Named("scaffold", {"weighting": "uniform"}), "serverscaffold", "SCAFFOLD", "clientSCAFFOLD"
    ),
    "moon": Compared(
        Named("moon", {"mu": 1.0, "temperature": 0.5}),
        "servermoon",
        "MOON",
        "clientMOON",
        {"mu": 1.0, "tau": 0.5},
    ),
    "fedper": Compared(Named("fedper"), "serverper", "FedPer", "clientPer", personal=True),
}


def _no_rows(*_: Any, **__: Any) -> list[Any]:
    return []


def load(oracle: Compared, federation: Federation) -> tuple[Any, list[Any], list[int]]:
    """PFLlib's server and clients on our data, and the number of the round that is being played."""
    for known in [name for name in sys.modules if name.startswith(("flcore", "utils"))]:
        del sys.modules[known]
    for name, content in {
        "h5py": {},
        "utils": {},
        "utils.data_utils": {"read_client_data": _no_rows},
        "utils.dlg": {"DLG": None},
    }.items():
        stub(name, **content)
    base = __import__("flcore.clients.clientbase", fromlist=["Client"])
    module = __import__(f"flcore.servers.{oracle.module}", fromlist=[oracle.server])
    round = [1]
    base.Client.load_train_data = lambda self, batch_size=None: list(
        our_batches(federation, self.id, round[0])
    )
    site, world = site_of(federation), federation.world
    train = world.train
    args = argparse.Namespace(
        model=split_of(federation, 0), algorithm="", dataset="", device="cpu", save_folder_name="",
        few_shot=0,
        num_classes=world.classes, batch_size=train.batch, local_epochs=train.epochs,
        local_learning_rate=train.lr,
        learning_rate_decay=False, learning_rate_decay_gamma=1.0, **oracle.options,
    )  # fmt: skip
    made = getattr(module, oracle.client)
    clients = [
        made(args, c, site.split.size(c), 0, train_slow=False, send_slow=False)
        for c in range(CLIENTS)
    ]
    server = object.__new__(getattr(module, oracle.server))
    server.clients = server.selected_clients = clients
    server.global_model, server.client_drop_rate, server.time_threthold = (
        split_of(federation, 0),
        0.0,
        float("inf"),
    )
    server.current_num_join_clients = server.num_join_clients = server.num_clients = CLIENTS
    server.server_learning_rate, server.global_c = (
        1.0,
        [p.detach() * 0 for p in server.global_model.parameters()],
    )
    if oracle.personal:
        server.global_model = server.global_model.base
    return server, clients, round


def compare(name: str, oracle: Compared, rounds: int) -> float:
    """Plays both sides; prints a line a round, and gives the largest difference."""
    settled, federation = assemble(six_clients(oracle.ours, rounds, drop_last=True))
    server, clients, round = load(oracle, federation)
    federation.engine.open(settled.make_method(), site_of(federation))
    # everybody, in order: sums are rounded by it
    worst, random.sample = 0.0, lambda population, k: list(population)[:k]
    for row in play(federation):
        server.send_models()
        for client in clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()
        distance = _distance(oracle, server, federation)
        print(f"{name}, round {row['round']}: {distance:.1e} apart", flush=True)
        worst, round[0] = max(worst, distance), row["round"] + 1
        _give(server, federation)
    federation.engine.close()
    return worst


def _distance(oracle: Compared, server: Any, federation: Federation) -> float:
    if not oracle.personal:
        model = federation.method.global_model()
        assert model is not None
        return apart(server.global_model.weights(), model.state)
    server.send_models()  # a client's model is its own head on the common body
    ours: list[dict[str, Tensor]] = [
        dict(federation.method.model_for(federation.world.device(c)).state) for c in range(CLIENTS)
    ]
    return max(
        apart(client.model.weights(), own) for client, own in zip(server.clients, ours, strict=True)
    )


def _give(server: Any, federation: Federation) -> None:
    """Our global weights in place of theirs."""
    model = federation.method.global_model() or federation.method.model_for(
        federation.world.device(0)
    )
    split = Split(model.reference.network(model.view, model.state), model.reference.taps.head)
    with torch.no_grad():
        source = split if isinstance(server.global_model, Split) else split.base
        for theirs, ours in zip(server.global_model.parameters(), source.parameters(), strict=True):
            theirs.copy_(ours)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default=",".join(ORACLES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not (options.folder / "system" / "flcore" / "optimizers").is_dir():
        raise SystemExit(
            f"{options.folder} is no checkout of PFLlib: it has no system/flcore/optimizers"
        )
    lay_out_as_they_do()
    sys.path.insert(0, str(options.folder / "system"))
    return verdict(
        {name: compare(name, ORACLES[name], options.rounds) for name in options.methods.split(",")}
    )


if __name__ == "__main__":
    sys.exit(main())
