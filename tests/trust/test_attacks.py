"""Attacks: each changes what it says and nothing else, on every engine alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from benchmarks import trust
from nestling import Attack, EngineConfig, Experiment, InputError, Server, SplitConfig
from nestling.attacks import received_as
from nestling.fleet.server.serving import _begin
from nestling.message import Message
from nestling.methods import METHODS
from nestling.runs.admission import Round
from nestling.runs.assemble import assemble, site_of
from nestling.runs.attacked import attack
from nestling.runs.loop import send, train
from nestling.runs.run import Watcher
from nestling.training.client import Outcome
from tests.methods.test_baselines import equal
from tests.methods.test_server import SHARING, equal_groups
from tests.small import small

KINDS = ("sign", "scale", "labels", "counts", "huge", "free-rider")


def outcomes_of(method: Any, asked: Attack, flip: bool = False) -> tuple[Round, frozenset[int]]:
    """A round up to what the server gets; `flip` turns everybody's labels round."""
    made, federation = assemble(small(method, participants=4, attack=asked))
    site, round = site_of(federation), Round(1, {}, frozenset())
    if flip:
        site = replace(site, y=site.classes - 1 - site.y)
    federation.engine.open(made.make_method(), site)
    send(federation, round)
    train(federation, round)
    attack(federation, round)
    federation.engine.close()
    return round, federation.attackers


def same(a: Message, b: Message) -> bool:
    return (
        dict(a.facts) == dict(b.facts)
        and a.parts.keys() == b.parts.keys()
        and all(equal(dict(a.parts[k]), dict(b.parts[k])) for k in a.parts)
    )


def rest(outcome: Outcome) -> tuple[Any, ...]:
    """What no lie changes."""
    kept = {n: t.tolist() for n, t in outcome.memory.items()}
    return outcome.client, kept, float(outcome.loss), outcome.steps, outcome.samples


@pytest.mark.parametrize("kind", ["sign", "scale", "huge", "free-rider", "counts"])
@pytest.mark.parametrize("method", ["heterofl", "scaffold", "fednova", "flexfl", "prunefl"])
def test_a_lie_changes_what_it_says_and_nothing_else(method: str, kind: str) -> None:
    asked = Attack(kind, share=0.5, factor=3.0)  # type: ignore[arg-type]
    honest, _ = outcomes_of(method, Attack())
    lied, attackers = outcomes_of(method, asked)
    assert len(attackers) == 2 and honest.outcomes.keys() == lied.outcomes.keys()
    assert list(honest.outcomes) == list(lied.outcomes)
    for client, outcome in lied.outcomes.items():
        true = honest.outcomes[client]
        assert rest(true) == rest(outcome)
        if client not in attackers:
            assert same(true.reply, outcome.reply)
            continue
        if kind == "counts":
            facts = {**true.reply.facts, "samples": 3 * true.reply.facts["samples"]}
            assert same(Message(true.reply.parts, facts), outcome.reply)
            continue
        part = "update" if method == "fednova" else "weights"
        before, after = dict(true.reply[part]), dict(outcome.reply[part])
        sent = honest.sent[client].message["weights"]
        others = {k: v for k, v in true.reply.parts.items() if k != part}
        assert same(Message({**others, part: after}, true.reply.facts), outcome.reply)
        changed = sum(int((after[n] != t).sum()) for n, t in before.items())
        if kind == "huge":
            top = max(float(t.max()) for t in after.values())
            assert changed == 1 and top == pytest.approx(1e15)
            continue
        assert changed > 100
        times = {"sign": -3.0, "scale": 3.0, "free-rider": 0.0}[kind]
        for n, t in before.items():
            start = torch.zeros_like(t) if part == "update" else sent[n]
            if start.shape == t.shape:  # FlexFL's device may have cut what it was sent
                assert torch.allclose(after[n], start + times * (t - start), atol=1e-6)


def test_what_was_received_is_cut_as_the_client_cut_it() -> None:
    """FlexFL: a device trains a smaller model than it was sent; a free rider sends back that part
    of what it received."""
    made, federation = assemble(small("flexfl", participants=4, attack=Attack("free-rider", 1.0)))
    method, world = federation.method, federation.world
    rungs = method.pool.rungs
    assert len(rungs) > 1
    sent = rungs[-1].piece.view.extract(method.weights)
    for rung in rungs:
        found = received_as(sent, rungs[-1].piece.view, rung.piece.view)
        assert equal(dict(found), dict(rung.piece.view.extract(method.weights)))
    assert made.attack.on and len(federation.attackers) == len(world.fleet)


@pytest.mark.parametrize(("method", "kind"), [("fedproto", "prototypes"), ("fedmd", "logits")])
def test_poisoned_knowledge_is_that_of_other_classes(method: str, kind: str) -> None:
    asked = Attack(kind, share=0.5, factor=2.0)  # type: ignore[arg-type]
    honest, _ = outcomes_of(method, Attack())
    lied, attackers = outcomes_of(method, asked)
    part = "statistics" if kind == "prototypes" else "logits"
    assert len(attackers) == 2
    for client, outcome in lied.outcomes.items():
        true, found = honest.outcomes[client].reply, outcome.reply
        if client not in attackers:
            assert same(true, found)
            continue
        for name, told in true[part].items():
            classes = 0 if kind == "prototypes" else -1
            assert torch.equal(found[part][name], 2 * told.roll(-1, classes))
        others = {k: v for k, v in true.parts.items() if k != part}
        assert same(Message({**others, part: found[part]}, true.facts), found)


def test_who_tells_of_one_class_says_the_opposite() -> None:
    told = Message({"statistics": {"features": torch.tensor([[1.0, 2.0]])}}, {"classes": [3]})
    lie = Attack("prototypes").lie(told, {})
    assert lie["statistics"]["features"].tolist() == [[-1.0, -2.0]]


def test_attacks_are_a_public_name() -> None:
    assert nestling.attacks.Attack is Attack and "attacks" in nestling.__all__


def test_flipped_labels_are_those_of_attackers_alone() -> None:
    honest, _ = outcomes_of("fedavg", Attack())
    lied, attackers = outcomes_of("fedavg", Attack("labels", share=0.5))
    other, _ = outcomes_of("fedavg", Attack(), flip=True)
    for client, outcome in lied.outcomes.items():
        trained = (other if client in attackers else honest).outcomes[client]
        assert equal(dict(trained.reply["weights"]), dict(outcome.reply["weights"]))
        assert outcome.samples == honest.outcomes[client].samples
        if client in attackers:
            weights = honest.outcomes[client].reply["weights"]
            assert not equal(dict(weights), dict(outcome.reply["weights"]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["pool", "cohort"])
def test_the_engine_does_not_matter(kind: str, engine: str) -> None:
    asked = Attack(kind, share=0.5)  # type: ignore[arg-type]
    a, b, honest = (
        nestling.run(
            small(
                participants=4, engine=EngineConfig(e, 1), attack=k, server=Server(merge="median")
            )
        ).federation.method.weights
        for e, k in (("inline", asked), (engine, asked), ("inline", Attack()))
    )
    assert all(torch.allclose(a[n], t, atol=1e-5) for n, t in b.items())
    assert engine == "cohort" or equal(a, b)
    # Whoever claims more rows than it has is refused, and so missing.
    assert not equal(a, honest)


def test_without_an_attack_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attack, "lie", lambda *_: pytest.fail("somebody lied"))
    a, b = (
        nestling.run(small("heterofl", attack=k)) for k in (Attack(), Attack(share=1.0, factor=9))
    )
    assert equal_groups(a.federation.state(), b.federation.state())
    assert not b.federation.attackers and not b.summary["notes"]


def test_a_run_under_attack_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    made = small(attack=Attack("sign", share=0.25))
    result = nestling.run(made, out=tmp_path / "run", watcher=Watcher(note=told.append))
    assert "UNDER ATTACK, as asked for: 1 of 4 clients lie (sign)" in told[0]
    assert told[0] in result.summary["notes"]
    head = (tmp_path / "run" / "report.html").read_text().partition("</header>")[0]
    assert "Under attack: 25.0% of the clients lie (sign)" in head
    plain = nestling.run(small(), out=tmp_path / "plain")
    assert plain.folder and "Under attack" not in (plain.folder / "report.html").read_text()
    again = nestling.resume(tmp_path / "run", overrides=("rounds=3",)).federation
    assert again.attackers == result.federation.attackers


def test_attackers_are_drawn_from_the_seed() -> None:
    asked = Attack("sign", share=0.3)
    drawn = {asked.attackers(20, seed) for seed in range(5)}
    assert len(drawn) > 1 and all(len(some) == 6 for some in drawn)
    assert asked.attackers(20, 3) == asked.attackers(20, 3) and not Attack().attackers(20, 3)


@pytest.mark.parametrize("method", SHARING)
def test_every_method_with_shared_weights_can_be_attacked(method: str) -> None:
    made = small(method, participants=4, attack=Attack("sign", share=0.5), rounds=2)
    result = nestling.run(made)
    honest = nestling.run(small(method, participants=4))
    a, b = (r.federation.method.shared_weights() for r in (result, honest))
    assert result.summary["refused"] == 0 and not equal_groups(a, b)


@pytest.mark.parametrize(
    ("method", "kind"), [("fedmd", "free-rider"), ("draftfed", "sign"), ("draftfed", "huge")]
)
def test_methods_whose_clients_send_nothing_of_the_kind_refuse(method: str, kind: str) -> None:
    assert method in METHODS
    with pytest.raises(InputError, match=r"attack.kind: .*send nothing that"):
        Experiment(method=method, attack=Attack(kind))  # type: ignore[arg-type]
    Experiment(method=method, attack=Attack("labels"))


@pytest.mark.parametrize(("method", "part"), [("fedproto", "statistics"), ("fedmd", "logits")])
def test_what_is_told_instead_of_weights_is_turned_round(method: str, part: str) -> None:
    public = SplitConfig(kind="iid", size=60, public=0.01)
    made, federation = assemble(small(method, split=public, attack=Attack("sign", 0.5, 2.0)))
    replies = []
    for lies in (False, True):
        round, site = Round(1, {}, frozenset()), site_of(federation)
        federation.engine.open(made.make_method(), site)
        send(federation, round)
        train(federation, round)
        if lies:
            attack(federation, round)
        replies.append({c: o.reply for c, o in round.outcomes.items()})
        federation.engine.close()
    honest, heard = replies
    assert federation.attackers & honest.keys()
    for client, reply in honest.items():
        times = -2.0 if client in federation.attackers else 1.0
        assert all(torch.equal(heard[client][part][n], times * t) for n, t in reply[part].items())
        assert dict(heard[client].facts) == dict(reply.facts)


def test_real_devices_are_not_attacked() -> None:
    with pytest.raises(InputError, match=r"attack.kind: attacks are for simulations"):
        _begin(Experiment(attack=Attack("sign")), None)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("attack.kind=sing", "attack.kind: unknown kind 'sing' (did you mean 'sign'?"),
        ("attack.share=1.5", "attack.share: must be in [0, 1], not 1.5"),
        ("attack.factor=-1", "attack.factor: must be at least 0, not -1.0"),
    ],
)
def test_bad_settings_are_named(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        Experiment.read(None, [override])
    assert said in str(error.value)


def test_the_section_survives_a_file(tmp_path: Path) -> None:
    made = Experiment(attack=Attack("scale", 0.1, 5.0), server=Server(merge="trimmed", trim=0.3))
    (tmp_path / "e.toml").write_text(made.to_toml())
    assert Experiment.read(tmp_path / "e.toml") == made


@pytest.mark.parametrize(
    ("line", "kind"), [("heterofl sign 20", "global"), ("fedproto clean", "personal")]
)
def test_a_cell_of_the_table_of_liars_is_played(line: str, kind: str) -> None:
    played = trust.play(line, "mean", 0, 1, "cpu")
    assert 0 < played[kind] < 1 and played["seconds"] > 0
