"""Tables with named columns, and folders of pictures and sounds by class."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nestling
from nestling import Data, Experiment, InputError
from nestling.cli.main import main
from nestling.data import load
from nestling.data.log_mel import mel_filters

RNG = np.random.default_rng(2)
ROWS = 30


def refused(word: str, field: str, name: str, path: Path, **how: Any) -> None:
    with pytest.raises(InputError, match=word) as caught:
        load(name, path=str(path), **how)
    assert caught.value.field == field and caught.value.fix, caught.value


# Columns


def table(folder: Path, text: str = "", **columns: list[Any]) -> Path:
    path = folder / "t.csv"
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    path.write_text(text or "\n".join(lines) + "\n")
    return path


def flowers(folder: Path, **more: list[Any]) -> Path:
    return table(
        folder,
        length=RNG.normal(5, 1, ROWS).round(3).tolist(),
        width=[k * 10 for k in range(ROWS)],
        species=[("iris", "rose", "tulip")[k % 3] for k in range(ROWS)],
        client=[f"garden {k // 10}" for k in range(ROWS)],
        test=[("train", "test")[k % 5 == 0] for k in range(ROWS)],
        **more,
    )


def test_a_table_by_its_columns(tmp_path: Path) -> None:
    data = load("csv", path=str(flowers(tmp_path)), label="species")
    assert data.shape == (2,) and data.class_names == ("iris", "rose", "tulip")
    assert (len(data.y), len(data.y_test)) == (24, 6)
    assert data.client is not None and np.bincount(data.client).tolist() == [8, 8, 8]
    assert torch.allclose(data.x.mean(0), torch.zeros(2), atol=1e-5)
    assert data.reading is not None and "2 columns as features" in data.reading.line("natural")
    one = load(
        "csv", path=str(flowers(tmp_path)), label="species", features=("width",), scale="none"
    )
    wanted = [k * 10 for k in range(ROWS) if k % 5]
    assert one.shape == (1,) and one.x[:, 0].tolist() == wanted
    # a client that is not wanted is no feature either
    assert load("csv", path=str(flowers(tmp_path)), label="species", client="none").shape == (2,)


def test_other_names_for_client_and_test(tmp_path: Path) -> None:
    path = flowers(tmp_path, who=[k % 2 for k in range(ROWS)], held=[k < 6 for k in range(ROWS)])
    found = load(
        "csv",
        path=str(path),
        label="species",
        client="who",
        test="held",
        features=("length", "width"),
    )
    assert found.client is not None and int(found.client.max()) == 1 and len(found.y_test) == 6


def test_gaps_quotes_and_delimiters(tmp_path: Path) -> None:
    rows = "".join(f'{k};"{k % 2}";"a; {k % 2}"\n' for k in range(20))
    path = table(tmp_path, "﻿a;b;label\n" + rows + ";1;a; 1\n".replace("a; 1", '"a; 1"'))
    refused("1 missing", "data.path", "csv", path, options={"delimiter": ";"})
    data = load("csv", path=str(path), options={"delimiter": ";"}, missing="mean")
    assert data.class_names == ("a; 0", "a; 1") and data.shape == (2,)


@pytest.mark.parametrize(
    ("text", "how", "word", "field"),
    [
        ("a,b\n1,2\n", {}, "no column 'label' or 'y'", "data.label"),
        ("a,y\n1,0\n2,1\n", {"label": "z"}, "no column 'z'", "data.label"),
        ("a,y\n1,0\n2,1\n", {"features": ("b",)}, "no column 'b'", "data.features"),
        ("a,y\n1,0\n2,1\n", {"client": "who"}, "no column 'who'", "data.client"),
        ("a,y\n1,0\nred,1\n", {}, "'red' in row 3", "data.features"),
        ("a,y\n1,0\n2,1,3\n", {}, "row 3 has 3 cells", "data.path"),
        ("a,a,y\n1,0,1\n2,1,0\n", {}, "twice", "data.path"),
        ("a,y\n", {}, "no rows", "data.path"),
        ("", {}, "no rows", "data.path"),
        ("y\n0\n1\n", {}, "no column of features", "data.path"),
        ("a,y\n1,0.5\n2,1.5\n", {}, "takes values", "data.path"),
        ("a,y\n1,\n2,1\n", {}, "'y' is empty in row 2", "data.path"),
        ("a,y,test\n1,0,maybe\n2,1,test\n", {}, "'maybe'", "data.path"),
        ("a,y\n1,0\n2,1\n", {"options": {"delimeter": ";"}}, "delimiter", "data.options.delimeter"),
        ("a,y\n1,0\n2,1\n", {"transform": "log-mel"}, "no use", "data.transform"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, how: dict[str, Any], word: str, field: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=word) as caught:
        load("csv", path=str(path), **how)
    assert caught.value.field == field


def test_a_table_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00a")
    refused("cannot be read", "data.path", "csv", tmp_path / "t.csv")
    refused("cannot be read", "data.path", "csv", tmp_path / "absent.csv")
    refused("cannot be read", "data.path", "csv", tmp_path)


def test_whole_numbers_written_as_others_are_classes(tmp_path: Path) -> None:
    path = table(tmp_path, a=list(range(20)), y=[f"{k % 2 * 3}.0" for k in range(20)])
    assert load("csv", path=str(path)).class_names == ("0", "3")


def test_parquet_without_its_package_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    refused(r"needs pyarrow.*nestling\[tables\]", "data.name", "parquet", tmp_path / "t.parquet")


def test_parquet_is_read_as_the_same_table(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    path = flowers(tmp_path)
    parquet.write_table(csv.read_csv(path), tmp_path / "t.parquet")
    one = load("csv", path=str(path), label="species")
    other = load("parquet", path=str(tmp_path / "t.parquet"), label="species")
    assert pyarrow and torch.equal(one.x, other.x) and torch.equal(one.y_test, other.y_test)
    assert np.array_equal(one.client, other.client) and one.class_names == other.class_names
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nothing")
    refused("cannot be read", "data.path", "parquet", tmp_path / "t.parquet")


# Pictures


def picture(path: Path, array: np.ndarray) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(array).save(path)


def pictures(folder: Path, *shape: int, count: int = 5) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {"cat": [], "dog": []}
    for name, arrays in found.items():
        for k in range(count):
            arrays.append(RNG.integers(0, 255, shape, dtype=np.uint8))
            picture(folder / name / f"{k % 2}_{k}.png", arrays[-1])
    return found


@pytest.mark.parametrize("shape", [(6, 7), (6, 7, 3)])
def test_a_folder_of_pictures(tmp_path: Path, shape: tuple[int, ...]) -> None:
    made = pictures(tmp_path, *shape)
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    (tmp_path / ".hidden").mkdir()
    data = load("images", path=str(tmp_path))
    assert (
        data.class_names == ("cat", "dog") and data.shape == ((1, 6, 7), (3, 6, 7))[len(shape) - 2]
    )
    whole = torch.cat([data.x, data.x_test])
    assert len(whole) == 10 and 0 <= float(whole.min()) <= float(whole.max()) <= 1
    first = torch.tensor(made["cat"][0].reshape(6, 7, -1)).permute(2, 0, 1) / 255
    assert any(torch.allclose(first, one) for one in whole)
    assert data.reading is not None and "1 other files left out" in data.reading.line("iid")


def test_pictures_of_two_kinds_and_sizes(tmp_path: Path) -> None:
    pictures(tmp_path, 6, 7)
    picture(tmp_path / "dog" / "colour.png", RNG.integers(0, 255, (6, 7, 3), dtype=np.uint8))
    assert load("images", path=str(tmp_path)).shape == (3, 6, 7)
    picture(tmp_path / "dog" / "large.png", RNG.integers(0, 255, (9, 9), dtype=np.uint8))
    refused(r"large.png: is 9×9, 0_0.png is 6×7", "data.path", "images", tmp_path)
    assert load("images", path=str(tmp_path), options={"size": [8, 4]}).shape == (3, 8, 4)
    refused("no size", "data.options.size", "images", tmp_path, options={"size": [8]})
    (tmp_path / "dog" / "broken.png").write_bytes(b"\x89PNG nothing")
    refused("broken.png: cannot be read", "data.path", "images", tmp_path)


def test_sides_and_clients_of_a_folder(tmp_path: Path) -> None:
    pictures(tmp_path / "a" / "train", 5, 5)
    pictures(tmp_path / "a" / "test", 5, 5, count=2)
    data = load("images", path=str(tmp_path / "a"), client="prefix")
    assert (len(data.y), len(data.y_test)) == (10, 4)
    assert data.client is not None and np.bincount(data.client).tolist() == [6, 4]
    for animal in ("cat", "dog"):
        for who in ("ann", "bob"):
            for k in range(3):
                picture(
                    tmp_path / "b" / animal / who / f"{k}.png",
                    RNG.integers(0, 255, (5, 5), dtype=np.uint8),
                )
    data = load("images", path=str(tmp_path / "b"), client="folder")
    assert data.client is not None and int(data.client.max()) == 1
    refused("no client's folder", "data.path", "images", tmp_path / "a", client="folder")
    refused("prefix", "data.client", "images", tmp_path / "b", client="who")
    (tmp_path / "a" / "val").mkdir()
    refused("test, train, val", "data.path", "images", tmp_path / "a")
    refused("no such folder", "data.path", "images", tmp_path / "c")
    (tmp_path / "c").mkdir()
    refused("no .png files", "data.path", "images", tmp_path / "c")


def test_pictures_without_the_package_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestling.data.folders.find_spec", lambda _: None)
    refused(r"needs Pillow.*nestling\[images\]", "data.name", "images", tmp_path)


# Sounds

RATE = 2000


def sound(
    path: Path, signal: np.ndarray, width: int = 2, channels: int = 1, rate: int = RATE
) -> None:
    """A .wav file of samples from -1 to 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    top = 2 ** (8 * width - 1)
    whole = np.clip(np.rint(signal * top), -top, top - 1).astype(np.int64)
    whole = whole + 128 if width == 1 else whole
    data = b"".join(
        int(v).to_bytes(width, "little", signed=width > 1) * channels for v in whole.tolist()
    )
    with wave.open(str(path), "wb") as file:
        file.setsampwidth(width)
        file.setnchannels(channels)
        file.setframerate(rate)
        file.writeframes(data)


def tone(hertz: float, seconds: float = 0.2) -> np.ndarray:
    at = np.arange(round(seconds * RATE)) / RATE
    return 0.5 * np.sin(2 * np.pi * hertz * at + RNG.uniform(0, 6))


def tones(folder: Path, count: int = 12) -> None:
    for name, hertz in (("low", 200), ("middle", 400), ("high", 800)):
        for k in range(count):
            sound(folder / name / f"s{k % 3}_{k}.wav", tone(hertz * RNG.uniform(0.95, 1.05)))


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 1), (3, 2), (4, 1)])
def test_samples_of_any_width(tmp_path: Path, width: int, channels: int) -> None:
    signals = [tone(100), tone(300)]
    for k, signal in enumerate(signals * 3):
        sound(tmp_path / ("a", "b")[k % 2] / f"{k}.wav", signal, width, channels)
    data = load("wavs", path=str(tmp_path), scale="none")
    assert data.shape == (1, 400)
    whole = torch.cat([data.x, data.x_test])[:, 0]
    for signal in signals:
        assert (whole - torch.tensor(signal)).abs().max(1).values.min() < 2 ** (
            2 - 8 * width
        ) + 1e-6


def test_lengths_rates_and_damage(tmp_path: Path) -> None:
    tones(tmp_path)
    sound(tmp_path / "low" / "long.wav", tone(200, 0.4))
    data = load("wavs", path=str(tmp_path))
    assert data.shape == (1, 800)
    assert data.reading is not None and "36 filled with silence" in data.reading.line("iid")
    short = load("wavs", path=str(tmp_path), options={"seconds": 0.1})
    assert short.shape == (1, 200)
    assert short.reading is not None and "37 cut off" in short.reading.line("iid")
    sound(tmp_path / "low" / "other.wav", tone(200), rate=4000)
    refused("other.wav: has 4000 samples a second", "data.path", "wavs", tmp_path)
    (tmp_path / "low" / "other.wav").write_bytes(b"RIFF nothing")
    refused("other.wav: cannot be read", "data.path", "wavs", tmp_path)
    refused("no use", "data.label", "wavs", tmp_path, label="x")
    refused("out of range", "data.options.seconds", "wavs", tmp_path, options={"seconds": -1})


def test_log_mel_sees_where_a_tone_is(tmp_path: Path) -> None:
    tones(tmp_path)
    how = {"transform": "log-mel", "scale": "none", "options": {"bands": 16}}
    data = load("wavs", path=str(tmp_path), **how)
    size, step = round(0.032 * RATE), round(0.016 * RATE)
    assert data.shape == (1, 16, (400 - size) // step + 1)
    loudest = data.x.mean(-1)[:, 0].argmax(1)  # the loudest band of each row
    place = {name: loudest[data.y == data.class_names.index(name)] for name in data.class_names}
    assert place["low"].max() < place["middle"].min() <= place["middle"].max() < place["high"].min()
    # the same signals, as an array of one's own
    files = sorted((tmp_path / "low").iterdir()) + sorted((tmp_path / "high").iterdir())
    x = np.stack([tone(200) for _ in files[:12]] + [tone(800) for _ in files[12:]])
    options = {"rate": RATE, "bands": 16}
    given = Data.of(x, np.repeat([0, 1], 12), transform="log-mel", options=options).load(0)
    assert given.shape == data.shape
    for name, value in (("rate", 0), ("window", 9.0), ("step", 0), ("bands", 0), ("high", 5000)):
        wrong = {**options, name: value}
        with pytest.raises(InputError) as caught:
            Data.of(x, np.repeat([0, 1], 12), transform="log-mel", options=wrong).load(0)
        assert caught.value.field == f"data.options.{name}"
    with pytest.raises(InputError, match="one signal a row"):
        Data.of(np.zeros((24, 3, 4)), np.repeat([0, 1], 12), transform="log-mel").load(0)


def test_every_mel_band_hears_something() -> None:
    for bands in (1, 8, 64):
        weights = mel_filters(bands, 64, RATE, 20.0, RATE / 2)
        assert weights.shape == (bands, 33) and (weights.sum(1) > 0).all() and (weights >= 0).all()
        assert (np.diff(weights.argmax(1)) >= 0).all()


# As a user comes to them


def test_sounds_are_learnt_by_unequal_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tones(tmp_path / "sounds", count=24)
    settings = [
        "data.name=wavs", f"data.path={tmp_path / 'sounds'}", "data.client=prefix",
        "data.transform=log-mel", "data.options.bands=12", "split.kind=natural", "rounds=12",
        "participants=0", "fleet.tiers=[{ratio=0.5, count=2}, {ratio=1.0, count=1}]",
        "model.name=tinycnn", "model.channels=[8, 8]", "train.lr=0.1", "engine.name=inline",
    ]  # fmt: skip
    sets = [part for one in settings for part in ("--set", one)]
    monkeypatch.setattr("sys.argv", ["nestling", "run", *sets, "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr().out
    assert not stop.value.code and "log-mel of 12 bands" in said and "3 clients of its own" in said
    summary = nestling.runs.run.opened(tmp_path / "run")
    with summary as result:
        assert result.summary["global_score"]["last"] > 0.6  # a guess is right in a third


def test_a_table_in_a_file_beside_the_experiment(tmp_path: Path) -> None:
    flowers(tmp_path)
    text = '[data]\nname = "csv"\npath = "t.csv"\nlabel = "species"\nfeatures = ["width"]\n'
    (tmp_path / "e.toml").write_text(text)
    experiment = Experiment.read(tmp_path / "e.toml")
    assert experiment.data.load(0).shape == (1,)
    assert Experiment.from_table(experiment.to_table()) == experiment
