"""Three of eight devices lie, each in a way of its own: a fleet's own bounds do not save the mean,
and a rule does."""

from __future__ import annotations

from pathlib import Path

from nestling.fleet.protocol.courier import LoopCourier
from nestling.runs.loop import play
from tests.fleet import lying
from tests.fleet.loop import inline, live


def accuracy(merge: str, home: Path) -> float:
    """How a fleet ends with its liars."""
    devices = lying.handles(home, lying.all_three).values()
    courier = LoopCourier({100 + client: handle for client, handle in enumerate(devices)})
    _, federation = live(lying.asked(merge), courier)
    *_, last = list(play(federation))
    assert last["merged"] == len(lying.NAMES)  # nobody can be refused
    return float(last["global_score"])


def test_a_fleets_bounds_do_not_save_the_mean_and_a_rule_holds(tmp_path: Path) -> None:
    clean = inline(lying.asked("mean"))[1][-1]["global_score"]
    ended = {merge: accuracy(merge, tmp_path / merge) for merge in ("mean", "aligned")}
    assert clean > 0.75
    assert ended["mean"] < clean - 0.2, (clean, ended)
    assert ended["aligned"] > clean - 0.05, (clean, ended)
