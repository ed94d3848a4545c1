"""Models of one network tested as a stack give what each gives alone."""

from __future__ import annotations

import pytest
import torch

import nestling
from nestling.runs.evaluation import (
    Tested,
    _predict,
    _test_nested,
    _tested,
    stacked_answers,
)
from tests.small import small


def test_a_stack_of_models_is_tested_like_each_of_them() -> None:
    result = nestling.run(small("local", rounds=1, participants=0))
    world, method, bench = (
        result.federation.world,
        result.federation.method,
        result.federation.bench,
    )
    models = [
        method.model_for(world.device(client))
        for client in range(4)
        if world.device(client).tier == "small"
    ]
    assert len(models) == 2
    together = stacked_answers(models, world.task, bench)
    alone = [_tested(model, world, bench) for model in models]
    assert torch.equal(together.found, torch.stack([one.found for one in alone]))
    assert torch.allclose(together.loss, torch.stack([one.loss for one in alone]), atol=1e-4)
    assert not torch.equal(alone[0].found, alone[1].found)


def test_the_global_model_is_not_tested_twice(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    seen = []
    monkeypatch.setattr(
        "nestling.runs.evaluation._tested", lambda *a: seen.append(a) or _tested(*a)
    )
    nestling.run(small("all-large", rounds=1))
    assert len(seen) == 1
    seen.clear()
    nestling.run(small("heterofl", rounds=1))
    assert len(seen) == 3  # the widest part is the global model


def test_equal_parts_with_other_weights_are_tested_each(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    seen = []
    monkeypatch.setattr(
        "nestling.runs.evaluation._tested", lambda *a: seen.append(a) or _tested(*a)
    )
    tiers = (
        nestling.Tier(name="one", ratio=1.0, count=1),
        nestling.Tier(name="other", ratio=1.0, count=1),
    )
    nestling.run(small("local", rounds=1, participants=0, fleet=nestling.FleetConfig(tiers=tiers)))
    assert len(seen) == 2  # two clients with the same network and two models


class Keeping(torch.nn.Module):
    """Its code keeps something between its layers, as some networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x * 2
        return self.head(self.kept)


def test_any_number_of_threads_sees_the_same(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    module, x = Keeping().eval(), torch.randn(90, 6)
    found = []
    for threads in (1, 2, 3, 50):
        monkeypatch.setattr("nestling.runs.evaluation.cores", lambda threads=threads: threads)
        found.append(_predict(module, x, 7, lambda net, rows: net(rows).argmax(-1), -1))
    assert all(torch.equal(f, module(x).argmax(-1)) for f in found)


@pytest.mark.parametrize("norm", ["group", "batch", "sbn", "tracked"])
def test_nested_parts_are_tested_like_each_of_them(norm: str) -> None:
    result = nestling.run(
        small(rounds=2, model=nestling.Named("tinycnn", {"channels": [8, 16, 16], "norm": norm}))
    )
    world, method, bench = (
        result.federation.world,
        result.federation.method,
        result.federation.bench,
    )
    tested: Tested = {}
    _test_nested(method, world, bench, tested)
    # statistics are each network's own
    assert len(tested) == (3 if norm in ("group", "batch") else 0)
    for client in range(4):
        model = method.model_for(world.device(client))
        for known, said in tested.get(("main", model.view.key()), []):
            assert all(torch.equal(known.state[name], t) for name, t in model.state.items())
            # a tie may be rounded the other way
            other = _tested(model, world, bench)
            assert float((said.found != other.found).float().mean()) < 0.002
            assert torch.allclose(said.loss, other.loss, atol=1e-3)


def test_parts_that_read_others_are_not_tested_by_the_whole() -> None:
    plain = nestling.Named("shared-average", {"nested": False, "inner": 0.0})
    assert not nestling.run(small(plain, rounds=1)).federation.method.nests
    assert not nestling.run(small("heterofl", rounds=1)).federation.method.nests
