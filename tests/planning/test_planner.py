"""From a module to a plan: the operations found, where the buffers lie, and what it all takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nestling.devices.fit import RATIOS
from nestling.errors import InputError
from nestling.models import build
from nestling.planning import descriptor, forecast
from nestling.planning.arena import Buffer, aligned, floor_of, place
from nestling.planning.descriptor import (
    INPUT_GRADIENT,
    NONE,
    RELU,
    RELU6,
    TRAINED,
    DescriptorSettings,
)
from nestling.planning.graph import Graph, Node, Unsupported, affine_of, lower
from nestling.planning.plan import MemoryPlan, plan
from nestling.runs.assemble import reference_network
from nestling.tiny.runtime import native, toolchain
from nestling.tiny.runtime.data import pack
from nestling.tiny.runtime.job import Job, Step
from nestling.world import ratio_view
from tests.devices.networks_for_cost import Residual, digits, ds_cnn
from tests.tiny import arena_run

NETWORKS = [
    ("tinycnn", (1, 8, 8), {}),
    ("tinycnn", (1, 28, 28), {"norm": "none"}),
    ("cnn", (1, 28, 28), {"width": 0.1}),
    ("dscnn", (1, 49, 10), {"kernel": (10, 4), "norm": "none", "width": 0.5}),
    ("dscnn", (1, 25, 10), {"width": 0.25, "norm": "group"}),
    ("resnet8", (3, 32, 32), {"width": 0.25}),
    ("resnet8", (3, 32, 32), {"norm": "none"}),
    ("tinyresnet", (1, 28, 28), {}),
    ("mlp", (1, 8, 8), {}),
    ("autoencoder", (1, 8, 8), {}),
    ("autoencoder", (40,), {"norm": "group", "hidden": (16, 12), "code": 4}),
    ("cnn1d", (3, 32), {}),
    ("mobilenetv2", (3, 32, 32), {"width": 0.25}),
    ("tinyexits", (1, 28, 28), {}),
]


def network(name: str, shape: tuple[int, ...], options: dict[str, object]) -> nn.Module:
    torch.manual_seed(1)
    return build(name, shape=shape, classes=10, **options)


def forward(graph: Graph, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The graph computed by torch, one sample."""
    values = {graph.input: x.reshape(graph.shapes[graph.input])[None]}
    for node in graph.nodes:
        inputs = [values[value] for value in node.inputs]
        out = OPERATIONS[node.kind](node, inputs, state)
        if node.activation:
            out = F.relu(out) if node.activation == RELU else F.relu6(out)
        assert tuple(out.shape[1:]) == graph.shapes[node.output]
        values[node.output] = out
    return values[graph.output].flatten(1)


def of(state: dict[str, Tensor], name: str | None) -> Tensor | None:
    return None if name is None else state[name]


def conv(node: Node, inputs: list[Tensor], state: dict[str, Tensor]) -> Tensor:
    weight = state[node.weight or ""]
    weight = weight.reshape(*weight.shape[:2], *node.kernel)
    return F.conv2d(
        inputs[0], weight, of(state, node.bias), node.stride, node.padding, groups=node.groups
    )


def affine(node: Node, inputs: list[Tensor], state: dict[str, Tensor]) -> Tensor:
    scale, shift = affine_of(node, state)
    return inputs[0] * scale[:, None, None] + shift[:, None, None]


OPERATIONS: dict[str, Callable[[Node, list[Tensor], dict[str, Tensor]], Tensor]] = {
    "conv": conv,
    "affine": affine,
    "dense": lambda n, x, s: F.linear(x[0].flatten(1), s[n.weight or ""], of(s, n.bias))[
        ..., None, None
    ],
    "max_pool": lambda n, x, s: F.max_pool2d(x[0], n.kernel, n.stride, n.padding),
    "avg_pool": lambda n, x, s: F.avg_pool2d(x[0], n.kernel, n.stride, n.padding),
    "add": lambda n, x, s: x[0] + x[1],
    "group_norm": lambda n, x, s: F.group_norm(
        x[0], n.groups, of(s, n.weight), of(s, n.bias), n.eps
    ),
    "activation": lambda n, x, s: x[0],
}


def same(module: nn.Module, shape: tuple[int, ...], *, inference: bool = False) -> Graph:
    """The module's graph, which computes what the module computes."""
    graph = lower(module, shape, inference=inference)
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(3))
    module.train(not inference)
    with torch.no_grad():
        expected = torch.cat([module(row[None]).flatten(1) for row in x])
        found = torch.cat([forward(graph, module.state_dict(), row) for row in x])
    assert torch.allclose(found, expected, atol=1e-5), (found - expected).abs().max()
    return graph


@pytest.mark.parametrize(("name", "shape", "options"), NETWORKS)
def test_a_graph_computes_what_its_network_computes(
    name: str, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    module = network(name, shape, options)
    graph = same(module, shape)
    if name != "tinyexits":  # whose other exits no output depends on
        assert set(graph.weights) == set(module.state_dict()) == set(graph.trainable)


def test_a_narrow_view_lowers_too() -> None:
    reference = reference_network("tinycnn", {}, (1, 8, 8), 10, 0, "main")
    graph = same(reference.network(ratio_view(reference, 0.3)), (1, 8, 8))
    assert graph.shapes[1] == (8, 4, 4)  # of 20 channels: whole groups of four


@pytest.mark.parametrize("norm", ["tracked", "sbn"])
def test_running_statistics_become_an_affine_for_inference(norm: str) -> None:
    module = network("tinycnn", (1, 8, 8), {"norm": "tracked"})
    module.train()
    for _ in range(3):
        module(torch.randn(8, 1, 8, 8))
    graph = same(module.eval(), (1, 8, 8), inference=True)
    assert [node.kind for node in graph.nodes].count("affine") == 3
    with pytest.raises(Unsupported, match="batch normalisation"):
        lower(module, (1, 8, 8))
    with pytest.raises(Unsupported, match="batch normalisation"):
        plan(graph)
    frozen = plan(graph, freeze=tuple(graph.weights))
    assert frozen.trained == 0
    assert frozen.header.output_grad == NONE
    entry = next(entry for entry in frozen.names if entry.name == graph.nodes[1].variance)
    scale, _ = affine_of(graph.nodes[1], module.state_dict())
    assert np.array_equal(
        frozen.pack(module.state_dict())[entry.offset : entry.offset + entry.size], scale.numpy()
    )


class Functional(nn.Module):
    """Written without layers for most of it, partly in place, with values read more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)),
            nn.Parameter(torch.randn(5, 48) / 20),
        )
        self.scale, self.shift = (
            nn.Parameter(torch.randn(4, 1, 1)),
            nn.Parameter(torch.randn(1, 4, 1, 1)),
        )
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        r = torch.relu(h) + F.hardtanh(h, 0.0, 6.0)
        r = r * self.scale + self.shift
        r.relu_()
        F.gelu(r)  # nobody wants it
        q = F.max_pool2d(r, (2, 1))
        q += F.avg_pool2d(r, (2, 1))
        q = q + q
        return F.linear(F.dropout(q, 0.0).flatten(1), self.b)


class Sequence(nn.Module):
    """1-D: convolution, both poolings, and the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(3, 4, 3, padding=1, groups=1), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool1d(F.max_pool1d(F.relu6(self.conv(x)), 3, stride=2, padding=1), 2)
        return self.head(x.mean(2))


def test_functional_code_and_values_read_twice() -> None:
    graph = same(Functional(), (2, 8, 7))
    kinds = [node.kind for node in graph.nodes]
    assert kinds == [
        "conv",
        "activation",
        "activation",
        "add",
        "affine",
        "max_pool",
        "avg_pool",
        "add",
        "add",
        "dense",
    ]
    assert [node.activation for node in graph.nodes][1:5] == [RELU, RELU6, 0, RELU]
    assert graph.nodes[4].weight == "scale"
    assert graph.nodes[4].bias == "shift"
    assert list(graph.weights) == ["b", "scale", "shift", "a.weight", "a.bias"]


def test_sequences_have_height_one() -> None:
    graph = same(Sequence(), (3, 12))
    assert graph.shapes[0] == (3, 1, 12)
    assert [node.kernel for node in graph.nodes] == [(1, 3), (1, 3), (1, 2), (1, 3), (1, 1)]


def test_adaptive_pooling_that_divides() -> None:
    same(
        nn.Sequential(
            nn.Conv2d(1, 2, 1),
            nn.AdaptiveAvgPool2d((4, 2)),
            nn.AdaptiveMaxPool2d((2, 2)),
            nn.Flatten(),
        ),
        (1, 8, 8),
    )


class Odd(nn.Module):
    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.what = nn.Conv2d(1, 2, 3), what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self.conv(x)).flatten(1)


def odd(what: Callable[[Tensor], Tensor]) -> nn.Module:
    return Odd(what)


@pytest.mark.parametrize(
    ("module", "layer", "operation"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU()), "1", "GELU"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), "1", "batch normalisation"),
        (nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2)), "0", "dilation"),
        (nn.Sequential(nn.ConvTranspose2d(1, 2, 3)), "0", "transposed"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.5)), "1", "dropout"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(4)),
            "1",
            "adaptive pooling of 6x6 to 4x4",
        ),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(6, 2)), "1", "several rows"),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LayerNorm(72)),
            "2",
            "layer normalisation",
        ),
        (nn.Sequential(nn.MaxPool2d(17, padding=8)), "0", "maximum over 289"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Hardtanh()), "1", "-1"),
        (odd(lambda x: torch.cat([x, x], 1)), "", "concatenation"),
        (odd(lambda x: x.transpose(2, 3).relu()), "", "transposed"),
        (odd(lambda x: x[:, :1].relu()), "", "part"),
        (odd(lambda x: x * x), "", "product"),
        (odd(lambda x: x * 2), "", "product"),
        (odd(lambda x: x + 1), "", "sum"),
        (odd(lambda x: x + x.mean((2, 3), keepdim=True)), "", "unequal shapes"),
        (odd(lambda x: x.mean(1)), "", "mean over channels"),
        (odd(lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False)), "", "cut window"),
        (odd(lambda x: F.conv2d(x.reshape(1, 1, 12, 6), torch.ones(1, 1, 1, 1))), "", "reshaped"),
        (odd(lambda x: F.group_norm(x, 1, torch.ones(2))), "", "computed weight"),
    ],
)
def test_what_the_runtime_lacks_is_named(module: nn.Module, layer: str, operation: str) -> None:
    with pytest.raises(Unsupported) as caught:
        lower(module, (1, 8, 8))
    assert caught.value.layer == layer
    assert operation in caught.value.operation
    assert caught.value.fix
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize(("name", "shape", "options"), NETWORKS)
def test_a_plan_reaches_the_floor_and_loses_nothing(
    name: str, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    made = plan(network(name, shape, options), shape, momentum=True, mask=True)
    assert made.parts["activations"] == made.floor
    assert sum(made.parts.values()) == made.arena
    if made.arena < 2**20:
        arena_run.run(made)


def test_the_descriptor_comes_back() -> None:
    made = plan(
        network("resnet8", (3, 16, 16), {"width": 0.25}),
        (3, 16, 16),
        anchor=True,
        target=True,
        present=True,
        scales=[((), 4 / 3)],
    )
    header, ops = descriptor.from_bytes(made.descriptor)
    assert header == made.header
    assert tuple(ops) == made.ops
    assert {op.scale for op in ops if op.kind == descriptor.CONV} == {float(np.float32(4 / 3))}
    assert {op.scale for op in ops if op.kind != descriptor.CONV} == {1.0}
    assert len(made.descriptor) == descriptor.HEADER_BYTES + len(ops) * descriptor.OP_BYTES


def test_a_digit_network_by_hand() -> None:
    """The ReLUs go behind the pools, so that the large maps are dead before the backward: it peaks
    at the first pool, both ways."""
    made = plan(digits(1.0, 28), (1, 28, 28))
    image, large, pooled, winners = 4 * 28 * 28, 4 * 8 * 28 * 28, 4 * 8 * 14 * 14, 8 * 14 * 14
    assert made.parts == {
        "weights": 4 * 9098,
        "gradients": 4 * 9098,
        "activations": image + large + pooled + winners,
    }
    assert [op.activation for op in made.ops] == [0, RELU, 0, RELU, 0]
    both = TRAINED + INPUT_GRADIENT
    assert [op.flags for op in made.ops] == [TRAINED, INPUT_GRADIENT, both, INPUT_GRADIENT, both]
    assert made.header.output == made.header.output_grad


def test_the_keyword_network_against_the_feasibility_study() -> None:
    """492 and 580 KB, and under 240 KB in all at half width."""
    whole = plan(ds_cnn(), (1, 49, 10))
    assert whole.params == 22_604
    assert (whole.arena + len(whole.descriptor)) / 1024 == pytest.approx(492, abs=0.5)
    moving = plan(ds_cnn(), (1, 49, 10), momentum=True)
    assert (moving.arena + len(moving.descriptor)) / 1024 == pytest.approx(580, abs=0.5)
    assert sum(forecast.ram(plan(ds_cnn(0.5), (1, 49, 10))).values()) < 240 * 1024
    ours = network("dscnn", (1, 49, 10), {"kernel": (10, 4), "norm": "none", "width": 0.5})
    assert sum(forecast.ram(plan(ours, (1, 49, 10))).values()) < 240 * 1024


def test_blocks_come_only_when_asked_for() -> None:
    graph = lower(digits(), (1, 8, 8))
    bare, full = (
        plan(graph),
        plan(graph, momentum=True, anchor=True, mask=True, target=True, present=True),
    )
    header = bare.header
    assert (header.momentum, header.anchor, header.mask, header.target, header.present) == (
        NONE,
    ) * 5
    assert full.parts["momentum"] == full.parts["anchor"] == 4 * 1898
    assert full.parts["mask"] == aligned(math.ceil(1898 / 8)) == 4 * math.ceil(1898 / 32)
    assert full.parts["target"] == full.parts["present"] == 40
    assert full.arena - bare.arena == sum(full.parts[name] for name in forecast.BLOCKS)
    arena_run.run(full)


def test_a_frozen_prefix_keeps_no_activations() -> None:
    module = network("resnet8", (3, 32, 32), {"width": 0.5})
    whole, part = (
        plan(module, (3, 32, 32)),
        plan(module, (3, 32, 32), freeze=("stem", "stages.0", "stages.1")),
    )
    head = plan(module, (3, 32, 32), freeze=("stem", "stages"))
    arena_run.run(part)
    arena_run.run(head)
    assert whole.params == part.params == head.params
    assert head.trained == 32 * 10 + 10
    assert [bool(op.flags) for op in head.ops] == [False] * (len(head.ops) - 1) + [True]
    assert head.ops[-1].flags == TRAINED
    assert whole.parts["activations"] > part.parts["activations"] >= head.parts["activations"]
    # The block of parameters begins with the trained ones.
    assert [entry.trained for entry in part.names] == sorted(
        (entry.trained for entry in part.names), reverse=True
    )
    frozen = next(node for node in part.graph.nodes if node.weight == "stages.2.0.conv1.weight")
    # and no gradient for what comes before
    assert part.ops[part.graph.nodes.index(frozen)].flags == TRAINED


def test_a_layer_may_be_frozen_in_part() -> None:
    made = plan(digits(), (1, 8, 8), freeze=("0.weight", "7.bias"))
    assert {entry.name for entry in made.names if not entry.trained} == {"0.weight", "7.bias"}
    assert made.ops[0].flags == TRAINED
    arena_run.run(made)


def test_states_go_in_and_out() -> None:
    module = network("tinyresnet", (1, 28, 28), {})
    state = module.state_dict()
    made = plan(module, (1, 28, 28), freeze=("stem",))
    flat = made.pack(state)
    assert flat.dtype == np.float32
    assert flat.shape == (made.params,)
    back = made.unpack(flat + 1, state)
    assert list(back) == list(state)
    for name, tensor in state.items():
        moved = 0 if name.startswith("stem") else 1
        assert torch.equal(back[name], tensor + moved)
        assert back[name].data_ptr() != tensor.data_ptr()
    with pytest.raises(InputError, match="parameters"):
        made.unpack(flat[1:], state)
    with pytest.raises(InputError, match="shape"):
        made.pack(network("tinyresnet", (1, 28, 28), {"width": 0.5}).state_dict())


def test_a_mask_in_the_order_of_the_plan() -> None:
    module = digits()
    made = plan(module, (1, 8, 8), freeze=("0.weight",), mask=True)
    flags = {
        name: torch.rand(tensor.shape) < 0.5
        for name, tensor in module.state_dict().items()
        if name != "3.weight"
    }
    found = made.mask(flags)
    for entry in made.names:
        if entry.trained:
            part = found[entry.offset : entry.offset + entry.size]
            expected = flags.get(entry.name, torch.ones(entry.shape, dtype=torch.bool))
            assert np.array_equal(part, expected.flatten().numpy())


def test_logits_that_end_in_an_activation_are_kept_apart_from_their_gradient() -> None:
    made = plan(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (4,))
    assert made.header.output != made.header.output_grad
    arena_run.run(made)


def test_a_forecast_needs_no_second_plan() -> None:
    graph = lower(digits(), (1, 8, 8))
    size = forecast.footprint(plan(graph))
    made = plan(graph, momentum=True, mask=True, present=True)
    assert forecast.ram(made) == forecast.ram(size, ("momentum", "mask", "present"))
    parts = forecast.ram(made)
    assert sum(parts.values()) == forecast.FIRMWARE.statics + len(made.descriptor) + made.arena
    with pytest.raises(InputError, match="momentun"):
        forecast.ram(size, ("momentun",))


class Uneven(nn.Module):
    """A pool over the edge, a group norm without weights, a value that an activation and a pool
    read, logits that end in a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4, affine=False)
        self.b, self.head = nn.Conv2d(4, 4, 2, stride=2, groups=2), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        q = F.relu6(F.max_pool2d(h, 2, ceil_mode=True)) + F.max_pool2d(F.relu(h), 2, ceil_mode=True)
        return F.relu(self.head(self.b(q).mean((2, 3))))


@pytest.mark.parametrize("freeze", [(), ("a.weight",), ("a",)])
@pytest.mark.parametrize(
    ("module", "shape"), [(Functional, (2, 8, 7)), (Uneven, (2, 7, 7)), (Sequence, (3, 12))]
)
def test_a_plan_trains_as_torch_does(
    module: type[nn.Module], shape: tuple[int, ...], freeze: tuple[str, ...]
) -> None:
    if toolchain.host_compiler() is None:
        pytest.skip("there is no C compiler: apt-get install gcc, or pip install nestling[tiny]")
    torch.manual_seed(5)
    net, x, y = module(), torch.randn(12, *shape), torch.arange(12) % 2
    made = plan(net, shape, freeze=freeze, momentum=True)
    steps = [Step(np.arange(4) + 4 * k) for k in range(3)]
    done = native.run_job(
        Job(made, made.pack(net.state_dict()), DescriptorSettings(lr=0.02, momentum=0.9), steps),
        pack(x, y),
    )
    found = made.unpack(done.weights, net.state_dict())
    trained = [
        p
        for n, p in net.named_parameters()
        if not any(n == f or n.startswith(f + ".") for f in freeze)
    ]
    optimiser = torch.optim.SGD(trained, lr=0.02, momentum=0.9)
    for step in steps:
        net.zero_grad()
        F.cross_entropy(net(x[step.rows]), y[step.rows]).backward()
        optimiser.step()
    for name, tensor in net.state_dict().items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), name


def test_a_weight_under_two_names_is_refused() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(Unsupported, match="second name"):
        lower(tied, (4,))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tinycnn", (1, 28, 28)),
        ("dscnn", (1, 49, 10)),
        ("resnet8", (3, 32, 32)),
        ("cnn1d", (3, 32)),
    ],
)
def test_a_wider_piece_never_takes_less(name: str, shape: tuple[int, ...]) -> None:
    options = {"norm": "group"} if name == "dscnn" else {}
    reference = reference_network(name, options, shape, 10, 0, "main")
    sizes = [
        sum(forecast.ram(plan(reference.network(ratio_view(reference, r)), shape)).values())
        for r in RATIOS[::2]
    ]
    assert sizes == sorted(sizes)


def test_too_many_operations_and_too_wide_a_layer() -> None:
    with pytest.raises(Unsupported, match="257 operations"):
        plan(nn.Sequential(*(nn.Linear(1, 1) for _ in range(257))), (1,))
    with pytest.raises(Unsupported, match="such a size"):
        plan(nn.Linear(70_000, 1), (70_000,))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Chains with residuals, pools, norms and values that several operations read."""
    shapes = [(draw(st.integers(1, 4)), draw(st.integers(2, 6)), draw(st.integers(1, 6)))]
    nodes: list[Node] = []
    weights: dict[str, tuple[int, ...]] = {}
    for index in range(draw(st.integers(1, 12))):
        source = draw(st.integers(max(0, len(shapes) - 3), len(shapes) - 1))
        node, shape = draw(operations(index, source, shapes, weights))
        shapes.append(shape)
        nodes.append(node)
    weights["head"] = (3, math.prod(shapes[-1]))
    nodes.append(
        Node(
            "dense",
            (len(shapes) - 1,),
            len(shapes),
            "head",
            activation=draw(st.sampled_from([0, 0, RELU])),
        )
    )
    return trimmed(nodes, [*shapes, (3, 1, 1)], weights)


@st.composite
def operations(
    draw: st.DrawFn,
    index: int,
    source: int,
    shapes: list[tuple[int, int, int]],
    weights: dict[str, tuple[int, ...]],
) -> tuple[Node, tuple[int, int, int]]:
    channels, high, wide = shapes[source]
    kind = draw(
        st.sampled_from(
            [
                "conv",
                "conv",
                "add",
                "add",
                "max_pool",
                "avg_pool",
                "group_norm",
                "affine",
                "activation",
            ]
        )
    )
    node = Node(
        kind,
        (source,),
        len(shapes),
        activation=draw(st.sampled_from([0, RELU, RELU6])),
        layer=str(index),
    )
    if kind == "conv":
        out = draw(st.integers(1, 4))
        weights |= {f"w{index}": (out, channels, 3, 3), f"b{index}": (out,)}
        return replace(node, weight=f"w{index}", bias=f"b{index}", kernel=(3, 3), padding=(1, 1)), (
            out,
            high,
            wide,
        )
    if kind in ("group_norm", "affine"):
        weights |= {f"w{index}": (channels,), f"b{index}": (channels,)}
        return replace(
            node,
            weight=f"w{index}",
            bias=f"b{index}",
            groups=channels if kind == "group_norm" else 1,
        ), shapes[source]
    if kind == "add":
        other = draw(
            st.sampled_from(
                [value for value, shape in enumerate(shapes) if shape == shapes[source]]
            )
        )
        return replace(node, inputs=(source, other)), shapes[source]
    if kind == "activation":
        return replace(node, activation=RELU), shapes[source]
    kernel = (min(2, high), min(2, wide))
    return replace(node, kernel=kernel, stride=kernel), (
        channels,
        high // kernel[0],
        wide // kernel[1],
    )


def trimmed(
    nodes: list[Node], shapes: list[tuple[int, int, int]], weights: dict[str, tuple[int, ...]]
) -> Graph:
    """Without what the output does not depend on."""
    wanted = {nodes[-1].output}
    for node in reversed(nodes):
        wanted |= set(node.inputs) if node.output in wanted else set()
    kept = [node for node in nodes if node.output in wanted]
    number = {value: place for place, value in enumerate([0, *(node.output for node in kept)])}
    kept = [
        replace(node, inputs=tuple(number[v] for v in node.inputs), output=number[node.output])
        for node in kept
    ]
    used = {name for node in kept for name in (node.weight, node.bias) if name}
    left = {name: shape for name, shape in weights.items() if name in used}
    return Graph(
        tuple(kept),
        tuple(shapes[value] for value in number),
        0,
        len(number) - 1,
        left,
        frozenset(left),
    )


@settings(max_examples=300, deadline=None)
@given(graph=graphs(), data=st.data())
def test_no_buffer_of_any_plan_destroys_another(graph: Graph, data: st.DataObject) -> None:
    if 0 not in {value for node in graph.nodes for value in node.inputs}:
        return
    freeze = data.draw(st.sets(st.sampled_from(sorted(graph.weights))))
    arena_run.run(
        plan(graph, freeze=tuple(freeze), momentum=data.draw(st.booleans()), mask=True, target=True)
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 10), st.integers(0, 6)),
        min_size=1,
        max_size=20,
    )
)
def test_placed_buffers_are_apart_while_both_exist(drawn: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(size, start, start + length) for size, start, length in drawn]
    offsets, total = place(buffers)
    assert floor_of(buffers) <= total <= sum(aligned(buffer.size) for buffer in buffers)
    for step in range(17):
        taken = sorted(
            (at, at + b.size)
            for at, b in zip(offsets, buffers, strict=True)
            if b.start <= step <= b.end
        )
        assert all(at % 4 == 0 and end <= total for at, end in taken)
        assert all(one[1] <= other[0] for one, other in pairwise(taken))
    assert place(buffers) == (offsets, total)


def broken(made: MemoryPlan) -> list[MemoryPlan]:
    """Plans in which one place is wrong by a word."""
    found = []
    for index, op in enumerate(made.ops):
        for name in ("out", "first_grad", "aux"):
            if getattr(op, name) not in (NONE, made.header.output):
                ops = list(made.ops)
                ops[index] = replace(op, **{name: getattr(op, name) - 4})
                found.append(replace(made, ops=tuple(ops)))
    return found


def test_the_checker_finds_plans_that_are_wrong_by_a_word() -> None:
    wrong = broken(plan(Residual(), (4,))) + broken(plan(digits(), (1, 8, 8)))
    assert len(wrong) > 8
    for made in wrong:
        with pytest.raises(AssertionError):
            arena_run.run(made)
