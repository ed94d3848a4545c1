"""Nestling's HeteroFL beside the authors' own code: the same clients, initial weights, order of
batches and learning rate.

    python benchmarks/oracles/heterofl.py FOLDER [--norm none|bn|gn] [--rounds 3]

FOLDER is a checkout of the authors' repository; nothing of it is changed. Its `Federation` cuts and
merges, its `Local` trains. Prints how far the global models are apart after each round, and ends
with 1 where that is more than 1e-5.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep import APART, CLIENTS, apart, lay_out_as_they_do, our_batches, six_clients, stub
from torch import Tensor

from nestling import Named
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play

RATES, CHANNELS = (1.0, 0.5, 0.25), (8, 16, 32)
NORMS = {"none": "none", "bn": "batch", "gn": "group"}
CONFIG = {
    "control": {}, "model_name": "conv", "model_split_mode": "fix", "global_model_rate": 1.0,
    "scale": True, "mask": True, "device": "cpu", "optimizer_name": "SGD",
    "conv": {"hidden_size": list(CHANNELS)}, "num_users": CLIENTS,
}  # fmt: skip


def _network(norm: str) -> Named:
    return Named("cnn", {"channels": list(CHANNELS), "norm": NORMS[norm]})


def load(folder: Path, norm: str) -> tuple[Any, Any]:
    """The authors' `Federation` and `Local`. What they import for data, logs and pictures stands
    empty: it is not called."""
    stubs = {
        "config": {"cfg": {**CONFIG, "norm": norm}},
        "data": dict.fromkeys(
            ("fetch_dataset", "make_data_loader", "split_dataset", "SplitDataset")
        ),
        "metrics": {"Metric": lambda: types.SimpleNamespace(evaluate=lambda *_: {})},
        "logger": {"Logger": None},
        "torchvision": {},
        "torchvision.utils": {"save_image": None},
    }
    for name, content in stubs.items():
        stub(name, **content)
    sys.path.insert(0, str(folder / "src"))
    sys.argv = sys.argv[:1]  # the module reads the command line when it is imported
    training = __import__("train_classifier_fed")
    cfg = training.cfg
    cfg.update(
        momentum=0.9,
        weight_decay=5e-4,
        num_epochs={"local": 1},
        classes_size=10,
        data_shape=[1, 28, 28],
    )
    return training.Federation, training.Local


def theirs_of(state: Mapping[str, Tensor], names: list[str]) -> OrderedDict[str, Tensor]:
    """Our weights under their names, which stand in the same order."""
    return OrderedDict((name, t.clone()) for name, t in zip(names, state.values(), strict=True))


def names_of(folder: Path) -> list[str]:
    """The authors' names of the whole network's parameters."""
    models = __import__("models")
    return [name for name, _ in models.conv(model_rate=1).named_parameters()]


def play_theirs(
    federation: Federation, server: Any, local: Any, rates: list[float], round: int
) -> None:
    """One round of all clients in the authors' code."""
    log = types.SimpleNamespace(append=lambda *_, **__: None)
    users = list(range(CLIENTS))
    sent, indices = server.distribute(users)
    replies = []
    for user in users:
        data = [{"img": [*x], "label": [*y]} for x, y in our_batches(federation, user, round)]
        replies.append(
            local(rates[user], data, server.label_split[user]).train(
                sent[user], federation.world.train.lr, log
            )
        )
    server.combine(replies, indices, users)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--norm", default="none", choices=sorted(NORMS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not (options.folder / "src" / "fed.py").is_file():
        raise SystemExit(f"{options.folder} is no checkout of HeteroFL: it has no src/fed.py")
    lay_out_as_they_do()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    settled, federation = assemble(
        six_clients(
            "heterofl",
            options.rounds,
            RATES,
            model=_network(options.norm),
            momentum=0.9,
            weight_decay=5e-4,
            clip=1.0,
        )
    )
    world = federation.world
    made, local = load(options.folder, options.norm)
    names = names_of(options.folder)
    rates = [world.fleet.tier_of(client).ratio for client in range(CLIENTS)]
    held = {client: world.split.counts(client).nonzero()[0].tolist() for client in range(CLIENTS)}
    server = made(theirs_of(world.main.initial, names), rates, held)
    federation.engine.open(settled.make_method(), site_of(federation))
    worst = 0.0
    for row in play(federation):
        play_theirs(federation, server, local, rates, row["round"])
        ours = federation.method.state()["weights"]
        distance = apart(server.global_parameters, theirs_of(ours, names))
        print(
            f"heterofl, norm {options.norm}, round {row['round']}: global weights {distance:.1e} "
            "apart",
            flush=True,
        )
        worst = max(worst, distance)
    federation.engine.close()
    return int(worst > APART)


if __name__ == "__main__":
    sys.exit(main())
