"""The networks: one table, and `build` to make one by name.

Weights come from torch's global generator: build inside `seeds.torch_seeded` for a network that can
be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from nestling.errors import InputError, unknown
from nestling.models import (
    autoencoder,
    cnn,
    cnn1d,
    densenet,
    dscnn,
    exits,
    forecaster,
    gpt,
    kwt,
    lstm,
    mlp,
    mobilenet,
    preresnet,
    resnet,
    resnet8,
    tinycnn,
    tinyresnet,
    vgg,
    vit,
)
from nestling.models.exits import ExitNet
from nestling.models.norm import NORMS, calibrate, norm_layer
from nestling.models.options import check_classes, check_options, check_shape, option_names
from nestling.models.own import build_own

__all__ = [
    "MODELS",
    "NORMS",
    "ExitNet",
    "ModelInfo",
    "build",
    "calibrate",
    "norm_layer",
    "option_names",
    "parameters",
    "state_entries",
]


@dataclass(frozen=True)
class ModelInfo:
    """One row of the table. `input` is "image", "sequence", "text" (token ids) or "any"; `norm`
    the default; `note` the paper's use."""

    build: Callable[..., nn.Module]
    title: str
    input: str
    norm: str
    note: str


_FEDIN = "FedIN's clients, with norm tracked"
_DRAFTFED = "DraftFed's clients, with norm tracked"
_DEPTH = "for methods that cut the depth, such as DepthFL"

MODELS: dict[str, ModelInfo] = {
    "mlp": ModelInfo(mlp.mlp, "fully connected network", "any", "none", "no paper in particular"),
    "autoencoder": ModelInfo(
        autoencoder.autoencoder,
        "dense autoencoder",
        "any",
        "none",
        "MLPerf Tiny's anomaly detection, with norm tracked",
    ),
    "cnn": ModelInfo(
        cnn.cnn,
        "four 3x3 convolutions",
        "image",
        "group",
        "HeteroFL's MNIST network, with norm sbn",
    ),
    "tinycnn": ModelInfo(
        tinycnn.tinycnn,
        "strided CNN for microcontrollers",
        "image",
        "group",
        "no paper in particular",
    ),
    "cnn1d": ModelInfo(
        cnn1d.cnn1d, "1-D CNN for sensor windows", "sequence", "group", "no paper in particular"
    ),
    "forecaster": ModelInfo(
        forecaster.forecaster,
        "dilated causal 1-D CNN for forecasts",
        "sequence",
        "none",
        "TCN, smaller",
    ),
    "dscnn": ModelInfo(
        dscnn.dscnn,
        "depth-wise separable CNN",
        "image",
        "tracked",
        "MLPerf Tiny's keyword spotting",
    ),
    "kwt": ModelInfo(
        kwt.kwt, "keyword transformer over frames", "sequence", "layer", "KWT, smaller; for sounds"
    ),
    "lstm": ModelInfo(
        lstm.lstm,
        "LSTM for sequences, and for texts with words = so many",
        "sequence",
        "none",
        "no paper in particular",
    ),
    "gpt": ModelInfo(
        gpt.gpt,
        "causal transformer over token ids, tells the next one",
        "text",
        "layer",
        "no paper in particular",
    ),
    "vit": ModelInfo(
        vit.vit, "small vision transformer", "image", "layer", "no paper in particular"
    ),
    "resnet8": ModelInfo(
        resnet8.resnet8, "ResNet-8", "image", "group", "MLPerf Tiny's image classification"
    ),
    "resnet10": ModelInfo(resnet.resnet10, "ResNet-10", "image", "group", _FEDIN),
    "resnet14": ModelInfo(resnet.resnet14, "ResNet-14", "image", "group", _FEDIN),
    "resnet18": ModelInfo(resnet.resnet18, "ResNet-18", "image", "group", _FEDIN),
    "resnet22": ModelInfo(resnet.resnet22, "ResNet-22", "image", "group", _FEDIN),
    "resnet26": ModelInfo(resnet.resnet26, "ResNet-26", "image", "group", _FEDIN),
    "resnet34": ModelInfo(
        resnet.resnet34,
        "ResNet-34",
        "image",
        "group",
        "FlexFL: norm batch, stem cifar, channels (64, 96, 128, 256, 512)",
    ),
    "resnet50": ModelInfo(resnet.resnet50, "ResNet-50", "image", "group", _DRAFTFED),
    "resnet101": ModelInfo(resnet.resnet101, "ResNet-101", "image", "group", _DRAFTFED),
    "resnet152": ModelInfo(resnet.resnet152, "ResNet-152", "image", "group", _DRAFTFED),
    "preresnet18": ModelInfo(
        preresnet.preresnet18,
        "pre-activation ResNet-18",
        "image",
        "group",
        "HeteroFL's CIFAR network, with norm sbn",
    ),
    "vgg16": ModelInfo(
        vgg.vgg16, "VGG16 with 4096-4096 head", "image", "group", "FlexFL, with norm batch"
    ),
    "mobilenetv2": ModelInfo(
        mobilenet.mobilenetv2, "MobileNetV2", "image", "group", "FlexFL, with norm batch"
    ),
    "densenet121": ModelInfo(densenet.densenet121, "DenseNet-121", "image", "group", _DRAFTFED),
    "densenet161": ModelInfo(densenet.densenet161, "DenseNet-161", "image", "group", _DRAFTFED),
    "densenet169": ModelInfo(densenet.densenet169, "DenseNet-169", "image", "group", _DRAFTFED),
    "densenet201": ModelInfo(densenet.densenet201, "DenseNet-201", "image", "group", _DRAFTFED),
    "exitcnn": ModelInfo(exits.exitcnn, "CNN with an exit a stage", "image", "group", _DEPTH),
    "exitresnet": ModelInfo(
        exits.exitresnet, "ResNet with an exit a stage", "image", "group", _DEPTH
    ),
    "tinyexits": ModelInfo(
        exits.tinyexits,
        "strided CNN with an exit a stage, for microcontrollers",
        "image",
        "group",
        _DEPTH,
    ),
    "tinyresnet": ModelInfo(
        tinyresnet.tinyresnet, "residual CNN for microcontrollers", "image", "group", _DEPTH
    ),
}


def build(name: str, *, shape: tuple[int, ...], classes: int, **options: object) -> nn.Module:
    """The network `name` for inputs of `shape` (without batch); a name "package.module:callable"
    calls the user's own."""
    shape, classes = check_shape(shape), check_classes(classes)
    if ":" in name:
        return build_own(name, shape=shape, classes=classes, options=options)
    if name not in MODELS:
        error = unknown("model", name, MODELS, field="model.name")
        raise InputError(
            error.message,
            field=error.field,
            fix=f'{error.fix}; your own: "package.module:callable"',
        )
    builder = MODELS[name].build
    return builder(shape=shape, classes=classes, **check_options(name, builder, options))


def parameters(module: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(entry.numel() for entry in module.parameters() if entry.requires_grad)


def state_entries(module: nn.Module) -> int:
    """The number of entries of the whole state, running statistics and counters included."""
    return sum(entry.numel() for entry in module.state_dict().values())
