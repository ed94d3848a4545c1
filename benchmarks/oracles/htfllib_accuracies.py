"""Methods whose loss in HtFLlib is another one than ours: accuracies of both, from the same
clients, networks, weights and batches.

    python benchmarks/oracles/htfllib_accuracies.py FOLDER [--methods fd,fml,fedkd] [--rounds 30]
        [--seeds 3]

FOLDER is a checkout of HtFLlib; nothing of it is changed. Its own loop is played, with its own
server. Training alone is there as a control: it must be the same on both sides. Prints the personal
accuracy (every class of the test set by its share of a client's rows) in the mean over six clients,
mean ± standard deviation over the seeds, and whether the two differ by more than the larger
deviation.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from htfllib import Exchanged, Theirs
from lockstep import CLIENTS, Split, lay_out_as_they_do, six_clients
from torch import nn

from nestling import Named
from nestling.methods.distill.pair import Pair
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play

RATE = 0.05


@dataclass
class Free(Exchanged):
    """A method that each side plays by itself; `prepare` leaves what their server has before its
    clients are made."""

    prepare: Callable[[Theirs], None] = lambda theirs: None
    widths: tuple[float, ...] = (0.5, 1.0)


class Playing(Theirs):
    """HtFLlib's loop from its first to its last round."""

    def _network(self, number: int) -> Split:
        return own_network(self.federation, number)

    def _args(self) -> argparse.Namespace:
        features = self._network(0).head.in_features
        return argparse.Namespace(**{**vars(super()._args()), "feature_dim": features})

    def _client(self, number: int) -> Any:
        if number == 0:
            self.oracle.prepare(self)  # type: ignore[attr-defined]
        return super()._client(number)

    def play(self, rounds: int) -> None:
        """Their `train`, without tests, files of results and prints."""
        server, self.round = self.server, 0

        def began() -> None:
            self.round += 1

        server.__dict__.update(
            self.oracle.options,
            evaluate=began,
            select_clients=lambda: self.clients,
            save_results=lambda: None,
        )
        server.__dict__.update(
            global_rounds=rounds - 1, eval_gap=1, auto_break=False, rs_test_acc=[0.0], Budget=[]
        )
        server.energy = self.oracle.options.get("T_start")
        with contextlib.redirect_stdout(io.StringIO()):
            server.train()


def own_network(federation: Federation, client: int) -> Split:
    """The network that a client uses; of a pair its own one."""
    model = federation.method.model_for(federation.world.device(client))
    network, head = model.reference.network(model.view, model.state), model.reference.taps.head
    return (
        Split(network.own, head.removeprefix("own."))
        if isinstance(network, Pair)
        else Split(network, head)
    )


def _shared_network(theirs: Theirs) -> None:
    """The network that all share: as in the library, one like the first client's."""
    theirs.save(own_network(theirs.federation, 0), "global_model")


ORACLES = {
    "local": Free(Named("local", {"size": 16}), "serverlocal", "Local", "clientLocal"),
    "fd": Free(Named("fd"), "serverfd", "FD", "clientFD", {"lamda": 1.0}),
    "fml": Free(
        Named("fml", {"ratio": 0.5}),
        "serverfml",
        "FML",
        "clientFML",
        {"alpha": 0.5, "beta": 0.5},
        prepare=_shared_network,
    ),
    "fedkd": Free(
        Named("fedkd", {"ratio": 0.5}),
        "serverkd",
        "FedKD",
        "clientKD",
        {"mentee_learning_rate": RATE, "T_start": 0.95, "T_end": 0.98},
        prepare=_shared_network,
        widths=(1.0,),  # there all networks need equally many features
    ),
}


def accuracies(oracle: Free, rounds: int, seed: int) -> tuple[float, float]:
    """Ours and theirs."""
    experiment = six_clients(
        oracle.ours, rounds, oracle.widths, drop_last=True, lr=RATE
    ).with_changes(seed=seed)
    settled, federation = assemble(experiment)
    with tempfile.TemporaryDirectory() as home:
        theirs = Playing(oracle, federation, home)
        theirs.play(rounds)
        found = [
            _personal(theirs.load(f"Client_{c}", "model"), federation, c) for c in range(CLIENTS)
        ]
    federation.engine.open(settled.make_method(), site_of(federation))
    for _ in play(federation):
        pass
    federation.engine.close()
    return statistics.mean(
        _personal(own_network(federation, c), federation, c) for c in range(CLIENTS)
    ), statistics.mean(found)


@torch.no_grad()
def _personal(network: nn.Module, federation: Federation, client: int) -> float:
    world, data = federation.world, federation.bench
    right = network.eval()(data.x_test).argmax(-1) == data.y_test
    counts = torch.as_tensor(world.split.counts(client)).double()
    by_class = torch.stack(
        [right[data.y_test == label].double().mean() for label in range(world.classes)]
    )
    return float((by_class * counts).sum() / counts.sum())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default=",".join(ORACLES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.load = partial(torch.load, weights_only=False)  # it saves whole modules
    lay_out_as_they_do()
    sys.path.insert(0, str(options.folder / "system"))
    for name in options.methods.split(","):
        found = [accuracies(ORACLES[name], options.rounds, seed) for seed in range(options.seeds)]
        ours, theirs = zip(*found, strict=True)
        gap, spread = (
            statistics.mean(ours) - statistics.mean(theirs),
            max(statistics.stdev(ours), statistics.stdev(theirs)),
        )
        shown = [
            f"{statistics.mean(v):.2%} ± {100 * statistics.stdev(v):.2f}" for v in (ours, theirs)
        ]
        word = "within the spread" if abs(gap) <= spread else "BEYOND the spread"
        print(f"{name}: ours {shown[0]}, theirs {shown[1]}; {gap:+.2%}, {word}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
