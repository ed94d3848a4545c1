"""Reader for the original CIFAR-10 python files.

They are pickles, and a pickle may run any code when loaded. Here it cannot: the three names an
array needs resolve to an inert stand-in, every other name is refused, and the array is rebuilt from
the raw bytes afterwards.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from nestling.errors import InputError
from nestling.harmless import harmless

TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILE = "test_batch"
FILES = (*TRAIN_FILES, TEST_FILE, "batches.meta")
CLASS_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

_PIXELS = 3 * 32 * 32
_ARRAY_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """One batch file: uint8 images (N, 3, 32, 32) and uint8 labels (N,)."""
    batch = _load(path)
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise _bad(path, "has no 'data' and 'labels'")
    x, y = _rebuild(batch[b"data"], path), _labels(batch[b"labels"], path)
    if len(x) != len(y):
        raise _bad(path, f"holds {len(x)} images but {len(y)} labels")
    return x, y


def read_folder(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images and labels, test images and labels of a `cifar-10-batches-py` folder."""
    parts = [read_batch(folder / name) for name in TRAIN_FILES]
    x, y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return x, y, *read_batch(folder / TEST_FILE)


class _Inert:
    """Stands in for numpy's array and dtype: remembers what it was given and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAY_NAMES:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which CIFAR-10 files never do"
            )
        return _Inert


def _load(path: Path) -> Any:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _bad(path, f"cannot be read: {error}") from error
    try:
        _bound_memo(raw)
        return _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise nearly anything
        why = harmless(str(error)) or type(error).__name__
        raise _bad(path, f"is not a CIFAR-10 batch: {why}") from error


def _bound_memo(raw: bytes) -> None:
    # The unpickler's memo is a table as long as the largest index: five bytes could ask for
    # gigabytes.
    for opcode, argument, _ in pickletools.genops(raw):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(raw):
            raise pickle.UnpicklingError("its memo index is out of range")


def _rebuild(array: Any, path: Path) -> np.ndarray:
    match getattr(array, "state", None):
        case (_, (int(rows), int(width)), _Inert(args=(b"u1", *_)), False, bytes(raw)):
            if width == _PIXELS and len(raw) == rows * width:
                return np.frombuffer(raw, np.uint8).reshape(rows, 3, 32, 32)
    raise _bad(path, f"'data' is not an array of {_PIXELS} bytes a row")


def _labels(labels: Any, path: Path) -> np.ndarray:
    good = (
        isinstance(labels, list)
        and labels
        and all(type(label) is int and 0 <= label < len(CLASS_NAMES) for label in labels)
    )
    if not good:
        raise _bad(path, f"'labels' is not a list of numbers 0..{len(CLASS_NAMES) - 1}")
    return np.array(labels, np.uint8)


def _bad(path: Path, message: str) -> InputError:
    fix = "delete the file and fetch it again, or point NESTLING_DATA at a folder with the original"
    return InputError(f"{path} {message}", field="data.name", fix=fix)
