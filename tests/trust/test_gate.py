"""The gate behind the merge: what ruins the model does not stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

import nestling
from nestling import Attack, Experiment, InputError, Server, SplitConfig, Train, cli
from nestling.runs import checkpoint
from nestling.runs import run as running
from nestling.runs.good import go_back, kept
from nestling.runs.run import Watcher
from tests.methods.test_server import equal_groups
from tests.small import small

PUBLIC = SplitConfig(kind="iid", size=200, public=0.02)
FAST = Train(epochs=3, batch=20, lr=0.05)
RUIN = Attack("sign", 0.25, 300.0)


def made(gate: float, attack: Attack | None = None) -> Experiment:
    """Four clients, one of which may ruin the model in every round that it takes part in."""
    server, lies = Server(gate=gate), attack or Attack()
    return small(
        "fedavg", rounds=6, participants=2, split=PUBLIC, server=server, attack=lies, train=FAST
    )


@contextmanager
def every_round() -> Iterator[None]:
    """A checkpoint after every round, however fast it is."""
    with patch.object(running.play_rounds, "__defaults__", (0.0,)):
        yield


def test_a_round_that_ruins_the_model_is_taken_back() -> None:
    notes: list[str] = []
    rows = nestling.run(made(2.0, attack=RUIN), watcher=Watcher(note=notes.append)).metrics
    returned = [row["round"] for row in rows if row["gate"]["returned"]]
    assert returned and len(returned) < len(rows)
    assert sum("went back to its best state" in note for note in notes) == len(returned)
    without = nestling.run(made(0.0, attack=RUIN)).metrics
    assert "gate" not in without[-1]
    assert rows[-1]["global_score"] - without[-1]["global_score"] > 0.3


def test_the_state_after_a_return_is_that_of_the_best_round() -> None:
    run = nestling.run(made(2.0, attack=RUIN)).federation
    good = {n.removeprefix("server:good:"): s for n, s in run.kept.items() if "good:" in n}
    last = nestling.run(made(2.0, attack=RUIN)).metrics[-1]
    same = equal_groups(good, run.method.state())
    assert same == (last["gate"]["returned"] or last["gate"]["loss"] == last["gate"]["best"])


def test_a_resumed_run_returns_to_the_same_state(tmp_path: Path) -> None:
    nestling.run(made(2.0, attack=RUIN).with_changes(rounds=3), out=tmp_path / "run")
    parts = nestling.resume(tmp_path / "run", overrides=("rounds=6",))
    whole = nestling.run(made(2.0, attack=RUIN))
    assert equal_groups(parts.federation.state(), whole.federation.state())
    assert [r["gate"] for r in parts.metrics] == [r["gate"] for r in whole.metrics]


def test_a_gate_that_is_never_closed_changes_nothing() -> None:
    a, b = (nestling.run(made(gate)).federation.method.state() for gate in (0.0, 1e9))
    assert equal_groups(a, b)


def test_the_last_good_states_are_files_that_a_run_can_go_back_to(tmp_path: Path) -> None:
    home = tmp_path / "run"
    made_of = made(1e9).with_changes(server=Server(gate=1e9, good=2))
    with every_round():
        nestling.run(made_of.with_changes(rounds=4), out=home)
    assert kept(home) == [3, 4]
    with every_round():
        other = nestling.run(made_of.with_changes(rounds=3), out=tmp_path / "shorter")
    command = CliRunner().invoke(cli.app, ["back", str(home), "--to", "3"])
    assert command.exit_code == 0 and "in place of that after round 4" in command.output
    state, totals = checkpoint.load(home) or ({}, None)
    assert equal_groups(state, other.federation.state()) and totals and totals.round == 4
    resumed = nestling.resume(home, overrides=("rounds=5",))
    assert [row["round"] for row in resumed.metrics] == [1, 2, 3, 4, 5]
    assert CliRunner().invoke(cli.app, ["back", str(home)]).output.startswith("kept: the states")
    with pytest.raises(InputError, match=r"--to: no state after round 1 .*kept: 4, 5"):
        go_back(home, 1)


def test_a_state_that_did_not_pass_is_not_kept(tmp_path: Path) -> None:
    server = Server(gate=2.0, good=10)
    with every_round():
        result = nestling.run(
            made(2.0, attack=RUIN).with_changes(server=server), out=tmp_path / "run"
        )
    passed = [row["round"] for row in result.metrics if not row["gate"]["returned"]]
    assert kept(tmp_path / "run") == passed and 0 < len(passed) < 6


def test_a_good_state_that_was_damaged_is_refused_by_name(tmp_path: Path) -> None:
    server = Server(gate=1e9, good=1)
    nestling.run(made(1e9).with_changes(server=server, rounds=1), out=tmp_path / "run")
    (file,) = (tmp_path / "run" / "good").iterdir()
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(InputError, match=file.name):
        go_back(tmp_path / "run", 1)


def test_states_are_good_only_where_a_gate_says_so() -> None:
    with pytest.raises(InputError, match=r"server.good: no state is good without a gate"):
        Server(good=3)


def test_without_public_rows_or_a_global_model_it_is_refused() -> None:
    with pytest.raises(InputError, match=r"server.gate: .*no labelled public rows.*split.public"):
        nestling.run(small("fedavg", server=Server(gate=2.0), split=SplitConfig(size=60, public=0)))
    with pytest.raises(InputError, match=r"server.gate: Local has no global model"):
        Experiment(method="local", server=Server(gate=2.0))
    with pytest.raises(InputError, match=r"server.gate: must be above 1"):
        Server(gate=1.0)
