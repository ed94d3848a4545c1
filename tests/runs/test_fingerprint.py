"""What a run was made of is written down, and whoever goes on with it has the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
from nestling.runs.assemble import assemble
from nestling.runs.export import export
from nestling.runs.fingerprint import of_networks
from nestling.views import Reference
from tests.small import NETWORKS, small


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
        **{
            "data": Data("npz", str(path)),
            "model": "mlp",
            "split": SplitConfig(alpha=1.0, min_size=5, public=0.02),
            **changes,
        }
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


def from_npz(folder: Path) -> nestling.Experiment:
    return on_arrays(arrays(folder / "d.npz"))


def from_csv(folder: Path) -> nestling.Experiment:
    with np.load(arrays(folder / "d.npz")) as found:
        lines = [[*row.tolist(), int(y)] for row, y in zip(found["x"], found["y"], strict=True)]
    head = [*(f"x{k}" for k in range(6)), "label"]
    (folder / "d.csv").write_text("\n".join(",".join(map(str, line)) for line in [head, *lines]))
    return on_arrays(folder, data=Data("csv", str(folder / "d.csv")))


def from_images(folder: Path) -> nestling.Experiment:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog", "owl"):
        (folder / "pictures" / kind).mkdir(parents=True)
        for k in range(60):
            pixels = rng.integers(0, 255, (8, 8), dtype=np.uint8)
            image.fromarray(pixels).save(folder / "pictures" / kind / f"{k}.png")
    return on_arrays(folder, data=Data("images", str(folder / "pictures")))


def from_objects(folder: Path) -> nestling.Experiment:
    with np.load(arrays(folder / "d.npz")) as found:
        return on_arrays(folder, data=Data.of(found["x"], found["y"]))


def from_digits(_: Path) -> nestling.Experiment:
    return small()


@pytest.mark.parametrize("door", [from_npz, from_csv, from_images, from_objects, from_digits])
def test_no_test_row_depends_on_the_seed(
    tmp_path: Path, door: Callable[[Path], nestling.Experiment]
) -> None:
    experiment = door(tmp_path)
    benches = [
        assemble(experiment.with_changes(seed=seed, rounds=1))[1].bench for seed in (0, 1, 7)
    ]
    assert len(benches[0].y_test) > 20
    for bench in benches[1:]:
        assert torch.equal(bench.x_test, benches[0].x_test)
        assert torch.equal(bench.y_test, benches[0].y_test)
    assert not all(torch.equal(bench.x, benches[0].x) for bench in benches)  # seeds do count


def test_test_rows_are_those_that_seed_0_has_always_had(tmp_path: Path) -> None:
    path = str(arrays(tmp_path / "d.npz"))
    assert torch.equal(load("npz", path=path).x_test, load("npz", path=path, seed=0).x_test)


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
    assert gone_on.summary["global_score"] == whole["global_score"]
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
    assert again.summary["global_score"] == trusted.summary["global_score"]
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
    whole = nestling.run(on_arrays("d.npz", rounds=3)).summary["global_score"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert nestling.resume("../home/run", overrides=("rounds=3",)).summary["global_score"] == whole
    assert analyse(Path("../home/run"))["clients"]
    home.rename(tmp_path / "moved")  # with its data
    assert export(Path("../moved/run"), device="large", formats=("c",))
    shutil.move(tmp_path / "moved" / "d.npz", tmp_path / "other.npz")
    with pytest.raises(InputError, match="is not there"):
        nestling.load("../moved/run").model  # noqa: B018
    given = ("rounds=4", f"data.path={tmp_path / 'other.npz'}")
    assert nestling.resume("../moved/run", overrides=given).summary["rounds_done"] == 4


def test_a_run_with_a_catalogue_of_its_own_opens_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = (Path(nestling.__file__).parent / "devices" / "catalogue.toml").read_text()
    home = tmp_path / "home"
    home.mkdir()
    (home / "mine.toml").write_text(ours.replace("[raspberry-pi-4]", "[mine]"))
    fleet = nestling.FleetConfig(
        catalogue="mine.toml", tiers=(nestling.Tier(device="mine", count=3),)
    )
    monkeypatch.chdir(home)
    nestling.run(small("fedavg", fleet=fleet, rounds=1), out="run")
    monkeypatch.chdir(tmp_path)
    again = nestling.resume("home/run", overrides=("rounds=2",))
    assert again.summary["rounds_done"] == 2


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


# What a network is beside its weights


@dataclass(frozen=True)
class Config:
    heads: int = 1


class Plain:
    def __init__(self, heads: int) -> None:
        self._heads = heads


class Slotted:
    __slots__ = ("heads",)

    def __init__(self, heads: int) -> None:
        self.heads = heads


class Scaled:
    """An object that is called."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


def divided(x: Tensor, by: int = 1) -> Tensor:
    return x / by


def dividing(by: int) -> Callable[[Tensor], Tensor]:
    def divide(x: Tensor) -> Tensor:
        return x / by

    return divide


class Bare(nn.Module):
    """A network that is told apart by what is set on it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1))


def bare(name: str = "", value: Any = None, seed: int = 0) -> Bare:
    torch.manual_seed(seed)
    network = Bare()
    if name:
        setattr(network, name, value)
    return network


def prints(network: nn.Module) -> dict[str, str]:
    return of_networks([Reference("main", network, (4,))])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("heads", int),
        ("_heads", int),
        ("config", Config),
        ("_config", Config),
        ("config", Plain),
        ("config", Slotted),
        ("config", lambda heads: SimpleNamespace(deep={"er": [Plain(heads)]})),
        ("scale", Scaled),
        ("scale", lambda by: partial(divided, by=by)),
        ("scale", dividing),
        ("scale", lambda by: Scaled(by).__call__),
        ("scale", lambda by: (divided, Scaled.__call__)[by > 1]),
        ("_scale", lambda by: {Scaled: by, Config(by): None}),
    ],
)
def test_attributes_tell_networks_apart(name: str, make: Callable[[int], Any]) -> None:
    one, again, other = (prints(bare(name, make(number))) for number in (1, 1, 4))
    assert one == again
    assert one["code"] != other["code"] and one["weights"] == other["weights"]


def test_attributes_that_are_tensors_count_with_the_weights() -> None:
    """They may be drawn, as weights are: two seeds are of one network."""
    one, other = (prints(bare("_noise", torch.full((3,), x))) for x in (0.0, 1.0))
    assert one["code"] == other["code"] and one["weights"] != other["weights"]
    assert prints(bare("_noise", torch.zeros(4)))["code"] != one["code"]


def test_what_torch_keeps_for_itself_is_no_attribute() -> None:
    seeds = [prints(bare(seed=seed)) for seed in (0, 1)]
    assert seeds[0]["code"] == seeds[1]["code"] and seeds[0]["weights"] != seeds[1]["weights"]
    looked_at = bare()
    looked_at.register_forward_hook(lambda *_: None)
    assert prints(looked_at.eval()) == seeds[0]

    class Recurrent(nn.LSTM):  # whose weights stand in private lists as well
        pass

    torch.manual_seed(0)
    assert prints(Recurrent(4, 2))["code"] == prints(Recurrent(4, 2))["code"]


def test_what_leads_nowhere_ends() -> None:
    """Circles, and objects of which nothing can be said but their kind."""
    ring: list[Any] = []
    ring += [ring, {"ring": ring}, open(os.devnull), object(), threading.Lock()]  # noqa: SIM115
    network = bare("_ring", ring)
    network._self = [network, network.last, network.forward]
    assert prints(network) == prints(network)
    ring[2].close()


SPELLED = """
import sys
from tests.runs.test_fingerprint import Bare, Config, Plain, Scaled, bare, dividing, prints
value = {"a", "b", "c", "dd", 3}, frozenset({Scaled, Config}), Plain(object()), dividing(2), Scaled
print(prints(bare("_value", [*value, lambda x: x, {Config: {1, 2, "x"}}]))["code"])
"""


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    """Whatever the order of sets, and wherever objects lie."""
    found = set()
    for number in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": number}
        made = subprocess.run(
            [sys.executable, "-c", SPELLED], env=environment, capture_output=True, check=True
        )
        found.add(made.stdout)
    assert len(found) == 1 and found != {b""}


def test_a_network_with_another_configuration_object_does_not_go_on(tmp_path: Path) -> None:
    def configured(count: int) -> Heads:
        network = heads(1)
        network._config = Config(count)
        return network

    nestling.run(small("fedavg", model=configured(1), rounds=1), out=tmp_path / "run")
    with pytest.raises(InputError, match=r"another network: .*attributes"):
        nestling.resume(tmp_path / "run", overrides=("rounds=2",), model=configured(4))
    again = nestling.resume(tmp_path / "run", overrides=("rounds=2",), model=configured(1))
    assert again.summary["rounds_done"] == 2


# Code that an experiment names

METHOD_CODE = """
from dataclasses import dataclass
from nestling.methods.baselines.fedavg import FedAvg

PACE = {pace}

def helped(value):
    return value * {factor}

@dataclass
class Average(FedAvg):
    def choose(self, number, count):
        return super().choose(number, helped(count) // {factor} * PACE // PACE)
"""
NETWORK_CODE = """
from torch import nn
from nestling.models import build

class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self._scale = inner, {scale}

    def forward(self, x):
        return self.inner(x) * self._scale

def network(*, shape, classes, **options):
    return Net(build("tinycnn", shape=shape, classes=classes, **options))
"""


@pytest.mark.parametrize(
    ("change", "text", "other", "word"),
    [
        (
            {"method": "code_of_mine:Average"},
            METHOD_CODE.format(pace=1, factor=3),
            METHOD_CODE.format(pace=1, factor=35),
            "another method: code_of_mine:Average changed",
        ),
        (
            {"method": "code_of_mine:Average"},
            METHOD_CODE.format(pace=1, factor=3),
            METHOD_CODE.format(pace=25, factor=3),
            "another method: code_of_mine:Average changed",
        ),
        (
            {"model": nestling.Named("code_of_mine:network", {"channels": [8, 16, 16]})},
            NETWORK_CODE.format(scale=1.0),
            NETWORK_CODE.format(scale=0.25),
            "another network: its code, shapes or attributes changed",
        ),
    ],
)
def test_code_that_is_named_must_be_what_the_run_began_with(
    tmp_path: Path,
    module: Callable[[str], None],
    change: dict[str, Any],
    text: str,
    other: str,
    word: str,
) -> None:
    module(text)
    nestling.run(small(**{"method": "fedavg", **change, "rounds": 1}), out=tmp_path / "run")
    name = str(change.get("method", "code_of_mine:network"))
    module(other)
    for look in (
        lambda: nestling.resume(tmp_path / "run", overrides=("rounds=2",), trust=[name]),
        lambda: analyse(tmp_path / "run", trust=[name]),
    ):
        with pytest.raises(InputError, match=f"{word}.*put the code back"):
            look()
    module(text + "\n\ndef something_else():\n    pass\n")
    again = nestling.resume(tmp_path / "run", overrides=("rounds=2",), trust=[name])
    assert again.summary["rounds_done"] == 2


def test_a_fingerprint_of_an_earlier_form_is_believed_as_to_code(
    tmp_path: Path, module: Callable[[str], None]
) -> None:
    module(METHOD_CODE.format(pace=1, factor=3))
    given = small("code_of_mine:Average", model=heads(1), rounds=1)
    nestling.run(given, out=tmp_path / "run")
    path = tmp_path / "run" / "federation.json"
    said = json.loads(path.read_text())
    del said["fingerprint"]["form"], said["fingerprint"]["method"]
    said["fingerprint"]["network"]["code"] = "0123456789abcdef"
    path.write_text(json.dumps(said))
    options: dict[str, Any] = {"trust": ["code_of_mine:Average"], "overrides": ("rounds=2",)}
    with pytest.raises(InputError, match="another network: its weights"):  # as it always was
        nestling.resume(tmp_path / "run", model=heads(1, seed=1), **options)
    result = nestling.resume(tmp_path / "run", model=heads(1), **options)
    assert any("say less of code" in note for note in result.summary["notes"])
    assert fingerprint(tmp_path / "run")["form"] == 2  # and known from now on
    later = {**options, "overrides": ("rounds=3",)}
    assert not any(
        "say less" in note
        for note in nestling.resume(tmp_path / "run", model=heads(1), **later).summary["notes"]
    )


def test_methods_in_the_table_have_no_code_of_ones_own(tmp_path: Path) -> None:
    nestling.run(small("fedavg", rounds=1, model=NETWORKS[""]), out=tmp_path / "run")
    assert "method" not in fingerprint(tmp_path / "run")
