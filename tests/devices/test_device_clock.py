"""The virtual clock."""

from __future__ import annotations

import pytest

from nestling.devices import Budget, cost_of, device, round_time
from nestling.errors import InputError
from tests.devices.networks_for_cost import digits

COST = cost_of(digits(), (1, 8, 8))
BUDGET = Budget(batch=8, samples=100, epochs=1)


def test_a_round_by_hand() -> None:
    chip = device("stm32f446")  # 0.06 MAC/cycle at 180 MHz, 115.2 kbit/s, 220 mW, radio 20 mW
    timing = round_time(chip, COST, BUDGET, bytes_down=7592, bytes_up=1152)
    assert timing.down_s == pytest.approx(7592 * 8 / 115_200)
    assert timing.up_s == pytest.approx(0.08)
    assert timing.compute_s == pytest.approx(66_432 * 100 / 10.8e6)
    assert timing.total_s == pytest.approx(timing.down_s + timing.compute_s + timing.up_s)
    assert timing.energy_j == pytest.approx(
        0.22 * timing.compute_s + 0.02 * (timing.down_s + timing.up_s)
    )


def test_slowdown_stretches_everything() -> None:
    once = round_time(device("reference"), COST, BUDGET, 1000, 1000)
    twice = round_time(device("reference"), COST, BUDGET, 1000, 1000, slowdown=2.0)
    assert twice.total_s == pytest.approx(2 * once.total_s)
    assert twice.energy_j == pytest.approx(2 * once.energy_j)
    assert once.compute_s == pytest.approx(66_432 * 100 / 1e9)


@pytest.mark.parametrize(
    ("down", "up", "slowdown"), [(-1, 0, 1.0), (0, -1, 1.0), (0, 0, 0.0), (0, 0, float("nan"))]
)
def test_nonsense_is_refused(down: int, up: int, slowdown: float) -> None:
    with pytest.raises(InputError):
        round_time(device("reference"), COST, BUDGET, down, up, slowdown)
