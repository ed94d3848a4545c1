"""What scripts that compare two source trees share: their options, a process for each tree, and the
table's experiments in it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The options that all of them take."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "before", type=Path, nargs="?", default=HERE, help="the folder of the source as it was"
    )
    parser.add_argument(
        "--after",
        type=Path,
        default=HERE,
        help="the folder of the source as it is (default: this one)",
    )
    parser.add_argument(
        "--lines", default="", help="names of methods, separated by commas (default: all)"
    )
    parser.add_argument("--out", type=Path, help="a JSON file of all that was found")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser


def environment_of(tree: Path, **more: str) -> Mapping[str, str]:
    """The environment of a process that imports a tree and not this one."""
    paths = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and Path(path).resolve() != HERE
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "benchmarks"), *paths]),
        **more,
    }


def experiments_of(tree: Path, lines: str) -> Iterator[tuple[str, str, Any, int]]:
    """In such a process: setting, method, experiment, and the rounds that it must play before it is
    steady, of `gpu_table.py`."""
    sys.path[:] = [
        str(tree),
        str(tree / "benchmarks"),
        *[p for p in sys.path if p != str(HERE / "benchmarks")],
    ]
    sys.argv = [sys.argv[0], "--data", "embedded", *(["--lines", lines] if lines else [])]
    import gpu_table

    import nestling

    assert Path(nestling.__file__).is_relative_to(tree), f"{nestling.__file__} is not of {tree}"
    for setting, name, experiment in gpu_table._experiments(gpu_table._options()):
        yield setting, name, experiment, gpu_table.LONG.get(name, 0)
