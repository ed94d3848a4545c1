"""A job as a board is told it, in numbers only: what a session sends, what a gateway is given, what
names the job in a journal."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from nestling.errors import InputError
from nestling.planning.descriptor import NONE, DescriptorSettings, Header, from_bytes
from nestling.tiny.link import bundle
from nestling.tiny.runtime.job import Job, Step
from nestling.tiny.runtime.native import ANCHOR, MASK, PRESENT, packed

_MOST_ROWS = 1 << 16  # rows, batches and inner inputs travel in 16 bits


@dataclass(frozen=True, eq=False)
class Orders:
    """All that travels to a board for one job.

    sizes, inner: of every step. rows, shifts: of all steps, one after the other. mask: packed to
    bits, the first one lowest.
    """

    descriptor: np.ndarray
    settings: np.ndarray
    weights: np.ndarray
    sizes: np.ndarray
    inner: np.ndarray
    rows: np.ndarray
    shifts: np.ndarray | None = None
    anchor: np.ndarray | None = None
    mask: np.ndarray | None = None
    present: np.ndarray | None = None
    targets: np.ndarray | None = None

    @cached_property
    def header(self) -> Header:
        """The header of the job's descriptor."""
        return from_bytes(self.descriptor.tobytes())[0]

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each step begins in `rows`, and at last their number."""
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    @property
    def blocks(self) -> list[tuple[int, np.ndarray | None]]:
        """What stays the same through the job, by block of the arena. What the plan has room for
        and the job does not give is zero, as it is in the host build."""
        found = [(ANCHOR, self.anchor)]
        for block, place, given, size in (
            (MASK, self.header.mask, self.mask, _mask_bytes(self.header)),
            (PRESENT, self.header.present, self.present, 4 * self.header.classes),
        ):
            found.append(
                (block, np.zeros(size, np.uint8) if given is None and place != NONE else given)
            )
        return found

    @cached_property
    def digest(self) -> str:
        """Names the job: two that are equal give the same weights."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def number(self) -> int:
        """The job's name on the board."""
        return int(self.digest[:8], 16) or 1

    def to_bytes(self) -> bytes:
        """The arrays as a bundle."""
        return bundle.pack({}, self.arrays())

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields that are given, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in found.items() if array is not None}


def orders_of(job: Job) -> Orders:
    """What a board is told of a job."""
    steps = list(job.steps)
    if any(len(step.rows) == 0 for step in steps):
        raise InputError("a step without samples", field="steps")
    rows = (
        np.concatenate([np.asarray(step.rows, np.int64) for step in steps])
        if steps
        else np.zeros(0, np.int64)
    )
    sizes, inner = [len(step.rows) for step in steps], [step.inner for step in steps]
    if max([0, *sizes, *inner, *rows]) >= _MOST_ROWS or min([0, *inner, *rows]) < 0:
        raise InputError(
            "rows, batches and inner inputs of a board's step are numbers below 65536",
            field="steps",
        )
    return checked(
        Orders(
            descriptor=np.frombuffer(job.plan.descriptor, np.uint8),
            settings=np.frombuffer(job.settings.to_bytes(), "<f4"),
            weights=_floats(job.weights),
            sizes=np.asarray(sizes, np.uint32),
            inner=np.asarray(inner, np.uint16),
            rows=rows.astype(np.uint16),
            shifts=_shifts(steps),
            anchor=None if job.anchor is None else _floats(job.anchor),
            mask=None if job.mask is None else packed(job.mask).view(np.uint8),
            present=None if job.present is None else _floats(job.present),
            targets=None if job.targets is None else np.ascontiguousarray(job.targets, np.float32),
        )
    )


def orders_from(arrays: dict[str, np.ndarray]) -> Orders:
    """The orders in the arrays of a bundle; anything else is refused."""
    known = {field.name for field in fields(Orders)}
    if not set(arrays) <= known:
        raise InputError(f"arrays that no job has: {', '.join(sorted(set(arrays) - known))}")
    try:
        return checked(Orders(**arrays))
    except TypeError as error:
        raise InputError(f"not a job: {error}") from error


def checked(orders: Orders) -> Orders:
    """The orders, if their parts belong together."""
    # in this order: a later one may rely on what the earlier ones found right
    for name, fault in _faults(orders):
        if fault:
            raise InputError(fault, field=name)
    return orders


def _faults(orders: Orders) -> Iterator[tuple[str, str]]:
    try:
        header = orders.header
    except (ValueError, struct.error) as error:
        raise InputError(f"not a descriptor: {error}", field="plan") from error
    yield "settings", _wrong(orders.settings, np.float32, (len(fields(DescriptorSettings)),))
    yield "weights", _wrong(orders.weights, np.float32, (header.params,))
    yield "steps", _wrong(orders.sizes, np.uint32, (orders.sizes.size,))
    if not ((orders.sizes > 0) & (orders.sizes < _MOST_ROWS)).all():
        yield "steps", "a step without samples, or with too many"
    samples = int(orders.sizes.sum())
    yield "steps", _wrong(orders.inner, np.uint16, (orders.sizes.size,))
    yield "steps", _wrong(orders.rows, np.uint16, (samples,))
    yield "steps", _wrong(orders.shifts, np.int8, (samples, 2))
    if _setting(orders, "mu") and orders.anchor is None:
        yield "anchor", "a proximal term without an anchor"
    # a squared error may be towards values that the board has in its data, if it has room for them
    towards = ("kd",) if header.target != NONE else ("mse", "kd")
    if _setting(orders, *towards) and orders.targets is None:
        yield "targets", "a loss on targets without targets"
    yield (
        "anchor",
        _wrong(orders.anchor, np.float32, (header.trained,)) or _room(orders.anchor, header.anchor),
    )
    yield (
        "mask",
        _wrong(orders.mask, np.uint8, (_mask_bytes(header),)) or _room(orders.mask, header.mask),
    )
    yield (
        "present",
        _wrong(orders.present, np.float32, (header.classes,))
        or _room(orders.present, header.present),
    )
    yield "targets", _wrong_targets(orders, header) or _room(orders.targets, header.target)


def _mask_bytes(header: Header) -> int:
    return -(-header.trained // 32) * 4


def _setting(orders: Orders, *names: str) -> bool:
    places = [field.name for field in fields(DescriptorSettings)]
    return any(orders.settings[places.index(name)] > 0 for name in names)


def _wrong(array: np.ndarray | None, dtype: Any, shape: tuple[int, ...]) -> str:
    if array is None or (array.dtype == dtype and array.shape == shape):
        return ""
    return f"{array.dtype} {array.shape} where {np.dtype(dtype)} {shape} was expected"


def _wrong_targets(orders: Orders, header: Header) -> str:
    if orders.targets is None:
        return ""
    rows = int(orders.rows.max(initial=0)) + 1
    if orders.targets.ndim != 2 or len(orders.targets) < rows:
        return f"targets of shape {orders.targets.shape} for {rows} rows"
    return _wrong(orders.targets, np.float32, (len(orders.targets), header.classes))


def _room(array: np.ndarray | None, place: int) -> str:
    return "the plan has no room for it" if array is not None and place == NONE else ""


def _floats(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32).reshape(-1)


def _shifts(steps: Sequence[Step]) -> np.ndarray | None:
    if all(step.shifts is None for step in steps):
        return None
    each = [
        np.zeros((len(step.rows), 2), np.int64) if step.shifts is None else np.asarray(step.shifts)
        for step in steps
    ]
    found = np.concatenate(each)
    if abs(found).max(initial=0) > 127:
        raise InputError("an image is moved by a few pixels only", field="steps")
    return found.astype(np.int8)
