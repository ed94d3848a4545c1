"""The fixed tasks: each an experiment of Nestling that the other contestants repeat with the same
clients, rows and start weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from images import made_up_images
from networks import NETWORKS
from torch import nn

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

FEW_IMAGES = {"train": 10_000, "test": 2_000}
HETEROFL_RATIOS = (1.0, 0.5, 0.25, 0.125, 0.0625)


@dataclass(frozen=True)
class Task:
    """A task of so many rounds. `network` builds what the others train; None where only Nestling
    can do the task."""

    name: str
    experiment: Experiment
    network: Callable[..., nn.Module] | None

    @property
    def rounds(self) -> int:
        """How many rounds are played."""
        return self.experiment.rounds


def cnn9k(rounds: int = 30) -> Task:
    """The embedded digits and 9098 parameters: the overhead of a simulator shows."""
    train = _sgd(epochs=1, batch=10)
    return _fedavg(
        "cnn9k", Data("mnist12k"), rounds, clients=100, rows=50, participants=20, train=train
    )


def cifar_cnn(rounds: int = 12) -> Task:
    """The CIFAR-10 setting of pfl-research's benchmarks: 1.6 M parameters, 50 of 1000 clients a
    round."""
    train = _sgd(epochs=1, batch=10)
    return _fedavg(
        "cifar_cnn", _colour_images(), rounds, clients=1000, rows=50, participants=50, train=train
    )


def vgg16(rounds: int = 8) -> Task:
    """A large network and few clients: nearly all of a round is arithmetic. For a GPU."""
    train = _sgd(epochs=5, batch=50)
    data = Data("npz", path=str(made_up_images(**FEW_IMAGES)))
    return _fedavg("vgg16", data, rounds, clients=10, rows=500, participants=10, train=train)


def heterofl_resnet18(rounds: int = 12) -> Task:
    """HeteroFL with five widths of ResNet-18: engines of Nestling against each other."""
    tiers = tuple(Tier(name=f"width-{ratio:g}", ratio=ratio, count=20) for ratio in HETEROFL_RATIOS)
    experiment = Experiment(
        method="heterofl",
        model=Named("resnet18", {"stem": "cifar", "norm": "sbn"}),
        data=Data("npz", path=str(made_up_images(**FEW_IMAGES))),
        rounds=rounds,
        participants=10,
        split=SplitConfig(kind="iid", size=50, public=0.0),
        fleet=FleetConfig(tiers=tiers),
        train=_sgd(epochs=1, batch=10),
        evaluate=Evaluation(every=rounds, clients=1, calibration=500),
        engine=EngineConfig("inline"),
    )
    return Task("heterofl_resnet18", experiment, None)


def heterofl_vgg16(rounds: int = 8) -> Task:
    """HeteroFL with five widths of VGG16, ten of a hundred clients with 500 images each, five
    epochs. For a GPU."""
    tiers = tuple(Tier(name=f"width-{ratio:g}", ratio=ratio, count=20) for ratio in HETEROFL_RATIOS)
    return _vgg16_parts("heterofl_vgg16", Named("heterofl"), tiers, rounds)


def flexfl_vgg16(rounds: int = 8) -> Task:
    """FlexFL with its three levels of VGG16, else the same."""
    tiers = tuple(
        Tier(name=f"size-{size:g}", ratio=1.0, share=1 / 3, memory_mean=100 * size)
        for size in (0.25, 0.5, 1.0)
    )
    method = Named("flexfl", {"levels": [0.25, 0.5, 1.0], "pretrain": 1})
    return _vgg16_parts("flexfl_vgg16", method, tiers, rounds)


TASKS: dict[str, Callable[..., Task]] = {
    "cnn9k": cnn9k,
    "cifar_cnn": cifar_cnn,
    "vgg16": vgg16,
    "heterofl_resnet18": heterofl_resnet18,
    "heterofl_vgg16": heterofl_vgg16,
    "flexfl_vgg16": flexfl_vgg16,
}
"""Every task by name; called with a number of rounds, or without for its own."""


def _fedavg(
    name: str, data: Data, rounds: int, *, clients: int, rows: int, participants: int, train: Train
) -> Task:
    experiment = Experiment(
        method="fedavg",
        model=Named(f"networks:{name}"),
        data=data,
        rounds=rounds,
        participants=participants,
        split=SplitConfig(kind="iid", size=rows, public=0.0),
        fleet=FleetConfig(size=clients, tiers=(Tier(name="all", ratio=1.0, share=1.0),)),
        train=train,
        # Rounds are to be pure training: one test, after the last.
        evaluate=Evaluation(every=rounds, clients=1),
        engine=EngineConfig("inline"),
    )
    return Task(name, experiment, NETWORKS[name])


def _vgg16_parts(name: str, method: Named, tiers: tuple[Tier, ...], rounds: int) -> Task:
    experiment = Experiment(
        method=method,
        model=Named("vgg16", {"norm": "batch"}),
        data=_colour_images(),
        rounds=rounds,
        participants=10,
        split=SplitConfig(kind="iid", size=500, public=0.01),
        fleet=FleetConfig(size=100, tiers=tiers),
        train=Train(epochs=5, batch=50, lr=0.01, momentum=0.5, decay=1.0, augment="none"),
        evaluate=Evaluation(every=rounds, clients=1),
        engine=EngineConfig("inline"),
    )
    return Task(name, experiment, None)


def _sgd(epochs: int, batch: int) -> Train:
    return Train(
        epochs=epochs,
        batch=batch,
        optimizer="sgd",
        lr=0.05,
        momentum=0.0,
        decay=1.0,
        augment="none",
    )


def _colour_images() -> Data:
    """CIFAR-10 where the data folder has it, else the made-up images."""
    folder = os.environ.get("NESTLING_DATA")
    real = folder and (Path(folder).expanduser() / "cifar-10-batches-py").is_dir()
    return Data("cifar-10") if real else Data("npz", path=str(made_up_images()))
