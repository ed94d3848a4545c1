"""The C runtime compiled for this machine: the exact, fast simulator of every board.

It is the same C as in the firmware, with the same flags, and gives the same bits. Engines share
nothing, so that any number of jobs may run in threads at the same time; ctypes lets go of Python's
lock while C works.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_uint8, c_uint32, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from nestling.errors import InputError
from nestling.planning.descriptor import NONE
from nestling.tiny.runtime.job import Done, Job
from nestling.tiny.runtime.toolchain import FLAGS, RUNTIME, build

SOURCES = ("maths.c", "check.c", "kernels.c", "linear.c", "train.c", "data.c")
WEIGHTS, MOMENTUM, ANCHOR, MASK, PRESENT, TARGET, LOGITS = range(7)
"""The blocks of `nst_block`."""

REASONS = (
    "nothing is wrong",
    "a null or unaligned pointer",
    "not a descriptor or not data, or of another version",
    "its length does not agree with what it says",
    "its checksum is wrong",
    "the plan needs a larger arena",
    "a number of the header that cannot be",
    "a buffer that is missing, unaligned or not inside the arena",
    "two buffers that must be apart overlap",
    "an unknown kind of operation, flag or activation",
    "sizes that do not agree with each other",
    "weights or biases outside of their block",
    "a number that is not finite or out of its range",
    "settings that the plan has no buffer for (momentum, anchor, target, or nothing to train)",
    "not now: nothing is attached or begun, or the batch is not complete",
    "no such row in the data",
    "a label that the network has no class for",
    "an image moved too far",
    "an inner loss that is impossible: too many inputs, or the last operation is not a trained "
    "dense one",
    "data of another shape than the network's input, or whose targets are not what is asked for",
)
"""What the runtime's codes mean, in the order of the enumeration in nestling.h."""


class RuntimeRefused(InputError):
    """The runtime refused; `code` is its reason."""

    def __init__(self, code: int, what: str, op: int = NONE) -> None:
        """Words the error from the runtime's code and, where one is to blame, the operation's
        number."""
        reason = REASONS[code] if 0 <= code < len(REASONS) else f"code {code}"
        place = "" if op == NONE else f" (operation {op})"
        super().__init__(f"the C runtime refused {what}: {reason}{place}", field="tiny")
        self.code, self.op = code, op


class _Settings(ctypes.Structure):
    _fields_ = [
        (name, c_float)
        for name in (
            "lr",
            "momentum",
            "decay",
            "clip",
            "mu",
            "ce",
            "mse",
            "kd",
            "temperature",
            "inner",
        )
    ]


class _Blob(ctypes.Structure):
    _fields_ = [
        *((name, c_uint32) for name in ("rows", "channels", "height", "width", "kind", "crc")),
        ("scale", c_float),
        ("offset", c_float),
        ("targets", c_void_p),
        ("samples", c_void_p),
    ]


class _Engine(ctypes.Structure):
    _fields_ = [
        ("header", c_void_p),
        ("ops", c_void_p),
        ("arena", POINTER(c_uint8)),
        *(
            (name, c_uint32)
            for name in ("arena_bytes", "begun", "steps", "batch", "pending", "inner", "bad_op")
        ),
        ("loss", c_float),
        ("settings", _Settings),
    ]


@cache
def library() -> ctypes.CDLL:
    """The runtime, compiled when it is needed for the first time on this machine."""
    sources = [RUNTIME / name for name in SOURCES]
    return load(build("nestling.so", sources, (*FLAGS, "-O3", "-fPIC"), ("-shared",)))


def load(path: Path) -> ctypes.CDLL:
    """A build of the runtime, its functions described."""
    found = ctypes.CDLL(str(path))
    engine, blob = POINTER(_Engine), POINTER(_Blob)
    found.nst_attach.argtypes = [engine, c_void_p, c_uint32, c_void_p, c_uint32]
    found.nst_begin.argtypes = [engine, POINTER(_Settings)]
    found.nst_batch.argtypes = [engine, blob, c_void_p, c_void_p, c_void_p, c_uint32, c_uint32]
    found.nst_sample.argtypes = [
        engine,
        blob,
        c_uint32,
        c_int,
        c_int,
        c_uint32,
        c_uint32,
        c_void_p,
        POINTER(c_float),
    ]
    found.nst_step.argtypes = [engine]
    found.nst_forward.argtypes = [engine, blob, c_uint32]
    found.nst_block.argtypes = [engine, c_uint32, POINTER(c_uint32)]
    found.nst_block.restype = c_void_p
    found.nst_blob_open.argtypes = [blob, c_void_p, c_uint32]
    for name in ("nst_exp", "nst_log", "nst_sqrt"):
        getattr(found, name).argtypes, getattr(found, name).restype = [c_float], c_float
    if found.nst_sizes() != ctypes.sizeof(_Engine) * 0x10000 + ctypes.sizeof(_Blob):
        raise RuntimeError("nestling.h and native.py disagree about the layout of the engine")
    return found


class FlashData:
    """A client's data, opened and checked. Many engines may read it."""

    def __init__(self, blob: bytes) -> None:
        """Has the runtime check a copy of the blob."""
        self._kept = _aligned(blob)  # the view points into it
        self.view = _Blob()
        _check(
            library().nst_blob_open(byref(self.view), self._kept.ctypes.data, len(blob)), "the data"
        )

    @property
    def rows(self) -> int:
        """How many rows the data has."""
        return int(self.view.rows)


class CRuntime:
    """One training engine with an arena of its own: exactly as many bytes as the plan says, or as
    many as given."""

    def __init__(self, descriptor: bytes, arena: int) -> None:
        """Has the runtime check the plan and lay it out in a fresh arena of `arena` bytes."""
        self._library, self._engine = library(), _Engine()
        self._descriptor, self._arena = (
            _aligned(descriptor),
            np.zeros(max(arena + 3, 4) // 4, np.uint32),
        )
        code = self._library.nst_attach(
            byref(self._engine),
            self._descriptor.ctypes.data,
            len(descriptor),
            self._arena.ctypes.data,
            arena,
        )
        _check(code, "the plan", self._engine.bad_op)

    def block(self, which: int) -> np.ndarray:
        """A block of the arena where it lies; empty where the plan has none."""
        size = c_uint32()
        start = self._library.nst_block(byref(self._engine), which, byref(size))
        if not start:
            return np.empty(0, np.float32)
        first = (start - self._arena.ctypes.data) // 4
        return self._arena[first : first + size.value // 4].view(
            np.uint32 if which == MASK else np.float32
        )

    def write(self, which: int, values: np.ndarray, what: str) -> None:
        """Fills a block of the arena; another number of values than the plan has is refused."""
        block = self.block(which)
        if block.shape != values.shape:
            fix = f"the plan has {block.size} of them"
            raise InputError(f"{values.size} numbers for {what}", field="tiny", fix=fix)
        block[:] = values

    def begin(self, settings: bytes) -> None:
        """Starts a job with these settings (`DescriptorSettings.to_bytes`)."""
        _check(
            self._library.nst_begin(
                byref(self._engine), byref(_Settings.from_buffer_copy(settings))
            ),
            "the settings",
        )

    def batch(
        self,
        data: FlashData,
        rows: np.ndarray,
        shifts: np.ndarray | None = None,
        targets: np.ndarray | None = None,
        inner: int = 0,
    ) -> float:
        """One step; gives the loss summed over its samples."""
        at = [
            _pointer(rows, np.uint32, (len(rows),)),
            _pointer(shifts, np.int8, (len(rows), 2)),
            _pointer(targets, np.float32, None),
        ]
        code = self._library.nst_batch(
            byref(self._engine), byref(data.view), *(p for _, p in at), len(rows), inner
        )
        _check(code, "a step")
        return float(self._engine.loss)

    def forward(self, data: FlashData, row: int) -> np.ndarray:
        """The logits of one row."""
        _check(self._library.nst_forward(byref(self._engine), byref(data.view), row), "a row")
        return self.block(LOGITS).copy()

    @property
    def steps(self) -> int:
        """How many steps the engine has done."""
        return int(self._engine.steps)


def engine_for(job: Job) -> CRuntime:
    """An engine that holds the plan, the weights and all else of a job, and has begun."""
    engine = CRuntime(job.plan.descriptor, job.plan.arena)
    engine.write(WEIGHTS, np.asarray(job.weights, np.float32), "the weights")
    if job.anchor is not None:
        engine.write(ANCHOR, np.asarray(job.anchor, np.float32), "the anchor")
    if job.mask is not None:
        engine.write(MASK, packed(job.mask), "the mask")
    if job.present is not None:
        engine.write(PRESENT, np.asarray(job.present, np.float32), "the classes present")
    engine.begin(job.settings.to_bytes())
    return engine


def run_job(job: Job, blob: bytes) -> Done:
    """A job, exactly as the firmware does it."""
    engine, data = engine_for(job), FlashData(blob)
    targets = job.targets
    if targets is not None and np.shape(targets) != (data.rows, job.plan.header.classes):
        raise InputError(
            f"targets of shape {np.shape(targets)}",
            field="tiny",
            fix=f"one row of logits for each of {data.rows} rows",
        )
    loss, samples = 0.0, 0
    for step in job.steps:
        loss += engine.batch(data, step.rows, step.shifts, targets, step.inner)
        samples += len(step.rows)
    return Done(engine.block(WEIGHTS).copy(), loss, engine.steps, samples)


def packed(flags: np.ndarray) -> np.ndarray:
    """Flags as the bits of 32-bit words, the first flag in the lowest bit."""
    bits = np.packbits(np.asarray(flags).astype(bool).reshape(-1), bitorder="little")
    return np.concatenate([bits, np.zeros(-len(bits) % 4, np.uint8)]).view("<u4")


def _aligned(data: bytes) -> np.ndarray:
    """A copy that starts at a multiple of 4."""
    words = np.zeros(max(len(data) + 3, 4) // 4, np.uint32)
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return words


def _pointer(
    values: np.ndarray | None, kind: type, shape: tuple[int, ...] | None
) -> tuple[np.ndarray | None, int | None]:
    """The array as C wants it, which must be kept while its address is in use, and that address."""
    if values is None:
        return None, None
    array = np.asarray(values)
    if shape is not None and array.shape != shape:
        raise InputError(f"an array of shape {array.shape}", field="tiny", fix=f"shape {shape}")
    if np.issubdtype(kind, np.integer) and array.size:
        limits = np.iinfo(kind)
        if array.min() < limits.min or array.max() > limits.max:
            raise InputError("a row or a shift that is out of its range", field="tiny")
    kept: np.ndarray = np.ascontiguousarray(array, kind)
    return kept, kept.ctypes.data


def _check(code: int, what: str, op: int = NONE) -> None:
    if code:
        raise RuntimeRefused(code, what, op)
