"""Nestling beside HtFLlib's own code: the same clients, networks, initial weights, order of batches
and learning rate.

    python benchmarks/oracles/htfllib.py FOLDER [--methods local,fedproto] [--rounds 3]

FOLDER is a checkout of HtFLlib; nothing of it is changed. Its clients and servers are driven round
by round, and before every round its server is given what ours sends, so that a difference in one
round does not hide the next. Prints, for every method, how far the clients' weights are apart after
each round, and how far what the servers made of the replies is. Ends with 1 if weights are apart by
more than 1e-5.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
class Exchanged(Oracle):
    """What the servers make of a round's replies, by name, and how theirs is given ours."""

    give: Callable[[Theirs, Federation], None] = lambda theirs, federation: None
    made: Callable[[Theirs], Mapping[str, Tensor]] = lambda theirs: {}
    ours_made: Callable[[Federation], Mapping[str, Tensor]] = lambda federation: {}


class Theirs:
    """HtFLlib's clients and server, on our data."""

    def __init__(self, oracle: Exchanged, federation: Federation, home: str) -> None:
        self.federation, self.home, self.round, self.oracle = federation, home, 1, oracle
        self.site, self.world = site_of(federation), federation.world
        networks = [self._network(client) for client in range(CLIENTS)]
        for known in [name for name in sys.modules if name.startswith("flcore")]:
            del sys.modules[known]  # it holds the networks of the last comparison
        stub(
            "flcore.trainmodel.models",
            BaseHeadSplit=lambda args, cid=0, *_, **__: copy.deepcopy(networks[cid]),
        )
        stub("utils.data_utils", read_client_data=lambda *_, **__: [])
        stub("h5py")
        self.base = __import__("flcore.clients.clientbase", fromlist=["Client"])
        self.module = __import__(f"flcore.servers.{oracle.module}", fromlist=[oracle.server])
        owner = self
        self.base.Client.load_train_data = lambda self, batch_size=None: list(
            our_batches(federation, self.id, owner.round)
        )
        self.clients = [self._client(number) for number in range(CLIENTS)]
        self.server = self._server()

    def _network(self, number: int) -> Split:
        return split_of(self.federation, number)

    def _args(self) -> argparse.Namespace:
        train = self.world.train
        plain = {
            "algorithm": "",
            "dataset": "",
            "device": "cpu",
            "save_folder_name": "temp",
            "save_folder_name_full": self.home,
        }
        sizes = {
            "num_classes": self.world.classes,
            "batch_size": train.batch,
            "local_epochs": train.epochs,
            "few_shot": 0,
        }
        more = {
            "local_learning_rate": train.lr,
            "models_folder_name": "",
            "num_clients": CLIENTS,
            "join_ratio": 1.0,
        }
        return argparse.Namespace(**plain, **sizes, **more, **self.oracle.options)

    def _client(self, number: int) -> Any:
        made = getattr(self.module, self.oracle.client)
        samples = self.site.split.size(number)
        return made(self._args(), number, samples, 0, train_slow=False, send_slow=False)

    def _server(self) -> Any:
        made = object.__new__(getattr(self.module, self.oracle.server))
        made.args, made.role, made.device, made.save_folder_name = (
            self._args(),
            "Server",
            "cpu",
            self.home,
        )
        made.clients = made.selected_clients = self.clients
        made.num_classes, made.batch_size = self.world.classes, self.world.train.batch
        made.client_drop_rate, made.current_num_join_clients = 0.0, CLIENTS
        return made

    def load(self, role: str, item: str) -> Any:
        return self.base.load_item(role, item, self.home)

    def save(self, thing: Any, item: str, role: str = "Server") -> None:
        self.base.save_item(thing, role, item, self.home)

    def weights(self, client: int) -> dict[str, Tensor]:
        return self.load(f"Client_{client}", "model").weights()


def compare(name: str, oracle: Exchanged, rounds: int) -> float:
    """Plays both sides; prints a line a round, and gives the largest difference of weights."""
    settled, federation = assemble(six_clients(oracle.ours, rounds, (0.5, 1.0), drop_last=True))
    worst = 0.0
    with tempfile.TemporaryDirectory() as home:
        theirs = Theirs(oracle, federation, home)
        federation.engine.open(settled.make_method(), site_of(federation))
        for row in play(federation):
            for client in theirs.clients:
                client.train()
            made = oracle.made(theirs)
            server = (
                f", what the server made {apart(made, oracle.ours_made(federation)):.1e}"
                if made
                else ""
            )
            oracle.give(theirs, federation)
            pairs = [
                (theirs.weights(c), federation.method.model_for(federation.world.device(c)).state)
                for c in range(CLIENTS)
            ]
            weights = max(apart(one, other) for one, other in pairs)
            print(f"{name}, round {row['round']}: weights {weights:.1e} apart{server}", flush=True)
            worst, theirs.round = max(worst, weights), row["round"] + 1
        federation.engine.close()
    return worst


def _prototypes(theirs: Theirs) -> dict[str, Tensor]:
    theirs.server.receive_protos()
    found = theirs.load("Server", "global_protos")
    return {str(label): prototype for label, prototype in found.items()}


def _our_prototypes(federation: Federation) -> dict[str, Tensor]:
    table = federation.method.table  # type: ignore[attr-defined]
    return {
        str(label): table.rows["features"][label]
        for label in table.known.nonzero().flatten().tolist()
    }


def _give_prototypes(theirs: Theirs, federation: Federation) -> None:
    theirs.save(
        {int(label): t for label, t in _our_prototypes(federation).items()}, "global_protos"
    )


def _our_head(federation: Federation) -> dict[str, Tensor]:
    model = federation.method.model_for(federation.world.device(0))
    start = f"{model.reference.taps.head}."
    return {
        name.removeprefix(start): t for name, t in model.state.items() if name.startswith(start)
    }


def _head(theirs: Theirs) -> dict[str, Tensor]:
    theirs.server.receive_ids()
    theirs.server.aggregate_parameters()
    return dict(theirs.load("Server", "head").named_parameters())


def _give_head(theirs: Theirs, federation: Federation) -> None:
    head = theirs.load("Client_0", "model").head
    head.load_state_dict(_our_head(federation))
    theirs.save(head, "head")
    for client in theirs.clients:
        client.set_parameters()


def _give_trained_prototypes(theirs: Theirs, federation: Federation) -> None:
    """The server of FedTGP has a prototype of every class, whether anybody has told of it or not;
    ours sends those told of."""
    known = _our_prototypes(federation)
    theirs.save(
        {label: known.get(str(label), []) for label in range(theirs.world.classes)}, "global_protos"
    )


ORACLES = {
    "local": Exchanged(Named("local", {"size": 16}), "serverlocal", "Local", "clientLocal"),
    "fedproto": Exchanged(
        Named("fedproto", {"predict": "head", "weighting": "uniform", "lam": 1.0}),
        "serverproto",
        "FedProto",
        "clientProto",
        {"lamda": 1.0},
        _give_prototypes,
        _prototypes,
        _our_prototypes,
    ),
    "lg-fedavg": Exchanged(
        Named("lg-fedavg"), "serverlg", "LG_FedAvg", "clientLG", {}, _give_head, _head, _our_head
    ),
    "fedgh": Exchanged(Named("fedgh"), "servergh", "FedGH", "clientGH", {}, _give_head),
    "fedtgp": Exchanged(
        Named("fedtgp", {"predict": "head", "lam": 1.0}),
        "servertgp",
        "FedTGP",
        "clientTGP",
        {"lamda": 1.0},
        _give_trained_prototypes,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default=",".join(ORACLES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not (options.folder / "system" / "flcore").is_dir():
        raise SystemExit(f"{options.folder} is no checkout of HtFLlib: it has no system/flcore")
    torch.load = partial(torch.load, weights_only=False)  # it saves whole modules
    lay_out_as_they_do()
    sys.path.insert(0, str(options.folder / "system"))
    worst = {}
    for name in options.methods.split(","):
        worst[name] = compare(name, ORACLES[name], options.rounds)
    return verdict(worst)


if __name__ == "__main__":
    sys.exit(main())
