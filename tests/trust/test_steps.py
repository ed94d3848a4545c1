"""How long a step may be: a reply that goes too far is brought back to what others do, and said."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import Attack, Experiment, InputError, Server, SplitConfig, Train
from nestling.message import Message
from nestling.methods import Reply
from nestling.runs.admission import Round
from nestling.runs.assemble import assemble
from nestling.runs.bounds import REMEMBERED, STEPS, hold
from nestling.runs.run import Watcher
from tests.methods.test_server import equal_groups
from tests.small import small

EVEN = SplitConfig(kind="iid", size=100)


def attacked(most: float, kind: Any = "scale", factor: float = 100.0, **more: Any) -> Experiment:
    """Four clients, one of which sends a step that is much too long."""
    given: dict[str, Any] = {"rounds": 5, "participants": 4, "split": EVEN, **more}
    train = Train(epochs=2, batch=20, lr=0.05)
    server, lies = Server(most_step=most), Attack(kind, 0.25, factor)
    return small(given.pop("method", "fedavg"), server=server, attack=lies, train=train, **given)


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fednova", "prunefl", "fedproto"])
def test_a_step_that_is_too_long_counts_as_the_longest_that_may_be(method: str) -> None:
    told: list[tuple[int, int, str]] = []
    watcher = Watcher(clipped=lambda *said: told.append(said))
    result = nestling.run(attacked(3.0, method=method), watcher=watcher)
    (liar,) = result.federation.attackers
    assert [(client, round) for client, round, _ in told] == [(liar, r) for r in range(1, 6)]
    assert all("server.most_step" in reason for *_, reason in told)
    for row in result.metrics:
        assert [one["client"] for one in row["clipped"]] == [liar] and row["refused"] == 0
    free = nestling.run(attacked(0.0, method=method))
    assert not any("clipped" in row for row in free.metrics)


def test_what_ruined_a_run_does_not_any_more() -> None:
    ends = {
        most: nestling.run(attacked(most, "sign", 100.0, rounds=8)).metrics[-1]["global_score"]
        for most in (0.0, 1.0)
    }
    assert ends[1.0] - ends[0.0] > 0.2


def test_a_bound_that_nobody_reaches_changes_no_bit() -> None:
    free, held = (
        nestling.run(small("fedavg", rounds=3, server=Server(most_step=most))).federation
        for most in (0.0, 1e6)
    )
    assert equal_groups(free.method.state(), held.method.state())
    assert STEPS not in free.kept and len(held.kept[STEPS]["lengths"]) == 9


def test_a_resumed_run_holds_replies_to_the_same(tmp_path: Path) -> None:
    nestling.run(attacked(2.0).with_changes(rounds=2), out=tmp_path / "run")
    parts = nestling.resume(tmp_path / "run", overrides=("rounds=5",))
    whole = nestling.run(attacked(2.0))
    assert equal_groups(parts.federation.state(), whole.federation.state())
    assert [row["clipped"] for row in parts.metrics] == [row["clipped"] for row in whole.metrics]


def replies_with(federation: Any, lengths: list[float]) -> list[Reply]:
    """Replies whose steps are so long in every entry."""
    found = []
    for client, length in enumerate(lengths):
        device = federation.world.device(client)
        piece = federation.method.piece(device, 1)
        sent = federation.method.send(device, piece, 1)
        weights = {n: t + length for n, t in sent["weights"].items()}
        found.append(Reply(device, piece, sent, Message({"weights": weights}, {"samples": 60})))
    return found


def held(federation: Any, lengths: list[float]) -> tuple[list[float], Round]:
    """How long steps count that were so long, and the round."""
    round, replies = Round(1, {}, {}), replies_with(federation, lengths)
    hold(federation, round, replies)
    first = next(iter(replies[0].sent["weights"]))
    steps = [r.message["weights"][first] - r.sent["weights"][first] for r in replies]
    return [float(step.mean()) for step in steps], round


def test_the_median_is_that_of_the_last_replies_and_of_this_round() -> None:
    _, federation = assemble(small("fedavg", server=Server(most_step=2.0)))
    moved, round = held(federation, [1.0, 1.0, 1.0, 50.0])
    assert moved == pytest.approx([1, 1, 1, 2], rel=1e-4) and list(round.clipped) == [3]
    # One reply alone: what others did in rounds before is what it is held against.
    moved, round = held(federation, [50.0])
    assert moved == pytest.approx([2.0], rel=1e-4) and list(round.clipped) == [0]
    for _ in range(40):  # everybody's steps grow: the median follows
        moved, _ = held(federation, [8.0, 8.0, 8.0])
    assert moved == pytest.approx([8, 8, 8], rel=1e-4)
    assert len(federation.kept[STEPS]["lengths"]) == REMEMBERED


def test_what_is_not_finite_is_left_to_those_who_refuse_it() -> None:
    _, federation = assemble(small("fedavg", server=Server(most_step=2.0)))
    moved, round = held(federation, [1.0, 1.0, math.nan, math.inf])
    assert not round.clipped and torch.isfinite(federation.kept[STEPS]["lengths"]).all()
    assert moved[:2] == pytest.approx([1, 1], rel=1e-4)


def test_where_nobody_moves_nobody_is_held() -> None:
    _, federation = assemble(small("fedavg", server=Server(most_step=2.0)))
    moved, round = held(federation, [0.0, 0.0, 0.0, 1.0])
    assert not round.clipped and moved == pytest.approx([0, 0, 0, 1], rel=1e-4)


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(InputError, match=r"server.most_step: must be 0 .* at least 1"):
        Server(most_step=0.5)
