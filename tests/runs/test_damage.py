"""What a run goes on from is what was written, or refused by the file's name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nestling.errors import InputError
from nestling.runs import checkpoint
from nestling.runs.federation import Totals
from nestling.store import ClientStore

STATE = {"w": torch.arange(20.0), "mask": torch.tensor([True, False, True])}


def damaged(good: bytes) -> Iterator[bytes]:
    """With each byte changed, and cut short at each."""
    rng = random.Random(1)
    for place in range(len(good)):
        changed = bytearray(good)
        changed[place] ^= rng.randint(1, 255)
        yield bytes(changed)
        yield good[:place]


def saved(folder: Path) -> Path:
    checkpoint.save(folder, {"method": STATE}, Totals(round=3))
    return folder / checkpoint.NAME


def put(folder: Path) -> Path:
    ClientStore(folder).put(7, STATE, 3)
    return folder / "7.3.bin"


def got(folder: Path) -> object:
    store = ClientStore(folder)
    store.resume(3)
    return store.get(7)


@pytest.mark.parametrize(("write", "read"), [(saved, checkpoint.load), (put, got)])
def test_a_changed_byte_and_a_cut_are_always_refused(
    write: Callable[[Path], Path], read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = write(tmp_path)
    good = path.read_bytes()
    assert read(tmp_path)
    for data in damaged(good):
        path.write_bytes(data)
        with pytest.raises(InputError, match=f"{path} is damaged"):
            read(tmp_path)
