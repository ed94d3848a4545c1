"""Ten thousand descriptors that nobody planned, under AddressSanitizer and UBSan: each is refused,
or it trains without a report."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from nestling.errors import InputError
from nestling.planning import descriptor as d
from nestling.planning.plan import MemoryPlan, plan
from nestling.tiny.runtime import data, native, toolchain
from tests.tiny.nets import OPERATIONS

MANY = 10_000
SHIFT = 17  # the code for an image moved too far
SANITIZED = (
    "-g",
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
LARGEST = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
WIDTH = {  # bytes of the fields of an operation
    **dict.fromkeys(("kind", "flags", "activation"), 1),
    **dict.fromkeys(
        ("kernel_height", "kernel_width", "stride_height", "stride_width", "pad_top", "pad_left"), 1
    ),
    **dict.fromkeys(
        (
            "in_channels",
            "in_height",
            "in_width",
            "out_channels",
            "out_height",
            "out_width",
            "groups",
        ),
        2,
    ),
}


@pytest.fixture(scope="module")
def harness() -> Path:
    compiler = next((c for c in ("gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip(
            "neither gcc nor clang is installed, which bring the sanitizers: apt-get install gcc"
        )
    sources = [
        Path(__file__).with_name("fuzz_descriptors.c"),
        *(toolchain.RUNTIME / name for name in native.SOURCES),
    ]
    flags = (*toolchain.FLAGS, *SANITIZED, f"-I{toolchain.RUNTIME}")
    try:
        return toolchain.build("fuzz-descriptors", sources, flags, compiler=[compiler])
    except InputError as error:
        if "libasan" in str(error) or "libubsan" in str(error):
            pytest.skip(f"{compiler} has no sanitizers: apt-get install libgcc-12-dev")
        raise


def answers(harness: Path, inputs: list[bytes], *words: str) -> list[list[int]]:
    """The codes for each descriptor: of attaching it, then of training with it."""
    given = b"".join(struct.pack("<I", len(x)) + x for x in inputs)
    options = {
        "ASAN_OPTIONS": "abort_on_error=0:detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run(
        [harness, *words],
        input=given,
        capture_output=True,
        timeout=300,
        env={**os.environ, **options},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return [[int(code) for code in line.split()] for line in done.stdout.decode().splitlines()]


@cache
def plans() -> list[MemoryPlan]:
    """Plans of every operation, with and without what a plan may have beside."""
    found = []
    for number, (shape, made) in enumerate(OPERATIONS.values()):
        torch.manual_seed(number)
        net, extra = (
            made(),
            {
                name: bool(number >> k & 1)
                for k, name in enumerate(("momentum", "anchor", "mask", "target", "present"))
            },
        )
        found.append(plan(net, shape, scales=[((), 0.5)] if number % 3 else (), **extra))
    return found


def mutant(source: np.random.Generator) -> bytes:
    """A plan with one to four of its numbers changed, its checksum right again."""
    base = plans()[source.integers(len(plans()))]
    header, ops = base.header, list(base.ops)
    for _ in range(source.integers(1, 5)):
        if source.random() < 0.25:
            name = fields(header)[source.integers(len(fields(header)))].name
            header = replace(header, **{name: number(source, getattr(header, name), 4, header)})
        else:
            k = source.integers(len(ops))
            ops[k] = changed(source, ops[k], ops, header)
    if source.random() < 0.05:
        source.shuffle(ops)
    return d.to_bytes(header, ops)


def changed(source: np.random.Generator, op: d.Op, ops: list[d.Op], header: d.Header) -> d.Op:
    name = fields(op)[source.integers(len(fields(op)))].name
    if name in ("scale", "eps"):
        return replace(
            op, **{name: float(source.choice([0.0, -1.0, 1e30, 1e-30, np.inf, np.nan, 0.5]))}
        )
    if source.random() < 0.2:  # what another operation has there
        return replace(op, **{name: getattr(ops[source.integers(len(ops))], name)})
    return replace(op, **{name: number(source, getattr(op, name), WIDTH.get(name, 4), header)})


def number(source: np.random.Generator, old: int, width: int, header: d.Header) -> int:
    """Near the old one, at an edge, or anything."""
    near = [
        old + 1,
        old - 1,
        old + 4,
        old - 4,
        old * 2,
        old // 2,
        old ^ 1 << int(source.integers(8 * width)),
    ]
    edges = [0, 1, 2, 3, LARGEST[width], LARGEST[width] - 3, LARGEST[width] // 2 + 1]
    places = [
        header.arena,
        header.arena - 4,
        header.weights,
        header.grads,
        header.input,
        header.output,
        4 * header.params,
    ]
    anything = [
        int(source.integers(LARGEST[width] + 1)),
        int(source.integers(header.arena // 4 + 1)) * 4,
    ]
    pool = [near, edges, places, anything][source.integers(4)]
    return pool[source.integers(len(pool))] & LARGEST[width]


def noise(source: np.random.Generator) -> bytes:
    """Bytes that are nothing at all, or a descriptor with damage, which its checksum mostly agrees
    with."""
    if source.random() < 0.5:
        return source.bytes(int(source.integers(0, 400)))
    whole = bytearray(plans()[source.integers(len(plans()))].descriptor)
    for _ in range(source.integers(1, 6)):
        whole[source.integers(16, len(whole))] = source.integers(256)
    if source.random() < 0.2:
        whole = whole[: source.integers(16, len(whole) + 1)]
    if source.random() < 0.9:
        whole[12:16] = struct.pack("<I", zlib.crc32(bytes(whole[16:])))
    return bytes(whole)


def test_plans_train_without_a_report(harness: Path) -> None:
    for codes in answers(harness, [p.descriptor for p in plans()]):
        assert codes == [0, 0, 0, 0, 0]


def test_fuzzed_descriptors_are_refused_or_train(harness: Path) -> None:
    source = np.random.default_rng(2024)
    given = [mutant(source) if source.random() < 0.8 else noise(source) for _ in range(MANY)]
    found = answers(harness, given)
    assert len(found) == MANY
    codes = Counter(codes[0] for codes in found)
    accepted = [codes for codes in found if codes[0] == 0]
    assert all(len(codes) == 5 for codes in accepted)
    # The fuzzing is worth something only if it gets past every check: most are refused, for all
    # kinds of reasons, and many are not.
    assert 300 < len(accepted) < MANY // 2
    assert set(codes) >= set(range(2, 13))


def blob(source: np.random.Generator) -> bytes:
    """Data with some bytes changed, its checksum mostly right again."""
    shape = (source.integers(1, 4), *source.integers(1, 5, 3))
    x = source.integers(0, 9, shape) if source.random() < 0.5 else source.normal(size=shape)
    sort = source.random()  # of the targets: labels, values, or the samples themselves
    y = source.integers(0, 9, shape[0])
    if sort < 0.5:
        y = source.normal(size=(shape[0], 3)) if sort < 0.3 else np.asarray(x).reshape(shape[0], -1)
    whole = bytearray(data.pack(x, y.astype(np.float32) if sort < 0.5 else y))
    for _ in range(source.integers(0, 3)):
        word = 4 * int(source.integers(10))
        old = struct.unpack_from("<I", whole, word)[0]
        struct.pack_into(
            "<I",
            whole,
            word,
            int(source.choice([old + 1, old - 1, old * 2, 1 << 31, 0xFFFFFFFF, 0, 1])) & 0xFFFFFFFF,
        )
    if source.random() < 0.3:
        struct.pack_into("<I", whole, 32, len(whole))
    if source.random() < 0.1:
        whole = whole[: source.integers(len(whole) + 1)]
    if source.random() < 0.8 and len(whole) >= 40:
        struct.pack_into("<I", whole, 36, zlib.crc32(bytes(whole[40:])))
    return bytes(whole)


def test_fuzzed_data_is_refused_or_read(harness: Path) -> None:
    source = np.random.default_rng(7)
    found = answers(harness, [blob(source) for _ in range(5000)], "data")
    assert len(found) == 5000
    assert all(codes == [0, 0, SHIFT] for codes in found if codes[0] == 0)
    assert {codes[0] for codes in found} == {0, 2, 3, 4, 12}
    assert 500 < sum(codes[0] == 0 for codes in found) < 4500
