"""What is given away: the sdist passes tests of its own, the wheel runs away from the checkout, the
README's example is well typed."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nestling import Experiment
from tests.shell import Shell, blocks

HOME = Path(__file__).parent.parent
SHIPPED = (
    "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md",
    "MANIFEST.in", "Makefile", "mkdocs.yml",
    "pyproject.toml", "nestling", "tests", "benchmarks", "docs", "examples", "deploy",
)  # fmt: skip
TABLE_ROWS = ["FedAvg", "HeteroFL", "FedRolex", "Shared-average"]
PROMISED = 600
"""Seconds that the first table takes at most, as its page says."""
GENERATED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def run(command: Sequence[str], folder: Path, path: Path | None = None, **more: str) -> str:
    """What a command prints, in a folder, with packages of `path` before all others."""
    env = {**os.environ, **({"PYTHONPATH": str(path)} if path else {}), **more}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was made of it."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in SHIPPED:
        source = HOME / name
        shutil.copytree(source, copy / name, ignore=GENERATED) if source.is_dir() else shutil.copy(
            source, copy / name
        )
    run(["-m", "build", "--no-isolation", "--outdir", str(out), "."], copy)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    run(
        [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(folder),
            str(*built.glob("*.whl")),
        ],
        folder,
    )
    return folder


def test_the_wheel_has_all_that_the_package_reads(installed: Path) -> None:
    there = {
        str(path.relative_to(installed))
        for path in (installed / "nestling").rglob("*")
        if path.is_file()
    }
    here = [
        path
        for path in (HOME / "nestling").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    missing = {str(path.relative_to(HOME)) for path in here} - there
    assert missing == {"nestling/methods/ruff.toml"}  # which only the checkout needs


def test_the_wheel_runs_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = run(["-c", "import nestling; print(nestling.__file__)"], tmp_path, installed).strip()
    assert Path(where).is_relative_to(installed)
    run(["-m", "nestling", "run", "--set", "rounds=2", "--out", "out"], tmp_path, installed)
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_sdist_passes_its_tests(built: Path, tmp_path: Path) -> None:
    """All of them are found there, and those of the most basic parts pass; `make test` in the
    unpacked folder runs the others."""
    with tarfile.open(*built.glob("*.tar.gz")) as packed:
        packed.extractall(tmp_path, filter="data")
    (home,) = tmp_path.iterdir()
    found = run(["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"], home, home)
    here = run(["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"], HOME)
    assert found.splitlines()[-1].split(" in ")[0] == here.splitlines()[-1].split(" in ")[0]
    basic = [
        "tests/test_message.py",
        "tests/test_store.py",
        "tests/test_contributing.py",
        "tests/test_new_method.py",
    ]
    run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *basic], home, home)


@pytest.mark.slow
def test_the_readmes_example_is_well_typed(installed: Path, tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (HOME / "README.md").read_text(), re.DOTALL)
    assert examples
    for number, text in enumerate(examples):
        (tmp_path / f"example_{number}.py").write_text(text)
    files = [f"example_{number}.py" for number in range(len(examples))]
    options = [
        "--strict",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    run(["-m", "mypy", *options, *files], tmp_path, MYPYPATH=str(installed))
    wrong = examples[0].replace('method="heterofl"', "method=7")
    (tmp_path / "wrong.py").write_text(wrong)
    with pytest.raises(AssertionError, match="arg-type"):
        run(["-m", "mypy", *options, "wrong.py"], tmp_path, MYPYPATH=str(installed))


def test_what_callers_may_write_names_every_field() -> None:
    """The typed signature, which only type checkers see, against the fields that there are."""
    source = inspect.getsource(Experiment)
    said = re.search(r"def __init__\((.*?)\) -> None", source, re.DOTALL)
    assert said is not None
    names: list[Any] = re.findall(r"^ +(\w+): ", said[1], re.MULTILINE)
    assert names == [one.name for one in fields(Experiment) if one.init]


def required(wheel: Path) -> dict[str, Distribution]:
    """What the package in `wheel` requires without any extra, and what that requires in turn."""
    found: dict[str, Distribution] = {}
    (own,) = distributions(name="nestling", path=[str(wheel)])
    open_: list[tuple[Distribution, frozenset[str]]] = [(own, frozenset())]
    while open_:
        by, extras = open_.pop()
        for text in by.requires or ():
            need = Requirement(text)
            wanted = [{"extra": extra} for extra in ("", *extras)]
            if need.marker is None or any(map(need.marker.evaluate, wanted)):
                name = canonicalize_name(need.name)
                if name not in found or need.extras:
                    found[name] = distribution(name)
                    open_.append((found[name], frozenset(need.extras)))
    return found


@pytest.fixture(scope="module")
def alone(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it requires, linked from this one, as `pip install`
    of the wheel would make it: nothing else can be imported there."""
    home = tmp_path_factory.mktemp("alone")
    run(["-m", "venv", "--without-pip", str(home)], home)
    (packages,) = home.glob("lib/python*/site-packages")
    for path in installed.iterdir():
        (packages / path.name).symlink_to(path)
    for own in required(installed).values():
        tops = {file.parts[0] for file in own.files or ()} - {"..", "__pycache__"}
        for top in sorted(tops):
            link, target = packages / top, Path(str(own.locate_file(top)))
            if not link.exists() and target.exists():
                link.symlink_to(target)
    return home


def test_an_environment_of_the_wheel_alone_has_nothing_else(alone: Path, tmp_path: Path) -> None:
    here = {canonicalize_name(own.metadata["Name"]) for own in distributions()}
    others = (
        "pytest",
        "hypothesis",
        "matplotlib",
        "pandas",
        "flwr",
        "tensorboard",
        "sklearn",
        "onnx",
        "ray",
    )
    assert {"pytest", "hypothesis"} <= here
    script = (
        "from importlib.util import find_spec; from importlib.metadata import distributions\n"
        f"print([name for name in {others} if find_spec(name)])\n"
        "print(*{one.metadata['Name'] for one in distributions()})\n"
        "import nestling; print(nestling.__file__)"
    )
    done = subprocess.run(
        [alone / "bin" / "python", "-c", script],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    seen, names, where = done.stdout.splitlines()
    assert seen == "[]" and Path(where).is_relative_to(alone)
    assert {"nestling", "torch", "numpy"} <= set(names.split()) and len(names.split()) < len(here)


@pytest.mark.minutes
def test_the_first_table_from_an_empty_folder(alone: Path, tmp_path: Path) -> None:
    """Every command of the page, one after the other, with nothing but the wheel and what it
    requires. The first sweep is killed when it has a finished run; the second goes on with it."""
    page = HOME / "docs" / "first_table.md"
    (tmp_path / "work").mkdir()
    (packages,) = alone.glob("lib/python*/site-packages")
    shell = Shell(
        tmp_path / "work", tmp_path / "programs", home=packages, python=alone / "bin" / "python"
    )
    for text in (*blocks(page, "python"), *blocks(page, "toml")):
        (shell.folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
    commands = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert len(commands) == 10
    killed = commands.index("nestling sweep table.toml")
    said, began = [], time.monotonic()
    for number, command in enumerate(commands):
        if number == killed:
            shell.kill(command, when=lambda: any(shell.folder.rglob("runs/*-seed*/summary.json")))
            finished = {
                path: path.read_bytes() for path in shell.folder.rglob("runs/*-seed*/summary.json")
            }
            said.append("")
        else:
            said.append(shell.type(command).stdout)
    assert time.monotonic() - began < PROMISED
    assert "run folder: runs/first" in said[1] and "data npz: 1,200 rows" in said[1]
    done = re.search(r"12 runs, (\d+) of them done", said[killed + 1])
    assert done is not None and 1 <= int(done[1]) < 12
    assert all(path.read_bytes() == summary for path, summary in finished.items())
    table = (shell.folder / "table.tex").read_text()
    rows = table.partition("\\midrule")[2].partition("\\bottomrule")[0].strip().splitlines()
    assert [row.partition(" & ")[0] for row in rows] == TABLE_ROWS
    assert all(" & 3 & " in row for row in rows)
    difference = (shell.folder / "difference.html").read_text()
    for row in TABLE_ROWS:
        assert row in said[5] and row in difference
    assert 'id="coverage"' in difference and "Who trained which channels" in difference
    assert (shell.folder / "runs/sweep-table/runs/heterofl-seed0/report.html").is_file()
    assert "differs" in said[9]
