"""The accuracies of FlexFL's released code, round by round, on CIFAR-10: what our curve is laid
beside.

    NESTLING_DATA=FOLDER python benchmarks/oracles/flexfl_curve.py CHECKOUT [--rounds 30]
        [--seed 1] [--asked released|tiers] [--gamma 10] [--device cuda] [--ours RUN] [--out FILE]

CHECKOUT is a checkout of the authors' repository; nothing of it is changed. Its own loop is played
with its own settings for VGG16 on CIFAR-10, IID, and its preset shares of zeros; only the reader of
data and the log are ours, since they need packages and a network. `--asked tiers` has the server
ask devices that can hold a model, as the paper's megabytes imply, where the released code's numbers
of devices are those of its test bed. `--gamma 0` is FlexFL without self-distillation. RUN is the
folder of a run of ours, as `nestling reproduce flexfl-table-x` leaves it: its tested rounds stand
beside theirs. `--out` keeps what is there after every round.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flexfl import from_file, load
from lockstep import stub
from torch.utils.data import TensorDataset

from nestling import data
from nestling.runs.folder import RunFolder

VGG_CIFAR10 = 9
"""The number of the preset shares of zeros."""

TESTED = ("0-acc", "2-acc", "4-acc")
"""The models of 25, 50 and 100 %, whose mean is reported."""

TIERS = {4: 40, 14: 70}
"""The first device that a model is sent to: in the released code, and by the tiers of 100
devices."""


def main() -> int:
    options = _options()
    released, args = _released(options.checkout), _settings(options)
    rows = data.load("cifar-10")
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    order = np.random.permutation(len(rows.y))
    users = {k: part.tolist() for k, part in enumerate(np.array_split(order, args.num_users))}
    if options.asked == "tiers":
        chosen = types.SimpleNamespace(
            randint=lambda low, high: random.randint(TIERS.get(low, low), high),
            choice=random.choice,
        )
        sys.modules["models.Fed"].__dict__["random"] = chosen
    ours, curve = _ours(options.ours), []
    began = time.monotonic()

    def told(_: Any, __: Any, number: int, accuracies: dict[str, float], *rest: Any) -> None:
        curve.append([accuracies[name] / 100 for name in TESTED])
        mean = sum(curve[-1]) / len(TESTED)
        beside = f", ours {ours[number + 1]:.2%}" if number + 1 in ours else ""
        print(
            f"round {number + 1}: {mean:.2%}{beside} ({time.monotonic() - began:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
        if options.out:
            options.out.write_text(
                json.dumps(
                    {
                        "asked": options.asked,
                        "gamma": args.gamma,
                        "seed": args.seed,
                        "theirs": curve,
                    }
                )
            )

    released.__dict__.update(upload_data=told, init_run=lambda *_: None, endrun=lambda *_: None)
    released.FlexFL(
        args, TensorDataset(rows.x, rows.y), TensorDataset(rows.x_test, rows.y_test), users
    )
    gaps = [sum(curve[n - 1]) / len(TESTED) - value for n, value in ours.items() if n <= len(curve)]
    if gaps:
        print(
            f"over {len(gaps)} rounds tested by both: theirs {np.mean(gaps):+.2%} in the mean, "
            f"{max(gaps, key=abs):+.2%} at most"
        )
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--asked", default="released", choices=("released", "tiers"))
    parser.add_argument("--gamma", type=float, default=10.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> argparse.Namespace:
    """The released code's defaults, and what its command for this table sets."""
    return argparse.Namespace(
        model="vgg", dataset="cifar10", num_classes=10, num_channels=3, gpu=0,
        device=options.device, verbose=False, log=0, name="",
        epochs=options.rounds, num_users=100, frac=0.1, local_ep=5, local_bs=50, bs=128,
        optimizer="sgd", lr=0.01, lr_decay=0.998,
        momentum=0.5, weight_decay=1e-4, seed=options.seed, algorithm="FlexFL",
        client_hetero_ration="4:3:3", r=0, decrease=0.1,
        pretrain=0, onlypretrain=0, apoz=VGG_CIFAR10, T=3, gamma=options.gamma,
    )  # fmt: skip


def _released(checkout: Path) -> Any:
    """The authors' loop."""
    code = load(checkout)
    stub("tqdm", tqdm=lambda rounds: rounds)
    stub("wandbUtils", init_run=None, upload_data=None, endrun=None)
    tested = from_file("models.test", checkout / "models" / "test.py").test
    sys.modules["models"].__dict__.update(
        LocalUpdate_FlexFL=code["models.Update"].LocalUpdate_FlexFL, test=tested
    )
    return from_file("Training_FlexFL", checkout / "Algorithm" / "Training_FlexFL.py")


def _ours(folder: Path | None) -> dict[int, float]:
    """Our mean accuracy by tested round."""
    rows = RunFolder(folder).metrics() if folder else []
    tested = {
        row["round"]: [tier["global_score"] for tier in row["by_tier"].values()]
        for row in rows
        if row.get("by_tier")
    }
    return {
        number: sum(values) / len(values) for number, values in tested.items() if None not in values
    }


if __name__ == "__main__":
    sys.exit(main())
