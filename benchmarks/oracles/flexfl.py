"""Nestling's FlexFL beside the authors' own code: the same pool of models, clients, weights, order
of batches and learning rate.

    python benchmarks/oracles/flexfl.py FOLDER [--rounds 2] [--single]

FOLDER is a checkout of the authors' repository; nothing of it is changed. The network is its VGG16
for one-channel images, without dropout (whose draws differ). Its search makes the pool of five
models, its clients train with self-distillation, its server merges; which client trains which model
is what our server and devices decide, and what it begins with is what our server sends: in the
first round weights of every model's own, as in the authors' loop. Both sides calculate in double
precision, because in a network as deep as this one rounding soon decides a maximum; `--single` has
them calculate as they are used. Prints, for every round, the models that were trained, and how far
replies and global models are apart; ends with 1 where that is more than 1e-5, or where our models
are none of its pool.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lockstep import (
    APART,
    CLIENTS,
    apart,
    lay_out_as_they_do,
    our_batches,
    replies_of,
    six_clients,
    stub,
)
from torch import Tensor, nn

from nestling import FleetConfig, Named, Tier
from nestling.models import build
from nestling.runs.assemble import assemble

APOZ = [
    0.506,
    0.513,
    0.650,
    0.618,
    0.635,
    0.595,
    0.565,
    0.607,
    0.604,
    0.588,
    0.589,
    0.810,
    0.964,
    0.994,
    0.805,
]
ARGS = argparse.Namespace(
    model="vgg", num_classes=10, num_channels=1, device="cpu", decrease=0.1, gamma=10, T=3,
    optimizer="sgd", lr=0.01, lr_decay=1.0,
    momentum=0.5, weight_decay=1e-4, local_ep=1,
)  # fmt: skip

FLEET = FleetConfig(
    tiers=tuple(
        Tier(name=f"{mean:g} %", ratio=1.0, count=CLIENTS // 3, memory_mean=mean)
        for mean in (35.0, 60.0, 110.0)
    )
)

EMPTY: dict[str, list[str]] = {
    "wandb": [],
    "tqdm": ["tqdm"],
    "utils": [],
    "utils.Clients": ["Clients"],
    "utils.get_dataset": ["get_dataset"],
    "utils.options": ["args_parser"],
    "utils.set_seed": ["set_random_seed"],
    "optimizer": [],
    "optimizer.Adabelief": ["AdaBelief"],
    "models": ["ResNet18_cifar", "MobileNetV2", "test", "LocalUpdate_FedAvg", "Aggregation"],
}
"""What the files import for data, logs and other networks: it is not called."""


class Precise(nn.Module):
    """Images in the precision that is set."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.get_default_dtype())


def load(folder: Path) -> dict[str, Any]:
    """The authors' search, client and server, file by file."""
    for name, content in EMPTY.items():
        stub(name, **dict.fromkeys(content))
    sys.modules["models"].__dict__["vgg_16_bn"] = from_file(
        "models.vgg", folder / "models" / "vgg.py"
    ).vgg_16_bn
    files = {
        "models.Fed": "models/Fed.py",
        "models.Update": "models/Update.py",
        "getAPOZ": "getAPOZ.py",
    }
    return {name: from_file(name, folder / path) for name, path in files.items()}


def from_file(name: str, path: Path) -> Any:
    """One file of the authors', imported under the name that their other files know."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pool_of(code: dict[str, Any]) -> list[nn.Module]:
    """The authors' five models, the smallest first, without dropout and as they are after a first
    test: in evaluation mode."""
    search = code["getAPOZ"]
    widths = search.calculateScale(ARGS, search.getNet(ARGS, [1] * 50), APOZ)[1]
    models: list[nn.Module] = search.modelList(ARGS, widths)[0]
    for model in models:
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        model.eval()
    return models


def trained_by_them(
    code: dict[str, Any], models: list[nn.Module], level: int, batches: list[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """What the authors' client makes of a model of the pool."""
    client = object.__new__(code["models.Update"].LocalUpdate_FlexFL)
    client.args, client.loss_func = ARGS, code["models.Update"].KDLoss(ARGS)
    client.ldr_train, client.verbose = batches, False
    state: dict[str, Tensor] = client.train(
        0, copy.deepcopy(models[level]), [copy.deepcopy(m) for m in models], level
    )
    return state


def shapes(state: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in state.values()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--single", action="store_true")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float32 if options.single else torch.float64)
    if not (options.folder / "getAPOZ.py").is_file():
        raise SystemExit(f"{options.folder} is no checkout of FlexFL: it has no getAPOZ.py")
    lay_out_as_they_do()
    code = load(options.folder)
    models = pool_of(code)
    network = build(
        "vgg16",
        shape=(1, 28, 28),
        classes=10,
        norm="batch",
        late=True,
        dropout=0.0,
        hidden=(256, 256),
    )
    network.stem = Precise()
    flexfl = Named("flexfl", {"levels": [0.25, 0.5, 1.0], "compat": "code", "apoz": APOZ})
    # Two batches a client, so that little is rounded where `--single` is given.
    train = {
        "lr": ARGS.lr,
        "momentum": ARGS.momentum,
        "weight_decay": ARGS.weight_decay,
        "drop_last": True,
        "size": 20,
    }
    experiment = six_clients(flexfl, options.rounds, model=network, **train).with_changes(
        fleet=FLEET
    )
    settled, federation = assemble(experiment)
    names = list(models[-1].state_dict())
    fed, method, worst = code["models.Fed"], settled.make_method(), 0.0
    for round in range(1, options.rounds + 1):
        ours = federation.method.state()["weights"]
        whole = dict(zip(names, ours.values(), strict=True))
        replies = replies_of(federation, method, round, federation.method.choose(round, CLIENTS))
        theirs, distance = [], 0.0
        for reply in replies:
            level = [shapes(m.state_dict()) for m in models].index(shapes(reply.message["weights"]))
            sent = dict(zip(names, reply.sent["weights"].values(), strict=True))
            models[level].load_state_dict(fed.split_model(sent, models[level].state_dict()))
            batches = [
                (x.to(torch.get_default_dtype()), y)
                for x, y in our_batches(federation, reply.device.id, round)
            ]
            state = trained_by_them(code, models, level, batches)
            theirs.append(state)
            distance = max(
                distance,
                apart(state, dict(zip(names, reply.message["weights"].values(), strict=True))),
            )
        # Its server adds up in single precision whatever it is given.
        before = {name: tensor.float() for name, tensor in whole.items()}
        merged = fed.Aggregation_FedSlim(theirs, [reply.samples for reply in replies], before)
        federation.method.merge(replies, round)
        after = dict(zip(names, federation.method.state()["weights"].values(), strict=True))
        glob = apart(merged, after)
        levels = [
            [shapes(m.state_dict()) for m in models].index(shapes(r.message["weights"]))
            for r in replies
        ]
        print(
            f"flexfl, round {round}: models {levels}, replies {distance:.1e}, global weights "
            f"{glob:.1e} apart",
            flush=True,
        )
        worst = max(worst, distance, glob)
    return int(worst > APART)


if __name__ == "__main__":
    sys.exit(main())
