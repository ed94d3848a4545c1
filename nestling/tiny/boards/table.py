"""The boards: one table of what each has, and the firmware that is linked for it.

RAM from the bottom up: the stack, the node's own data, then the region that holds a descriptor and
behind it the arena that the descriptor plans. So a plan needs `FIRMWARE.statics` + its descriptor +
its arena of RAM, to the byte. In flash the client's data lie behind the firmware.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nestling.errors import InputError, unknown
from nestling.files import write_atomic
from nestling.planning.firmware import FIRMWARE
from nestling.tiny.runtime import elf, toolchain

BOARDS_DIR = toolchain.RUNTIME / "boards"
ENGINE = ("maths.c", "check.c", "kernels.c", "linear.c", "train.c", "data.c", "link.c", "node.c")
SHARED = ("start.c", "cortex.c", "memory.c")
KB = 1024


@dataclass(frozen=True)
class Uart:
    """A serial port: the driver's name, where its registers lie and its interrupt."""

    kind: str
    address: int
    irq: int


@dataclass(frozen=True)
class Board:
    """A board. `machine` is QEMU's name for it; None: Unicorn runs it. `device` is the catalogue's
    entry whose figures hold for it."""

    name: str
    machine: str | None
    core: str
    fpu: bool
    ram: int
    ram_bytes: int
    flash: int
    flash_bytes: int
    uart: Uart
    device: str
    clock_hz: int  # of the emulated core, which is what its clock counts
    note: str = ""


@dataclass(frozen=True)
class Firmware:
    """A linked image. `flash_bytes` is all of it, `static_bytes` stack and data, `region_bytes`
    what is left for descriptor and arena, `blob` where the client's data go and `blob_bytes` the
    room there."""

    board: Board
    path: Path
    flash_bytes: int
    static_bytes: int
    region_bytes: int
    blob: int
    blob_bytes: int

    @property
    def ram_bytes(self) -> int:
        """All RAM that the image takes."""
        return self.static_bytes + self.region_bytes


CMSDK = Uart("cmsdk", 0x40004000, 0)
TABLE = {
    board.name: board
    for board in (
        Board(
            "stm32vldiscovery", "stm32vldiscovery", "cortex-m3", False, 0x20000000, 8 * KB,
            0x08000000, 128 * KB,
            Uart("stm32", 0x40013800, 37), "stm32f100", 24_000_000,
        ),
        Board(
            "microbit", "microbit", "cortex-m0", False, 0x20000000, 16 * KB, 0x00000000, 256 * KB,
            Uart("nrf51", 0x40002000, 2), "nrf51822", 16_000_000,
        ),
        Board(
            "lm3s6965evb", "lm3s6965evb", "cortex-m3", False, 0x20000000, 64 * KB, 0x00000000,
            256 * KB,
            Uart("pl011", 0x4000C000, 5), "lm3s6965", 12_500_000,
        ),
        Board(
            "netduinoplus2", "netduinoplus2", "cortex-m4", True, 0x20000000, 128 * KB, 0x08000000,
            1024 * KB,
            Uart("stm32", 0x40011000, 37), "stm32f405", 168_000_000,
            "QEMU 7.2 gives it 192 KB in one piece; the chip has 128 KB and 64 KB apart, so 128 "
            "KB are linked",
        ),
        Board(
            "mps2-an386", "mps2-an386", "cortex-m4", True, 0x20000000, 256 * KB, 0x00000000,
            1024 * KB, CMSDK, "nrf52840", 25_000_000,
            "the machine has megabytes; linked as the 256 KB of RAM and 1 MB of flash of an "
            "nRF52840",
        ),
        Board(
            "mps2-an500", "mps2-an500", "cortex-m7", True, 0x20000000, 512 * KB, 0x00000000,
            2048 * KB, CMSDK, "stm32h743", 25_000_000,
            "the machine has megabytes; linked as the 512 KB bank and 2 MB of flash of an "
            "STM32H743",
        ),
    )
}  # fmt: skip
UNICORN = "unicorn:"
UNICORN_CORES = {
    "m0": ("cortex-m0", False),
    "m3": ("cortex-m3", False),
    "m4": ("cortex-m4", True),
    "m7": ("cortex-m7", True),
}
PAGE = 1024  # what Unicorn maps memory in


def board(name: str) -> Board:
    """The board called `name`: one of the table, or any other that Unicorn runs, such as
    "unicorn:ram=20K,flash=64K,cpu=m3"."""
    if name.startswith(UNICORN):
        return _unicorn(name)
    if name not in TABLE:
        raise unknown("board", name, [*TABLE, "unicorn:ram=20K,flash=64K,cpu=m3"], field="board")
    return TABLE[name]


def _unicorn(name: str) -> Board:
    keys = dict(re.findall(r"(\w+)=(\w+)", name))
    if set(keys) != {"ram", "flash", "cpu"} or name != UNICORN + ",".join(
        f"{key}={value}" for key, value in keys.items()
    ):
        raise InputError(
            f"cannot read {name!r}", field="board", fix='write "unicorn:ram=20K,flash=64K,cpu=m3"'
        )
    if keys["cpu"] not in UNICORN_CORES:
        raise unknown("cpu", keys["cpu"], UNICORN_CORES, field="board")
    core, fpu = UNICORN_CORES[keys["cpu"]]
    ram, flash = _size(keys["ram"]), _size(keys["flash"])
    return Board(
        name,
        None,
        core,
        fpu,
        0x20000000,
        ram,
        0x00000000,
        flash,
        CMSDK,
        "reference",
        0,
        "emulated by Unicorn",
    )


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KM]?)", text)
    value = int(match[1]) * {"": 1, "K": KB, "M": KB * KB}[match[2]] if match else 0
    if not 2 * KB <= value <= 256 * KB * KB or value % PAGE:
        raise InputError(
            f"{text!r} is no size of memory",
            field="board",
            fix="give whole kilobytes, such as 20K or 1M",
        )
    return value


def region(name: str | Board) -> int:
    """The RAM that is left on a board for a descriptor and its arena."""
    wanted = board(name) if isinstance(name, str) else name
    return wanted.ram_bytes - FIRMWARE.statics


def firmware(
    name: str | Board, arena_bytes: int | None = None, compiler: Sequence[str] | None = None
) -> Firmware:
    """Builds the board's firmware; `arena_bytes` is the region for descriptor and arena (None: all
    RAM that is left).

    An arena that does not fit the board's RAM is refused by the linker: an InputError with its
    message.
    """
    wanted = board(name) if isinstance(name, str) else name
    command = list(compiler or toolchain.arm_compiler() or ())
    if not command:
        toolchain.need("ARM compiler")
    target = (*toolchain.FLAGS, *_target(wanted, command))
    # One by one: a core's objects serve all its boards, and another arena only needs linking.
    objects = [
        toolchain.build(f"{path.stem}.o", [path], (*target, *extra, "-c"), (), command)
        for path, extra in _sources(wanted)
    ]
    path = toolchain.build(
        f"{re.sub(r'[^A-Za-z0-9-]+', '-', wanted.name)}.elf",
        objects,
        target,
        ("-static", "-Wl,--gc-sections", "-T", _script(wanted, arena_bytes), *_libraries(command)),
        command,
    )
    return _measured(wanted, path)


def _target(wanted: Board, compiler: Sequence[str]) -> list[str]:
    flags = ["-ffreestanding", "-ffunction-sections", "-fdata-sections", f"-I{toolchain.RUNTIME}"]
    if not toolchain.is_zig(compiler):
        fpu = {"cortex-m4": "fpv4-sp-d16", "cortex-m7": "fpv5-sp-d16"}
        floats = (
            ["-mfloat-abi=hard", f"-mfpu={fpu[wanted.core]}"]
            if wanted.fpu
            else ["-mfloat-abi=soft"]
        )
        return [*flags, f"-mcpu={wanted.core}", "-mthumb", *floats]
    fpu = {"cortex-m4": "+vfp4d16sp", "cortex-m7": "+fp_armv8d16sp"}
    # Left alone it makes loops and functions several times as large, and frames that the stack has
    # no room for.
    flags += ["-fno-unroll-loops", "-fno-inline-functions"]
    core = wanted.core.replace("-", "_") + (fpu[wanted.core] if wanted.fpu else "")
    return [
        *flags,
        "-target",
        f"thumb-freestanding-eabi{'hf' if wanted.fpu else ''}",
        f"-mcpu={core}",
    ]


def _libraries(compiler: Sequence[str]) -> list[str]:
    # zig brings its own support library, unless it is told that there is none.
    return [] if toolchain.is_zig(compiler) else ["-nostdlib", "-lgcc"]


def _sources(wanted: Board) -> list[tuple[Path, list[str]]]:
    """The sources of a board, each with what it alone is told."""
    uart = [f"-DNST_UART={wanted.uart.address:#x}u", f"-DNST_IRQ={wanted.uart.irq}u"]
    files = [
        *(toolchain.RUNTIME / file for file in ENGINE),
        *(BOARDS_DIR / file for file in SHARED),
    ]
    told = {"node.c": [f"-DNST_BUILD={_build_number():#010x}u"]}
    return [
        *((path, told.get(path.name, [])) for path in files),
        (BOARDS_DIR / f"uart_{wanted.uart.kind}.c", uart),
    ]


def _build_number() -> int:
    """Changes with any source: by it a gateway knows which firmware a board runs."""
    files = sorted([*toolchain.RUNTIME.glob("*.[ch]"), *BOARDS_DIR.glob("*.[ch]")])
    return zlib.crc32(b"".join(path.read_bytes() for path in files))


def _script(wanted: Board, arena_bytes: int | None) -> Path:
    """The linker script, written where the build finds it."""
    rest = "ORIGIN(RAM) + LENGTH(RAM) - ADDR(.bss) - SIZEOF(.bss)"
    values = {
        "flash": hex(wanted.flash),
        "flash_bytes": wanted.flash_bytes,
        "ram": hex(wanted.ram),
        "ram_bytes": wanted.ram_bytes,
        "stack_bytes": FIRMWARE.stack,
        "region_bytes": rest if arena_bytes is None else arena_bytes,
    }
    text = (BOARDS_DIR / "cortex-m.ld").read_text()
    for key, value in values.items():
        text = text.replace(f"@{key}@", str(value))
    path = toolchain.cache_dir() / "build" / f"{zlib.crc32(text.encode()):08x}.ld"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_atomic(path, text)
    return path


def _measured(wanted: Board, path: Path) -> Firmware:
    image = elf.read(path)
    at = image.symbols
    return Firmware(
        wanted,
        path,
        flash_bytes=sum(len(segment.data) for segment in image.segments),
        static_bytes=at["nst_region"] - wanted.ram,
        region_bytes=at["nst_region_end"] - at["nst_region"],
        blob=at["nst_blob"],
        blob_bytes=at["nst_flash_end"] - at["nst_blob"],
    )
