"""Whether a network's own code computes the right sizes when the network is cut.

A forward may reshape channels into heads, make its first hidden state, or take some channels by
number: then it uses sizes, from shapes (`C // heads`) or from attributes (`self.heads`). Cut
networks are run on the meta device, in which some axes are halved and others are not, and every
operation must make what follows from the wide network's. Where one does not,

1. attributes are looked for whose values are numbers of channels, and follow the view from then on;
2. heads are tied to the channels of the same layer that are as many as all heads have: whoever
   divides the one by the other then gets what it expects;
3. what the operation touches is left whole, with a note that names the line.
"""

from __future__ import annotations

import itertools
import linecache
import math
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nestling.views.axes import FREE, Axes
from nestling.views.rules import tensors_in
from nestling.views.shrink import resize
from nestling.views.steps import (
    LAYING_OUT,
    Carried,
    Steps,
    TracedStep,
    answer,
    following,
    run_on_meta,
    scalars_of,
)
from nestling.views.ties import Ties
from nestling.views.view import View

_MOST = 200  # ways to read a module's attributes that are tried
_OURS = (os.path.dirname(torch.__file__), os.path.dirname(__file__))


@dataclass(frozen=True, eq=False)
class Trial:
    """What cut networks are compared with: the wide network on the meta device, its axes, the
    channel of every node, and the steps of its pass."""

    module: nn.Module
    shape: Sequence[int]
    dtype: torch.dtype
    axes: Axes
    channels: np.ndarray
    steps: Steps


@dataclass(frozen=True)
class _Failure:
    """Where a cut network went wrong: the number of steps that were right, the module, the line."""

    keep: np.ndarray
    right: int
    path: str
    line: str
    problem: str


class _DiffersError(Exception):
    """An operation of a cut network made something else than was expected."""


def mend(trial: Trial, ties: Ties, counts: dict[str, np.ndarray], notes: list[str]) -> bool:
    """Tries cut networks; where one goes wrong, changes the counts or the ties and says True."""
    failure = next(filter(None, (_tried(trial, keep) for keep in _probes(trial.axes))), None)
    if failure is None:
        return False
    found = _recounted(trial, failure, counts)
    if found is not None:
        counts.update(found)
    elif not _coupled(trial, ties, failure):
        _left_whole(trial, ties, failure)
        notes.append(
            f"{failure.line} does not run when its channels are cut ({failure.problem}), so they "
            "stay whole; let it take sizes from its layers' weights, e.g. reshape(B, N, -1, "
            "head_dim), or from attributes of its own module"
        )
    return True


def _probes(axes: Axes) -> Iterator[np.ndarray]:
    """Flags of views that keep the first or the last half of all axes, and that halve some but not
    others: for any two axes there is a view that halves only the first."""
    numbers = np.arange(len(axes.names))
    bits = range(max(1, math.ceil(math.log2(len(numbers) or 1))))
    some = [(numbers >> bit & 1) == side for bit in bits for side in (0, 1)]
    for halved, last in [(numbers >= 0, False), (numbers >= 0, True), *((s, False) for s in some)]:
        keep = np.ones(axes.channels, dtype=bool)
        for number in np.flatnonzero(halved):
            start, size, grain = axes.offsets[number], axes.sizes[number], axes.grains[number]
            half = math.ceil(size / grain / 2) * grain
            gone = slice(start, start + size - half) if last else slice(start + half, start + size)
            keep[gone] = False
        if not keep.all():
            yield keep


def _tried(
    trial: Trial, keep: np.ndarray, counts: Mapping[str, np.ndarray] | None = None
) -> _Failure | None:
    view = View(trial.axes, keep)
    shapes = {name: view.shape(name) for name in view.members}
    sizes = {**view.sizes, **_kept(trial.channels, counts or {}, keep)}
    path: list[str] = []
    watch = _Watch(trial, keep)
    try:
        small = resize(trial.module, shapes, counts=sizes)
        with torch.no_grad(), following(small, path), watch:
            answer(small, trial.shape, trial.dtype)
    except Exception as error:
        line = _line(error.__traceback__, path[-1] if path else "")
        return _Failure(keep, watch.right, path[-1] if path else "", line, _said(error))
    return None


def _kept(
    channels: np.ndarray, counts: Mapping[str, np.ndarray], keep: np.ndarray
) -> dict[str, int]:
    flags = np.append(keep, True)  # the last one answers for FREE = -1
    return {name: int(flags[channels[nodes]].sum()) for name, nodes in counts.items()}


class _Watch(TorchDispatchMode):
    """Compares every operation that computes something with the one of the wide network."""

    def __init__(self, trial: Trial, keep: np.ndarray) -> None:
        super().__init__()
        self.flags = np.append(keep, True)
        self.channels = trial.channels
        self.steps = [step for step in trial.steps if step.name not in LAYING_OUT]
        self.right = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, _, _ = run_on_meta(func, args, kwargs)
        name = func.overloadpacket.__name__
        if name not in LAYING_OUT:
            step = self.steps[self.right] if self.right < len(self.steps) else None
            shapes = [tuple(t.shape) for t in tensors_in(out)]
            if step is None or step.name != name or len(shapes) != len(step.made):
                raise _DiffersError(f"it runs {name} where the wide network does not")
            if scalars_of(func, args) != step.scalars:
                raise _DiffersError(f"{name} is given another number")
            for shape, made in zip(shapes, step.made, strict=True):
                if step.used and not self._as_expected(shape, made):
                    raise _DiffersError(f"{name} makes {shape}")
            self.right += 1
        return out

    def _as_expected(self, shape: tuple[int, ...], made: Carried) -> bool:
        if len(shape) != len(made.shape):
            return False
        joint = {d for j in made.joints for d in j.dims}
        return all(
            shape[d] == (made.shape[d] if line is None else self._count(line))
            for d, line in enumerate(made.nodes)
            if d not in joint
        ) and all(math.prod(shape[d] for d in j.dims) == self._count(j.nodes) for j in made.joints)

    def _count(self, nodes: np.ndarray) -> int:
        return int(self.flags[self.channels[nodes]].sum())


def _recounted(
    trial: Trial, failure: _Failure, counts: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray] | None:
    """Attributes of the module that went wrong, read as numbers of channels so that it gets
    further."""
    path = _own_module(trial.module, failure.path)
    best, furthest = None, failure.right
    for found in itertools.islice(_readings(_choices(trial, path, counts)), _MOST):
        again = _tried(trial, failure.keep, {**counts, **found})
        if again is None:
            return found
        if again.right > furthest:
            best, furthest = found, again.right
    return best


def _readings(choices: Mapping[str, Sequence[np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """All ways to read some attributes as numbers of channels, of few attributes first: one that
    happens to have the same value must stay."""
    for number in range(1, len(choices) + 1):
        for names in itertools.combinations(choices, number):
            for lines in itertools.product(*(choices[name] for name in names)):
                yield dict(zip(names, lines, strict=True))


def _choices(
    trial: Trial, path: str, counts: Mapping[str, np.ndarray]
) -> dict[str, list[np.ndarray]]:
    """For every whole number among a module's attributes: the channels that it may be the number
    of; one that was found out before stays so."""
    lines: dict[int, dict[bytes, np.ndarray]] = {}
    for step in trial.steps:
        if _inside(step.path, path):
            for line in (n for c in (*step.read, *step.made) for n in c.lines()):
                channels = trial.channels[line]
                if (channels != FREE).any():
                    lines.setdefault(len(line), {}).setdefault(channels.tobytes(), line)
    found: dict[str, list[np.ndarray]] = {}
    for name, value in vars(trial.module.get_submodule(path)).items():
        key = f"{path}.{name}" if path else name
        if type(value) is int and value in lines and key not in counts:
            found[key] = list(lines[value].values())
    return found


def _coupled(trial: Trial, ties: Ties, failure: _Failure) -> bool:
    """Ties each head to its share of the layer's other channels that are as many as all heads have;
    says whether there was anything to tie."""
    changed = False
    own = _own_module(trial.module, failure.path)
    inside = [step for step in trial.steps if _inside(step.path, own)]
    if own == "" and failure.path:
        inside = [step for step in trial.steps if _inside(step.path, failure.path)]
    heads = {n for step in inside for c in (*step.read, *step.made) for n in _nodes(c)}
    for group in ties.heads:
        if not heads.issuperset(group.nodes.tolist()):
            continue
        spread = np.repeat(group.nodes, group.channels)
        wanted = trial.channels[spread]
        for line in (n for step in inside for c in (*step.read, *step.made) for n in c.lines()):
            channels = trial.channels[line]
            if len(line) == len(spread) and (channels != FREE).any() and (channels != wanted).any():
                changed |= ties.join(line, spread)
    return changed


def _left_whole(trial: Trial, ties: Ties, failure: _Failure) -> None:
    for lines in _suspects(trial, ties, failure):
        live = [line for line in lines if (trial.channels[line] != FREE).any()]
        if live:
            for line in live:
                ties.freeze_nodes(line)
            return


def _suspects(trial: Trial, ties: Ties, failure: _Failure) -> Iterator[list[np.ndarray]]:
    """What may be to blame, from the least to everything: constants that the network made, what the
    operation touched, what its module did, all channels."""
    near = list(_region(trial.steps, failure.right))
    touched = [n for step in near for c in (*step.read, *step.made) for n in c.lines()]
    yield [n for n in touched if ties.made.intersection(n.tolist())]
    yield touched
    yield [
        n
        for step in trial.steps
        if _inside(step.path, _own_module(trial.module, failure.path))
        for c in (*step.read, *step.made)
        for n in c.lines()
    ]
    yield [np.arange(len(trial.channels))]


def _region(steps: Steps, right: int) -> Iterator[TracedStep]:
    """The step that came next after so many right ones, and those before it that only laid tensors
    out."""
    done = 0
    for step in steps:
        if done == right:
            yield step
        if step.name not in LAYING_OUT:
            done += 1
        if done > right:
            return


def _nodes(carried: Carried) -> Iterator[int]:
    for line in carried.lines():
        yield from line.tolist()


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(outer + ".")


def _own_module(module: nn.Module, path: str) -> str:
    """The innermost module of the user's own around a path."""
    while path and type(module.get_submodule(path)).__module__.startswith("torch.nn."):
        path = path.rpartition(".")[0]
    return path


def _said(error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    return (
        first[:120]
        if isinstance(error, _DiffersError)
        else f"{type(error).__name__}: {first[:120]}"
    )


def _line(frames: TracebackType | None, path: str) -> str:
    """The last line of the user's own code among the frames of an error."""
    for frame in reversed(traceback.extract_tb(frames)):
        if not frame.filename.startswith(_OURS) and not frame.filename.startswith("<"):
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{os.path.basename(frame.filename)}:{frame.lineno} `{code}`"
    return path or "the network"
