"""Networks over steps, trained one client after the other and in stacks: the same, also where
clients hold different parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nestling
from nestling import Data, EngineConfig, Experiment, Named
from tests.fleet.loop import state_of
from tests.fleet.test_tasks import ODD, WAVES, experiment, of

PICTURES = np.tile(WAVES[:, :1, None, :], (1, 1, 16, 1)).astype(np.float32)
SMALL = {"dim": 16, "depth": 1, "hidden": 16, "heads": 2, "head_dim": 8}
NETWORKS: dict[str, tuple[Data, Named]] = {
    "vit": (of(PICTURES, ODD, layout="chw"), Named("vit", SMALL)),
    "kwt": (of(WAVES, ODD, layout="cl"), Named("kwt", SMALL)),
    "lstm": (of(WAVES, ODD, layout="cl"), Named("lstm", {"hidden": [12, 8]})),
}


def check(wanted: Experiment, tolerance: float = 1e-5) -> None:
    one, many = (
        state_of(nestling.run(wanted.with_changes(engine=EngineConfig(name))).federation)
        for name in ("inline", "cohort")
    )
    assert one.keys() == many.keys() and one
    apart = max(float((one[name] - many[name]).abs().max()) for name in one)
    assert apart <= tolerance, apart


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_they_give_the_same_in_a_stack(name: str) -> None:
    data, model = NETWORKS[name]
    changes: dict[str, Any] = {"data": data, "model": model, "method": "heterofl", "rounds": 1}
    check(experiment("classification", **changes))
