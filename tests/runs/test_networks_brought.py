"""Whole runs with the networks that people bring: they are cut, sent, merged and written as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import nestling
from nestling import EngineConfig, Experiment, FleetConfig, Tier
from nestling.cli.progress import terminal_watcher
from nestling.errors import InputError
from nestling.models.tied import tied_names
from nestling.runs.assemble import assemble
from nestling.views.cutting import cutting
from tests.small import small
from tests.test_bad_input import call
from tests.views.modern import Block, FusedAttention

SIDE = 28
UNLIKE = FleetConfig(tiers=(Tier(name="half", ratio=0.5, count=2), Tier(ratio=1.0, count=2)))
EQUAL = FleetConfig(tiers=(Tier(ratio=1.0, count=4),))


class Lines(nn.Module):
    """A recurrent network that reads an image line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(SIDE, 8, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[:, 0, ::4])[0][:, -1])


class Patches(nn.Module):
    """A transformer whose patches are lines of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(SIDE, 12)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.positions = nn.Parameter(torch.randn(1, 8, 12))
        self.block = Block(12, FusedAttention(12, 3), 10)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[:, 0, ::4])
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.block(x)[:, 0])


class Tied(nn.Module):
    """One layer in two places, and one matrix in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE, 12)
        self.twice = nn.Linear(12, 12)
        self.again = self.twice
        self.wide, self.gate = nn.Linear(12, 8), nn.Linear(12, 8)
        self.gate.weight = self.wide.weight
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x[:, 0].mean(1)))
        x = x + F.relu(self.again(F.relu(self.twice(x))))
        return self.head(F.relu(self.wide(x)) * torch.sigmoid(self.gate(x)))


class Sorting(nn.Module):
    """An operation that nobody can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIDE, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sort(self.inner(x[:, 0].mean(1)), -1).values)


class PartlySorting(nn.Module):
    """An operation that nobody can cut, before a perceptron that can be."""

    def __init__(self) -> None:
        super().__init__()
        self.sorting = nn.Linear(SIDE, 12)
        self.wide = nn.Linear(12, 20)
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sort(self.sorting(x[:, 0].mean(1)), -1).values
        return self.head(F.relu(self.wide(x)))


class Named(nn.Module):
    """It gives a dict, as the libraries of transformers do, and in it more than the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(SIDE, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = F.relu(self.wide(x[:, 0].mean(1)))
        return {"hidden": hidden, "logits": self.head(hidden)}


class Pair(Named):
    """It gives a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        said = super().forward(x)
        return said["hidden"], said["logits"]


BROUGHT = {c.__name__: c for c in (Lines, Patches, Tied, Named, Pair)}


def brought(network: type[nn.Module], method: str, fleet: FleetConfig, engine: str) -> Experiment:
    torch.manual_seed(0)
    return small(
        method,
        model=network(),
        fleet=fleet,
        participants=4,
        rounds=1,
        engine=EngineConfig(engine),
    )


@pytest.mark.parametrize("name", BROUGHT)
def test_unlike_devices_train_it_alike_on_two_engines(name: str) -> None:
    one, other = (
        nestling.run(brought(BROUGHT[name], "heterofl", UNLIKE, engine))
        for engine in ("inline", "cohort")
    )
    state, again = one.model.state_dict(), other.model.state_dict()  # type: ignore[union-attr]
    torch.manual_seed(0)
    before = BROUGHT[name]().state_dict()
    assert state.keys() == again.keys()
    for key, tensor in state.items():
        assert torch.allclose(tensor, again[key], atol=1e-5)
        assert not torch.equal(tensor, before[key])


def test_a_tied_tensor_is_one_in_messages_files_and_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    experiment = brought(Tied, "heterofl", UNLIKE, "inline")
    _, federation = assemble(experiment)
    names = [n for n in Tied().state_dict() if not n.startswith("again.") and n != "gate.weight"]
    devices = [federation.world.device(client) for client in range(4)]
    device = next(d for d in devices if d.tier != "half")
    message = federation.method.send(device, device.piece, 1)
    assert set(message["weights"]) == set(names)
    assert message.nbytes == 4 * sum(p.numel() for p in Tied().parameters())

    result = nestling.run(experiment, out=run)
    written = load_file(run / "global.safetensors")
    assert set(written) == set(names)
    assert tied_names(result.model) == tied_names(Tied())  # type: ignore[arg-type]
    fresh = Tied()
    load_model(fresh, run / "global.safetensors")
    assert torch.equal(fresh.gate.weight, written["wide.weight"])
    assert tied_names(fresh) == tied_names(Tied())


def test_a_network_that_cannot_be_cut_is_trained_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with terminal_watcher() as watcher:
        nestling.run(brought(Sorting, "heterofl", EQUAL, "inline"), out=run, watcher=watcher)
    assert "the network cannot be cut: every device trains all of it" in capsys.readouterr().out
    cut = json.loads((run / "federation.json").read_text())["model"]["cut"]
    assert cut["share"] == 0 and cut["whole"] == ["inner", "head"]


@pytest.mark.parametrize("method", ["fedavg", "local", "fedmd", "shared-average", "fedrolex"])
def test_methods_take_it_at_ratio_one(method: str) -> None:
    assert nestling.run(brought(Sorting, method, EQUAL, "inline")).summary["rounds"] == 1


def test_a_share_of_it_is_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match="ratio = 1, or name a smaller network"):
        assemble(brought(Sorting, "heterofl", UNLIKE, "inline"))


def test_what_is_left_whole_is_said_with_the_share() -> None:
    _, federation = assemble(brought(PartlySorting, "heterofl", UNLIKE, "inline"))
    found = cutting(federation.world.main)
    able = 20 * 12 + 20 + 20 * 10
    every = sum(p.numel() for p in PartlySorting().parameters())
    assert found.share == pytest.approx(able / every) and found.whole == ("sorting",)
    assert found.lines() == [
        f"{able / every:.0%} of the network's parameters can be cut; left whole: sorting"
    ]
    _, usual = assemble(small("heterofl"))
    assert cutting(usual.world.main).lines() == []


def partly(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    assert shape == (1, SIDE, SIDE) and classes == 10
    return PartlySorting()


def test_fit_says_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "tests.runs.test_networks_brought:partly"
    assert call(["fit", name, "--device", "nrf52840"], monkeypatch) == 0
    assert "of the network's parameters can be cut; left whole: sorting" in capsys.readouterr().out
    assert call(["fit", "tinycnn", "--device", "nrf52840", "--json"], monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)[0]["cut"]["share"] > 0.95


def test_outputs_that_could_be_either_are_refused() -> None:
    class Twins(Named):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            said = super().forward(x)["logits"]
            return {"one": said, "other": said}

    class Nothing(Named):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"hidden": super().forward(x)["hidden"]}

    with pytest.raises(InputError, match=r"'one' \(2, 10\), 'other' \(2, 10\)\) more than one"):
        assemble(brought(Twins, "fedavg", UNLIKE, "inline"))
    with pytest.raises(InputError, match=r"'hidden' \(2, 12\)\) none has the shape"):
        assemble(brought(Nothing, "fedavg", UNLIKE, "inline"))


def test_a_network_with_named_outputs_goes_on_as_it_began(tmp_path: Path) -> None:
    network = Named()
    whole = nestling.run(small("heterofl", model=network, fleet=UNLIKE, rounds=2))
    torch.manual_seed(0)
    again = Named()
    again.load_state_dict(network.state_dict())
    nestling.run(small("heterofl", model=again, fleet=UNLIKE, rounds=1), out=tmp_path / "run")
    went_on = nestling.resume(tmp_path / "run", model=again, overrides=("rounds=2",))
    for name, tensor in whole.model.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(tensor, went_on.model.state_dict()[name]), name  # type: ignore[union-attr]


def test_a_network_that_was_asked_stays_in_its_mode() -> None:
    tiers = (Tier(name="a", model="tinycnn", count=2), Tier(name="b", model="mlp", count=2))
    _, federation = assemble(small("fedmd", fleet=FleetConfig(tiers=tiers)))
    for plan in federation.world.plans.values():
        assert all(layer.training for layer in plan.piece.reference.module.modules())
