"""What clients keep: in memory, on disk, and as it was at a checkpoint."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from nestling.errors import InputError
from nestling.message import Message
from nestling.store import ClientStore, Records


def kept(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def test_it_spills_to_disk_beyond_its_limit(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, limit_bytes=10_000)
    for client in range(20):
        store.put(client, kept(client), 1)
    assert store._bytes <= 10_000 and len(store._recent) <= 2
    assert all(float(store.get(c)["w"][0]) == c for c in range(20))


def test_without_a_folder_it_spills_to_one_that_goes_with_it() -> None:
    store = ClientStore(limit_bytes=10_000)
    for round in (1, 2):
        for client in range(20):
            store.put(client, kept(100 * round + client), round)
    assert store._bytes <= 10_000 and len(store._recent) <= 2 and store.clients() == list(range(20))
    for _ in range(2):  # what is read back and pushed out again is the same
        assert all(float(store.get(c)["w"][0]) == 200 + c for c in range(20))
    store.put(0, kept(7), 3)  # newer than what lies on disk
    assert float(store.get(0)["w"][0]) == 7
    assert all(float(store.get(c)["w"][0]) == (7 if c == 0 else 200 + c) for c in range(20))
    folder = store._temporary
    assert folder is not None and len(list(folder.iterdir())) == 20  # one version each
    del store
    gc.collect()
    assert not folder.exists()


def test_what_fits_is_not_written_without_a_folder() -> None:
    store = ClientStore()
    for client in range(20):
        store.put(client, kept(client), 1)
    assert store._temporary is None and store.clients() == list(range(20))


def test_a_round_is_flushed_once_before_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    flush = os.fsync
    monkeypatch.setattr("os.fsync", lambda handle: flushed.append(handle) or flush(handle))
    store = ClientStore(tmp_path / "clients")
    for client in range(10):
        store.put(client, kept(client), 1)
    assert not flushed  # a state counts only once a checkpoint says so
    store.sync()
    assert len(flushed) == 11  # every file, and the folder that names them
    store.covered(1)
    assert len(flushed) == 11
    store.put(3, kept(0), 2)
    store.covered(2)
    assert len(flushed) == 13


def test_half_a_file_of_an_unfinished_round_does_no_harm(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.put(1, kept(1), 1)
    store.covered(1)
    (tmp_path / "1.2.bin").write_bytes(b"half")
    again = ClientStore(tmp_path)
    again.resume(1)
    assert float(again.get(1)["w"][0]) == 1


def test_a_resumed_run_sees_what_was_there_at_the_checkpoint(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.put(1, kept(1), 1)
    store.put(2, kept(1), 1)
    store.covered(1)
    store.put(1, kept(2), 2)  # round 2 began and the process died
    again = ClientStore(tmp_path)
    again.resume(1)
    assert float(again.get(1)["w"][0]) == 1 and float(again.get(2)["w"][0]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.1.bin", "2.1.bin"]


def test_old_versions_go_once_a_checkpoint_covers_newer_ones(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    for round in range(1, 9):
        store.put(5, kept(round), round)
        store.covered(round)
    assert len(list(tmp_path.iterdir())) <= 2


def test_without_checkpoints_nothing_a_resume_needs_is_removed(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.put(5, kept(1), 1)
    store.covered(1)
    for round in range(2, 6):
        store.put(5, kept(round), round)
    again = ClientStore(tmp_path)
    again.resume(1)
    assert float(again.get(5)["w"][0]) == 1


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    ClientStore(tmp_path).put(3, kept(1), 1)
    (tmp_path / "3.1.bin").write_bytes(b"nonsense")
    again = ClientStore(tmp_path)
    again.resume(1)
    with pytest.raises(InputError, match="client 3's state"):
        again.get(3)


def test_what_an_earlier_version_kept_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "3.1.safetensors").write_bytes(Message({"memory": kept(1)}).to_bytes())
    with pytest.raises(InputError, match="earlier version, without checksums"):
        ClientStore(tmp_path).resume(1)


def test_nothing_is_kept_of_nothing(tmp_path: Path) -> None:
    store = ClientStore(tmp_path / "clients")
    store.put(1, {}, 1)
    assert store.get(1) == {} and store.clients() == [] and not (tmp_path / "clients").exists()


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("limit", [2**20, 10_000], ids=["all in memory", "two in memory"])
def test_what_a_round_put_is_undone(tmp_path: Path, on_disk: bool, limit: int) -> None:
    store = ClientStore(tmp_path / "clients" if on_disk else None, limit)
    records = Records(store)
    for client in range(6):
        store.put(client, kept(client), 1)
    records.put(3, kept(30), 1)
    for round in (2, 3):  # the second was begun before the first was settled
        store.begin(round)
        for client in range(2, 8):
            store.put(client, kept(100 * round + client), round)
        records.put(3, kept(31), round)
        records.put(3, kept(32), round)  # again in the same round
        records.put(4, kept(40), round)
    store.undo(2)
    assert store.clients() == list(range(6)) and all(
        float(store.get(c)["w"][0]) == c for c in range(6)
    )
    assert float(records.get(3)["w"][0]) == 30 and records.get(4) == {} and store.get(7) == {}
    assert store._bytes == sum(t.nbytes for state in store._recent.values() for t in state.values())
    store.covered(1)
    store.put(2, kept(7), 2)
    assert float(store.get(2)["w"][0]) == 7
    if on_disk:
        again = ClientStore(tmp_path / "clients")
        again.resume(1)
        assert all(float(again.get(c)["w"][0]) == c for c in range(6)) and again.get(7) == {}


def test_what_is_settled_is_not_undone_and_nothing_is_held_for_it() -> None:
    store = ClientStore()
    store.put(1, kept(1), 1)
    store.begin(2)
    store.put(1, kept(2), 2)
    store.confirm(2)
    assert not store._replaced
    store.begin(3)
    store.put(1, kept(3), 3)
    store.undo(3)
    assert float(store.get(1)["w"][0]) == 2
    store.put(1, kept(4), 4)  # in no round that was begun
    assert not store._replaced
