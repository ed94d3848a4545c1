"""The cost of a network, against pencil, autograd, torch's own flop counter, and arenas that really
trained."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nestling.devices import cost_of
from nestling.errors import InputError
from nestling.models.record import record
from tests.devices.networks_for_cost import (
    Residual,
    TwoBranches,
    auto_encoder,
    digits,
    ds_cnn,
    resnet8,
    resnet18,
)


def test_one_layer_by_hand() -> None:
    cost = cost_of(nn.Linear(4, 3), (4,))
    assert (cost.params, cost.weight_bytes, cost.trainable_bytes) == (15, 60, 60)
    # nothing before it is trained: no input gradient
    assert (cost.macs, cost.train_macs) == (12, 24)
    assert cost.activation_bytes == 28  # x 16, output (or its gradient, in place) 12
    assert (cost.inference_bytes, cost.layers) == (28, 1)


@pytest.mark.parametrize("inplace", [False, True])
def test_two_layers_by_hand(inplace: bool) -> None:
    cost = cost_of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=inplace), nn.Linear(3, 2)), (4,))
    assert (cost.macs, cost.train_macs) == (18, 18 + 18 + 6)
    # Peak in the backward of the second layer: x 16, h 12 (ReLU still needs it), dy 8, dh 12.
    assert cost.activation_bytes == 48
    assert cost.inference_bytes == 28
    assert cost.layers == 2


def test_pooling_keeps_index_bytes_by_hand() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    )
    # Peak in the backward of the pool: x 64, a 128 (for ReLU), 8 index bytes, dp 32, da 128.
    assert cost_of(net, (1, 4, 4)).activation_bytes == 360
    without_relu = nn.Sequential(net[0], *net[2:])
    # a is gone after the pool's forward, since the indices stand in for it.
    assert cost_of(without_relu, (1, 4, 4)).activation_bytes == 64 + 8 + 32 + 128


def test_residual_addition_by_hand() -> None:
    # Backward of the last layer: x, h, s, dy, ds, 16 bytes each; the addition overwrites the branch
    # and hands its gradient on.
    assert cost_of(Residual(), (4,)).activation_bytes == 80
    assert cost_of(Residual(), (4,)).inference_bytes == 48 - 16  # x is dead after the first layer


def test_concatenation_by_hand() -> None:
    cost = cost_of(TwoBranches(), (1, 2, 2))
    assert cost.macs == 4 * 2 + 4 * 3 + 40
    # Backward of the last layer: x 16, cat 80, dy 8, dcat 80.
    assert cost.activation_bytes == 184
    assert cost.layers == 4


def test_unknown_operation_keeps_all_it_touched() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.special.erfinv(self.a(x)))

    # Backward of erfinv: x 16, its input 12, its output 12, both gradients 24.
    assert cost_of(Odd(), (4,)).activation_bytes == 64


def test_frozen_prefix_costs_neither_memory_nor_gradients() -> None:
    net = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 3), nn.ReLU(), nn.Linear(3, 2))
    whole = cost_of(net, (4,))
    for layer in net[:3]:
        layer.requires_grad_(False)
    head = cost_of(net, (4,))
    assert head.params == 8
    assert head.weight_bytes == whole.weight_bytes
    assert head.macs == whole.macs == 120 + 90 + 6
    assert head.train_macs == head.macs + 6
    # the forward alone is the peak
    assert head.activation_bytes == head.inference_bytes == 120 + 16
    assert whole.activation_bytes > head.activation_bytes


# (network, input, arena that trained bit-exactly with momentum, index bytes alive at the peak)
ARENAS = [
    (digits(1.0, 8), (1, 8, 8), 28_152, 8 * 16),
    (digits(0.5, 8), (1, 8, 8), 10_808, 4 * 16),
    (digits(0.25, 8), (1, 8, 8), 4_728, 2 * 16),
    (digits(1.0, 28), (1, 28, 28), 175_032, 8 * 196),
    (digits(0.5, 28), (1, 28, 28), 85_688, 4 * 196),
    (ds_cnn(0.5), (1, 49, 10), 264_504, 0),
    (ds_cnn(0.25), (1, 49, 10), 121_016, 0),
]


@pytest.mark.parametrize(("net", "shape", "arena", "indices"), ARENAS)
def test_arena_of_the_c_runtime(
    net: nn.Module, shape: tuple[int, ...], arena: int, indices: int
) -> None:
    """The prototype's arenas are hit to the byte but for the pool indices, which it did not keep:
    under 1 % more."""
    cost = cost_of(net, shape)
    assert cost.weight_bytes + 2 * cost.trainable_bytes + cost.activation_bytes == arena + indices
    assert indices < 0.01 * arena


@pytest.mark.parametrize(
    ("net", "shape", "params", "million"),
    [
        (ds_cnn(), (1, 49, 10), 22_604, 2.66),
        (resnet8(), (3, 32, 32), 77_706, 12.5),
        (auto_encoder(), (640,), 265_864, 0.26),
    ],
)
def test_published_macs(
    net: nn.Module, shape: tuple[int, ...], params: int, million: float
) -> None:
    cost = cost_of(net, shape)
    assert cost.macs / 1e6 == pytest.approx(million, rel=0.02)
    assert cost.params == params


@pytest.mark.parametrize(
    ("net", "shape", "train_macs"),
    [
        (digits(1, 8), (1, 8, 8), 66e3),
        (digits(1, 28), (1, 28, 28), 814e3),
        (ds_cnn(0.25), (1, 49, 10), 761e3),
    ],
)
def test_training_macs_of_the_prototype(
    net: nn.Module, shape: tuple[int, ...], train_macs: float
) -> None:
    assert cost_of(net, shape).train_macs == pytest.approx(train_macs, rel=0.01)


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )


def transposed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.ConvTranspose2d(3, 2, 3, stride=2))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (digits, (1, 8, 8)),
        (ds_cnn, (1, 49, 10)),
        (resnet8, (3, 32, 32)),
        (conv1d, (2, 14)),
        (transposed, (1, 5, 5)),
        (Residual, (4,)),
        (lambda: nn.Linear(4, 6), (5, 4)),
    ],
)
def test_macs_equal_the_flops_torch_counts(make: type[nn.Module], shape: tuple[int, ...]) -> None:
    net = make()
    sample = torch.randn(1, *shape)
    with FlopCounterMode(display=False) as forward:
        net(sample)
    with FlopCounterMode(display=False) as both:
        net(sample).sum().backward()
    cost = cost_of(net, shape)
    assert cost.macs * 2 == forward.get_total_flops()
    grouped = any(getattr(part, "groups", 1) > 1 for part in net.modules())
    if not grouped:  # torch counts the weight gradient of a grouped convolution as if it were dense
        assert cost.train_macs * 2 == both.get_total_flops()


class Causal(nn.Module):
    """As much of attention as knows what is later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        likeness = self.layer(x)
        return likeness.masked_fill(steps > steps[:, None], -math.inf).softmax(-1)


def saved_bytes(net: nn.Module, sample: Tensor) -> int:
    """Bytes autograd really holds after a forward, weights aside."""
    weights = {
        tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())
    }
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(sample)
    total = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    del out
    return total


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Sigmoid()), (3, 8, 8)),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 1)),
            (3, 8, 8),
        ),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)),
            (3, 8, 8),
        ),
        (
            nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4), nn.Tanh()),
            (6,),
        ),
        (nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Softmax(1)), (6,)),
        (Residual(), (4,)),
        (TwoBranches(), (1, 2, 2)),
        (resnet8(), (3, 32, 32)),
        (Causal(), (5, 5)),
    ],
)
def test_what_is_kept_is_what_autograd_saves(net: nn.Module, shape: tuple[int, ...]) -> None:
    forward = record(net, shape)
    kept = {
        value for operation in forward.operations if operation.trained for value in operation.keeps
    }
    assert sum(forward.bytes[value] for value in kept) == saved_bytes(
        net.train(), torch.randn(1, *shape)
    )


def test_attention_and_recurrence_are_counted() -> None:
    layer = cost_of(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8))
    assert layer.macs == 5 * 8 * 24 + 2 * (2 * 5 * 5 * 4) + 5 * 8 * 8 + 2 * 5 * 8 * 16
    lstm = cost_of(nn.LSTM(4, 6, batch_first=True), (2, 4))
    assert lstm.macs == 2 * (4 + 6) * 24
    # only the second step has a trained input: the first's hidden state
    assert lstm.train_macs == 2 * lstm.macs + 6 * 24


def test_batch_statistics_of_a_single_value() -> None:
    """Torch refuses BatchNorm1d on one sample in training; the cost of one sample is still
    known."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    normed = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    a, b = cost_of(plain, (4,)), cost_of(normed, (4,))
    assert a.macs == b.macs
    assert a.train_macs == b.train_macs
    assert b.params == a.params + 12
    assert b.weight_bytes == a.weight_bytes + 4 * 24 + 8
    assert b.activation_bytes > a.activation_bytes


def test_tokens_go_into_an_embedding() -> None:
    net = nn.Sequential(nn.Embedding(50, 5), nn.Flatten(), nn.Linear(15, 2))
    cost = cost_of(net, (3,))
    assert cost.macs == 30
    assert cost.params == 250 + 32


def test_shared_weights_count_once_and_plain_tensors_are_constants() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a
            self.scale = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * self.scale + torch.arange(4))

    cost = cost_of(Odd(), (4,))
    assert (cost.params, cost.weight_bytes, cost.macs) == (20, 80, 32)


def test_the_module_is_left_alone() -> None:
    net = resnet8().eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    cost_of(net, (3, 32, 32))
    assert torch.equal(state, torch.get_rng_state())
    assert not net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_large_network_needs_no_arithmetic() -> None:
    cost = cost_of(resnet18(), (3, 32, 32))
    assert cost.macs == pytest.approx(555e6, rel=0.01)
    assert (
        cost.inference_bytes
        < cost.activation_bytes
        < 4 * sum(record(resnet18(), (3, 32, 32)).bytes)
    )


def test_cost_grows_with_width() -> None:
    costs = [cost_of(digits(k / 8), (1, 8, 8)) for k in range(1, 9)]
    for small, large in pairwise(costs):
        assert small.params < large.params
        assert small.train_macs < large.train_macs
        assert small.activation_bytes < large.activation_bytes


class Peeks(nn.Module):
    """Looks at a value, which a recording without arithmetic cannot know."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x


@pytest.mark.parametrize(
    ("net", "shape", "field"),
    [
        (digits(), (3, 8, 8), "model"),
        (Peeks(), (4,), "model"),
        (digits(), (1, 0, 8), "shape"),
        (digits(), (1, 8.0, 8), "shape"),
    ],
)
def test_bad_inputs_say_what_is_wrong(net: nn.Module, shape: tuple[int, ...], field: str) -> None:
    with pytest.raises(InputError) as caught:
        cost_of(net, shape)
    assert caught.value.field == field
    assert caught.value.fix
