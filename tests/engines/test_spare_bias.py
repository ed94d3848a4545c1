"""Biases in front of batch statistics: left out, with the same result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestling import Named, Train
from nestling.engines.cuda.spare_bias import may_spare_biases, spare_biases
from nestling.models.norm import norm_layer
from nestling.training.objectives import Batch, Given, Net, supervised
from tests.engines.test_cohort import alone, assert_same, federation_of, group_with, recording
from tests.small import errands_of


def sequence(kind: str) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        norm_layer(kind, 4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
        nn.Linear(27, 2),
    )


@pytest.mark.parametrize("kind", ["batch", "sbn"])
def test_output_and_gradients_stay(kind: str) -> None:
    torch.manual_seed(0)
    plain, x = sequence(kind), torch.randn(6, 2, 5, 5)
    spared = copy.deepcopy(plain)
    assert spare_biases(spared) == ["0"]
    outs = [net(x) for net in (plain, spared)]
    assert torch.allclose(*outs, atol=1e-6)
    grads = [
        torch.autograd.grad(out.square().sum(), list(net.parameters()), allow_unused=True)
        for out, net in zip(outs, (plain, spared), strict=True)
    ]
    for name, one, other in zip(dict(plain.named_parameters()), *grads, strict=True):
        if name == "0.bias":
            assert other is None and float(one.abs().max()) < 1e-4
        else:
            assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("kind", ["tracked", "group", "per-width", "none"])
def test_biases_that_count_are_kept(kind: str) -> None:
    assert spare_biases(sequence(kind)) == []


class Apart(nn.Module):
    """Reads what the convolution puts out itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), norm_layer("batch", 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        return self.norm(out) + out


def test_only_plain_sequences_count() -> None:
    assert spare_biases(Apart()) == []


def looks_inside(net: Net, batch: Batch, given: Given) -> Tensor:
    seen: list[Tensor] = []
    layer = next(m for m in net.module.modules() if isinstance(m, nn.Conv2d))
    handle = layer.register_forward_hook(lambda layer, _, out: seen.append(out))
    try:
        loss = supervised(net, batch, given)
    finally:
        handle.remove()
    return loss + seen[0].square().mean()


BIASED = {
    "model": Named("vgg16", {"width": 0.0625, "hidden": [8], "dropout": 0.0, "norm": "batch"})
}


def test_an_objective_that_looks_inside_keeps_them() -> None:
    assert may_spare_biases(group_with(objective=supervised, **BIASED))
    assert not may_spare_biases(group_with(objective=looks_inside, **BIASED))


@pytest.mark.parametrize("way", ["stack", "slots"])
@pytest.mark.usefixtures("images_as_they_are")
def test_training_gives_the_same(way: str) -> None:
    train: dict[str, Any] = {
        "train": Train(epochs=1, batch=20, lr=0.01, momentum=0.5, weight_decay=0.1)
    }
    made, federation, site = federation_of("heterofl", **BIASED, **train)
    errands, engine = errands_of(federation, 4), recording(way)
    engine.open(made, site)
    assert_same(alone(made, errands, site), list(engine.run(errands)), 1e-3)
