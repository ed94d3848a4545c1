"""Nestling's DepthFL beside the code that the paper's first author gave to Flower: the same
clients, initial weights, order of batches and learning rate.

    python benchmarks/oracles/depthfl.py FOLDER [--rounds 3] [--single]

FOLDER is `baselines/depthfl` of a checkout of Flower; nothing of it is changed (Flower itself must
be installed). The network is its ResNet-18 with all of its exits, its modules put into our form of
a network with exits; images are padded and halved to 16x16 pixels of three channels, because its
gates need sides that can be halved again and again. Its clients train with mutual distillation and
FedDyn and keep their FedDyn state in files, as released; its server merges. Four of six clients
take part in a round, so that deep stages are sometimes nobody's. Prints the depths that were
trained, and how far replies, FedDyn states and global models are apart; ends with 1 where that is
more than 1e-5. Both sides calculate in double precision: with batches of ten, rounding to single
precision soon decides on which side of zero an activation lies, and weights part by 1e-2 within two
rounds. What remains is a 1e-7 that the released distillation adds to every probability. `--single`
is for the servers alone, which are both given what our clients send.

Matched: the distillation of the released code climbs over 300 rounds counted from 0. Here it climbs
         over three counted from 1, and the
released clients are told that it is round 101, 201 and 301. Their learning rate does not fall, and
neither does ours.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
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
from nestling.models import ExitNet
from nestling.models.parts import named
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation
from nestling.views import State

STAGES, TAKING_PART, ALPHA, RAMP = 4, 4, 0.1, 3
SIZES = (0.2, 0.25, 0.5, 0.55, 0.9, 1.0)
"""Budgets that make clients of depth 1, 1, 2, 2, 3 and 4."""
FIT = {"feddyn": True, "kd": True, "alpha": ALPHA, "extended": True, "drop_client": False}


class Seen(nn.Module):
    """Images as the released network wants them, in the precision that is set."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.pad(x.to(torch.get_default_dtype()), (2, 2, 2, 2)), 2).expand(
            -1, 3, -1, -1
        )


class Gated(nn.Module):
    """A map weighed by the released attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) * x


def load(folder: Path) -> types.SimpleNamespace:
    """The released network, clients and strategy. They are told what to build by hydra, which here
    hands on what is given."""
    stub("omegaconf", DictConfig=dict)
    stub("hydra")
    stub("hydra.utils", instantiate=lambda depth: resnet(depth))
    sys.path.insert(0, str(folder))
    made = __import__("depthfl.resnet", fromlist=["multi_resnet18"]).multi_resnet18

    def resnet(depth: int) -> nn.Module:
        network: nn.Module = made(n_blocks=depth, num_classes=10)
        return network

    client, strategy = (
        __import__(f"depthfl.{name}", fromlist=["FedDyn"]) for name in ("client", "strategy")
    )
    return types.SimpleNamespace(network=resnet, clients=client.gen_client_fn, server=strategy)


def as_exits(theirs: nn.Module) -> ExitNet:
    """The released network's modules as stem, stages and heads."""
    heads = []
    for n in range(1, STAGES):
        gate, scala, linear = (
            getattr(theirs, f"{part}{n}") for part in ("attention", "scala", "middle_fc")
        )
        heads.append(named(gate=Gated(gate), scala=scala, flat=nn.Flatten(), linear=linear))
    heads.append(named(scala=theirs.scala4, flat=nn.Flatten(), linear=theirs.fc_layer))
    stem = named(seen=Seen(), conv=theirs.conv1, norm=theirs.bn1, relu=theirs.relu)
    return ExitNet(
        stem,
        nn.ModuleList([getattr(theirs, f"layer{n}") for n in range(1, STAGES + 1)]),
        nn.ModuleList(heads),
    )


def in_theirs(names: Mapping[str, str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some of our tensors by their names."""
    return {names[name]: t.detach() for name, t in state.items()}


def to_tensors(names: list[str], arrays: list[np.ndarray]) -> dict[str, Tensor]:
    """What travels there, by name: a list without names, of which a shallow network's is the
    beginning."""
    return {
        name: torch.as_tensor(array).double() for name, array in zip(names, arrays, strict=False)
    }


class Theirs:
    """The released federation: clients, strategy and the weights that it keeps."""

    def __init__(
        self,
        code: types.SimpleNamespace,
        initial: Mapping[str, Tensor],
        depths: list[int],
        lr: float,
    ) -> None:
        network, self.code, self.loaders = code.network(STAGES), code, [[] for _ in depths]
        self.names = list(network.state_dict())
        self.weights = [initial[name].numpy() for name in self.names]
        config = types.SimpleNamespace(
            num_clients=len(depths), fit_config=types.SimpleNamespace(**FIT)
        )
        self.strategy = code.server.FedDyn(config, network)
        self.client = code.clients(1, self.loaders, self.loaders, lr, 1.0, depths)

    def trained(
        self, client: int, batches: list[tuple[Tensor, Tensor]], round: int
    ) -> tuple[list[np.ndarray], dict[str, Tensor]]:
        """A client's round: what it sends, and its FedDyn state."""
        self.loaders[client][:] = [(Seen()(x), y) for x, y in batches]
        party = self.client(str(client)).numpy_client
        found = party.fit(self.weights, {**FIT, "curr_round": 1 + 300 * min(round, RAMP) // RAMP})[
            0
        ]
        # What it hands over is a view of its own weights.
        return [array.copy() for array in found], party.prev_grads

    def merge(self, replies: list[list[np.ndarray]], round: int) -> None:
        from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

        results = [
            (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters(reply), 1, {}))
            for reply in replies
        ]
        merged = self.code.server.aggregate_fit_depthfl(
            self.strategy, round, results, [], self.weights
        )[0]
        self.weights = parameters_to_ndarrays(merged)


def depth_of(federation: Federation, client: int) -> int:
    """How many stages a client trains."""
    view = federation.method.piece(federation.world.device(client), 0).view
    return sum(f"stages.{n}" not in view.dropped for n in range(STAGES))


def play(
    federation: Federation,
    theirs: Theirs,
    names: Mapping[str, str],
    method: Any,
    memories: dict[int, State],
    round: int,
    servers: bool,
) -> dict[str, float]:
    """One round on both sides, or only of both `servers`: how far replies, FedDyn states and merged
    weights are apart."""
    who = federation.method.choose(round, TAKING_PART)
    replies, sent, worst = (
        replies_of(federation, method, round, who, memories),
        [],
        {"replies": 0.0, "FedDyn states": 0.0},
    )
    for reply in replies:
        client = reply.device.id
        own = in_theirs(names, reply.message["weights"])
        kept = {name: t.flatten() for name, t in in_theirs(names, memories[client]).items()}
        same = [own[name].numpy() for name in theirs.names if name in own], kept
        arrays, past = (
            same
            if servers
            else theirs.trained(client, list(our_batches(federation, client, round)), round)
        )
        assert len(arrays) == len(own), "they trained other tensors"
        worst["replies"] = max(worst["replies"], apart(own, to_tensors(theirs.names, arrays)))
        worst["FedDyn states"] = max(worst["FedDyn states"], apart(kept, past))
        sent.append(arrays)
    theirs.merge(sent, round)
    federation.method.merge(replies, round)
    after = in_theirs(names, federation.method.state()["weights"])
    worst["global weights"] = apart(to_tensors(theirs.names, theirs.weights), after)
    depths = sorted(depth_of(federation, reply.device.id) for reply in replies)
    said = ", ".join(f"{what} {distance:.1e}" for what, distance in worst.items())
    print(f"depthfl, round {round}: depths {depths}, {said} apart", flush=True)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--single", action="store_true")
    options = parser.parse_args()
    if not (options.folder / "depthfl" / "strategy.py").is_file():
        raise SystemExit(
            f"{options.folder} is not Flower's baselines/depthfl: it has no depthfl/strategy.py"
        )
    lay_out_as_they_do()
    torch.set_default_dtype(torch.float32 if options.single else torch.float64)
    code = load(options.folder.resolve())
    torch.manual_seed(0)
    source = code.network(STAGES)
    network = as_exits(source)
    names = names_of(source, network)
    depthfl = Named("depthfl", {"ramp": RAMP, "alpha": ALPHA})
    train = {"weight_decay": 1e-3, "size": 20}
    settled, federation = assemble(
        six_clients(depthfl, options.rounds, SIZES, model=network, **train)
    )
    depths = [depth_of(federation, client) for client in range(CLIENTS)]
    worst, memories, method = 0.0, {}, settled.make_method()
    # The released clients keep files in the working folder.
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        theirs = Theirs(
            code, in_theirs(names, federation.world.main.initial), depths, federation.world.train.lr
        )
        for round in range(1, options.rounds + 1):
            worst = max(
                worst,
                *play(federation, theirs, names, method, memories, round, options.single).values(),
            )
    return int(worst > APART)


if __name__ == "__main__":
    sys.exit(main())
