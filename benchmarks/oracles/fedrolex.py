"""Nestling's FedRolex beside the authors' server: the same windows of the same network, and the
same mean over them.

    python benchmarks/oracles/fedrolex.py FOLDER [--rounds 5]

FOLDER is a checkout of the authors' repository. The network is theirs (a narrow ResNet-18), cut by
our tracing on one side and by their server on the other; our clients train it, and both servers
merge the same replies. Prints for every round whether the windows are the same and how far the
global models are apart; ends with 1 where they differ by more than 1e-5. Their server weights norms
and classifier by a count of updates that grows while it goes through the clients, so that later
clients weigh more; here the count stays one, which is the paper's mean. `--as-released` leaves it
as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lockstep import APART, CLIENTS, apart, lay_out_as_they_do, replies_of, six_clients, stub
from torch import Tensor, nn

from nestling import Named
from nestling.methods import Reply
from nestling.runs.assemble import assemble

RATES = (1.0, 0.5, 0.25)
CONFIG: dict[str, Any] = {
    "norm": "bn", "scale": False, "mask": True, "global_model_rate": 1.0, "data_shape": [1, 28, 28],
    "classes_size": 10,
    "resnet": {"hidden_size": [8, 16, 24, 32]}, "model_split_mode": "fix", "overlap": None,
    "weighting": "avg", "num_users": CLIENTS,
}  # fmt: skip


class OfImages(nn.Module):
    """Their network, asked for logits of images instead of a dictionary; its parameters keep their
    names."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        for name, part in theirs.named_children():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.conv1, self.layer1, self.layer2, self.layer3, self.layer4):
            x = part(x)
        return self.linear(F.adaptive_avg_pool2d(F.relu(self.n4(x)), 1).flatten(1))


class Ones(dict[str, Tensor]):
    """Counts of updates that stay one, whatever is added to them."""

    def __getitem__(self, name: str) -> Tensor:
        return torch.ones_like(super().__getitem__(name))

    def __deepcopy__(self, memo: object) -> Ones:
        return self


def load(folder: Path) -> tuple[nn.Module, Any]:
    """A network and the class of the rolling server. They send everything through ray, which here
    hands things on."""
    stub("ray", get=lambda x: x, put=lambda x: x)
    sys.path.insert(0, str(folder))
    network = __import__("models.resnet", fromlist=["resnet18"]).resnet18(cfg=CONFIG)
    return OfImages(network), __import__("resnet_server").ResnetServerRoll


def same_windows(replies: list[Reply], indices: list[dict[str, Any]]) -> bool:
    """Whether every client has the same channels of every tensor on both sides, in whatever
    order."""
    for reply, own in zip(replies, indices, strict=True):
        for name, theirs in own.items():
            axes = theirs if isinstance(theirs, tuple) else (theirs,)
            shape = reply.piece.reference.axes.shapes[name]
            for size, at, ours in zip(shape, axes, reply.piece.view.where(name), strict=False):
                if sorted(at.tolist()) != sorted(torch.arange(size)[ours].tolist()):
                    return False
    return True


def in_their_order(
    reply: Reply, own: dict[str, Any], like: dict[str, Tensor]
) -> OrderedDict[str, Tensor]:
    """A reply with its channels in the order in which their window has them."""
    found: OrderedDict[str, Tensor] = OrderedDict()
    for name, whole in like.items():
        put = torch.zeros_like(whole)
        grid = torch.meshgrid(
            *[
                torch.arange(n)[at]
                for n, at in zip(whole.shape, reply.piece.view.where(name), strict=True)
            ],
            indexing="ij",
        )
        put[grid] = reply.message["weights"][name]
        at = own[name]
        found[name] = put[torch.meshgrid(*at, indexing="ij")] if isinstance(at, tuple) else put[at]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--as-released", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "resnet_server.py").is_file():
        raise SystemExit(f"{options.folder} is no checkout of FedRolex: it has no resnet_server.py")
    lay_out_as_they_do()
    network, made = load(options.folder)
    settled, federation = assemble(
        six_clients(
            Named("fedrolex", {"compat": "code"}),
            options.rounds,
            RATES,
            model=network,
            momentum=0.9,
            clip=1.0,
        )
    )
    world = federation.world
    rates = [world.fleet.tier_of(client).ratio for client in range(CLIENTS)]
    held = {client: world.split.counts(client).nonzero()[0].tolist() for client in range(CLIENTS)}
    twin = OfImages(__import__("models.resnet", fromlist=["resnet18"]).resnet18(cfg=CONFIG))
    twin.load_state_dict(world.main.initial)
    server = made(twin, rates, {"label_split": held}, CONFIG)
    worst, method, users = 0.0, settled.make_method(), list(range(CLIENTS))
    for round in range(1, options.rounds + 1):
        replies = replies_of(federation, method, round, users)
        indices = server.split_model(users)
        windows = same_windows(replies, indices)
        theirs = [
            in_their_order(r, own, server.global_parameters)
            for r, own in zip(replies, indices, strict=True)
        ]
        if not options.as_released:
            server.tmp_counts = Ones(server.tmp_counts)
        server.combine(theirs, indices, users)
        server.rounds += 1
        federation.method.merge(replies, round)
        distance = apart(server.global_parameters, federation.method.state()["weights"])
        print(
            f"fedrolex, round {round}: windows {'the same' if windows else 'DIFFER'}, global "
            f"weights {distance:.1e} apart",
            flush=True,
        )
        worst = max(worst, distance if windows else 1.0)
    return int(worst > APART)


if __name__ == "__main__":
    sys.exit(main())
