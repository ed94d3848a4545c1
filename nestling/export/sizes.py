"""What the exported C source takes on a device: RAM by plan, flash as an ARM compiler builds it (an
estimate where there is none)."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nestling.devices import Profile
from nestling.devices.units import show_bytes
from nestling.errors import InputError
from nestling.export import c_source
from nestling.export.quantise import Quantised
from nestling.tiny.runtime import elf, toolchain

STACK_BYTES = 512
"""More than the deepest call takes on any core; a test measures it."""
CODE_BYTES, FLOAT_CODE_BYTES = 4096, 4096
"""Where there is no compiler: all operations with the divisions they need, and floats in software
for group normalisation."""

# (core in the catalogue, compiler's name, its FPU for gcc, the same for zig); the first that the
# catalogue's text begins with counts.
CORES = (
    ("Cortex-M0+", "cortex-m0plus", "", ""),
    ("Cortex-M0", "cortex-m0", "", ""),
    ("Cortex-M33", "cortex-m33", "fpv5-sp-d16", "+fp_armv8d16sp"),
    ("Cortex-M3", "cortex-m3", "", ""),
    ("Cortex-M4F", "cortex-m4", "fpv4-sp-d16", "+vfp4d16sp"),
    ("Cortex-M7", "cortex-m7", "fpv5-sp-d16", "+fp_armv8d16sp"),
)
STAND_IN = ("", "cortex-m3", "", "")
"""For cores that no compiler here knows: of the same kind, 32 bits and no FPU."""


@dataclass(frozen=True)
class Sizes:
    """Bytes by what they are for. `how` says where the flash figure comes from; `estimate` whether
    to mark it."""

    ram: dict[str, int]
    flash: dict[str, int]
    estimate: bool
    how: str

    @property
    def ram_bytes(self) -> int:
        """All RAM together."""
        return sum(self.ram.values())

    @property
    def flash_bytes(self) -> int:
        """All flash together."""
        return sum(self.flash.values())


def sizes(network: Quantised, profile: Profile) -> Sizes:
    """What the network takes on a device of this profile."""
    ram = {
        "arena": c_source.arena_of(network).size,
        "input": math.prod(network.shapes[network.input]),
        "output": math.prod(network.shapes[network.output]),
        "stack": STACK_BYTES,
    }
    weights = c_source.weight_bytes(network)
    compiler = toolchain.arm_compiler()
    if compiler is None:
        floats = any(operation.kind == "group_norm" for operation in network.operations)
        code = CODE_BYTES + (FLOAT_CODE_BYTES if floats else 0)
        return Sizes(
            ram, {"weights": weights, "code": code}, True, "estimate: there is no ARM compiler here"
        )
    core = core_of(profile)
    code = measured(network, core, compiler) - weights
    flash = {"weights": weights, "code": code}
    if core is STAND_IN:
        return Sizes(ram, flash, True, f"estimate: built for {core[1]} in place of {profile.core}")
    tool = "zig" if toolchain.is_zig(compiler) else compiler[0]
    return Sizes(ram, flash, False, f"measured: {tool} -O2 for {core[1]}")


def core_of(profile: Profile) -> tuple[str, str, str, str]:
    """The row of `CORES` for a device."""
    text = re.sub(r"^\d+x ", "", profile.core)
    return next((row for row in CORES if text.startswith(row[0])), STAND_IN)


def measured(network: Quantised, core: tuple[str, str, str, str], compiler: Sequence[str]) -> int:
    """Bytes of flash of the linked source with the support library that it needs."""
    sections = elf.read(linked(network, core, compiler)).sections
    return sum(
        size
        for name, size in sections.items()
        if name.startswith((".text", ".rodata", ".data", ".ARM.ex"))
    )


def linked(
    network: Quantised,
    core: tuple[str, str, str, str],
    compiler: Sequence[str],
    link: Sequence[str | Path] = (),
) -> Path:
    """The source, built for a core as a program that is nothing else."""
    with tempfile.TemporaryDirectory(prefix="nst") as folder:
        for name, text in c_source.write(network, "model").items():
            (Path(folder) / name).write_text(text)
        library = [] if toolchain.is_zig(compiler) else ["-lgcc"]
        return toolchain.build(
            "model.elf",
            [Path(folder) / "model.c"],
            (*toolchain.FLAGS, *target(core, compiler)),
            (
                "-nostdlib",
                "-static",
                "-Wl,--gc-sections",
                "-Wl,--entry=model_infer",
                *link,
                *library,
            ),
            list(compiler),
        )


def target(core: tuple[str, str, str, str], compiler: Sequence[str]) -> list[str]:
    """What a compiler is told of a core."""
    _, cpu, fpu, zig_fpu = core
    # Without this the compiler turns loops into calls of a C library, which need not be there.
    flags = ["-ffreestanding", "-ffunction-sections", "-fdata-sections"]
    if toolchain.is_zig(compiler):
        kind = "thumb-freestanding-eabi" + ("hf" if fpu else "")
        return [*flags, "-target", kind, f"-mcpu={cpu.replace('-', '_')}{zig_fpu}"]
    floats = ["-mfloat-abi=hard", f"-mfpu={fpu}"] if fpu else ["-mfloat-abi=soft"]
    return [*flags, "-fno-tree-loop-distribute-patterns", "-mthumb", f"-mcpu={cpu}", *floats]


def require_room(needed: Sizes, profile: Profile) -> None:
    """Refuses a network that the device has no room for."""
    for what, size, there in (
        ("RAM", needed.ram_bytes, float(profile.ram_bytes)),
        ("flash", needed.flash_bytes, float(profile.flash_bytes)),
    ):
        if size > there:
            raise InputError(
                f"the int8 network takes {show_bytes(size)} of {what}, and {profile.name} has "
                f"{show_bytes(there)}",
                field="--device",
                fix="give the tier a smaller ratio or network, or export for a larger device",
            )
