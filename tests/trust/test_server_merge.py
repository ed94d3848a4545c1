"""`server.merge`: every method with shared weights merges robustly, and those without refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import EngineConfig, Experiment, FleetConfig, InputError, Named, Server, Tier
from nestling.message import Message
from nestling.methods import METHODS, Reply, SharedWeights, method_class
from nestling.methods.server import merge_round
from nestling.runs.run import Watcher
from nestling.trust.robust import RULES, Robust
from nestling.views import Contribution, merge
from tests.methods.test_baselines import Table, equal
from tests.methods.test_server import SHARING, equal_groups
from tests.small import QUICK, small

EQUALS = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=5),))


def ruined(reply: Reply) -> Reply:
    """The reply with 1e6 in every weight."""
    parts = {
        kind: {n: torch.full_like(t, 10**6) for n, t in part.items()}
        if kind in ("weights", "update", "control")
        else part
        for kind, part in reply.message.parts.items()
    }
    return Reply(reply.device, reply.piece, reply.sent, Message(parts, reply.message.facts))


def largest_after_a_lie(method: Any, server: Server) -> float:
    """The largest weight after a round in which one of five lied."""
    table = Table(method, fleet=EQUALS, participants=5, server=server)
    replies = table.play(range(5))
    merge_round(server, table.method, [ruined(replies[0]), *replies[1:]], 1, {})
    groups = table.method.shared_weights().values()
    return max(float(t.abs().max()) for state in groups for t in state.values() if t.numel())


def largest(method: str, server: Server) -> float:
    """The same for a method by name, without what it does with replies beside their merge."""
    chosen = Named("fedftg", {"iterations": 0}) if method == "fedftg" else method
    return largest_after_a_lie(chosen, server)


@pytest.mark.parametrize("method", SHARING)
def test_one_liar_of_five_ruins_the_mean_and_no_rule(method: str) -> None:
    found = {w: largest(method, Server(merge=w)) for w in ("mean", *RULES)}
    assert found.pop("mean") > 1e4
    assert all(value < 100 for value in found.values()), found


@pytest.mark.parametrize("method", ["shared-average", "heterofl", "heteroavg", "flexfl", "fedavg"])
def test_without_a_rule_it_is_the_mean_bit_for_bit(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no rule is ever asked."""
    monkeypatch.setattr(Robust, "merge", lambda *_: pytest.fail("a rule was asked"))
    server = Server(merge="mean", trim=0.4)
    table = Table(Named(method, QUICK.get(method, {})), server=server)
    replies = table.play(range(4))
    shares = table.method.shares(replies)
    expected = {group: merge(share.weights, share.given) for group, share in shares.items()}
    merge_round(server, table.method, replies, 1, {})
    assert equal_groups(expected, table.method.shared_weights())
    a, b = (nestling.run(small(method, server=s)).federation.state() for s in (Server(), server))
    assert equal_groups(a, b)


def test_the_rule_is_what_is_kept() -> None:
    table = Table("heterofl", server=Server(merge="median"))
    replies = table.play(range(4))
    share = table.method.shares(replies)[""]
    merge_round(Server(merge="median"), table.method, replies, 1, {})
    assert equal(table.method.weights, Robust("median").merge(share.weights, share.given))


@pytest.mark.parametrize("rule", RULES)
def test_it_works_with_optimiser_and_mean_of_models_and_resumes(rule: str, tmp_path: Path) -> None:
    server = Server("momentum", average=2, merge=rule)
    nestling.run(small(rounds=2, participants=4, server=server), out=tmp_path / "parts")
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=4",)).federation
    whole = nestling.run(small(rounds=4, participants=4, server=server)).federation
    plain = nestling.run(small(rounds=4, participants=4, server=Server(merge=rule))).federation
    assert equal_groups(parts.state(), whole.state())
    assert not equal(whole.method.weights, plain.method.weights)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", ["pool", "cohort"])
def test_the_engine_does_not_matter(rule: str, engine: str) -> None:
    a, b = (
        nestling.run(
            small("heterofl", participants=4, engine=EngineConfig(e, 1), server=Server(merge=rule))
        ).federation.method.weights
        for e in ("inline", engine)
    )
    assert all(torch.allclose(a[n], t, atol=1e-5) for n, t in b.items())
    assert engine == "cohort" or equal(a, b)


def test_a_run_says_what_it_can_bear_and_how_many_entries_few_hold() -> None:
    told: list[str] = []
    made = small(participants=4, rounds=3, server=Server(merge="median"))
    notes = nestling.run(made, watcher=Watcher(note=told.append)).summary["notes"]
    assert "fewer than half of those that hold an entry may lie (1 of 4" in told[0]
    thin = [note for note in told if "held by fewer than 3" in note]
    assert len(thin) == 1 and thin[0] in notes and told[0] in notes


TELLING = [name for name in METHODS if method_class(name).by_rule]


@pytest.mark.parametrize("method", [n for n in METHODS if n not in {*SHARING, *TELLING}])
def test_methods_without_shared_weights_refuse_and_name_those_with(method: str) -> None:
    with pytest.raises(InputError, match=r"server.merge: .*keeps no shared weights") as error:
        Experiment(method=method, server=Server(merge="median"))
    assert all(name in str(error.value) for name in SHARING)
    assert not method_class(method).shares_weights


@pytest.mark.parametrize("method", [*SHARING, *TELLING])
def test_every_method_that_says_so_plays_a_round_under_a_rule(method: str) -> None:
    """What a class says of itself its heirs say too, whose merge may be another."""
    asked = small(method, rounds=1, participants=4, server=Server(merge="aligned"))
    (row,) = nestling.run(asked).metrics
    assert row["merged"] == 4


class OwnWay(SharedWeights):
    """A method that does not let the server choose."""

    info = method_class("fedavg").info

    def merge(self, replies: Any, round: int) -> None:
        given = [Contribution(r.piece.view, r.message["weights"]) for r in replies]
        self.weights = merge(self.weights, given)


def test_a_method_that_merges_its_own_way_is_found_out() -> None:
    with pytest.raises(InputError, match=r"merges weights in a way of its own.*self.fuse"):
        nestling.run(small(OwnWay(), server=Server(merge="median")))
    nestling.run(small(OwnWay()))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "server.merge=krumm",
            "server.merge: unknown way to merge 'krumm' (allowed: mean, clipped, median, trimmed, "
            "krum, aligned)",
        ),
        ("server.trim=0.5", "server.trim: must be above 0 and below 0.5"),
        ("server.trim=0", "server.trim: must be above 0 and below 0.5"),
    ],
)
def test_bad_settings_are_named(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        Experiment.read(None, [override])
    assert said in str(error.value)
