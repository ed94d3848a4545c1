"""Every task on the GPU gives what it gives in this process on the CPU, up to rounding, and the
same bits every time."""

from __future__ import annotations

import pytest
import torch

import nestling
from nestling import EngineConfig
from tests.gpu.test_every_method import TOLERANCE, apart, states
from tests.tasks.test_every_method import BESIDE, made

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("task", BESIDE)
@pytest.mark.parametrize("method", ["fedavg", "heterofl", "shared-average", "local"])
def test_a_task_gives_the_same_on_the_gpu(method: str, task: str) -> None:
    engines = (
        EngineConfig("inline", device="cpu"),
        EngineConfig("cohort", device="cuda"),
        EngineConfig("cohort", device="cuda"),
    )
    results = [nestling.run(made(method, task, rounds=3, engine=engine)) for engine in engines]
    assert not [note for note in results[1].federation.engine.notes if "NOT RECORDED" in note]
    plain, gpu, again = (states(result) for result in results)
    assert apart(plain, gpu) <= TOLERANCE
    assert all(torch.equal(tensor, again[name]) for name, tensor in gpu.items())
    scores = [result.metrics[-1]["global_score"] for result in results]
    assert scores[0] == pytest.approx(scores[1], abs=0.05) and scores[1] == scores[2]
