"""The methods that `docs/new_method.md` shows: short, whole, and what they say they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import EngineConfig
from nestling.training.distiller import logits_of
from tests.small import small

ROOT = Path(__file__).resolve().parent.parent
SHOWN = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "new_method.md").read_text(), flags=re.DOTALL
)
FILES = ("own_method.py", "own_exchange.py")
NAMES = ("own_method:ServerMomentum", "own_exchange:Consensus")


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.parametrize(("code", "file"), list(zip(SHOWN, FILES, strict=True)))
def test_the_page_shows_the_whole_file_in_forty_lines(code: str, file: str) -> None:
    assert code == (ROOT / "examples" / file).read_text()
    assert len(code.splitlines()) <= 40


def played(name: str, **changes: Any) -> nestling.Result:
    return nestling.run(small(name, rounds=6, **changes))


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_on_every_engine_alike_and_goes_on(name: str, tmp_path: Path) -> None:
    whole = played(name)
    stacked = played(name, engine=EngineConfig("cohort", 1))
    assert whole.summary["personal_score"]["last"] > 0.3
    assert whole.summary["bytes_up"] == stacked.summary["bytes_up"]
    assert abs(whole.metrics[-1]["loss"] - stacked.metrics[-1]["loss"]) < 1e-3
    nestling.run(small(name, rounds=4), out=tmp_path / "run")
    resumed = nestling.resume(tmp_path / "run", overrides=("rounds=6",), trust=(name,))
    states = [result.federation.method.state() for result in (whole, resumed)]
    assert states[0].keys() == states[1].keys() and all(
        torch.equal(t, states[1][kind][name])
        for kind, state in states[0].items()
        for name, t in state.items()
    )


def test_momentum_at_nothing_is_the_mean() -> None:
    """With beta = 0 what the example adds is gone: the plain mean over prefixes is left."""
    import own_method

    from nestling.methods.submodel.shared_average import SharedAverage

    methods = (
        SharedAverage(nested=False, inner=0.0),
        own_method.ServerMomentum(beta=0.0),
        own_method.ServerMomentum(beta=0.5),
    )
    plain, nothing, half = (
        nestling.run(small(method, rounds=3)).federation.method.weights for method in methods
    )
    assert all(torch.allclose(t, nothing[name], atol=1e-6) for name, t in plain.items())
    assert not all(torch.allclose(t, half[name], atol=1e-3) for name, t in plain.items())


def test_who_learns_from_all_says_what_all_say() -> None:
    """With weight 0 nobody learns from anybody, and clients agree less."""
    import own_exchange

    def apart(weight: float) -> float:
        world = (
            method := nestling.run(
                small(own_exchange.Consensus(weight=weight), rounds=6)
            ).federation.method
        ).world
        models = [method.model_for(world.device(client)) for client in range(4)]
        said = torch.stack(
            [
                logits_of(m.reference.network(m.view, m.state), world.public).softmax(-1)
                for m in models
            ]
        )
        return float((said - said.mean(0)).abs().mean())

    assert apart(1.0) < 0.8 * apart(0.0)
