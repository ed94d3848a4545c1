"""The server's optimiser and its mean of last models: the published formulas, partial ownership,
state, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nestling
from nestling import EngineConfig, Experiment, InputError, Named, Server
from nestling.message import Message
from nestling.methods import METHODS, SharedWeights, method_class
from nestling.methods.server import RATES, merge_round, shown
from nestling.runs.assemble import assemble, site_of
from nestling.runs.loop import play
from nestling.runs.run import opened
from nestling.views import State
from tests.methods.learning import experiment
from tests.methods.test_baselines import ONE_TIER, TRACKED, Table, equal
from tests.runs.test_rounds import Ahead
from tests.small import small

PLAIN = Named("shared-average", {"nested": False, "inner": 0.0})
SHARING = [name for name in METHODS if method_class(name).shares_weights]

Seen = list[tuple[State, State]]
Update = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The weights before each merge, and what the mean over clients makes of them."""
    found: Seen = []
    plain = SharedWeights.merge

    def watched(self: SharedWeights, replies: Any, round: int) -> None:
        before = self.weights
        plain(self, replies, round)
        found.append((before, self.weights))

    monkeypatch.setattr(SharedWeights, "merge", watched)
    return found


def fedavgm(x: Tensor, d: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m = 0.8 * m + d
    return x - 0.5 * m, m, v


def fedadam(x: Tensor, d: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m, v = 0.8 * m + 0.2 * d, 0.95 * v + 0.05 * d**2
    return x - 0.5 * m / (v**0.5 + 0.01), m, v


def fedyogi(x: Tensor, d: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m, v = 0.8 * m + 0.2 * d, v - 0.05 * d**2 * (v - d**2).sign()
    return x - 0.5 * m / (v**0.5 + 0.01), m, v


def fedadagrad(x: Tensor, d: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = v + d**2
    return x - 0.5 * d / (v**0.5 + 0.01), m, v


PAPERS: dict[str, Update] = {
    "momentum": fedavgm,
    "adam": fedadam,
    "yogi": fedyogi,
    "adagrad": fedadagrad,
}


@pytest.mark.parametrize("name", PAPERS)
def test_on_whole_networks_it_is_the_papers_formula(name: str, seen: Seen) -> None:
    """In float64, tensor by tensor; batch statistics and their counters are the plain mean."""
    server = Server(name, lr=0.5, momentum=0.8, betas=(0.8, 0.95), tau=0.01)
    result = nestling.run(small("fedavg", rounds=5, fleet=ONE_TIER, model=TRACKED, server=server))
    trained = result.federation.world.main.parameters
    zeros = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in seen[0][0].items()}
    m, v = dict(zeros), {n: z + 0.01**2 for n, z in zeros.items()}
    after = [before for before, _ in seen[1:]] + [result.federation.method.weights]
    for (old, merged), new in zip(seen, after, strict=True):
        for n, x in old.items():
            if n in trained:
                expected, m[n], v[n] = PAPERS[name](
                    x.double(), x.double() - merged[n].double(), m[n], v[n]
                )
                assert torch.allclose(new[n].double(), expected, rtol=1e-6, atol=2e-7)
                assert not torch.equal(new[n], merged[n])
            else:
                assert torch.equal(new[n], merged[n]) and not torch.equal(new[n], old[n])


def test_momentum_without_any_and_with_rate_one_is_fedavg() -> None:
    plain, stepped = (
        nestling.run(small("fedavg", server=s)).federation.method
        for s in (Server(), Server("momentum", momentum=0))
    )
    assert all(torch.allclose(stepped.weights[n], t, atol=1e-6) for n, t in plain.weights.items())


def test_without_optimiser_the_server_adds_nothing() -> None:
    """Also to the state; a mean of one model is none."""
    plain = nestling.run(small(PLAIN, rounds=3)).federation
    for server in (Server(lr=0.3, momentum=0.5, tau=0.1), Server(average=1)):
        other = nestling.run(small(PLAIN, rounds=3, server=server)).federation
        assert (
            other.shown is other.method
            and other.state().keys() == plain.method.state().keys() == {"weights"}
        )
        assert equal(other.method.weights, plain.method.weights)


# -- partial ownership -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("method", [PLAIN, "heteroavg", "fednova", "heterofl"])
def test_what_nobody_held_stays_with_its_moments(method: Any, name: str) -> None:
    table, server = Table(method), Server(name)
    kept = merge_round(server, table.method, table.play(range(4)), 1, {})
    before, moments = table.method.shared_weights()[""], dict(kept)
    members = table.tier("small")
    kept = merge_round(server, table.method, table.play(members, 2), 2, kept)
    after = table.method.shared_weights()[""]
    view, moved = table.world.device(members[0]).piece.view, 0
    for n, t in after.items():
        held = torch.zeros_like(t, dtype=torch.bool)
        held[view.where(n)] = True
        assert torch.equal(t[~held], before[n][~held])
        for kind in kept:
            assert torch.equal(kept[kind][n][~held], moments[kind][n][~held])
        moved += int((t[held] != before[n][held]).sum())
    assert moved and any((moments["server:first:"][n] != 0).any() for n in after)


def test_momentum_carries_what_is_held_even_without_a_gradient() -> None:
    """As in the paper: held entries move on by their momentum, though the clients send back what
    they got."""
    table, server = Table(PLAIN), Server("momentum")
    replies = table.play(table.tier("small"))
    kept = merge_round(server, table.method, replies, 1, {})
    before = table.method.weights
    view = replies[0].piece.view
    for reply in replies:
        reply.message = Message({"weights": view.extract(before)}, reply.message.facts)
    kept = merge_round(server, table.method, replies, 2, kept)
    name = "stages.1.conv.weight"
    gone = before[name] - table.method.weights[name]
    assert torch.allclose(gone, kept["server:first:"][name], atol=1e-7) and bool(
        (gone[view.where(name)] != 0).any()
    )
    assert kept["server:first:"][name].count_nonzero() == gone.count_nonzero()


def test_classes_that_nobody_has_keep_their_rows() -> None:
    """HeteroFL's masked output layer: a row counts by the clients that hold its class, not by the
    view."""
    table, server = (
        Table("heterofl", split=nestling.SplitConfig(kind="classes", classes=2, size=60)),
        Server("momentum"),
    )
    kept = merge_round(server, table.method, table.play(range(4)), 1, {})
    before, replies = table.method.weights, table.play([3], 2)
    merge_round(server, table.method, replies, 2, kept)
    absent = ~replies[0].message["present"]["classes"].bool()
    name = table.method.output[0]
    assert absent.any() and torch.equal(table.method.weights[name][absent], before[name][absent])
    assert not torch.equal(table.method.weights[name][~absent], before[name][~absent])


def test_nobody_answers_and_nothing_moves() -> None:
    table, server = Table(PLAIN), Server("adam", average=2)
    kept = merge_round(server, table.method, table.play(range(4)), 1, {})
    before = table.method.weights
    after = merge_round(server, table.method, [], 2, kept)
    assert equal(table.method.weights, before) and all(equal(after[n], kept[n]) for n in kept)


def test_what_is_pruned_stays_pruned() -> None:
    result = nestling.run(small("prunefl", rounds=4, server=Server("momentum")))
    method = result.federation.method
    pruned = {n: ~mask for n, mask in method.masks.items()}
    assert any(flags.any() for flags in pruned.values())
    assert all((method.weights[n][flags] == 0).all() for n, flags in pruned.items())


# -- the mean of last models -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 9])
def test_the_mean_of_the_last_models_is_shown_and_training_goes_on_from_the_last(
    count: int,
) -> None:
    runs = {k: nestling.run(small("fedavg", rounds=k, model=TRACKED)) for k in (1, 2, 3, 4)}
    result = nestling.run(small("fedavg", rounds=4, model=TRACKED, server=Server(average=count)))
    assert equal(result.federation.method.weights, runs[4].federation.method.weights)
    assert [r["loss"] for r in result.metrics] == [r["loss"] for r in runs[4].metrics]
    last = [runs[k].federation.method.global_model() for k in (4, 3, 2, 1)[:count]]
    model = result.federation.shown.global_model()
    assert model is not None
    for n, t in model.state.items():
        mean = sum(m.state[n].double() for m in last) / len(last)
        assert torch.allclose(
            t.double(), mean if t.is_floating_point() else last[0].state[n].double(), atol=1e-7
        )
    assert result.model is not None and equal(dict(result.model.state_dict()), dict(model.state))


def test_what_is_tested_and_saved_is_the_mean(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from nestling.runs.evaluation import evaluate

    result = nestling.run(small(PLAIN, rounds=3, server=Server(average=3)), out=tmp_path / "run")
    federation = result.federation
    saved, model = (
        load_file(tmp_path / "run" / "global.safetensors"),
        federation.shown.global_model(),
    )
    assert (
        model is not None
        and equal(saved, dict(model.state))
        and not equal(saved, federation.method.weights)
    )
    tested = evaluate(federation.shown, federation.world, federation.bench)
    assert result.metrics[-1]["global_score"] == tested["global_score"]
    with opened(tmp_path / "run") as again:
        assert again.model is not None and equal(dict(again.model.state_dict()), saved)


# -- every method ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SHARING)
def test_every_method_with_shared_weights_goes_on_where_it_stood(
    method: str, tmp_path: Path
) -> None:
    """Stopped after two rounds and gone on to four, against four in one go: the same bits, moments
    and last models included."""
    settings = {"server": Server("yogi", average=3)}
    nestling.run(small(method, rounds=2, **settings), out=tmp_path / "parts")
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=4",)).federation
    whole = nestling.run(small(method, rounds=4, **settings), out=tmp_path / "whole").federation
    a, b = parts.state(), whole.state()
    assert a.keys() == b.keys() and sum(name.startswith("server:") for name in a) >= 5
    assert all(equal(a[name], b[name]) for name in a)
    assert whole.shown is not whole.method


def equal_groups(a: dict[str, State], b: dict[str, State]) -> bool:
    return a.keys() == b.keys() and all(equal(a[g], b[g]) for g in a)


@pytest.mark.parametrize("method", ["heteroavg", "scaffold"])
def test_groups_have_moments_and_means_of_their_own(method: str) -> None:
    made = small(
        Named(method, {"averaging": "group"}),
        rounds=3,
        participants=4,
        server=Server("adam", average=2),
    )
    federation = nestling.run(made).federation
    groups = federation.method.weights.keys()
    assert len(groups) == 3
    assert set(federation.kept) == {
        f"server:{k}:{g}" for k in ("first", "second", "0", "1") for g in groups
    }


def test_a_round_that_is_played_again_takes_its_moments_back() -> None:
    """A reply that is not finite, found out a round late: the same as if it had been refused at
    once."""

    def played(lookahead: int) -> dict[str, State]:
        made, federation = assemble(
            small("all-large", rounds=4, participants=4, server=Server("adam", average=2))
        )
        federation.engine = engine = Ahead({2: 1})
        engine.lookahead = lookahead
        engine.open(made.make_method(), site_of(federation))
        assert sum(row["refused"] for row in play(federation)) == 1
        return federation.state()

    assert equal_groups(played(0), played(1))


@pytest.mark.parametrize("engine", ["pool", "cohort"])
def test_the_engine_does_not_matter(engine: str) -> None:
    a, b = (
        nestling.run(
            small(PLAIN, rounds=3, engine=EngineConfig(e, 1), server=Server("adam"))
        ).federation.state()
        for e in ("inline", engine)
    )
    assert all(
        torch.allclose(a[k][n], t, atol=1e-5) for k, part in b.items() for n, t in part.items()
    )
    assert engine == "cohort" or equal_groups(a, b)


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SHARING])
@pytest.mark.parametrize(
    ("server", "said"), [(Server("adam"), "optimizer"), (Server(average=2), "average")]
)
def test_methods_without_shared_weights_refuse(method: str, server: Server, said: str) -> None:
    with pytest.raises(
        InputError, match=rf"server.{said}: .*keeps no shared weights.*set server.{said} ="
    ):
        Experiment(method=method, server=server)


def test_the_methods_with_shared_weights() -> None:
    assert {
        "fedavg",
        "heterofl",
        "shared-average",
        "scaffold",
        "fedhm",
        "prism",
        "prunefl",
        "lotteryfl",
    } <= set(SHARING)
    assert not {"hermes", "local", "fedmd", "decoupled", "fedzkt"} & set(SHARING)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "server.optimizer=sgd",
            "server.optimizer: unknown optimiser 'sgd' (allowed: none, momentum, adam, yogi, "
            "adagrad)",
        ),
        ("server.lr=-1", "server.lr: must not be negative"),
        ("server.momentum=1", "server.momentum: must be in [0, 1)"),
        ("server.betas=[0.9, 1.0]", "server.betas: must be in [0, 1)"),
        ("server.tau=0", "server.tau: must be above 0"),
        ("server.average=-1", "server.average: must not be negative"),
        (
            "server.optimiser=adam",
            "server.optimiser: unknown field 'optimiser' (did you mean 'optimizer'?",
        ),
    ],
)
def test_bad_settings_are_named(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        Experiment.read(None, [override])
    assert said in str(error.value)


def test_the_section_survives_a_file(tmp_path: Path) -> None:
    made = Experiment(server=Server("yogi", lr=0.02, betas=(0.8, 0.9), average=4))
    (tmp_path / "e.toml").write_text(made.to_toml())
    assert Experiment.read(tmp_path / "e.toml") == made


def test_nothing_is_shown_before_there_is_anything() -> None:
    table = Table(PLAIN)
    assert shown(Server(average=3), table.method, {}) is table.method


@pytest.mark.parametrize("name", RATES)
def test_it_learns(name: str) -> None:
    """Ten classes; with each optimiser's own rate, whole networks and parts alike."""
    for method in ("fedavg", "shared-average"):
        result = nestling.run(
            experiment(
                method, 0, rounds=10, evaluate=nestling.Evaluation(every=10), server=Server(name)
            )
        )
        assert result.summary["global_score"]["last"] > 0.4, (
            method,
            result.summary["global_score"],
        )
