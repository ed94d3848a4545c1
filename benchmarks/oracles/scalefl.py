"""Nestling's ScaleFL beside the authors' own code: the same clients, initial weights, order of
batches and learning rate.

    python benchmarks/oracles/scalefl.py FOLDER [--rounds 3] [--gamma 5] [--single]

FOLDER is a checkout of the authors' repository; nothing of it is changed. The network is their
ResNet with four exits, of six blocks instead of 54, its modules put into our form of a network with
exits. Their server cuts levels by following gradients and merges, their clients train with weighted
exits and distillation, which begins in the second of three rounds; its weight is far above the
published 0.05, so that it counts. Prints how far the parts that are sent, the replies and the
global models are apart; ends with 1 where that is more than 1e-5. Both sides calculate in double
precision: rounding to single precision soon decides on which side of zero an activation lies, and
weights part by 1e-3 in the third round. `--single` is for the servers alone, which are both given
what our clients send.

Matched: widths of which both sides cut the same number of channels (theirs round down, ours up).
         They do not divide what a shortcut's
convolution puts out; ours divides behind every convolution, so those of shortcuts are hidden from
it here. They begin to distil when the rounds that are over are more than a quarter of all, ours
when they are at least that many: `kd_start` is set a little higher.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import types
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lockstep import (
    APART,
    CLIENTS,
    apart,
    lay_out_as_they_do,
    names_of,
    our_batches,
    replies_of,
    six_clients,
    stub,
)
from torch import Tensor, nn

from nestling import Named
from nestling.methods import Reply
from nestling.models import ExitNet
from nestling.models.parts import named
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation

BLOCKS, EXITS, WIDTHS = (2, 2, 2), (1, 3, 5), (0.5, 0.5, 0.75, 1.0)
SIZES = (0.2, 0.3, 0.5, 0.6, 0.9, 1.0)
"""Budgets that make clients of all four levels."""
TRAIN = {"lr": 0.05, "lr_type": "none", "momentum": 0.9, "weight_decay": 5e-4, "num_epoch": 1}


class Colour(nn.Module):
    """Images of three channels, as the authors' network wants them, in the precision that is
    set."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.get_default_dtype()).expand(-1, 3, -1, -1)


class Projection(nn.Module):
    """A convolution of a shortcut that our method does not know as one, since theirs does not
    divide what it puts out."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.stride = conv.weight, conv.stride

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, stride=self.stride)


def load(folder: Path) -> types.SimpleNamespace:
    """The authors' federator, network and criterion. What they import for data, tests and other
    networks stands empty."""
    stub("data_tools")
    stub("data_tools.dataloader", get_client_dataloader=None)
    stub("predict", local_validate=None)
    networks = ("msdnet:msdnet24", "efficientnet:effnetb4", "bert.modeling_bert:bert")
    stub("models.bert")
    for module, name in (entry.split(":") for entry in networks):
        stub(f"models.{module}", **dict.fromkeys((f"{name}_1", f"{name}_4")))
    sys.path.insert(0, str(folder))
    fed, resnet, utils = (
        __import__(name, fromlist=["x"]) for name in ("fed", "models.resnet", "models.model_utils")
    )
    return types.SimpleNamespace(fed=fed, resnet=resnet, KDLoss=utils.KDLoss)


def their_network(code: types.SimpleNamespace) -> nn.Module:
    network: nn.Module = code.resnet.ResNet(
        code.resnet.BasicBlock, list(BLOCKS), 10, ee_layer_locations=list(EXITS)
    )
    return network


def as_exits(theirs: Any) -> ExitNet:
    """The authors' network's modules as stem, stages and heads: a stage ends where an exit
    stands."""
    stages: list[list[nn.Module]] = [[]]
    for group in theirs.layers:
        for number, part in enumerate(group):
            stages += [[]] if number else []
            stages[-1] += [undivided(block) for block in part]
    heads = [
        named(layers=exit.layers, linear=exit.fc)
        for exit in chain.from_iterable(theirs.ee_classifiers)
    ]
    heads.append(named(pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), linear=theirs.linear))
    stem = named(colour=Colour(), conv=theirs.conv1, norm=theirs.bn1, relu=nn.ReLU())
    return ExitNet(
        stem, nn.ModuleList([nn.Sequential(*stage) for stage in stages]), nn.ModuleList(heads)
    )


def undivided(block: Any) -> nn.Module:
    """A block whose shortcut our method leaves alone."""
    if len(block.shortcut):
        block.shortcut[0] = Projection(block.shortcut[0])
    return block


class Theirs:
    """The authors' federation: a global network that levels are cut from."""

    def __init__(
        self, code: types.SimpleNamespace, initial: Mapping[str, Tensor], rounds: int, gamma: float
    ) -> None:
        self.code, network = code, their_network(code)
        network.load_state_dict(initial)
        levels = len(WIDTHS)
        self.args = argparse.Namespace(
            vertical_scale_ratios=list(WIDTHS), horizontal_scale_ratios=list(range(1, levels + 1)),
            client_split_ratios=[1] * levels,
            num_rounds=rounds, num_clients=CLIENTS, sample_rate=1.0, alpha=100, use_gpu=0,
            arch="resnet", image_size=(28, 28),
            print_freq=1, KD_T=3, KD_gamma=gamma,
        )  # fmt: skip
        self.server, self.criterion = code.fed.Federator(network, self.args), code.KDLoss(self.args)

    def sent(self, level: int) -> nn.Module:
        """What a client of a level is given: all stages at its width."""
        network: nn.Module = self.server.get_local_split(level, WIDTHS[level])
        return network

    def trained(
        self, level: int, batches: list[tuple[Tensor, Tensor]], client: int, round: int
    ) -> tuple[Any, Any]:
        """A client's round: its weights, and which of them it trained."""
        own = [self.sent(level), batches, level, WIDTHS[level], level + 1, client]
        with contextlib.redirect_stdout(io.StringIO()):
            weights, flags, _ = self.code.fed.execute_client_round(
                [None, None, self.criterion, self.args, None, TRAIN, round - 1, None, *own]
            )
        return weights, flags

    def merge(self, replies: list[tuple[Any, Any]], levels: list[int]) -> dict[str, Tensor]:
        network = self.server.global_model
        weights, flags = zip(*replies, strict=True)
        network.load_state_dict(self.server.average_weights(weights, flags, levels, network))
        merged: dict[str, Tensor] = network.state_dict()
        return merged


def level_of(reply: Reply) -> int:
    """Which level a piece is of, from 0: a level has one stage more than the one below."""
    return sum(f"stages.{n}" not in reply.piece.view.dropped for n in range(len(WIDTHS))) - 1


def play(
    federation: Federation,
    theirs: Theirs,
    names: Mapping[str, str],
    method: Any,
    round: int,
    servers: bool,
) -> dict[str, float]:
    """One round on both sides, or only of both `servers`: how far what is sent, comes back and is
    made of it are apart."""
    replies, levels, found, colour = (
        replies_of(federation, method, round, range(CLIENTS)),
        [],
        [],
        Colour(),
    )
    worst = {"parts": 0.0, "replies": 0.0}
    for reply in replies:
        client, level = reply.device.id, level_of(reply)
        given, own = (
            {names[n]: t for n, t in m["weights"].items()} for m in (reply.sent, reply.message)
        )
        worst["parts"] = max(worst["parts"], apart(given, theirs.sent(level).state_dict()))
        batches = [(colour(x), y) for x, y in our_batches(federation, client, round)]
        same = own, {name: name in own for name in names.values()}
        weights, flags = same if servers else theirs.trained(level, batches, client, round)
        assert {name for name, trained in flags.items() if trained} == set(own), (
            "they trained other tensors"
        )
        worst["replies"] = max(
            worst["replies"], apart(own, {name: t.detach() for name, t in weights.items()})
        )
        levels.append(level)
        found.append((weights, flags))
    federation.method.merge(replies, round)
    ours = {names[n]: t for n, t in federation.method.state()["weights"].items()}
    worst["global weights"] = apart(theirs.merge(found, levels), ours)
    said = ", ".join(f"{what} {distance:.1e}" for what, distance in worst.items())
    print(f"scalefl, round {round}: levels {sorted(levels)}, {said} apart", flush=True)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gamma", type=float, default=5.0)
    parser.add_argument("--single", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "fed.py").is_file():
        raise SystemExit(f"{options.folder} is no checkout of ScaleFL: it has no fed.py")
    lay_out_as_they_do()
    torch.set_default_dtype(torch.float32 if options.single else torch.float64)
    code = load(options.folder.resolve())
    torch.manual_seed(0)
    source = their_network(code)
    network = as_exits(source)
    names = names_of(source, network)
    late = (options.rounds // 4 + 0.5) / options.rounds
    scalefl = Named("scalefl", {"widths": list(WIDTHS), "gamma": options.gamma, "kd_start": late})
    train = {name: TRAIN[name] for name in ("lr", "momentum", "weight_decay")}
    settled, federation = assemble(
        six_clients(scalefl, options.rounds, SIZES, model=network, size=20, **train)
    )
    initial = {names[n]: t for n, t in federation.world.main.initial.items()}
    theirs = Theirs(code, initial, options.rounds, options.gamma)
    worst, method = 0.0, settled.make_method()
    for round in range(1, options.rounds + 1):
        worst = max(worst, *play(federation, theirs, names, method, round, options.single).values())
    return int(worst > APART)


if __name__ == "__main__":
    sys.exit(main())
