"""What `fit` says a training step takes on a device with torch, against what torch's allocator had
out at most in one step of the in-process engine on a CPU: within 15 %.

Not counted: torch and Python themselves (one number, `TORCH_RAM`), what the kernels of a
convolution need while they work, and what an optimiser makes for the length of its own step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestling.devices import Budget, catalogue, cost_of
from nestling.devices.fit import ram_parts
from nestling.models import MODELS, build
from nestling.training.objectives import Batch, Net, supervised
from nestling.training.optimisers import Buffers, Optim
from nestling.training.phase import Phase
from nestling.training.trainer import train_step

WITHIN = 0.15
TORCH_DEVICE = "raspberry-pi-zero-2w"


def most_out(step: Callable[[], object]) -> int:
    """The most bytes that the allocator had out at once, beyond those before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    out = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        out += event.nbytes()
        most = max(most, out)
    assert events and most > 0
    return most


def measured(net: nn.Module, x: Tensor, y: Tensor, optim: Optim) -> int:
    """Bytes at the peak of a step that is not the first: weights, what the optimiser remembers, the
    batch, and all that the step allocates."""
    net.train()
    phase = Phase(objective=supervised, epochs=1, batch=len(x), optim=optim)
    own, buffers = Net(net, dict(net.named_parameters())), Buffers()
    batch = Batch(x, y, torch.arange(len(x)))
    for _ in range(2):
        train_step(own, phase, batch, buffers)
    held = [*net.state_dict().values(), *buffers.tensors(), x]
    return sum(t.nbytes for t in held) + most_out(lambda: train_step(own, phase, batch, buffers))


def claimed(net: nn.Module, shape: tuple[int, ...], batch: int, optimizer: str) -> int:
    """What `fit` counts for it, less torch itself."""
    budget = Budget(batch, batch, 1, optimizer)
    parts = ram_parts(catalogue()[TORCH_DEVICE], cost_of(net, shape), budget)
    return sum(size for name, size in parts.items() if name != "runtime")


OPTIMS = {"momentum": Optim("sgd", 0.01, 0.9), "adam": Optim("adam", 0.001)}


def check(net: nn.Module, x: Tensor, y: Tensor, optimizer: str = "momentum") -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as every engine has it
    try:
        found = measured(net, x, y, OPTIMS[optimizer])
    finally:
        torch.set_num_threads(before)
    told = claimed(net, tuple(x.shape[1:]), len(x), optimizer)
    assert abs(told / found - 1) < WITHIN, f"fit says {told}, torch had {found} out"


# network: shape, classes, options; a text is of whole numbers, values are told by the last ones
NETWORKS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "vit": ((3, 32, 32), 10, {"depth": 2}),
    "kwt": ((1, 40, 49), 12, {"depth": 2}),
    "gpt": ((48,), 65, {"depth": 2}),
    "lstm": ((9, 64), 6, {"hidden": [64, 32]}),
    "forecaster": ((7, 96), 24 * 7, {}),
    "autoencoder": ((640,), 640, {}),
    "cnn": ((1, 28, 28), 10, {"channels": [16, 32, 32, 64]}),
}


def batch_for(net: nn.Module, name: str, size: int) -> tuple[Tensor, Tensor]:
    shape, classes, _ = NETWORKS[name]
    if name == "gpt":
        texts = torch.randint(classes, (size, *shape))
        return texts, texts.roll(-1, 1)
    x = torch.randn(size, *shape)
    of_values = name in ("forecaster", "autoencoder")
    return x, torch.randn(size, classes) if of_values else torch.randint(classes, (size,))


@pytest.mark.parametrize("size", [4, 24])
@pytest.mark.parametrize("width", [1.0, 0.5])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_takes_what_fit_says(name: str, width: float, size: int) -> None:
    torch.manual_seed(0)
    shape, classes, options = NETWORKS[name]
    net = build(name, shape=shape, classes=classes, width=width, **options)
    check(net, *batch_for(net, name, size))


class Steps(nn.Module):
    """Something over (rows, 9, steps), read at the last step."""

    def __init__(self, inner: nn.Module, inputs: int = 9, size: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(9, inputs) if inputs != 9 else nn.Identity()
        self.inner, self.head = inner, nn.Linear(size, 5)

    def forward(self, x: Tensor) -> Tensor:
        said = self.inner(self.first(x.transpose(1, 2)))
        return self.head((said[0] if isinstance(said, tuple) else said)[:, -1])


class ByCell(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 48)
        pair = (state, state)
        for step in x.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                pair = self.cell(step, pair)
            else:
                pair = (self.cell(step, pair[0]), state)
        return pair[0][:, None]


class Looks(nn.Module):
    """Torch's attention as a module or as a function."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.MultiheadAttention(48, 4, batch_first=True)
        self.qkv = nn.Linear(48, 144)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind != "function":
            return self.inner(x, x, x, need_weights=self.kind == "weights")[0]
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 12)).permute(2, 0, 3, 1, 4)
        said = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return said.transpose(1, 2).flatten(2)


def encoder(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(48, 4, 96, dropout=dropout, batch_first=True)


OWN: dict[str, Callable[[], nn.Module]] = {
    "LSTM of two layers": lambda: Steps(nn.LSTM(9, 48, 2, batch_first=True)),
    "LSTM both ways": lambda: Steps(nn.LSTM(9, 24, batch_first=True, bidirectional=True)),
    "LSTM of long inputs": lambda: Steps(nn.LSTM(96, 48, batch_first=True), inputs=96),
    "GRU": lambda: Steps(nn.GRU(9, 48, batch_first=True)),
    "GRU of two layers": lambda: Steps(nn.GRU(9, 48, 2, batch_first=True)),
    "RNN of two layers": lambda: Steps(nn.RNN(9, 48, 2, batch_first=True)),
    "LSTM cell": lambda: Steps(ByCell(nn.LSTMCell(9, 48))),
    "GRU cell": lambda: Steps(ByCell(nn.GRUCell(9, 48))),
    "encoder layer": lambda: Steps(encoder(), inputs=48),
    "encoder layer, dropout": lambda: Steps(encoder(0.1), inputs=48),
    "attention, module": lambda: Steps(Looks("module"), inputs=48),
    "attention, its weights told": lambda: Steps(Looks("weights"), inputs=48),
    "attention, function": lambda: Steps(Looks("function"), inputs=48),
}


@pytest.mark.parametrize("name", OWN)
def test_so_do_layers_of_ones_own_network(name: str) -> None:
    torch.manual_seed(0)
    check(OWN[name](), torch.randn(16, 9, 64), torch.randint(5, (16,)))


@pytest.mark.parametrize("name", ["lstm", "vit"])
def test_with_an_optimiser_that_remembers_more(name: str) -> None:
    torch.manual_seed(0)
    shape, classes, options = NETWORKS[name]
    net = build(name, shape=shape, classes=classes, **options)
    check(net, *batch_for(net, name, 24), "adam")


def test_scores_of_attention_grow_with_the_square_of_the_steps() -> None:
    """Written out, scores and their softmax are kept: two numbers a head and pair of steps."""

    def at(steps: int) -> int:
        return cost_of(build("kwt", shape=(40, steps), classes=4, depth=1), (40, steps)).torch_bytes

    longer, shorter, heads = at(191), at(95), 4
    scores = 4 * heads * (192**2 - 2 * 96**2)
    assert 2 * scores <= longer - 2 * shorter <= 4 * scores


SIDES = {"image": (3, 16, 16), "sequence": (3, 32), "any": (24,), "text": (12,)}
LEFT_OUT = ("lstm", "densenet", "resnet50", "resnet101", "resnet152")
"""The one that recurs; and large ones, of the same operations as smaller ones."""


@pytest.mark.parametrize("name", [n for n in sorted(MODELS) if not n.startswith(LEFT_OUT)])
def test_networks_without_recurrence_cost_what_they_did(name: str) -> None:
    """The bound with what torch does at once changes nothing where it does nothing at once."""
    shape = SIDES[MODELS[name].input]
    cost = cost_of(build(name, shape=shape, classes=4), shape)
    assert cost.torch_bytes == cost.activation_bytes
