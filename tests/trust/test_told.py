"""Rules for what is told beside weights: statistics by class, and logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nestling
from nestling import FleetConfig, Server, SplitConfig, Tier
from nestling.message import Message
from nestling.methods import Reply
from nestling.methods.server import merge_round
from nestling.trust.robust import RULES, Robust
from nestling.views import Contribution, full
from tests.methods.test_baselines import Table
from tests.methods.test_server import equal_groups
from tests.small import QUICK, small
from tests.views.test_views import AXES, state_of

EQUALS = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=5),))
PUBLIC = SplitConfig(kind="iid", size=60, public=0.01)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clients", [1, 2, 3, 7])
def test_a_rule_says_of_a_table_what_it_says_of_a_weight(rule: str, clients: int) -> None:
    torch.manual_seed(clients)
    network, axes = next(iter(AXES.items()))
    state = state_of(network, 0)
    name = next(n for n, t in state.items() if t.dim() > 1)
    # Which way a statistic points is seen from zero, a weight from what was sent.
    base = {name: state[name] * (rule != "aligned")}
    far = torch.rand(clients, *[1] * base[name].dim())
    said = base[name] + far * torch.randn(clients, *base[name].shape)
    held = torch.rand(said.shape) < 0.6
    given = [
        Contribution(full(axes), {name: v}, 1.0, {name: flags})
        for v, flags in zip(said, held, strict=True)
    ]
    as_weight = Robust(rule).merge(base, given)[name]
    assert torch.allclose(Robust(rule).combine(said, held, base[name]), as_weight, atol=1e-6)


def lied(reply: Reply) -> Reply:
    """The reply with statistics or logits a million times as large."""
    parts = {
        kind: {n: t * 1e6 for n, t in part.items()} if kind in ("statistics", "logits") else part
        for kind, part in reply.message.parts.items()
    }
    return Reply(reply.device, reply.piece, reply.sent, Message(parts, reply.message.facts))


def largest(method: Any) -> float:
    known = method.known if hasattr(method, "known") else method.table.rows
    return max(float(t.abs().max()) for t in known.values())


@pytest.mark.parametrize("method", ["fedproto", "fedhkd", "fedmd"])
def test_one_liar_of_five_ruins_the_mean_and_no_rule(method: str) -> None:
    found = {}
    for rule in ("mean", *RULES):
        server = Server(merge=rule)
        chosen = nestling.Named(method, QUICK.get(method, {}))
        table = Table(chosen, fleet=EQUALS, participants=5, server=server, split=PUBLIC)
        replies = table.play(range(5))
        merge_round(server, table.method, [lied(replies[0]), *replies[1:]], 1, {})
        found[rule] = largest(table.method)
    assert found.pop("mean") > 1e4
    assert all(value < 100 for value in found.values()), found


@pytest.mark.parametrize("method", ["fedproto", "fedhkd", "fedmd"])
def test_without_a_rule_nothing_changes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Robust, "combine", lambda *_: pytest.fail("a rule was asked"))
    a, b = (
        nestling.run(small(method, split=PUBLIC, server=server)).federation.state()
        for server in (Server(), Server(trim=0.4))
    )
    assert equal_groups(a, b)
