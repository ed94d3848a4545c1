"""Eight bits: what is folded keeps its numbers; reference, tflite-micro and the C source agree to
the bit; little accuracy is lost."""

from __future__ import annotations

import ctypes
import math
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nestling.errors import InputError
from nestling.export import c_source, reference, sizes, tflite
from nestling.export.fold import fold, run
from nestling.export.quantise import (
    IntegerOperation,
    IntegerScale,
    Quantised,
    fixed_point,
    fixed_points,
    quantise,
    scale_of,
    to_int8,
    weight_scales,
)
from nestling.models import build
from nestling.models.norm import calibrate
from nestling.planning.arena import Buffer, floor_of
from nestling.planning.descriptor import LINEAR
from nestling.planning.graph import Unsupported
from nestling.tiny.runtime import elf, toolchain
from tests.export.exported import (
    SmallCNN,
    Zoo,
    digits,
    exported,
    network,
    on_cortex,
    on_host,
    oracle,
    spiced,
)

ROWS = 300
NETWORKS = ("small-cnn", "dscnn-tracked", "tinycnn-tracked", "tinycnn-group")
GROUPS = {"batch": nn.BatchNorm2d, "group": lambda channels: nn.GroupNorm(channels // 4, channels)}
CORES = {row[1]: row for row in sizes.CORES}
NO_GCC = "arm-none-eabi-gcc is not installed: apt-get install gcc-arm-none-eabi"


def zoo(norm: str) -> tuple[nn.Module, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return spiced(Zoo(GROUPS[norm])), torch.randn(40, *Zoo.shape)


@pytest.mark.parametrize("norm", ["none", "tracked", "sbn", "per-width", "group"])
@pytest.mark.parametrize(
    ("name", "shape", "width"),
    [
        ("tinycnn", (1, 28, 28), 0.5),
        ("dscnn", (1, 16, 12), 0.25),
        ("resnet8", (3, 16, 16), 0.5),
        ("tinyresnet", (1, 16, 16), 0.5),
        ("cnn1d", (6, 64), 0.5),
        ("mobilenetv2", (3, 32, 32), 0.125),
    ],
)
def test_folding_keeps_the_logits(
    name: str, shape: tuple[int, ...], width: float, norm: str
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, x = (
            spiced(build(name, shape=shape, classes=5, width=width, norm=norm)),
            torch.randn(4, *shape),
        )
    module = calibrate(module, [x])
    folded = fold(module, shape)
    found = run(folded, x)[folded.output].flatten(1)
    torch.testing.assert_close(found, module(x).detach(), rtol=1e-4, atol=1e-4)
    assert all(layer.kind != "affine" for layer in folded.layers)


def test_a_norm_with_fixed_statistics_costs_no_operation() -> None:
    plain, normed = (
        build("tinycnn", shape=(1, 28, 28), classes=10, norm=norm).eval()
        for norm in ("none", "tracked")
    )
    assert len(fold(normed, (1, 28, 28)).layers) == len(fold(plain, (1, 28, 28)).layers)


def test_batch_statistics_are_refused_with_a_way_out() -> None:
    with pytest.raises(InputError, match=r"batch normalisation.*model\.norm"):
        fold(build("tinycnn", shape=(1, 28, 28), classes=10, norm="batch").eval(), (1, 28, 28))


def test_a_flattened_map_that_is_not_read_by_a_dense_layer_is_refused() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3)
    ).eval()
    with pytest.raises(Unsupported, match="flattened"):
        fold(module, (1, 4, 4))


@settings(max_examples=300, deadline=None)
@given(x=st.integers(-(2**31), 2**31 - 1), real=st.floats(2.0**-20, 1.0, exclude_max=True))
def test_rescaling_is_off_by_less_than_a_whole_rounding(x: int, real: float) -> None:
    multiplier, shift = fixed_point(real)
    assert 2**30 <= multiplier < 2**31
    found = int(reference.rescaled(np.array([x]), np.array([multiplier]), np.array([shift]))[0])
    exact = Fraction(x) * Fraction(multiplier) * Fraction(2) ** (shift - 31)
    # Rounded twice: a half by the first, already shifted down, and a half by the second.
    assert abs(found - exact) <= Fraction(1, 2) + Fraction(2) ** (min(shift, 0) - 1)


@settings(deadline=None)
@given(low=st.floats(-50, 50), width=st.floats(1e-3, 100))
def test_a_range_is_covered_and_zero_is_exact(low: float, width: float) -> None:
    scale = scale_of(low, low + width)
    for number in (low, low + width):
        byte = int(to_int8(np.array([number]), scale)[0])
        assert abs(scale.scale * (byte - scale.zero) - number) <= scale.scale * 1.01
    assert to_int8(np.zeros(1), scale)[0] == scale.zero


def test_a_class_that_is_never_said_is_not_said_in_eight_bits(tmp_path: Path) -> None:
    """FedProto decides among the classes of which its client has rows: the others' bias is −inf."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = spiced(build("mlp", shape=(1, 8, 8), classes=6))
        x = torch.randn(300, 1, 8, 8)
    plain = quantise(fold(module, (1, 8, 8)), x)
    head = [part for part in module.modules() if isinstance(part, nn.Linear)][-1]
    with torch.no_grad():
        head.weight[1:3], head.bias[1:3] = 0.0, -torch.inf
    wanted = module(x).argmax(-1).numpy()
    quantised = quantise(fold(module, (1, 8, 8)), x)
    said = reference.infer(quantised, quantised.quantise(x)).astype(int)
    others = np.delete(said, [1, 2], axis=1)
    assert said[:, 1:3].max() < others.min() and not np.isin(wanted, [1, 2]).any()
    before = reference.infer(plain, plain.quantise(x)).astype(int)
    assert np.isin(before.argmax(1), [1, 2]).any()  # with their own biases they are said
    assert np.mean(said.argmax(1) == wanted) > 0.95
    x = x[:20]
    assert np.array_equal(on_host(quantised, quantised.quantise(x), tmp_path), said[:20])
    with torch.no_grad():
        head.bias.fill_(-torch.inf)
    with pytest.raises(InputError, match="not finite"):
        quantise(fold(module, (1, 8, 8)), x)


def test_a_bias_far_larger_than_its_weights_stays_a_32_bit_number() -> None:
    scale = weight_scales(np.array([1e-9, 0.0]), np.array([1000.0, 0.0]), 0.01)
    assert np.all(np.abs(np.array([1000.0, 0.0]) / (0.01 * scale.astype(np.float64))) < 2**31)
    dead = nn.Linear(4, 2)
    with torch.no_grad():
        dead.weight.mul_(0)
    quantised = quantise(
        fold(nn.Sequential(nn.Flatten(), dead).eval(), (1, 2, 2)), torch.randn(8, 1, 2, 2)
    )
    logits = reference.infer(quantised, quantised.quantise(torch.randn(3, 1, 2, 2))).astype(float)
    after = quantised.scales[quantised.output]
    np.testing.assert_allclose(
        (logits - after.zero) * after.scale,
        dead.bias.detach().numpy()[None].repeat(3, 0),
        atol=after.scale,
    )


def test_they_round_halves_alike(tmp_path: Path) -> None:
    """Factors that are powers of two: every second, fourth, ... sum lies half way between two
    results."""
    scales = np.array([0.5, 0.25, 0.125, 2**-6, 1.5, 2.0], np.float32)
    multiplier, shift = fixed_points(scales.astype(np.float64))
    kind = {
        "kind": "dense",
        "inputs": (0,),
        "output": 1,
        "activation": LINEAR,
        "low": -128,
        "high": 127,
    }
    numbers = {
        "bias": np.arange(6, dtype=np.int32),
        "channel_scale": scales,
        "multiplier": multiplier,
        "shift": shift,
    }
    operation = IntegerOperation(**kind, weight=np.ones((6, 1), np.int8), **numbers)
    quantised = Quantised(
        (operation,),
        ((1, 1, 1), (1, 1, 6)),
        {0: IntegerScale(1.0, 3), 1: IntegerScale(1.0, -1)},
        0,
        1,
    )
    x = np.arange(-128, 128).astype(np.int8).reshape(256, 1, 1, 1)
    expected = reference.infer(quantised, x)
    up = np.array([math.floor(Fraction(q - 3, 2) + Fraction(1, 2)) for q in range(-128, 128)])
    np.testing.assert_array_equal(expected[:, 0], up - 1)
    np.testing.assert_array_equal(on_host(quantised, x, tmp_path), expected)
    np.testing.assert_array_equal(oracle(quantised, x), expected)


def test_the_root_is_correctly_rounded(tmp_path: Path) -> None:
    if toolchain.host_compiler() is None:
        pytest.skip("there is no C compiler: " + toolchain.HOW_TO_GET["C compiler"])
    kernels = Path(c_source.__file__).with_name("kernels.c").read_text()
    (tmp_path / "root.c").write_text(kernels + "float the_root(float x) { return root(x); }\n")
    flags = (*toolchain.FLAGS, "-Wno-unused-function", "-fPIC")
    root = ctypes.CDLL(
        str(toolchain.build("root.so", [tmp_path / "root.c"], flags, ("-shared",)))
    ).the_root
    root.argtypes, root.restype = [ctypes.c_float], ctypes.c_float
    bits = np.random.default_rng(0).integers(0x00800000, 0x7F800000, 20_000, dtype=np.uint32)
    numbers = np.concatenate(
        [
            bits.view(np.float32),
            np.array([1, 2, 4, 0.25, 1e-5, np.nextafter(np.float32(4), 0)], np.float32),
        ]
    )
    np.testing.assert_array_equal(
        np.array([root(x) for x in numbers], np.float32), np.sqrt(numbers)
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_reference_tflite_micro_and_c_agree_to_the_bit(name: str, tmp_path: Path) -> None:
    quantised = exported(name)[1]
    x = quantised.quantise(digits().x_test[:ROWS])
    expected = reference.infer(quantised, x)
    assert len(np.unique(expected, axis=0)) > ROWS // 2  # they are not all the same
    np.testing.assert_array_equal(on_host(quantised, x, tmp_path), expected)
    np.testing.assert_array_equal(oracle(quantised, x), expected)


@pytest.mark.parametrize(
    "name", ["small-cnn", pytest.param("wide dscnn-tracked", marks=pytest.mark.slow)]
)
def test_they_agree_on_the_whole_test_set(name: str, tmp_path: Path) -> None:
    quantised = exported(name)[1]
    x = quantised.quantise(digits().x_test)
    expected = reference.infer(quantised, x)
    before, after = accuracies(name)
    assert len(expected) == 2000 and before > 0.85 and after > before - 0.01
    np.testing.assert_array_equal(on_host(quantised, x, tmp_path), expected)
    np.testing.assert_array_equal(oracle(quantised, x), expected)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_they_agree_about_every_operation(norm: str, tmp_path: Path) -> None:
    module, x = zoo(norm)
    folded = fold(module, Zoo.shape)
    torch.testing.assert_close(
        run(folded, x)[folded.output].flatten(1), module(x).detach(), rtol=1e-4, atol=1e-4
    )
    quantised = quantise(folded, x)
    kinds = {operation.kind for operation in quantised.operations}
    assert kinds >= {"conv", "depthwise", "dense", "max_pool", "avg_pool", "add"}
    assert ("group_norm" in kinds) == (norm == "group")
    rows = quantised.quantise(3 * x)  # beyond what it was calibrated for, so that it is cut
    expected = reference.infer(quantised, rows)
    np.testing.assert_array_equal(on_host(quantised, rows, tmp_path), expected)
    np.testing.assert_array_equal(oracle(quantised, rows), expected)


def random_network(seed: int) -> tuple[nn.Module, tuple[int, int, int]]:
    """Convolutions, pools and norms of random sizes, strides and paddings."""
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 4)), int(rng.integers(7, 18)), int(rng.integers(7, 18)))
    layers: list[nn.Module] = []
    channels, high, wide = shape
    for _ in range(int(rng.integers(2, 5))):
        k = (int(rng.integers(1, min(high, 5) + 1)), int(rng.integers(1, min(wide, 5) + 1)))
        pad = (int(rng.integers(0, k[0] // 2 + 1)), int(rng.integers(0, k[1] // 2 + 1)))
        stride = (int(rng.integers(1, 3)), int(rng.integers(1, 3)))
        kind = rng.choice(["conv", "depthwise", "max", "avg", "norm"])
        if kind in ("conv", "depthwise"):
            after = channels * 2 if kind == "depthwise" else 4 * int(rng.integers(1, 4))
            layers.append(
                nn.Conv2d(
                    channels, after, k, stride, pad, groups=channels if kind == "depthwise" else 1
                )
            )
            channels = after
        elif kind == "norm":
            layers.append(
                nn.GroupNorm(max(1, channels // 4), channels)
                if channels % 4 == 0
                else nn.BatchNorm2d(channels)
            )
            k, pad, stride = (1, 1), (0, 0), (1, 1)
        else:
            layers.append((nn.MaxPool2d if kind == "max" else nn.AvgPool2d)(k, stride, pad))
        layers += [nn.ReLU()] if rng.random() < 0.5 else [nn.ReLU6()] if rng.random() < 0.5 else []
        high, wide = (
            (size + 2 * p - s) // t + 1
            for size, p, s, t in zip((high, wide), pad, k, stride, strict=True)
        )
    torch.manual_seed(seed)
    return spiced(
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * high * wide, 5)), seed
    ), shape


@pytest.mark.parametrize("seed", range(16))
def test_they_agree_about_random_networks(seed: int, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        module, shape = random_network(seed)
        x = torch.randn(30, *shape)
    quantised = quantise(fold(module, shape), x[:20])
    rows = quantised.quantise(x)
    expected = reference.infer(quantised, rows)
    np.testing.assert_array_equal(oracle(quantised, rows), expected)
    if seed % 4 == 0:
        np.testing.assert_array_equal(on_host(quantised, rows, tmp_path), expected)


def accuracies(name: str) -> tuple[float, float]:
    """On the test set, in float and in eight bits."""
    data = digits()
    with torch.no_grad():
        before = float((network(name)(data.x_test).argmax(-1) == data.y_test).float().mean())
    found = reference.outputs(exported(name)[1], data.x_test).argmax(-1)
    return before, float((found == data.y_test).float().mean())


@pytest.mark.parametrize("name", NETWORKS)
def test_less_than_a_point_of_accuracy_is_lost(name: str) -> None:
    before, after = accuracies(name)
    assert before > 0.8
    assert after > before - 0.01


@pytest.mark.parametrize("core", ["cortex-m0", "cortex-m4"])
@pytest.mark.parametrize("name", ["small-cnn", "zoo-group"])
def test_a_cortex_gives_the_same_in_the_memory_that_was_forecast(
    name: str, core: str, tmp_path: Path
) -> None:
    compiler = toolchain.arm_compiler()
    if compiler != [toolchain.GCC_ARM]:
        pytest.skip(NO_GCC)
    if name == "zoo-group":
        module, rows = zoo("group")
        quantised = quantise(fold(module, Zoo.shape), rows)
    else:
        quantised, rows = exported(name)[1], digits().x_test
    x = quantised.quantise(rows[:3])
    found, stack = on_cortex(quantised, x, CORES[core], compiler, tmp_path / "model.ld")
    np.testing.assert_array_equal(found, reference.infer(quantised, x))
    assert 0 < stack <= sizes.STACK_BYTES


def test_zig_builds_it_too(tmp_path: Path) -> None:
    compiler = toolchain.zig()
    if compiler is None:
        pytest.skip("ziglang is not installed: pip install 'nestling[tiny]'")
    quantised = exported("small-cnn")[1]
    x = quantised.quantise(digits().x_test[:1])
    found, stack = on_cortex(quantised, x, CORES["cortex-m3"], compiler, tmp_path / "model.ld")
    np.testing.assert_array_equal(found, reference.infer(quantised, x))
    assert stack <= sizes.STACK_BYTES


def test_the_c_source_is_free_of_undefined_behaviour(tmp_path: Path) -> None:
    if toolchain.host_compiler() is None or toolchain.is_zig(toolchain.host_compiler() or []):
        pytest.skip("there is no C compiler with sanitisers: apt-get install gcc")
    module, rows = zoo("group")
    quantised = quantise(fold(module, Zoo.shape), rows)
    for file, text in c_source.write(quantised, "model").items():
        (tmp_path / file).write_text(text)
    (tmp_path / "main.c").write_text(
        '#include <stdio.h>\n#include "model.h"\n'
        "int main(void) { static int8_t in[MODEL_INPUT_BYTES], out[MODEL_OUTPUT_BYTES];\n"
        "while (fread(in, 1, sizeof in, stdin) == sizeof in) {\n"
        "model_infer(in, out); fwrite(out, 1, sizeof out, stdout); } return 0; }\n"
    )
    program = tmp_path / "main"
    flags = [
        "-std=c99",
        "-g",
        "-O1",
        "-ffp-contract=off",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ]
    subprocess.run(
        ["cc", *flags, "-o", program, tmp_path / "main.c", tmp_path / "model.c"], check=True
    )
    extreme = np.random.default_rng(0).choice(
        np.array([-128, 127, 0], np.int8), (20, *quantised.shapes[quantised.input])
    )
    done = subprocess.run(
        [program], input=extreme.tobytes(), capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    np.testing.assert_array_equal(
        np.frombuffer(done.stdout, np.int8).reshape(20, -1), reference.infer(quantised, extreme)
    )


def test_the_arena_is_what_the_linker_hands_out_and_reaches_the_floor() -> None:
    if toolchain.arm_compiler() is None:
        pytest.skip(NO_GCC)
    quantised = exported("dscnn-tracked")[1]
    arena = c_source.arena_of(quantised)
    sections = elf.read(
        sizes.linked(quantised, CORES["cortex-m4"], toolchain.arm_compiler() or [])
    ).sections
    assert sections[".bss"] == arena.size
    assert sections.get(".data", 0) == 0
    lives = [
        Buffer(int(np.prod(quantised.shapes[o.output])), step, step + 1)
        for step, o in enumerate(quantised.operations)
        if o.output != quantised.output
    ]
    assert arena.size == floor_of(lives)  # a chain: each value lives until the next is made


def test_the_tflite_file_is_what_the_schema_says() -> None:
    schema = pytest.importorskip(
        "tflite_micro.tensorflow.lite.micro.python.schema_py_generated",
        reason="tflite-micro is not installed",
    )
    pytest.importorskip(
        "flatbuffers", reason="flatbuffers is not installed: pip install 'nestling[export]'"
    )
    raw = tflite.write(exported("dscnn-tracked")[1])
    assert raw[4:8] == b"TFL3"
    model = schema.Model.GetRootAs(raw)
    graph = model.Subgraphs(0)
    assert model.Version() == 3
    assert (graph.InputsLength(), graph.OutputsLength()) == (1, 1)
    assert list(graph.Tensors(graph.Inputs(0)).ShapeAsNumpy()) == [1, 28, 28, 1]
    assert list(graph.Tensors(graph.Outputs(0)).ShapeAsNumpy()) == [1, 10]
    kinds = [
        model.OperatorCodes(graph.Operators(k).OpcodeIndex()).BuiltinCode()
        for k in range(graph.OperatorsLength())
    ]
    names = schema.BuiltinOperator
    assert kinds.count(names.DEPTHWISE_CONV_2D) == 4
    assert kinds[-1] == names.FULLY_CONNECTED
    for k in range(graph.TensorsLength()):
        tensor = graph.Tensors(k)
        if tensor.Name().endswith(b"_weight"):
            assert len(set(tensor.Quantization().ScaleAsNumpy())) > 1  # one a channel
            data = model.Buffers(tensor.Buffer()).DataAsNumpy()
            assert raw.find(data.tobytes()) % 16 == 0


def test_only_what_a_network_needs_is_in_its_source() -> None:
    text = c_source.write(
        quantise(fold(SmallCNN().eval(), (1, 28, 28)), digits().x[:10]), "tiny_net"
    )
    assert set(text) == {"tiny_net.h", "tiny_net.c"}
    assert "group_norm" not in text["tiny_net.c"] and "max_pool" in text["tiny_net.c"]
    assert "void tiny_net_infer(const int8_t *input, int8_t *output);" in text["tiny_net.h"]
    with pytest.raises(InputError, match="name in C"):
        c_source.write(exported("small-cnn")[1], "1st")
