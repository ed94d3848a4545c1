"""A fleet of many families: every device trains the largest network of a list that fits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nestling
from nestling import (
    Data,
    EngineConfig,
    Evaluation,
    Experiment,
    FleetConfig,
    SplitConfig,
    Tier,
    Train,
)
from nestling.errors import InputError
from nestling.runs.assemble import assemble

LISTED: tuple[dict[str, Any], ...] = (
    {"name": "densenet121", "width": 0.125},
    {"name": "mlp", "hidden": [2]},
    {"name": "vgg16", "width": 0.03},
    {"name": "resnet8", "width": 0.3},
    {"name": "mobilenetv2", "width": 0.12},
    {"name": "cnn", "channels": [4, 8, 16, 32]},
)
EXPECTED = {
    "lm3s6965": "mlp",
    "nrf52840": "cnn",
    "esp32": "resnet8",
    "nrf5340": "vgg16",
    "stm32h7a3": "mobilenetv2",
    "raspberry-pi-zero-2w": "densenet121",
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small colour pictures of two classes: bright on top, bright below."""
    rng = np.random.default_rng(0)
    y = np.arange(160) % 2
    x = rng.normal(size=(160, 3, 32, 32)).astype(np.float32)
    x[y == 0, :, :16] += 1
    x[y == 1, :, 16:] += 1
    path = tmp_path_factory.mktemp("data") / "pictures.npz"
    np.savez(path, x=x, y=y)
    return path


def mixed(pictures: Path, method: str = "local", **fleet: Any) -> Experiment:
    tiers = tuple(Tier(device=device, count=1) for device in EXPECTED)
    return Experiment(
        method=method,
        data=Data("npz", path=str(pictures)),
        rounds=1,
        participants=0,
        split=SplitConfig(kind="iid", public=0.1),
        fleet=FleetConfig(**{"tiers": tiers, "networks": LISTED, **fleet}),
        train=Train(epochs=1, batch=10, momentum=0.0),
        engine=EngineConfig("inline"),
        evaluate=Evaluation(clients=6),
    )


def test_every_device_gets_the_largest_network_that_fits(pictures: Path) -> None:
    settled, federation = assemble(mixed(pictures))
    assert {tier: plan.tier.model for tier, plan in federation.world.plans.items()} == EXPECTED
    assert {t.name: t.model for t in settled.fleet.tiers} == EXPECTED and not settled.fleet.networks
    assert all(plan.fit is not None for plan in federation.world.plans.values())


def test_six_families_learn_in_one_federation(pictures: Path) -> None:
    result = nestling.run(mixed(pictures, "shared-distill"))
    assert result.metrics[-1]["refused"] == 0 and set(result.metrics[-1]["by_tier"]) == set(
        EXPECTED
    )
    assert result.metrics[-1]["bytes_up"] > 0


def test_a_tier_with_a_network_or_a_width_of_its_own_keeps_it(pictures: Path) -> None:
    tiers = (
        Tier(name="own", device="esp32", model="mlp", model_options={"hidden": [3]}, count=1),
        Tier(ratio=0.5, count=1),
    )
    _, federation = assemble(mixed(pictures, tiers=tiers))
    assert federation.world.plans["own"].tier.model_options == {"hidden": [3]}
    assert federation.world.plans["ratio-0.5"].piece.reference is federation.world.main


def test_what_cannot_be_is_said_by_field(pictures: Path) -> None:
    with pytest.raises(
        InputError, match=r"fleet.tiers\[0\].*none of the fleet's networks trains on lm3s6965"
    ):
        assemble(mixed(pictures, networks=({"name": "resnet18"},)))
    with pytest.raises(InputError, match=r"fleet.networks\[0\]"):
        assemble(mixed(pictures, networks=({"name": "nonet"},)))
    with pytest.raises(InputError, match=r"fleet.networks\[0\].*names no network"):
        assemble(mixed(pictures, networks=({"width": 1},)))
