"""What the comparisons with other people's code share: our order of batches, and how far two states
are apart."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor, nn

from nestling import (
    Data,
    EngineConfig,
    Evaluation,
    Experiment,
    FleetConfig,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.methods import Reply
from nestling.runs.assemble import site_of
from nestling.runs.federation import Federation
from nestling.training import trainer
from nestling.training.client import Errand, work
from nestling.views import State

CLIENTS = 6
APART = 1e-5
"""How far weights of the same method may be apart after a round: rounding."""


@dataclass
class Oracle:
    """A method on both sides: ours, and the module, server and client of a library that keeps both
    by those names."""

    ours: Named
    module: str
    server: str
    client: str
    options: dict[str, Any] = field(default_factory=dict)


def stub(name: str, **content: Any) -> None:
    """Has the other code find a module of this content where it would import one that it does not
    need here."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(content, __spec__=ModuleSpec(name, None))


def six_clients(
    method: str | Named, rounds: int, ratios: Sequence[float] = (1.0,), **changes: Any
) -> Experiment:
    """Six clients with a mix of some classes each, shared out over the widths, who all take part;
    `changes` are fields of `Train`, or the network, or the number of rows (`size`). Nothing is
    augmented, and rates stay as they are."""
    model, size = (
        changes.pop("model", Named("tinycnn", {"channels": [8, 16, 32]})),
        changes.pop("size", 100),
    )
    train = {
        "epochs": 1,
        "batch": 10,
        "lr": 0.05,
        "decay": 1.0,
        "momentum": 0.0,
        "augment": "none",
        **changes,
    }
    return Experiment(
        method=Named(method) if isinstance(method, str) else method,
        rounds=rounds,
        participants=CLIENTS,
        data=Data("mnist12k"),
        model=model,
        fleet=FleetConfig(
            tiers=tuple(
                Tier(name=f"width-{r:g}", ratio=r, count=CLIENTS // len(ratios)) for r in ratios
            )
        ),
        split=SplitConfig(kind="dirichlet", alpha=0.3, size=size),
        train=Train(**train),
        engine=EngineConfig("inline", device="cpu"),
        evaluate=Evaluation(every=rounds, clients=CLIENTS),
    )


class Split(nn.Module):
    """One of our networks in the shape of HtFLlib and PFLlib: everything before the head, and the
    head."""

    def __init__(self, network: nn.Module, head: str) -> None:
        super().__init__()
        self.name, self.head = head, copy.deepcopy(network.get_submodule(head))
        self.base = copy.deepcopy(network)
        parent, _, last = head.rpartition(".")
        setattr(self.base.get_submodule(parent), last, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))

    def weights(self) -> dict[str, Tensor]:
        """By the names that our network has."""
        return {
            **dict(self.base.named_parameters()),
            **{f"{self.name}.{n}": p for n, p in self.head.named_parameters()},
        }


def split_of(federation: Federation, client: int) -> Split:
    """The network that a client would use now."""
    model = federation.method.model_for(federation.world.device(client))
    return Split(model.reference.network(model.view, model.state), model.reference.taps.head)


def lay_out_as_they_do() -> None:
    """Images lie in memory as torch has them, channel by channel, for one thread. Our engines lay
    them out pixel by pixel, which rounds otherwise; where rounding decides which of two equal
    values is the largest, a client's weights are then 1e-3 apart."""
    torch.set_num_threads(1)
    trainer.by_pixel = lambda module, x: x


def our_batches(federation: Federation, client: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The inputs and labels of a client's batches in a round, in the order in which our engines
    train them."""
    world, site = federation.world, site_of(federation)
    rows, model = site.split.indices(client), federation.method.model_for(world.device(client))
    skeleton = model.reference.network(model.view)
    for some in trainer.batches(
        len(rows), world.train.phase(round), skeleton, site.seed, client, round
    ):
        at = torch.from_numpy(rows)[some]
        yield site.x[at], site.y[at]


def replies_of(
    federation: Federation,
    method: Any,
    round: int,
    who: Iterable[int],
    memories: dict[int, State] | None = None,
) -> list[Reply]:
    """The round of some clients, trained by our trainer; they leave what they remember in
    `memories`."""
    world, found, memories = federation.world, [], {} if memories is None else memories
    for client in who:
        device = world.device(client, round)
        piece = federation.method.piece(device, round)
        sent = federation.method.send(device, piece, round)
        errand = Errand(
            client, round, piece.reference.name, piece.spec(), sent, memories.get(client, {})
        )
        done = work(method, errand, site_of(federation))
        memories[client] = done.memory
        found.append(
            Reply(
                device, federation.method.returned(piece, sent, done.reply.facts), sent, done.reply
            )
        )
    return found


def names_of(theirs: nn.Module, ours: nn.Module) -> dict[str, str]:
    """Our name of every tensor → theirs, where our network is made of their modules, so that the
    tensors are the same objects."""
    known = {id(t): name for name, t in theirs.state_dict(keep_vars=True).items()}
    return {name: known[id(t)] for name, t in ours.state_dict(keep_vars=True).items()}


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of an entry, over all that `one` has."""
    assert not set(one) - set(other), f"names differ: {sorted(set(one) ^ set(other))[:4]}"
    return max(float((t.detach() - other[name]).abs().max()) for name, t in one.items())


def verdict(worst: Mapping[str, float]) -> int:
    """Says of every method whether it is the same; 1 where one is not."""
    print(
        "\n".join(
            f"{name}: {'the same' if w <= APART else 'NOT the same'}, {w:.1e}"
            for name, w in worst.items()
        )
    )
    return int(max(worst.values()) > APART)
