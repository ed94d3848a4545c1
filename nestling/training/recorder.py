"""The server's own training, recorded where clients' training is.

What a server does step after step (distilling, teaching a generator) is a body of work that changes
students in place. It is given as a function of its inputs; where work is recorded, students and
inputs lie in tensors that never move, and the function is recorded once and replayed in this round
and all later ones. Elsewhere the function is simply called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from functools import partial

from torch import Tensor

from nestling.training.distiller import Forward, Student
from nestling.training.kept import Kept
from nestling.training.lane import Lane, beside
from nestling.training.optimisers import Optim
from nestling.where import CPU, Where


class Recorder:
    """Does the work of one server."""

    def __init__(self, where: Where = CPU) -> None:
        """Has a lane where work on the device is recorded, else none."""
        self.where = where
        self._lane = Lane(where.device) if where.recorded else None
        self._students: dict[Hashable, Student] = {}
        self._kept: dict[Hashable, Kept] = {}

    @property
    def refusal(self) -> str:
        """Why some work could not be recorded; empty where all was."""
        return self._lane.refusal if self._lane else ""

    def student(
        self,
        name: Hashable,
        state: Mapping[str, Tensor],
        parameters: Collection[str],
        forward: Forward,
        optim: Optim,
    ) -> Student:
        """A student that starts from a state. One of the same name and shapes is taken again: what
        it does must be the same too."""
        if self._lane is None:
            return Student(state, parameters, forward, optim, name=name)
        key = (name, _shapes(state))
        if key not in self._students:
            self._students[key] = Student(state, parameters, forward, optim, name=key, lasting=True)
        self._students[key].begin(state, optim)
        return self._students[key]

    def keep(self, name: Hashable, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors that a body of work reads beside its inputs, in the places where it reads
        them."""
        if self._lane is None:
            return tensors
        key = (name, _shapes(tensors))
        if key not in self._kept:
            self._kept[key] = Kept(tensors)
        self._kept[key].take(tensors)
        return self._kept[key].tensors

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """The block in which work is done: after what was queued before it, and before what is
        queued behind it."""
        if self._lane is None:
            yield
            return
        with beside([self._lane]):
            self._lane.enter()
            yield

    def do(self, kind: Hashable, body: Callable[..., None], *inputs: Tensor) -> None:
        """Does the body with these inputs. Bodies of one kind do the same to the same students, and
        read the same kept tensors."""
        if self._lane is None:
            body(*inputs)
            return
        named = {str(number): tensor for number, tensor in enumerate(inputs)}
        places = self.keep(("inputs", kind), named)
        self._lane.do((kind, _shapes(named)), partial(body, *places.values()))


def _shapes(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
