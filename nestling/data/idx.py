"""Reader for IDX files, the format of MNIST and Fashion-MNIST: plain or gzipped, unsigned bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nestling.errors import InputError

_FIX = "delete the file and fetch it again, or point NESTLING_DATA at a folder with the original"
_DEFLATE_RATIO = 1032  # the most that deflate can expand its input


def read_idx(path: Path) -> np.ndarray:
    """The array inside one IDX file; gzip is recognised by its content, not by the file's name."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            limit = path.stat().st_size * (_DEFLATE_RATIO if zipped else 1)
            if not zipped:
                return _parse(file, path, limit)
            with gzip.GzipFile(fileobj=file) as unzipped:
                return _parse(unzipped, path, limit)
    except (OSError, EOFError, zlib.error) as error:
        raise _bad(path, f"cannot be read: {error}") from error


def read_images(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """A pair of IDX files: uint8 images (N, H, W) and uint8 labels (N,)."""
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3:
        raise _bad(images, f"holds {x.ndim} dimension(s), images need 3")
    if y.ndim != 1:
        raise _bad(labels, f"holds {y.ndim} dimension(s), labels need 1")
    if len(x) != len(y):
        raise _bad(labels, f"holds {len(y)} labels but {images} holds {len(x)} images")
    return x, y


def _parse(file: BinaryIO | gzip.GzipFile, path: Path, limit: int) -> np.ndarray:
    magic = file.read(4)
    if len(magic) < 4 or magic[:3] != b"\x00\x00\x08" or magic[3] == 0:
        raise _bad(
            path,
            f"is not an IDX file of unsigned bytes (it starts with {magic.hex() or 'nothing'})",
        )
    header = file.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise _bad(path, "is truncated inside its header")
    shape = struct.unpack(f">{magic[3]}I", header)
    size = math.prod(shape)
    # A header may promise terabytes: believe only what the file could hold before any memory is
    # asked for.
    body = file.read(size + 1) if size <= limit else b""
    if len(body) != size:
        found = "more" if len(body) > size else str(len(body)) if size <= limit else "fewer"
        raise _bad(
            path, f"is truncated or damaged: its header promises {size} values, it holds {found}"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def _bad(path: Path, message: str) -> InputError:
    return InputError(f"{path} {message}", field="data.name", fix=_FIX)
