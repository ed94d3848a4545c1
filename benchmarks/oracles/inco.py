"""Nestling's InCoAvg beside the authors' own code: the same clients, initial weights, order of
batches and learning rate.

    python benchmarks/oracles/inco.py FOLDER [--rounds 3] [--lr 0.001] [--single]
    python benchmarks/oracles/inco.py FOLDER --rounds 2 --lr 0.02

FOLDER is a checkout of the authors' repository; nothing of it is changed. Its main program needs
GPUs and accounts, so its functions are called one by one: it makes networks of five depths, from
ResNet-10 to ResNet-26, its clients train with Adam, its server averages the updates, rewrites those
of the deeper blocks, and adds them. Four of six clients take part in a round, so that deep blocks
are sometimes nobody's. Prints how far the updates that clients send and the global models are
apart, and how far the rewriting alone moved a weight; ends with 1 where they are more than 1e-5
apart. With the second command, θ and entries of updates are often at their limits. Both sides
calculate in double precision: Adam makes a step of full length of a gradient that is all rounding,
and in single precision weights part by 1e-2 within two rounds. `--single` is for the servers alone,
both given what our clients send: they are nearly 1e-5 apart, as ours takes an update from merged
weights that are rounded already and theirs averages exact updates, and more at larger rates, where
θ of small updates is all rounding.

Matched: `compat = "code"`, which is the released θ, of whatever sign and at most five. Their client
         takes the difference of its new
weights to a state that is no copy: on a GPU it becomes one when the network moves there, on a CPU
every update would be zero. Here the network hands out copies.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lockstep import APART, apart, lay_out_as_they_do, our_batches, replies_of, six_clients, stub
from torch import Tensor, nn

from nestling import Named
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation

TAKING_PART = 4
SIZES = (0.55, 0.56, 0.795, 0.82, 0.995, 1.0)
"""Budgets that make clients of all five depths."""
ARGS = argparse.Namespace(
    dataset="FashionMNIST", data_dir="", batch_size=10, vit=False, optimizer="Adam", lr=1e-3,
    epochs_client=1, client_number=5,
    InCo_training=1, clamp_max=5,
)  # fmt: skip


class BasicBlock(nn.Module):
    """The block of torchvision, which the authors build with: the same parts by the same names."""

    expansion = 1

    def __init__(
        self,
        before: int,
        after: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        *_: Any,
        **made: Any,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2, self.downsample = nn.BatchNorm2d(after), downsample

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def projection(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    """The convolution of torchvision's shortcuts."""
    return nn.Conv2d(before, after, 1, stride, bias=False)


class Batches(list[tuple[Tensor, Tensor]]):
    """A client's batches, with what the authors' log asks of a loader."""

    @property
    def dataset(self) -> list[Tensor]:
        return [label for _, labels in self for label in labels]


def load(folder: Path) -> Any:
    """The authors' functions. What they import for logs, data and transformers stands empty; a
    client is handed its batches."""
    stub("wandb")
    stub("tkinter", X=None)
    stub("torchvision")
    stub("torchvision.models")
    stub(
        "torchvision.models.resnet",
        ResNet=None,
        BasicBlock=BasicBlock,
        Bottleneck=None,
        conv1x1=projection,
    )
    stub("fed_model.cv.VIT_hetavg_new", vit_small_16_Layers=None)
    for data in ("cifar10", "cinic10", "FashionMNIST", "SVHN"):
        loader = f"fed_api.data_preprocessing.{data}.data_loader"
        stub(loader, partition_data=None, get_dataloader=lambda *given: (given[-1], None))
    sys.path[:0] = [str(folder / "fed_experiments" / "InCo"), str(folder)]
    return __import__("utils")


def in_set_precision(network: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    """A hook: images come in single precision."""
    return (given[0].to(torch.get_default_dtype()),)


class Theirs:
    """The authors' server: the weights of the deepest network."""

    def __init__(self, code: Any, initial: Mapping[str, Tensor]) -> None:
        self.code, self.weights = code, {name: t.clone() for name, t in initial.items()}

    def trained(self, rung: int, batches: Batches) -> dict[str, Tensor]:
        """The update of a client that has the network of a depth, counted from 0."""
        network = self.code.set_model_params(
            self.weights, self.code.create_client_model(ARGS, 10, rung + 1)
        )
        network.register_forward_pre_hook(in_set_precision)
        read, found = network.state_dict, {}
        network.state_dict = lambda: {name: t.clone() for name, t in read().items()}
        with contextlib.redirect_stdout(io.StringIO()):
            self.code.train(0, ARGS, network, "cpu", batches, found, 0)
        update: dict[str, Tensor] = found[0]
        return update

    def merge(self, updates: list[dict[str, Tensor]], round: int) -> float:
        """Adds what comes of some updates; gives how far their rewriting moved a weight."""
        # The sum is taken in the tensors of whoever comes first.
        plain, rewritten = (
            self.code.aggregate_gradients(
                {k: {n: t.clone() for n, t in update.items()} for k, update in enumerate(updates)},
                round,
                argparse.Namespace(**{**vars(ARGS), "InCo_training": on}),
            )
            for on in (0, 1)
        )
        self.weights = self.code.updated_params(self.weights, rewritten)
        return apart(rewritten, plain)


def play(federation: Federation, theirs: Theirs, method: Any, round: int, servers: bool) -> float:
    """One round on both sides, or only of both `servers`: how far they are apart at most."""
    who = federation.method.choose(round, TAKING_PART)
    replies, updates, depths, worst = replies_of(federation, method, round, who), [], [], 0.0
    for reply in replies:
        depths.append(federation.method.ladder.rung(reply.device))
        own = {
            name: t - reply.sent["weights"][name] for name, t in reply.message["weights"].items()
        }
        batches = Batches(our_batches(federation, reply.device.id, round))
        update = own if servers else theirs.trained(depths[-1], batches)
        assert set(own) == set(update), "they trained other tensors"
        worst = max(worst, apart(own, update))
        updates.append(update)
    moved = theirs.merge(updates, round)
    federation.method.merge(replies, round)
    merged = apart(theirs.weights, federation.method.state()["weights"])
    said = (
        f"updates {worst:.1e}, global weights {merged:.1e} apart (rewriting moved them by up "
        f"to {moved:.1e})"
    )
    print(f"inco, round {round}: depths {sorted(depths)}, {said}", flush=True)
    return max(worst, merged)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=ARGS.lr)
    parser.add_argument("--single", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "fed_experiments" / "InCo" / "utils.py").is_file():
        raise SystemExit(
            f"{options.folder} is no checkout of InCo-Aggregation: it has no "
            "fed_experiments/InCo/utils.py"
        )
    ARGS.lr = options.lr
    lay_out_as_they_do()
    torch.set_default_dtype(torch.float32 if options.single else torch.float64)
    code = load(options.folder.resolve())
    torch.manual_seed(0)
    network = code.create_server_model(10, ARGS)
    network.register_forward_pre_hook(in_set_precision)
    inco = Named("incoavg", {"compat": "code", "most": ARGS.clamp_max, "clip": 0.1})
    train = {"optimizer": "adam", "lr": ARGS.lr, "size": 20}
    settled, federation = assemble(six_clients(inco, options.rounds, SIZES, model=network, **train))
    theirs, method = Theirs(code, federation.world.main.initial), settled.make_method()
    worst = max(
        [
            play(federation, theirs, method, round, options.single)
            for round in range(1, options.rounds + 1)
        ]
    )
    return int(worst > APART)


if __name__ == "__main__":
    sys.exit(main())
