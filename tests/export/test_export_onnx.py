"""ONNX: another runtime computes what torch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from nestling.export import onnx_file
from nestling.export.fold import fold
from nestling.models import build
from tests.export.exported import Zoo, spiced

pytest.importorskip("onnx", reason="onnx is not installed: pip install 'nestling[export]'")
onnxruntime = pytest.importorskip(
    "onnxruntime", reason="onnxruntime is not installed: pip install 'nestling[dev]'"
)


def check(module: nn.Module, shape: tuple[int, ...]) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    raw = onnx_file.write(fold(module, shape), shape)
    session = onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
    for rows in (1, 5):
        x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))
        found = session.run(None, {"input": x.numpy()})[0]
        np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["none", "tracked", "group"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tinycnn", (1, 28, 28)),
        ("dscnn", (1, 16, 12)),
        ("resnet8", (3, 16, 16)),
        ("cnn1d", (6, 64)),
        ("mobilenetv2", (3, 32, 32)),
    ],
)
def test_a_network_of_the_library(name: str, shape: tuple[int, ...], norm: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        check(spiced(build(name, shape=shape, classes=5, width=0.25, norm=norm)), shape)


@pytest.mark.parametrize("shape", [(43,), (1, 8, 8)])
def test_a_network_of_dense_layers(shape: tuple[int, ...]) -> None:
    check(spiced(build("mlp", shape=shape, classes=6)), shape)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d, lambda channels: nn.GroupNorm(channels // 4, channels)]
)
def test_one_of_every_operation(norm: type[nn.Module]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        check(spiced(Zoo(norm)), Zoo.shape)


def test_a_class_that_is_never_said() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = spiced(build("mlp", shape=(1, 8, 8), classes=6))
    with torch.no_grad():
        [part for part in module.modules() if isinstance(part, nn.Linear)][-1].bias[2] = -torch.inf
    check(module, (1, 8, 8))
