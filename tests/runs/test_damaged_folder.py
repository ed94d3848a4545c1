"""What a disk did to a run folder: whoever goes on with it is told which file is damaged. And a
clock that jumps does no harm."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nestling
from nestling.errors import InputError
from nestling.files import parse_toml
from nestling.runfiles import NO_MATTER
from nestling.runs import fingerprint
from nestling.runs.analysis import analyse
from nestling.runs.export import export
from nestling.runs.run import opened
from tests.runs.crash_points import in_child
from tests.runs.test_crash_points import ROUNDS, Case, traces

CASE = Case("fedproto")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run stopped after all rounds but one, and what the whole run leaves."""
    home = tmp_path_factory.mktemp("runs")
    experiment = CASE.experiment()
    nestling.run(experiment, out=home / "whole")
    nestling.run(experiment.with_changes(rounds=ROUNDS - 1), out=home / "stopped")
    return home / "stopped", traces(home / "whole")


def gone_on(folder: Path) -> nestling.Result:
    return nestling.resume(folder, overrides=(f"rounds={ROUNDS}",))


def damages(data: bytes, draw: random.Random) -> list[bytes]:
    """Cut off at the start, in the middle, at the end; and with one bit turned over somewhere."""
    cut = [data[:place] for place in (0, len(data) // 2, len(data) - 1)]
    flipped = []
    for _ in range(8):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        flipped.append(bytes(changed))
    return cut + flipped


def test_a_damaged_checkpoint_is_refused_by_name(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(stopped[0], out)
    path = out / "checkpoint.bin"
    for data in damages(path.read_bytes(), random.Random(0)):
        path.write_bytes(data)
        with pytest.raises(InputError, match=re.escape(f"{path} is damaged")):
            gone_on(out)


@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_clients_state_cut_short_is_refused_by_name(
    stopped: tuple[Path, dict[str, Any]], cut: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(stopped[0], out)
    for path in (out / "clients").iterdir():
        path.write_bytes(path.read_bytes()[: -cut or 0])
    with pytest.raises(InputError, match=r"client \d's state cannot be read from .*clients"):
        gone_on(out)


def test_rounds_that_the_log_has_lost_are_said(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, wanted = stopped
    out = tmp_path / "run"
    shutil.copytree(folder, out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("\n".join(["{" + lines[0], *lines[1:]]) + "\n")
    result = gone_on(out)
    assert any(note == "metrics.jsonl has lost the rounds 1" for note in result.summary["notes"])
    assert traces(out)["rows"] == wanted["rows"][1:]
    assert traces(out)["state"] == wanted["state"]  # the run itself needs no log
    assert not any("lost" in note for note in wanted["summary"]["notes"])


def test_a_damaged_summary_is_named(stopped: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(stopped[0], out)
    (out / "summary.json").write_text('{"rounds": ')
    with pytest.raises(InputError, match=r"summary\.json is damaged"), opened(out):
        pass


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    """By whoever opens the run; going on with it writes the file again."""
    out = tmp_path / "run"
    nestling.run(Case("heterofl").experiment(), out=out)
    path = out / "global.safetensors"
    good = path.read_bytes()
    readers: list[Callable[[], object]] = [
        lambda: nestling.load(out).model,
        lambda: export(out, device="board"),
        lambda: analyse(out),
    ]
    for number, data in enumerate(damages(good, random.Random(0))):
        path.write_bytes(data)
        with pytest.raises(InputError, match=re.escape(f"{path} is damaged")):
            readers[number % len(readers)]()
    nestling.resume(out)
    assert path.read_bytes() == good and nestling.load(out).model is not None


def test_the_summary_of_an_earlier_end_accuses_no_model(tmp_path: Path) -> None:
    """A run that went on was killed after it had written its model, and before its summary."""
    out = tmp_path / "run"
    nestling.run(Case("heterofl").experiment().with_changes(rounds=ROUNDS - 1), out=out)
    before = (out / "summary.json").read_bytes()
    model = (out / "global.safetensors").read_bytes()
    gone_on(out)
    (out / "summary.json").write_bytes(before)
    assert (out / "global.safetensors").read_bytes() != model
    assert nestling.load(out).model is not None


def test_an_experiment_that_has_changed_is_said(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, wanted = stopped
    out = tmp_path / "run"
    shutil.copytree(folder, out)
    path = out / "experiment.toml"
    path.write_text(path.read_text().replace("size = 20", "size = 21"))
    result = gone_on(out)
    said = [note for note in result.summary["notes"] if "not as it was written" in note]
    assert len(said) == 1 and str(path) in said[0]
    assert not any("not as it was written" in note for note in wanted["summary"]["notes"])


def test_every_byte_of_an_experiment_counts(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Whatever changes what its settings are, and nothing else, is noted."""
    good = (stopped[0] / "experiment.toml").read_bytes()
    before = fingerprint.stored(json.loads((stopped[0] / "federation.json").read_text()))
    path, draw, noted = tmp_path / "experiment.toml", random.Random(0), 0

    def settings(data: bytes) -> object:
        return fingerprint.without(parse_toml(data.decode(), "it"), NO_MATTER)

    for place in range(len(good)):
        changed = bytearray(good)
        changed[place] ^= 1 << draw.randrange(7)
        path.write_bytes(changed)
        try:
            found = fingerprint.edited(before, path)
        except InputError:
            continue
        assert bool(found) == (settings(bytes(changed)) != settings(good)), changed.decode()
        noted += bool(found)
    assert noted > 100 and not fingerprint.edited(before, stopped[0] / "experiment.toml")


def test_a_clock_that_jumps_does_no_harm(tmp_path: Path) -> None:
    """A day forwards and back again, and a day backwards, from one look at it to the next."""
    (tmp_path / "still").mkdir()
    nestling.run(CASE.experiment(), out=tmp_path / "still" / "run")

    def jumping() -> None:
        true, jumps = time.time, itertools.cycle((0, 86400, -86400))
        time.time = lambda: true() + next(jumps)
        nestling.run(CASE.experiment().with_changes(rounds=2), out=tmp_path / "run")
        nestling.resume(tmp_path / "run", overrides=(f"rounds={ROUNDS}",))

    assert in_child(jumping)
    assert traces(tmp_path / "run") == traces(tmp_path / "still" / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds_done"] == ROUNDS
