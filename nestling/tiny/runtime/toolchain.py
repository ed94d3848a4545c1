"""The compilers: which of them this machine has, and a cache of what they built.

A build is found again by the hash of everything that went into it, so that a firmware is compiled
once on a machine, however many processes ask for it at the same time. The package `ziglang` stands
in where there is no compiler of the system's own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from nestling.errors import InputError

RUNTIME = Path(__file__).parent
FLAGS = ("-std=c99", "-ffp-contract=off", "-fno-fast-math", "-O2", "-Wall", "-Wextra", "-Werror")
"""What the runtime is compiled with everywhere: the same arithmetic gives the same bits on every
board and on the host."""

GCC_ARM = "arm-none-eabi-gcc"
LONGEST_BUILD = 300  # seconds; zig builds its own support library the first time
HOW_TO_GET = {
    "C compiler": "apt-get install gcc, or pip install nestling[tiny], which brings ziglang",
    "ARM compiler": "apt-get install gcc-arm-none-eabi, or pip install nestling[tiny], which "
    "brings ziglang",
    "qemu-system-arm": "apt-get install qemu-system-arm",
    "unicorn": "pip install nestling[tiny]",
}


def cache_dir() -> Path:
    """Where build products are kept: $NESTLING_CACHE, else ~/.cache/nestling."""
    return Path(os.environ.get("NESTLING_CACHE") or Path.home() / ".cache" / "nestling")


def host_compiler() -> list[str] | None:
    """The command that compiles for this machine, or None."""
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return zig()


def arm_compiler() -> list[str] | None:
    """The command that compiles for Cortex-M, or None; `targets` says what it is to be told of the
    core."""
    return [GCC_ARM] if shutil.which(GCC_ARM) else zig()


def zig() -> list[str] | None:
    """zig's C compiler, of the package `ziglang`, or None."""
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def is_zig(compiler: Sequence[str]) -> bool:
    """Whether the command is zig's compiler from the package `ziglang`."""
    return "ziglang" in compiler


def missing_tools() -> dict[str, str]:
    """What this machine lacks to build firmware and to run it, and how to get it."""
    have = {
        "C compiler": host_compiler() is not None,
        "ARM compiler": arm_compiler() is not None,
        "qemu-system-arm": shutil.which("qemu-system-arm") is not None,
        "unicorn": importlib.util.find_spec("unicorn") is not None,
    }
    return {tool: HOW_TO_GET[tool] for tool, there in have.items() if not there}


def need(tool: str) -> None:
    """Says how to get `tool` where it is missing."""
    how = missing_tools().get(tool)
    if how:
        raise InputError(f"{tool} is not installed", field="tiny", fix=how)


def build(
    name: str,
    sources: Sequence[str | Path],
    flags: Sequence[str] = FLAGS,
    link: Sequence[str | Path] = (),
    compiler: Sequence[str] | None = None,
) -> Path:
    """Compiles and links `sources` with one call of `compiler` (the host's, if none is given) and
    gives back the product.

    link: what follows the sources; paths among it (linker scripts) count by what they hold.
    """
    compiler = list(compiler or host_compiler() or ())
    if not compiler:
        need("C compiler")
    product = cache_dir() / "build" / f"{_digest(name, sources, flags, link, compiler)[:24]}-{name}"
    if not product.exists():
        _compile(
            product, [*compiler, *_quirks(compiler), *flags, *map(str, sources), *map(str, link)]
        )
    return product


def _quirks(compiler: Sequence[str]) -> list[str]:
    # Unless told otherwise zig traps undefined behaviour, which needs a run-time library that a
    # board does not have.
    return ["-fno-sanitize=undefined"] if is_zig(compiler) else []


def _digest(
    name: str,
    sources: Sequence[str | Path],
    flags: Sequence[str],
    link: Sequence[str | Path],
    compiler: Sequence[str],
) -> str:
    digest = hashlib.sha256(
        repr((name, _identity(tuple(compiler)), list(flags), [str(x) for x in link])).encode()
    )
    for path in _inputs(sources, flags, link):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _inputs(
    sources: Sequence[str | Path], flags: Sequence[str], link: Sequence[str | Path]
) -> list[Path]:
    """The files that a build reads: its sources, the headers that lie beside them or on the include
    path, and linker scripts."""
    files = [Path(source) for source in sources]
    folders = {file.parent for file in files} | {
        Path(flag[2:]) for flag in flags if flag.startswith("-I") and len(flag) > 2
    }
    headers = [header for folder in sorted(folders) for header in sorted(folder.glob("*.h"))]
    return [*files, *headers, *(x for x in link if isinstance(x, Path))]


@cache
def _identity(compiler: tuple[str, ...]) -> str:
    """Changes when the compiler does."""
    if is_zig(compiler):
        from importlib.metadata import version

        return f"ziglang {version('ziglang')}"
    path = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    stat = path.stat()
    return f"{compiler} {path} {stat.st_size} {stat.st_mtime_ns}"


def _compile(product: Path, command: list[str]) -> None:
    product.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=product.parent, prefix="part-") as folder:
        part = Path(folder) / product.name
        environment = {
            "ZIG_GLOBAL_CACHE_DIR": str(cache_dir() / "zig"),
            "ZIG_LOCAL_CACHE_DIR": str(cache_dir() / "zig"),
        }
        done = subprocess.run(
            [*command, "-o", str(part)],
            capture_output=True,
            text=True,
            timeout=LONGEST_BUILD,
            env={**os.environ, **environment},
            check=False,
        )
        if done.returncode or not part.exists():
            raise InputError(
                f"{command[0]} could not build "
                f"{product.name.partition('-')[2]}:\n{(done.stderr or done.stdout)[-4000:]}",
                field="tiny",
                fix="see the compiler's message",
            )
        part.replace(product)
