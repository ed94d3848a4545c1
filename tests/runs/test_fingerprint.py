"""What a run was made of is written down, and whoever goes on with it has the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nestling
from nestling import Data, InputError, SplitConfig
from nestling.cli.main import main
from nestling.data import load
from nestling.methods.baselines.fedavg import FedAvg
from nestling.runs.analysis import analyse
from nestling.runs.export import export
from tests.small import small


class Heads(nn.Module):
    """A network whose attribute changes what it computes, but no shape."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.last = nn.Linear(784, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x.flatten(1))) / self.heads)


@dataclass
class Mine(FedAvg):
    """FedAvg with a setting of its own."""

    pace: int = 1


def heads(count: int = 4, seed: int = 0) -> Heads:
    torch.manual_seed(seed)
    return Heads(count)


def fingerprint(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "federation.json").read_text())["fingerprint"]


def arrays(path: Path, seed: int = 0, **more: Any) -> Path:
    rng = np.random.default_rng(seed)
    y = np.arange(400) % 4
    x = rng.normal(size=(400, 6)) + y[:, None]
    np.savez(path, x=x, y=y, **more)
    return path


def on_arrays(path: Path | str, **changes: Any) -> nestling.Experiment:
    return small(
        data=Data("npz", str(path)),
        model="mlp",
        split=SplitConfig(alpha=1.0, min_size=5, public=0.02),
        **changes,
    )


def test_a_run_says_what_it_was_made_of(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "a": {},
        "again": {},
        "seed": {"seed": 1},
        "method": {"method": "fedavg"},
        "alpha": {"split": SplitConfig(alpha=0.3, size=60)},
        "workers": {"engine": nestling.EngineConfig("pool", 2)},
    }
    for name, change in changes.items():
        nestling.run(small(**{"rounds": 1, **change}), out=tmp_path / name)
    found = {name: fingerprint(tmp_path / name) for name in changes}
    one = found["a"]
    assert one == found["again"] == found["workers"]
    assert found["seed"]["data"] == one["data"] and found["seed"]["settings"] == one["settings"]
    assert found["seed"]["split"] != one["split"]
    assert found["seed"]["network"]["code"] == one["network"]["code"]
    assert found["seed"]["network"]["weights"] != one["network"]["weights"]
    assert found["method"]["settings"] != one["settings"]
    assert all(found["method"][part] == one[part] for part in ("data", "split", "network"))
    assert found["alpha"]["split"] != one["split"] and found["alpha"]["data"] == one["data"]


def test_no_test_row_depends_on_the_seed(tmp_path: Path) -> None:
    path = arrays(tmp_path / "d.npz")
    for experiment in (on_arrays(path), small()):
        benches = [
            nestling.run(experiment.with_changes(seed=seed, rounds=1)).federation.bench
            for seed in (0, 1, 7)
        ]
        for bench in benches[1:]:
            assert torch.equal(bench.x_test, benches[0].x_test)
            assert torch.equal(bench.y_test, benches[0].y_test)
        assert not all(torch.equal(bench.y, benches[0].y) for bench in benches)  # seeds do count
    # those that seed 0 has always had
    assert torch.equal(
        load("npz", path=str(path)).x_test, load("npz", path=str(path), seed=0).x_test
    )


def test_a_network_given_as_an_object_is_gone_on_with_as_that_object_only(tmp_path: Path) -> None:
    experiment = small("fedavg", model=heads(1), rounds=2)
    nestling.run(experiment, out=tmp_path / "run")
    whole = nestling.run(small("fedavg", model=heads(1), rounds=4)).summary
    with pytest.raises(InputError, match=r"resume\('.*run', model=\.\.\.\)"):
        nestling.resume(tmp_path / "run", overrides=("rounds=4",))
    for other, why in (
        (heads(4), "code, shapes or attributes"),
        (heads(1, seed=1), "weights"),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10)), "code"),
    ):
        with pytest.raises(InputError, match=f"another network: .*{why}"):
            nestling.resume(tmp_path / "run", overrides=("rounds=4",), model=other)
    for look in (analyse, lambda run: export(run, device="large")):
        with pytest.raises(InputError, match="was given as an object"):
            look(tmp_path / "run")
    gone_on = nestling.resume(tmp_path / "run", overrides=("rounds=4",), model=heads(1))
    assert gone_on.summary["global_accuracy"] == whole["global_accuracy"]
    assert nestling.load(tmp_path / "run", model=heads(1)).model is not None


def test_an_object_in_the_place_of_a_name_is_refused(tmp_path: Path) -> None:
    nestling.run(small("fedavg", rounds=1), out=tmp_path / "run")
    with pytest.raises(InputError, match="given no object"):
        nestling.resume(tmp_path / "run", overrides=("rounds=2",), model=heads())


def test_a_method_given_as_an_object_must_be_the_same(tmp_path: Path) -> None:
    nestling.run(small(Mine(pace=2), rounds=1), out=tmp_path / "run")
    with pytest.raises(InputError, match="another method"):
        nestling.resume(tmp_path / "run", overrides=("rounds=2",), method=Mine(pace=3))
    again = nestling.resume(tmp_path / "run", overrides=("rounds=2",), method=Mine(pace=2))
    assert again.summary["rounds_done"] == 2


def test_a_method_given_as_an_object_is_to_be_given_again(tmp_path: Path) -> None:
    nestling.run(small(Mine(pace=2), rounds=1), out=tmp_path / "run")
    name = f"{Mine.__module__}:Mine"
    for call in (nestling.resume, lambda run: nestling.load(run).model):
        with pytest.raises(InputError, match=r"given as an object, and no file holds it") as error:
            call(tmp_path / "run")
        assert error.value.field == "method" and error.value.fix is not None
        assert f"nestling.resume('{tmp_path / 'run'}', method=...)" in error.value.fix
        assert f"--trust {name}" in error.value.fix  # its class alone would do as well
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    again = nestling.resume(tmp_path / "run", overrides=("rounds=2",), method=Mine(pace=2))
    trusted = nestling.resume(tmp_path / "copy", overrides=("rounds=2",), trust=name)
    assert again.summary["global_accuracy"] == trusted.summary["global_accuracy"]
    assert again.summary["rounds_done"] == 2


def test_a_method_whose_class_is_gone_is_to_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a notebook was started anew: the folder names a class that is not there yet."""
    nestling.run(small(Mine(), rounds=1), out=tmp_path / "run")
    monkeypatch.delitem(globals(), "Mine")
    with pytest.raises(InputError, match=r"method: .*resume\('.*run', method=\.\.\.\)") as error:
        nestling.resume(tmp_path / "run", trust=(f"{__name__}:Mine",))
    assert "--trust" not in str(error.value) and "allowed:" not in str(error.value)


def test_a_run_opens_from_anywhere_and_after_it_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    arrays(home / "d.npz")
    monkeypatch.chdir(home)
    nestling.run(on_arrays("d.npz", rounds=2), out="run")
    whole = nestling.run(on_arrays("d.npz", rounds=3)).summary["global_accuracy"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert (
        nestling.resume("../home/run", overrides=("rounds=3",)).summary["global_accuracy"] == whole
    )
    assert analyse(Path("../home/run"))["clients"]
    home.rename(tmp_path / "moved")  # with its data
    assert export(Path("../moved/run"), device="large", formats=("c",))
    shutil.move(tmp_path / "moved" / "d.npz", tmp_path / "other.npz")
    with pytest.raises(InputError, match="is not there"):
        nestling.load("../moved/run").model  # noqa: B018
    given = ("rounds=4", f"data.path={tmp_path / 'other.npz'}")
    assert nestling.resume("../moved/run", overrides=given).summary["rounds_done"] == 4


def test_other_data_in_the_same_place_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = arrays(tmp_path / "d.npz")
    nestling.run(on_arrays(path, rounds=1), out=tmp_path / "run")
    arrays(path, seed=1)
    monkeypatch.setattr("sys.argv", ["nestling", "run", "--resume", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "other rows and test rows" in capsys.readouterr().err


def test_a_folder_of_an_earlier_version_is_believed_and_says_what_it_cannot_know(
    tmp_path: Path,
) -> None:
    path = arrays(tmp_path / "d.npz")
    nestling.run(on_arrays(path, rounds=1, seed=3), out=tmp_path / "run")
    said = json.loads((tmp_path / "run" / "federation.json").read_text())
    del said["fingerprint"], said["data_file"]
    (tmp_path / "run" / "federation.json").write_text(json.dumps(said))
    result = nestling.resume(tmp_path / "run", overrides=("rounds=2",))
    assert any("earlier version" in note for note in result.summary["notes"])
