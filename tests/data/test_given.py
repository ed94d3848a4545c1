"""Data given as objects: arrays, tensors, a torch `Dataset`, a Hugging Face `Dataset`, a
callable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import nestling
from nestling import Data, Experiment, FleetConfig, InputError, SplitConfig, Tier
from nestling.data.npz import read_npz
from nestling.files import read_toml

RNG = np.random.default_rng(1)
N = 60
X = RNG.normal(size=(N, 5)).astype(np.float32)
Y = np.arange(N) % 3
CLIENT = np.repeat([7, 3, 5], 20)
TEST = np.arange(N) % 5 == 0


def same(one: Any, other: Any) -> None:
    for name in ("x", "y", "x_test", "y_test"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.client is None) == (other.client is None)
    assert one.client is None or np.array_equal(one.client, other.client)
    assert one.class_names == other.class_names


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, np.ndarray.tolist])
def test_arrays_are_read_as_the_same_arrays_in_a_file(tmp_path: Path, kind: Any) -> None:
    np.savez(tmp_path / "f.npz", x=X, y=Y, client=CLIENT, test=TEST)
    given = Data.of(kind(X), kind(Y), client=kind(CLIENT), test=kind(TEST))
    if kind is not np.ndarray.tolist:  # whose numbers have 64 bits
        same(given.load(0), read_npz(tmp_path / "f.npz"))
    assert given.load(0).client is not None and len(given.load(0).y) == 48
    np.savez(tmp_path / "f.npz", x=X, y=Y)
    same(Data.of(X, Y).load(3), read_npz(tmp_path / "f.npz", seed=3))


@pytest.mark.parametrize("wrong", [{"label": "z"}, {"path": "f"}, {"options": {"rows": 3}}])
def test_settings_that_objects_have_no_use_for_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        Data.of(X, Y, **wrong).load(0)
    assert str(caught.value.field).startswith(f"data.{next(iter(wrong))}")


def test_what_was_given_is_not_touched() -> None:
    x = X.astype(np.float64)
    x[0, 0] = np.nan
    before = x.copy()
    Data.of(x, Y, missing="zero").load(0)
    assert np.array_equal(x, before, equal_nan=True)


def test_words_half_numbers_and_test_rows_of_their_own() -> None:
    names = np.array(["a", "b", "c"])[Y]
    data = Data.of(
        torch.tensor(X).bfloat16(), names.tolist(), test=(torch.tensor(X[:6]).bfloat16(), names[:6])
    ).load(0)
    assert data.class_names == ("a", "b", "c") and len(data.y) == N and len(data.y_test) == 6
    objects = np.array(names.tolist(), dtype=object)
    assert Data.of(X, objects).load(0).class_names == ("a", "b", "c")


class Clips(Dataset):  # type: ignore[type-arg]
    """Samples, classes and clients, one by one, as a user's own dataset has them."""

    classes = ("no", "yes", "maybe")

    def __init__(self, rows: slice) -> None:
        self.rows = np.arange(N)[rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int, str]:
        row = self.rows[number]
        return torch.tensor(X[row]), int(Y[row]), f"who{CLIENT[row]}"


def test_a_torch_dataset() -> None:
    data = Data.of(Clips(slice(0, 50)), test=Clips(slice(50, 60))).load(0)
    assert (len(data.y), len(data.y_test), data.shape) == (50, 10, (5,))
    assert data.class_names == Clips.classes and data.client is not None
    assert (
        data.client.tolist() == np.unique(CLIENT[:50].astype(str), return_inverse=True)[1].tolist()
    )
    plain = TensorDataset(torch.tensor(X), torch.tensor(Y))
    same(Data.of(plain).load(0), Data.of(X, Y).load(0))
    same(Data.of(plain, client=CLIENT).load(0), Data.of(X, Y, client=CLIENT).load(0))


class Label:
    names = ("low", "middle", "high")


class Columns:
    """What of a Hugging Face `Dataset` is used."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns
        self.column_names = list(columns)
        self.features = {name: Label() if name == "label" else object() for name in columns}

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


def test_named_columns() -> None:
    table = Columns(a=X[:, 0].tolist(), b=X[:, 1].tolist(), label=Y.tolist(), who=CLIENT.tolist())
    data = Data.of(table, "label", features=["a", "b"], client="who").load(0)
    assert data.shape == (2,) and data.class_names == Label.names and data.client is not None
    sounds = [{"array": row, "sampling_rate": 8000} for row in X]
    both = {"train": Columns(audio=sounds, label=Y.tolist()), "test": None}
    both["test"] = both["train"]
    data = Data.of(both).load(0)
    assert data.shape == (5,) and len(data.y) == len(data.y_test) == N
    for wrong in ({"features": "c"}, {"client": "whom"}, {"y": "classes"}, {}):
        with pytest.raises(InputError, match="a, b, label, who"):
            Data.of(table, **wrong)


def test_a_real_dataset_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Array2D((9, 9), "uint8"),
            "label": datasets.ClassLabel(names=list(Label.names)),
            "who": datasets.Value("int64"),
        }
    )

    def rows(count: int) -> Any:
        pictures = RNG.integers(0, 255, (count, 9, 9), dtype=np.uint8)
        columns = {"image": pictures.tolist(), "label": Y[:count], "who": CLIENT[:count]}
        return datasets.Dataset.from_dict(columns, features=features)

    data = Data.of(rows(N), client="who", layout="hw", scale="unit").load(0)
    assert data.shape == (1, 9, 9) and data.class_names == Label.names
    assert data.client is not None
    halves = datasets.DatasetDict({"train": rows(N), "test": rows(6)})
    assert len(Data.of(halves, layout="hw").load(0).y_test) == 6


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Data.of(X), "no y"),
        (lambda: Data.of([X, X[:, :3]], [0, 1]), "more than their first dimension"),
        (lambda: Data.of([X, X[0]], [0, 1]), "several dimensions of unequal size"),
        (lambda: Data.of([[[1, 2], [3]]], [0]), "no array"),
        (lambda: Data.of(X, Y, test=X[:3]), "test is float"),
        (lambda: Data.of(X, Y, test=(X[:3, :2], Y[:3])), "make them alike"),
        (lambda: Data.of(X[:40], Y), "40 rows but y has 60"),
        (lambda: Data.of(X, Y / 2), "classification"),
        (lambda: Data.of(np.array([{}] * N), Y), "no numbers"),
        (lambda: Data.of(torch.utils.data.Subset([(X[0],)] * 5, range(5))), "pairs"),  # type: ignore[arg-type]
    ],
)
def test_bad_objects(make: Any, word: str) -> None:
    with pytest.raises(InputError, match=word) as caught:
        make().load(0)
    assert caught.value.field == "data" and caught.value.fix


# Runs


def experiment(data: Any, kind: str = "natural", rounds: int = 2) -> Experiment:
    return Experiment(
        data=data,
        rounds=rounds,
        participants=0,
        split=SplitConfig(kind=kind, min_size=1, public=0.0),
        fleet=FleetConfig(tiers=(Tier(ratio=0.5, count=2), Tier(ratio=1.0, count=1))),
    )


def test_a_run_on_objects_equals_that_on_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", x=X, y=Y, client=CLIENT)
    file = nestling.run(experiment(Data("npz", str(tmp_path / "f.npz"))))
    given = nestling.run(experiment(Data.of(X, Y, client=CLIENT)))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            file.model.state_dict().values(),  # type: ignore[union-attr]
            given.model.state_dict().values(),  # type: ignore[union-attr]
            strict=True,
        )
    )


def test_a_run_on_objects_goes_on_with_the_same_objects_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = Data.of(X, Y, client=CLIENT), tmp_path / "run"
    nestling.run(experiment(data), out=out)
    with pytest.raises(InputError, match=r"resume\(FOLDER, data=") as caught:
        nestling.resume(out, overrides=("rounds=3",))
    assert caught.value.field == "data"
    for other in (Data.of(X + 1, Y, client=CLIENT), Data.of(X, Y), Data("npz", "f.npz")):
        with pytest.raises(InputError, match="other rows"):
            nestling.resume(out, overrides=("rounds=3",), data=other)
    with pytest.raises(InputError, match="settings"):
        nestling.resume(out, data=Data.of(X, Y, client=CLIENT, scale="none"))
    again = nestling.resume(out, overrides=("rounds=3",), data=Data.of(X, Y, client=CLIENT))
    whole = nestling.run(experiment(data, rounds=3))
    assert [m["loss"] for m in again.metrics] == [m["loss"] for m in whole.metrics]
    monkeypatch.setattr("sys.argv", ["nestling", "run", "--resume", str(out)])
    from nestling.cli.main import main

    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and "Data.of" in capsys.readouterr().err


def test_a_run_that_reads_a_file_takes_no_objects(tmp_path: Path) -> None:
    np.savez(tmp_path / "f.npz", x=X, y=Y, client=CLIENT)
    nestling.run(experiment(Data("npz", str(tmp_path / "f.npz"))), out=tmp_path / "run")
    with pytest.raises(InputError, match="reads 'npz' itself"):
        nestling.resume(tmp_path / "run", data=Data.of(X, Y))


def test_changes_keep_the_objects() -> None:
    told = experiment(Data.of(X, Y, client=CLIENT))
    assert told.with_changes(rounds=1).data.own is told.data.own
    table = told.to_table()
    assert table["data"]["name"] == "given" and "own" not in table["data"]
    read = Experiment.from_table(table)
    assert read == told and read.data.own is None
    assert read.with_objects_of(told).data.own is told.data.own


# A callable


def pairs(rows: int = N) -> tuple[np.ndarray, np.ndarray]:
    return X[:rows], Y[:rows]


def with_clients() -> dict[str, np.ndarray]:
    return {"x": X, "y": Y, "client": CLIENT, "test": TEST}


def clips() -> Clips:
    return Clips(slice(None))


def made() -> Data:
    return Data.of(X, Y, client=CLIENT)


def broken() -> None:
    raise ValueError("the disk is gone")


def four() -> tuple[int, ...]:
    return 1, 2, 3, 4


@pytest.mark.parametrize("name", ["pairs", "with_clients", "clips", "made"])
def test_a_callable_by_its_name(name: str) -> None:
    kind = "iid" if name == "pairs" else "natural"
    result = nestling.run(experiment(Data(f"{__name__}:{name}"), kind))
    assert f"data {__name__}:{name}: " in result.summary["data_read"]


def test_a_callable_gets_its_options_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        f'[data]\nname = "{__name__}:pairs"\n[data.options]\nrows = 30\n'
    )
    data = Experiment.read(tmp_path / "e.toml", ["data.scale=none"]).data.load(0)
    assert len(data.y) + len(data.y_test) == 30 and data.reading is not None
    assert "left as they are" in data.reading.line("iid")


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("broken", {}, "the disk is gone"),
        ("nothing", {}, "nothing to call"),
        ("four", {}, "returned 4 things"),
        ("pairs", {"row": 3}, "unexpected keyword"),
    ],
)
def test_bad_callables(name: str, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word) as caught:
        Data(f"{__name__}:{name}", options=options).load(0)
    assert caught.value.field == "data.name"
    with pytest.raises(InputError, match="No module named"):
        Data("no_such_module:rows").load(0)


def test_a_run_folder_does_not_import_the_data_it_names(tmp_path: Path) -> None:
    name = f"{__name__}:with_clients"
    nestling.run(experiment(Data(name)), out=tmp_path / "run")
    assert read_toml(tmp_path / "run" / "experiment.toml")["data"]["name"] == name
    kept = sys.modules.pop(__name__)
    try:
        with pytest.raises(InputError, match="--trust"):
            nestling.resume(tmp_path / "run", overrides=("rounds=3",))
        assert __name__ not in sys.modules
    finally:
        sys.modules[__name__] = kept
    assert nestling.resume(tmp_path / "run", overrides=("rounds=3",), trust=[name]).metrics
