"""The last good states of a run, each a file of its folder, and the way back to one of them.

A checkpoint whose state passed the gate is also kept under `good/`, the last few of them: a lie
that costs less than the gate allows is found later, if at all, and then by a person.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from nestling.errors import InputError
from nestling.runfiles import how_to_go_on
from nestling.runs import checkpoint, folder
from nestling.runs.federation import Totals
from nestling.views import State

FOLDER = "good"


def keep(path: Path, state: Mapping[str, State], totals: Totals, most: int) -> None:
    """Keeps a state beside the `most` − 1 last ones."""
    (path / FOLDER).mkdir(exist_ok=True)
    checkpoint.save(path / FOLDER, state, totals, _name(totals.round))
    for round in kept(path)[:-most]:
        (path / FOLDER / _name(round)).unlink()


def kept(path: Path) -> list[int]:
    """The rounds after which the states were that are kept, from old to new."""
    return sorted(int(file.stem) for file in (path / FOLDER).glob("*.bin") if file.stem.isdecimal())


def go_back(
    path: Path, round: int, tell: Callable[[int, Mapping[str, State]], None] = lambda *_: None
) -> int:
    """Puts the state after a round in place of the last one, of which `tell` is told before; gives
    the round at which the run stands, which goes on from there. What clients keep stays."""
    home = folder.reopen(path, field="RUN").take(field="RUN")
    try:
        known = kept(path)
        if round not in known:
            listed = ", ".join(map(str, known)) or "none (server.good says how many)"
            raise InputError(
                f"no state after round {round} is kept in {path}",
                field="--to",
                fix=f"the rounds that are kept: {listed}",
            )
        good = checkpoint.load(path / FOLDER, "--to", _name(round))
        now = checkpoint.load(path, "RUN")
        if good is None or now is None:
            raise InputError(
                f"the run in {path} has no checkpoint",
                field="RUN",
                fix=f"go on with it: {how_to_go_on(path)}",
            )
        tell(now[1].round, good[0])
        checkpoint.save(path, good[0], now[1])
        return now[1].round
    finally:
        home.close()


def _name(round: int) -> str:
    return f"{round:06d}.bin"
