"""Bad input: exit code 2, one clear message, no traceback, and no half-written run folder."""

from __future__ import annotations

import gzip
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

import nestling
import nestling.runs.loop
from nestling.cli import main
from tests.small import small

SMALL = [
    "--set", "rounds=1", "--set", "participants=2", "--set", "model.name=tinycnn", "--set",
    "model.channels=[4, 4]",
    "--set", "split.size=30", "--set", "fleet.size=2", "--set", "fleet.tiers=[{ratio=0.5, "
                                                                "count=1}, {ratio=1.0, count=1}]",
    "--set", "engine.name=inline",
]  # fmt: skip


class NoAxis(nn.Module):
    """Every hidden value is sorted away: no channel can be followed."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(784, 16), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).sort(dim=1).values)


class WrongOutputs(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(784, classes + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def sets(*overrides: str) -> Callable[[Path], list[str]]:
    """Arguments of a small run with further overrides."""
    return lambda tmp: [
        "run",
        *SMALL,
        *(part for o in overrides for part in ("--set", o.replace("TMP", str(tmp)))),
    ]


def mlp_on(**arrays: np.ndarray) -> Callable[[Path], list[str]]:
    def make(tmp: Path) -> list[str]:
        np.savez(tmp / "data.npz", **arrays)  # type: ignore[arg-type]
        pairs = [
            "data.name=npz",
            f"data.path={tmp}/data.npz",
            "rounds=1",
            "participants=2",
            "fleet.size=2",
        ]
        return ["run", *(part for o in pairs for part in ("--set", o))]

    return make


def truncated_idx(tmp: Path) -> list[str]:
    raw = tmp / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        head = (
            b"\0\0\x08\x03" + (100).to_bytes(4, "big") + (28).to_bytes(4, "big") * 2
            if "idx3" in name
            else b"\0\0\x08\x01" + (100).to_bytes(4, "big")
        )
        (raw / f"{name}-ubyte.gz").write_bytes(gzip.compress(head + b"\0" * 50))
    return sets("data.name=mnist")(tmp)


def bad_toml(text: str) -> Callable[[Path], list[str]]:
    def make(tmp: Path) -> list[str]:
        (tmp / "e.toml").write_text(text)
        return ["run", str(tmp / "e.toml")]

    return make


def bad_fleet(text: str) -> Callable[[Path], list[str]]:
    def make(tmp: Path) -> list[str]:
        (tmp / "fleet.toml").write_text(text)
        return ["run", "--set", f"fleet.path={tmp}/fleet.toml", "--set", "rounds=1"]

    return make


def finished(tmp: Path) -> Path:
    nestling.run(small(), out=tmp / "done")
    return tmp / "done"


def corrupt_checkpoint(tmp: Path) -> list[str]:
    folder = finished(tmp)
    data = bytearray((folder / "checkpoint.bin").read_bytes())
    data[-3] ^= 0xFF
    (folder / "checkpoint.bin").write_bytes(bytes(data))
    return ["run", "--resume", str(folder), "--set", "rounds=3"]


def changed_on_resume(tmp: Path) -> list[str]:
    return ["run", "--resume", str(finished(tmp)), "--set", "seed=3"]


def damaged_experiment(tmp: Path) -> list[str]:
    folder = finished(tmp)
    (folder / "experiment.toml").write_text("rounds = = 2")
    return ["run", "--resume", str(folder)]


def out_exists(tmp: Path) -> list[str]:
    (tmp / "out").mkdir()
    (tmp / "out" / "precious.txt").write_text("mine")
    return sets()(tmp)


def no_metrics(tmp: Path) -> list[str]:
    (tmp / "empty").mkdir()
    return ["report", str(tmp / "empty")]


def out_at(place: str) -> Callable[[Path], list[str]]:
    """A small run into a place that is no good; `file` is a file and `nowhere` a link to
    nothing."""

    def make(tmp: Path) -> list[str]:
        (tmp / "file").touch()
        (tmp / "nowhere").symlink_to(tmp / "gone")
        return [*sets()(tmp), "--out", place.replace("TMP", str(tmp))]

    return make


def written_to(place: str, *command: str) -> Callable[[Path], list[str]]:
    """A command on a finished run (RUN) that is to write where it cannot."""

    def make(tmp: Path) -> list[str]:
        (tmp / "file").touch()
        folder = finished(tmp) if "RUN" in command else tmp
        return [
            *(str(folder) if word == "RUN" else word for word in command),
            place.replace("TMP", str(tmp)),
        ]

    return make


LONG = "x" * 300  # longer than any name may be
X = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
Y = np.arange(60) % 3

CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "unknown method": (sets("method.name=heteroflx"), "did you mean 'heterofl'"),
    "unknown method option": (
        sets("method.name=heterofl", "method.dynamc=true"),
        "did you mean 'dynamic'",
    ),
    "wrong type of a method option": (
        sets("method.name=heterofl", "method.dynamic=3"),
        "method.dynamic: expected true or false",
    ),
    "method value out of range": (
        sets("method.name=shared-distill", "method.temperature=-1"),
        "method.temperature",
    ),
    "negative alpha": (sets("split.alpha=-1"), "split.alpha"),
    "unknown split": (sets("split.kind=dirichlett"), "did you mean 'dirichlet'"),
    "natural split of data without clients": (
        sets("split.kind=natural", "split.size=0"),
        "split.kind",
    ),
    "more clients than rows": (
        sets("split.size=0", "fleet.size=20000", "fleet.tiers=[{ratio=1.0}]"),
        "split.size",
    ),
    "unknown field": (sets("trian.lr=1"), "did you mean 'train'"),
    "wrong type": (sets("rounds=many"), "rounds: expected a whole number"),
    "zero rounds": (sets("rounds=0"), "rounds: must be at least 1"),
    "more participants than devices": (
        sets("participants=5"),
        "participants: 5 clients a round from a fleet of 2",
    ),
    "unknown data": (sets("data.name=mnst"), "did you mean 'mnist'"),
    "absent npz": (sets("data.name=npz", "data.path=TMP/no.npz"), "data.path"),
    "truncated idx": (truncated_idx, "truncated"),
    "NaN in data": (mlp_on(x=np.where(X > 2, np.nan, X), y=Y), "data.path"),
    "labels of another length": (mlp_on(x=X, y=Y[:50]), "data.path"),
    "one class only": (mlp_on(x=X, y=Y * 0), "class"),
    "unknown model": (sets("model.name=tinycn"), "did you mean 'tinycnn'"),
    "unknown model option": (sets("model.chanels=[4]"), "did you mean 'channels'"),
    "model for other data": (sets("model.name=cnn1d", "model.channels=[4]"), "model.name"),
    "a model with no traceable axis": (
        sets("model={name='tests.test_bad_input:NoAxis'}"),
        "no axis",
    ),
    "a model with wrong outputs": (
        sets("model={name='tests.test_bad_input:WrongOutputs'}"),
        "must give logits",
    ),
    "a model that does not exist": (
        sets("model={name='tests.test_bad_input:Nothing'}"),
        "model.name",
    ),
    "unknown device": (
        sets("fleet.tiers=[{device='stm32f40', count=2}]"),
        "did you mean 'stm32f405'",
    ),
    "shares that do not add up": (
        sets("fleet.tiers=[{ratio=0.5, share=0.5}, {ratio=1.0, share=0.4}]"),
        "add up",
    ),
    "a fleet nothing fits": (
        sets(
            "model.name=resnet34",
            "model={name='resnet34'}",
            "fleet.tiers=[{device='stm32f100', count=2}]",
        ),
        "no piece",
    ),
    "a tier that trains nothing": (sets("fleet.tiers=[{count=2}]"), "give device, ratio or model"),
    "ratio above one": (sets("fleet.tiers=[{ratio=1.5, count=2}]"), "fleet.tiers[0].ratio"),
    "own network where views are merged": (
        sets("fleet.tiers=[{model='mlp', count=2}]"),
        "shared-distill",
    ),
    "absent fleet file": (sets("fleet.tiers=[]", "fleet.path=TMP/none.toml"), "fleet.path"),
    "broken fleet file": (bad_fleet("[[tiers]\nratio = 1"), "not valid TOML"),
    "unknown key in a fleet file": (
        bad_fleet("[[tiers]]\nratio = 1.0\navailablity = 0.5"),
        "did you mean 'availability'",
    ),
    "absent experiment": (lambda tmp: ["run", str(tmp / "none.toml")], "there is no file"),
    "broken experiment": (bad_toml("rounds = = 3"), "not valid TOML"),
    "an engine that is none": (sets("engine.name=rey"), "engine.name"),
    "a device that is none": (sets("engine.device=tpu"), "engine.device"),
    "a GPU where there is none": (sets("engine.device=cuda"), "engine.device"),
    "a precision that is none": (sets("engine.precision=fp8"), "engine.precision"),
    "corrupt checkpoint": (corrupt_checkpoint, "is damaged"),
    "another seed on resume": (changed_on_resume, "only rounds, engine"),
    "damaged experiment on resume": (damaged_experiment, "not valid TOML"),
    "resume of nothing": (lambda tmp: ["run", "--resume", str(tmp)], "not a run folder"),
    "resume with a file": (lambda tmp: ["run", "x.toml", "--resume", str(tmp)], "--resume"),
    "quiet and json": (lambda tmp: ["run", "--quiet", "--json"], "exclude each other"),
    "out exists": (out_exists, "exists already"),
    "out is a file": (out_at("TMP/file"), "--out: "),
    "out below a file": (
        out_at("TMP/file/below/it"),
        "it is not a folder (name a folder you may write in)",
    ),
    "out below a link to nothing": (
        out_at("TMP/nowhere/run"),
        "it leads nowhere (name a folder you may write in)",
    ),
    "out where the system makes no folders": (
        out_at("/proc/nothing/run"),
        "--out: cannot write the run folder /proc/nothing/run",
    ),
    "out of too long a name": (out_at(f"TMP/{LONG}"), "File name too long (name a place"),
    "a comparison below a file": (
        written_to("TMP/file/x.html", "compare", "RUN", "--out"),
        "--out: cannot write",
    ),
    "a comparison of too long a name": (
        written_to(f"TMP/{LONG}.html", "compare", "RUN", "--out"),
        "--out: cannot write",
    ),
    "a comparison of an unknown kind": (
        written_to("TMP/x.docx", "compare", "RUN", "--out"),
        "unknown kind of file '.docx'",
    ),
    "a comparison in an unknown format": (
        written_to("latx", "compare", "RUN", "--format"),
        "did you mean 'latex'",
    ),
    "a comparison by an unknown measure": (
        written_to("globl", "compare", "RUN", "--measure"),
        "did you mean 'global'",
    ),
    "a comparison of an unknown column": (
        written_to("globl_last", "compare", "RUN", "--columns"),
        "did you mean 'global_last'",
    ),
    "a sweep as a run": (bad_toml("[sweep]\nseeds = 2"), "nestling sweep FILE"),
    "a target in percent": (written_to("90", "compare", "RUN", "--target"), "--target: "),
    "a comparison of nothing": (lambda tmp: ["compare", str(tmp / "none")], "no such folder"),
    "a sweep over an unknown method": (
        lambda tmp: ["sweep", "--methods", "fedavg,hetrofl", "--out", str(tmp / "s")],
        "did you mean 'heterofl'",
    ),
    "a sweep over an unknown field": (
        lambda tmp: ["sweep", "--vary", "split.alpa=1,2", "--out", str(tmp / "s")],
        "did you mean 'alpha'",
    ),
    "a sweep over no values": (
        lambda tmp: ["sweep", "--vary", "split.alpha", "--out", str(tmp / "s")],
        "--vary: cannot read",
    ),
    "a sweep over words for seeds": (
        lambda tmp: ["sweep", "--seeds", "many", "--out", str(tmp / "s")],
        "--seeds: cannot read",
    ),
    "a sweep of fewer than no runs at once": (
        lambda tmp: ["sweep", "--jobs", "-1", "--out", str(tmp / "s")],
        "--jobs: ",
    ),
    "a sweep below a file": (written_to("TMP/file/x", "sweep", "--out"), "--out: cannot write"),
    "an export below a file": (
        written_to("TMP/file/x", "export", "RUN", "--device", "large", "--format", "c", "--out"),
        "--out: cannot write",
    ),
    "results of a table below a file": (
        written_to("TMP/file/x.json", "reproduce", "heterofl-mnist", "--out"),
        "--out: cannot write in",
    ),
    "results of a table of too long a name": (
        written_to(f"TMP/{LONG}", "reproduce", "heterofl-mnist", "--out"),
        "--out: ",
    ),
    "runs of a table below a file": (
        written_to("TMP/file/x", "reproduce", "heterofl-mnist", "--runs"),
        "--runs: cannot write in",
    ),
    "report of nothing": (no_metrics, "empty"),
    "fit without a device": (lambda tmp: ["fit", "tinycnn"], "either --device or --fleet"),
    "fit of an unknown device": (
        lambda tmp: ["fit", "tinycnn", "--device", "esp23"],
        "did you mean 'esp32'",
    ),
    "fit with a bad shape": (
        lambda tmp: ["fit", "tinycnn", "--device", "esp32", "--shape", "a,b"],
        "--shape",
    ),
    "unknown option": (lambda tmp: ["run", "--rounds", "3"], "No such option"),
    "unknown command": (lambda tmp: ["rnu"], "No such command"),
}


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["nestling", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("case", CASES)
def test_bad_input(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = CASES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NESTLING_DATA", str(tmp_path))
    arguments = make(tmp_path)
    if arguments[0] == "run" and not {"--resume", "--quiet", "--out"} & set(arguments):
        arguments += ["--out", str(tmp_path / "out")]
    before = sorted(p for p in tmp_path.rglob("*"))
    capsys.readouterr()
    code = call(arguments, monkeypatch)
    shown = capsys.readouterr()
    message = [line for line in shown.err.splitlines() if line.strip()]
    assert code == 2, shown.err
    assert len(message) == 1 and message[0].startswith("nestling: ") and said in message[0], (
        shown.err
    )
    assert "Traceback" not in shown.out + shown.err
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_a_full_disk_at_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit on file sizes makes the system refuse writes exactly as a full disk does."""
    with file_limit(1000):
        code = call([*sets()(tmp_path), "--out", str(tmp_path / "out")], monkeypatch)
    assert code == 2 and "cannot write the run folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_later_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(metrics: nestling.runs.loop.Metrics) -> None:
        if metrics["round"] == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(nestling.InputError, match="cannot write the run folder"):
            nestling.run(
                small(rounds=4), out=tmp_path / "run", watcher=nestling.Watcher(round=fill)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    left = {p.name for p in (tmp_path / "run").iterdir()}
    assert not any(name.startswith(".") for name in left)
    result = nestling.resume(tmp_path / "run")
    assert result.summary["rounds_done"] == 4
    whole = nestling.run(small(rounds=4), out=tmp_path / "whole")
    assert (
        whole.folder
        and (tmp_path / "run" / "global.safetensors").read_bytes()
        == (whole.folder / "global.safetensors").read_bytes()
    )


class file_limit:
    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_our_own_faults_are_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nestling.cli.listing.method_rows", lambda: 1 / 0)
    assert call(["methods"], monkeypatch) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
