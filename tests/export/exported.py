"""Networks to export, and the parties whose numbers must agree: the reference, tflite-micro, the C
source on this machine and on an emulated Cortex-M."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.data import Dataset, load
from nestling.export import c_source, sizes, tflite
from nestling.export.fold import FoldedNetwork, fold
from nestling.export.quantise import Quantised, quantise
from nestling.models import build
from nestling.tiny.runtime import elf, toolchain

CALIBRATION = 500


@cache
def digits() -> Dataset:
    return load("mnist12k")


class SmallCNN(nn.Module):
    """conv, pool, conv, pool, dense."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(x.flatten(1))


class Zoo(nn.Module):
    """One of every operation, with the paddings, groups and activations that are easily forgotten.
    Two colours, so that the order of channels and pixels shows."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, (5, 3), stride=2, padding=(2, 1), bias=False)
        self.norm1 = norm(8)
        self.depthwise = nn.Conv2d(8, 16, 3, padding=1, groups=8)
        self.pointwise = nn.Conv2d(16, 12, 1)
        self.body, self.norm2 = nn.Conv2d(12, 12, 3, padding=1), norm(12)
        self.norm3 = norm(12)  # of a sum: nothing to fold it into
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=4)
        self.head = nn.Linear(12 * 3 * 4, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = F.relu6(self.pointwise(F.relu(self.depthwise(x))))
        inner = self.norm2(self.body(x))
        x = F.relu(inner + x) + F.relu(inner)  # the value before an activation has two readers
        x = self.grouped(F.relu6(self.norm3(x)))
        x = F.avg_pool2d(x, 3, stride=1, padding=1)
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        return self.head(x.flatten(1))

    shape = (2, 11, 14)


def spiced(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with random biases, normalisation and statistics, as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            centre = 1.0 if name.endswith(("weight", "var", "variances")) else 0.0
            tensor.copy_(centre + 0.3 * torch.rand(tensor.shape, generator=generator))
    return module.eval()


@torch.enable_grad()
def trained(module: nn.Module, rows: int, epochs: int = 1, lr: float = 0.01) -> nn.Module:
    """The module after some steps on the embedded digits."""
    data, generator = digits(), torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(data.x), generator=generator)[:rows]
    optimiser = torch.optim.Adam(module.parameters(), lr=lr)
    module.train()
    for _ in range(epochs):
        for part in chosen[torch.randperm(rows, generator=generator)].split(32):
            optimiser.zero_grad()
            F.cross_entropy(module(data.x[part]), data.y[part]).backward()
            optimiser.step()
    return module.eval()


@cache
def network(name: str) -> nn.Module:
    """A network that has learnt the digits: "small-cnn", or a model and its norm, as in
    "tinycnn-group"."""
    widths, work = (
        {"tinycnn": 0.5, "dscnn": 0.25, "wide dscnn": 0.5},
        {"dscnn": (5000, 2), "wide dscnn": (10_000, 2)},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "small-cnn":
            return trained(SmallCNN(), 5000, lr=0.003)
        model, norm = name.split("-")
        made = build(
            model.removeprefix("wide "),
            shape=(1, 28, 28),
            classes=10,
            width=widths[model],
            norm=norm,
        )
        return trained(made, *work.get(model, (2000, 1)))


@cache
def exported(name: str) -> tuple[FoldedNetwork, Quantised]:
    """The network folded, and in eight bits."""
    folded = fold(network(name), (1, 28, 28))
    return folded, quantise(folded, digits().x[:CALIBRATION])


def oracle(quantised: Quantised, x: np.ndarray) -> np.ndarray:
    """What tflite-micro makes of the .tflite file."""
    runtime = pytest.importorskip(
        "tflite_micro", reason="tflite-micro is not installed: pip install 'nestling[dev]'"
    ).runtime
    pytest.importorskip(
        "flatbuffers", reason="flatbuffers is not installed: pip install 'nestling[export]'"
    )
    interpreter = runtime.Interpreter.from_bytes(tflite.write(quantised), arena_size=1 << 22)
    found = []
    for row in x:
        interpreter.set_input(row[None], 0)
        interpreter.invoke()
        found.append(interpreter.get_output(0)[0])
    return np.stack(found)


def on_host(quantised: Quantised, x: np.ndarray, folder: Path) -> np.ndarray:
    """What the C source gives, compiled for this machine."""
    if toolchain.host_compiler() is None:
        pytest.skip("there is no C compiler: " + toolchain.HOW_TO_GET["C compiler"])
    for name, text in c_source.write(quantised, "model").items():
        (folder / name).write_text(text)
    flags = (*toolchain.FLAGS, "-pedantic", "-fPIC")
    infer = ctypes.CDLL(
        str(toolchain.build("model.so", [folder / "model.c"], flags, ("-shared",)))
    ).model_infer
    infer.argtypes, infer.restype = [ctypes.c_char_p, ctypes.c_char_p], None
    out = ctypes.create_string_buffer(int(np.prod(quantised.shapes[quantised.output])))
    found = []
    for row in x:
        infer(row.tobytes(), out)
        found.append(np.frombuffer(out.raw, np.int8))
    return np.stack(found)


FLASH, RAM, PAGE, RETURN = 0x08000000, 0x20000000, 1024, 0x0E000000
PAINT = 0xA5
SCRIPT = """ENTRY(model_infer)
SECTIONS {
  .text %#x : { *(.text*) *(.rodata*) }
  .ARM.exidx : { *(.ARM.exidx*) }
  .bss %#x : { *(.bss*) }
}
"""


def on_cortex(
    quantised: Quantised,
    x: np.ndarray,
    core: tuple[str, str, str, str],
    compiler: list[str],
    script: Path,
) -> tuple[np.ndarray, int]:
    """What the C source gives on an emulated core that has no more memory than the forecast says,
    and how much stack it used.

    RAM from the bottom up: stack, arena, input, output. `script` is a file to write the linker
    script to.
    """
    unicorn = pytest.importorskip(
        "unicorn", reason="unicorn is not installed: pip install 'nestling[tiny]'"
    )
    arm = pytest.importorskip("unicorn.arm_const")
    stack, arena = sizes.STACK_BYTES, c_source.arena_of(quantised).size
    script.write_text(SCRIPT % (FLASH, RAM + stack))
    image = elf.read(sizes.linked(quantised, core, compiler, ("-T", script)))
    machine = unicorn.Uc(unicorn.UC_ARCH_ARM, unicorn.UC_MODE_THUMB | unicorn.UC_MODE_MCLASS)
    machine.ctl_set_cpu_model(getattr(arm, f"UC_CPU_ARM_CORTEX_{core[1][7:].upper()}"))
    start, end = (
        min(s.run for s in image.segments),
        max(s.run + len(s.data) for s in image.segments),
    )
    machine.mem_map(
        start // PAGE * PAGE,
        -(-end // PAGE) * PAGE - start // PAGE * PAGE,
        unicorn.UC_PROT_READ | unicorn.UC_PROT_EXEC,
    )
    for segment in image.segments:
        machine.mem_write(segment.run, segment.data)
    inputs, outputs = (
        int(np.prod(quantised.shapes[v])) for v in (quantised.input, quantised.output)
    )
    machine.mem_map(RAM, -(-(stack + arena + inputs + outputs) // PAGE) * PAGE)
    machine.mem_map(RETURN, PAGE)
    if core[2]:  # the FPU is off after a reset
        machine.mem_map(0xE000E000, 4096)
        machine.reg_write(arm.UC_ARM_REG_FPEXC, 0x40000000)
    source = RAM + stack + arena
    machine.mem_write(RAM, bytes([PAINT]) * stack)
    found = []
    for row in x:
        machine.mem_write(source, row.tobytes())
        machine.reg_write(arm.UC_ARM_REG_R0, source)
        machine.reg_write(arm.UC_ARM_REG_R1, source + inputs)
        machine.reg_write(arm.UC_ARM_REG_SP, RAM + stack)
        machine.reg_write(arm.UC_ARM_REG_LR, RETURN | 1)
        machine.emu_start(image.symbols["model_infer"] | 1, RETURN)
        found.append(np.frombuffer(bytes(machine.mem_read(source + inputs, outputs)), np.int8))
    untouched = len(bytes(machine.mem_read(RAM, stack))) - len(
        bytes(machine.mem_read(RAM, stack)).lstrip(bytes([PAINT]))
    )
    return np.stack(found), stack - untouched
