from __future__ import annotations

import gzip
import http.server
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest


def idx_bytes(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.fixture
def write_idx() -> Callable[..., Path]:
    """Writes an IDX file, gzipped if its name says so."""

    def write(path: Path, array: np.ndarray) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = idx_bytes(array)
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
        return path

    return write


def cifar_bytes(
    images: np.ndarray,
    labels: list[int],
    *,
    module: bytes = b"numpy.core.multiarray",
    dtype: bytes = b"u1",
) -> bytes:
    """A batch in the form the original files have: protocol 2, byte strings, an old-style numpy
    array."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    rows, raw = len(images), images.tobytes()
    array = b"c" + module + b"\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += (
        b"(K\x01J"
        + struct.pack("<i", rows)
        + b"M\x00\x0c\x86cnumpy\ndtype\n"
        + text(dtype)
        + b"K\x00K\x01\x87R"
    )
    array += (
        b"(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<I", len(raw))
        + raw
        + b"tb"
    )
    items = b"](" + b"".join(b"J" + struct.pack("<i", label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"labels") + items + text(b"data") + array + b"u."


@pytest.fixture
def cifar_pickle() -> Callable[..., bytes]:
    """Makes such a batch."""
    return cifar_bytes


@pytest.fixture
def hostile_pickle() -> Callable[[Path], bytes]:
    """A pickle that creates `marker` through os.system when a normal unpickler loads it."""

    def make(marker: Path) -> bytes:
        import os

        class Payload:
            def __reduce__(self) -> tuple[object, ...]:
                return os.system, (f"touch {marker}",)

        return pickle.dumps({b"data": Payload(), b"labels": [0]}, protocol=3)

    return make


@dataclass
class Site:
    """A web site on the loopback interface: path -> (status, body, announced length)."""

    url: str
    answers: dict[str, tuple[int, bytes, int]]
    asked: list[str]

    def put(self, name: str, body: bytes, *, status: int = 200, length: int | None = None) -> str:
        self.answers["/" + name] = (status, body, len(body) if length is None else length)
        return self.url + name


@pytest.fixture
def site() -> Iterator[Site]:
    answers: dict[str, tuple[int, bytes, int]] = {}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, body, length = answers.get(self.path, (404, b"", 0))
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    yield Site(f"http://127.0.0.1:{server.server_address[1]}/", answers, asked)
    server.shutdown()
    server.server_close()
    thread.join()
