"""Every run says what it read; what could be read in two ways is refused until the user says which
it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import nestling
from nestling import Data, Experiment, FleetConfig, InputError, SplitConfig, Tier, Watcher
from nestling.cli.main import main
from nestling.data import load
from nestling.data.npz import read_npz
from tests.small import small

RNG = np.random.default_rng(0)
N = 40
Y = np.arange(N) % 2
CLIENT = np.repeat(["ann", "bob", "cid", "dee"], 10)


def file(folder: Path, x: np.ndarray, **arrays: np.ndarray) -> Path:
    path = folder / "mine.npz"
    np.savez(path, x=x, y=Y, **arrays)
    return path


def numbers(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.integers(0, 200, (N, *shape)).astype(dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "fixes"),
    [
        ((28, 28), np.float32, {"hw": (1, 28, 28), "lc": (28, 28)}),
        ((20, 16), np.float64, {"hw": (1, 20, 16), "lc": (16, 20)}),
        ((6, 128), np.float32, {"cl": (6, 128), "hw": (1, 6, 128)}),
        ((6, 40, 1), np.float32, {"chw": (6, 40, 1), "hwc": (1, 6, 40)}),  # CHW of width 1
        ((3, 32, 3), np.uint8, {"chw": (3, 32, 3), "hwc": (3, 3, 32)}),  # of width 3
        ((1, 9, 4), np.uint8, {"chw": (1, 9, 4), "hwc": (4, 1, 9)}),  # of width 4
        ((16, 4, 4), np.float32, {"chw": (16, 4, 4), "hwc": (4, 16, 4)}),
        ((64, 64, 13), np.float32, {"chw": (64, 64, 13), "hwc": (13, 64, 64)}),
        ((12,), np.int64, {"tokens": (12,), "f": (12,)}),
    ],
)
def test_what_could_be_either_is_refused_and_read_as_told(
    tmp_path: Path,
    shape: tuple[int, ...],
    dtype: type,
    fixes: dict[str, tuple[int, ...]],
) -> None:
    path = file(tmp_path, numbers(*shape, dtype=dtype))
    with pytest.raises(InputError) as caught:
        read_npz(path)
    assert caught.value.field == "data.layout"
    assert all(f'"{layout}"' in str(caught.value.fix) for layout in fixes)
    for layout, sample in fixes.items():
        found = read_npz(path, layout=layout)
        assert found.shape == sample
        assert found.reading is not None and found.reading.layout == layout


@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((128, 6), np.float32, "lc"),
        ((10, 3), np.float32, "lc"),
        ((28, 28), np.uint8, "hw"),
        ((32, 32, 3), np.float32, "hwc"),
        ((28, 28, 1), np.float32, "hwc"),
        ((3, 32, 32), np.float32, "chw"),
        ((13, 64, 64), np.float32, "chw"),
        ((64, 8, 8), np.float32, "chw"),
        ((7,), np.uint8, "f"),
        ((7,), bool, "f"),
    ],
)
def test_what_is_clear_needs_no_word(
    tmp_path: Path, shape: tuple[int, ...], dtype: type, layout: str
) -> None:
    found = read_npz(file(tmp_path, numbers(*shape, dtype=dtype)))
    assert found.reading is not None and found.reading.layout == layout


def test_a_picture_keeps_its_pixels_in_any_layout(tmp_path: Path) -> None:
    """The same pictures written in three ways are the same data."""
    x = RNG.normal(size=(N, 12, 9, 1)).astype(np.float32)
    found = [
        read_npz(file(tmp_path, written), layout=layout).x
        for layout, written in (
            ("hwc", x),
            ("hw", x[..., 0]),
            ("chw", np.moveaxis(x, -1, 1)),
        )
    ]
    assert found[0].shape[1:] == (1, 12, 9)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_layout_of_other_dimensions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 dimensions") as caught:
        read_npz(file(tmp_path, numbers(5)), layout="lc")
    assert caught.value.field == "data.layout"


def test_token_ids_stay_as_they_are(tmp_path: Path) -> None:
    x = numbers(12, dtype=np.int32)
    data = read_npz(file(tmp_path, x, test=np.arange(N) >= 30), layout="tokens")
    assert data.x.dtype == torch.int64 and np.array_equal(data.x, x[:30])
    assert data.reading is not None and "left as they are" in data.reading.line("iid")
    # whole numbers that a float file holds are ids too; others are none
    assert torch.equal(
        read_npz(file(tmp_path, x.astype(np.float64)), layout="tokens").x.sort(0).values,
        read_npz(file(tmp_path, x), layout="tokens").x.sort(0).values,
    )
    for wrong in (x - 300, x + 0.5, np.where(x > 100, np.nan, x)):
        with pytest.raises(InputError, match="whole numbers from 0"):
            read_npz(file(tmp_path, wrong), layout="tokens")
    with pytest.raises(InputError) as caught:
        read_npz(file(tmp_path, x), layout="tokens", scale="standard")
    assert caught.value.field == "data.scale"


class Words(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(20, 4), nn.Linear(4 * shape[0], 16)
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(self.words(x.long()).flatten(1))))


@pytest.mark.parametrize("engine", ["inline", "cohort"])
def test_a_network_learns_from_token_ids(tmp_path: Path, engine: str) -> None:
    x = RNG.integers(0, 20, (400, 6))
    np.savez(tmp_path / "words.npz", x=x, y=(x[:, 0] > 9).astype(int))
    data = Data("npz", str(tmp_path / "words.npz"), layout="tokens")
    told = {
        "data": data,
        "rounds": 6,
        "split": SplitConfig(kind="iid"),
        "train": nestling.Train(epochs=2, batch=10, lr=0.3),
        "engine": nestling.EngineConfig(engine, workers=1),
    }
    model = nestling.Named(f"{__name__}:Words")
    result = nestling.run(small("heterofl", model=model, **told))
    assert result.summary["global_score"]["last"] > 0.8
    with pytest.raises(InputError, match="token ids") as caught:
        nestling.run(small("heterofl", model=nestling.Named(), **told))
    assert caught.value.field == "model.name"


@pytest.mark.parametrize(
    ("dtype", "scale", "low", "high", "mean"),
    [
        (np.uint8, "auto", 0.0, 199 / 255, None),
        (np.uint8, "unit", 0.0, 199 / 255, None),
        (np.uint8, "none", 0.0, 199.0, None),
        (np.uint8, "standard", None, None, 0.0),
        (np.float32, "auto", None, None, 0.0),
        (np.float32, "unit", 0.0, 1.0, None),
        (np.float32, "none", 0.0, 199.0, None),
    ],
)
def test_the_scale_is_the_users(
    tmp_path: Path,
    dtype: type,
    scale: str,
    low: float | None,
    high: float | None,
    mean: float | None,
) -> None:
    x = numbers(8, 8, 1, dtype=dtype)
    x[0, 0, 0, 0], x[0, 0, 1, 0] = 0, 199
    data = read_npz(file(tmp_path, x, test=np.arange(N) >= 30), scale=scale)
    if low is not None and high is not None:
        assert float(data.x.min()) == pytest.approx(low)
        assert float(data.x.max()) == pytest.approx(high)
    if mean is not None:
        assert abs(float(data.x.mean()) - mean) < 1e-5
        assert abs(float(data.x.std()) - 1) < 1e-2
    assert data.reading is not None and (data.reading.low, data.reading.high) == (0, 199)


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ({"layout": "cwh"}, "data.layout"),
        ({"scale": "minmax"}, "data.scale"),
        ({"layout": "hwc"}, "data.layout"),
        ({"scale": "none"}, "data.scale"),
        ({"client": "who"}, "data.client"),
    ],
)
def test_sets_of_ours_are_read_in_one_way(setting: dict[str, str], field: str) -> None:
    with pytest.raises(InputError) as caught:
        load("mnist12k", **setting)
    assert caught.value.field == field


# Clients, and the line


def heard(experiment: Experiment, **options: object) -> tuple[str, nestling.Result]:
    lines: list[str] = []
    watcher = Watcher(started=lambda _e, told, _d: lines.append(told["data"]["line"]))
    result = nestling.run(experiment, watcher=watcher, **options)  # type: ignore[arg-type]
    return lines[0], result


def of_people(path: Path, kind: str, **data: str) -> Experiment:
    return Experiment(
        data=Data("npz", str(path), **data),
        rounds=1,
        participants=0,
        split=SplitConfig(kind=kind, min_size=1, public=0.0),
        fleet=FleetConfig(tiers=(Tier(ratio=1.0, count=4),)),
    )


def test_clients_in_a_file_are_used_or_said_to_be_ignored(tmp_path: Path) -> None:
    path = file(tmp_path, numbers(5), client=CLIENT)
    line, result = heard(of_people(path, "iid"), out=tmp_path / "run")
    assert '4 clients of its own, NOT USED: split.kind is "iid"' in line and "natural" in line
    assert result.summary["data_read"] == line
    assert json.loads((tmp_path / "run" / "federation.json").read_text())["data"]["clients"] == 4
    page = (tmp_path / "run" / "report.html").read_text()
    assert "NOT USED" in page
    line, result = heard(of_people(path, "natural"))
    assert line.endswith("4 clients of its own") and "32 rows and 8 to test with" in line
    line, _ = heard(of_people(path, "iid", client="none"))
    assert line.endswith("no clients of its own")


def test_a_client_that_the_user_names_is_used_or_refused(tmp_path: Path) -> None:
    path = file(tmp_path, numbers(5), subject=CLIENT)
    line, _ = heard(of_people(path, "natural", client="subject"))
    assert line.endswith("4 clients of its own")
    with pytest.raises(InputError, match="divides rows anew") as caught:
        nestling.run(of_people(path, "iid", client="subject"))
    assert caught.value.field == "split.kind"
    with pytest.raises(InputError, match="no array 'person'"):
        nestling.run(of_people(path, "natural", client="person"))


def test_the_line_says_what_was_done(tmp_path: Path) -> None:
    x = RNG.normal(size=(N, 30, 3))
    x[0, 0, 0] = np.nan
    data = read_npz(file(tmp_path, x, test=np.arange(N) >= 30), missing="mean")
    assert data.reading is not None
    low, high = np.nanmin(x), np.nanmax(x)
    assert data.reading.line("iid") == (
        "data npz: 30 rows and 10 to test with (as marked); a sample of 30×3 read as a sequence "
        f"(steps, channels), channels moved first, now 3×30; values {low:.4g} to {high:.4g}, "
        "standardised per channel (1 missing ones filled with the mean); 2 classes; no clients of "
        "its own"
    )


def test_other_tasks_are_told_that_classes_are_needed(tmp_path: Path) -> None:
    for y in (RNG.normal(size=N), RNG.integers(0, 2, (N, 3))):
        np.savez(tmp_path / "other.npz", x=numbers(5), y=y)
        with pytest.raises(InputError, match="classification"):
            read_npz(tmp_path / "other.npz")


@pytest.mark.parametrize("way", [(), ("--json",)])
def test_the_command_says_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    way: tuple[str, ...],
) -> None:
    path = file(tmp_path, numbers(5), client=CLIENT)
    (tmp_path / "e.toml").write_text(of_people(path, "natural").to_toml())
    call = ["nestling", "run", str(tmp_path / "e.toml"), "--out", str(tmp_path / "run"), *way]
    monkeypatch.setattr("sys.argv", call)
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert not stop.value.code
    lines = [line for line in (said.err if way else said.out).splitlines() if "data npz" in line]
    assert len(lines) == 1 and lines[0].endswith("4 clients of its own")


def test_values_are_not_taken_for_classes(tmp_path: Path) -> None:
    """Prices, by a user who says nothing of the task."""
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(60) * 1000)
    with pytest.raises(InputError, match=r"60 rows have \d+ classes") as found:
        load("npz", path=str(tmp_path / "d.npz"))
    assert 'data.task = "regression"' in str(found.value)
