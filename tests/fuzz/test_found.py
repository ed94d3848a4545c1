"""What fuzzing found, each as small as it gets: before, these ended in another exception than a
refusal, or were read as what they are not."""

from __future__ import annotations

import io
import json
import struct
import wave
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestling.data import load
from nestling.data.cifar import read_batch
from nestling.data.npz import read_npz
from nestling.errors import InputError
from nestling.files import parse_toml, sealed
from nestling.fleet.node.mqtt_device import read_blob
from nestling.fleet.node.own_data import read_rows
from nestling.fleet.protocol.wire import Answer, Parcel, Welcome
from nestling.fleet.server.roster import Roster
from nestling.message import Message
from nestling.report.compare import compare
from nestling.runfiles import lines_of
from nestling.runs import checkpoint
from nestling.runs.folder import RunFolder
from nestling.runs.sweep import read_sweep, seeds_of
from nestling.schema import convert
from nestling.tiny.link import bundle
from nestling.tiny.link.gateway import read_config
from nestling.tiny.link.journal import Found, JournalEntry
from nestling.tiny.link.session import State
from nestling.tiny.runtime.data import pack
from tests.fleet.test_roster import fleet
from tests.fleet.test_wire import answer
from tests.fuzz.formats import closed_letter, opened_letter

HUGE, DEEP = 10**400, "[" * 20000 + "]" * 20000


def message_with(bits: str = "{}", facts: str = "{}") -> bytes:
    """A message of one flag with another shape, or other facts."""
    data = Message({"mask": {"a": torch.tensor([True])}}).to_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    head["__metadata__"] |= {"bits": bits, "facts": facts}
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


@pytest.mark.parametrize(
    "shape", [f"[{HUGE}]", "[1e999]", f'["{"x" * 1000}", {HUGE}]', "[-1, -1]", '"a"']
)
def test_flags_of_a_shape_that_cannot_be(shape: str) -> None:
    with pytest.raises(InputError, match="not a readable message"):
        Message.from_bytes(message_with(bits=f'{{"mask/a": {shape}}}'))


@pytest.mark.parametrize("facts", ["7", "[]", '"a"', DEEP])
def test_facts_that_are_no_table(facts: str) -> None:
    with pytest.raises(InputError, match="not a readable message"):
        Message.from_bytes(message_with('{"mask/a": [1]}', facts))


def test_a_loss_too_large_for_a_float() -> None:
    letter = answer().to_bytes()
    head, body = opened_letter(letter)
    head["results"][0]["loss"] = HUGE
    with pytest.raises(InputError, match="loss is"):
        Answer.from_bytes(closed_letter(letter, json.dumps(head).encode(), body))


def test_a_scale_too_large_for_a_float() -> None:
    row = ["w", "f32", [1, 1], "i8", HUGE]
    with pytest.raises(InputError, match="the scale is"):
        Parcel({"facts": {}, "parts": [["weights", [row]]]}, b"\1").open()


@pytest.mark.parametrize("totals", [None, 7, {"a": 1}, {"round": "1"}, {"clock_seconds": HUGE}])
def test_a_checkpoint_whose_totals_are_none(tmp_path: Path, totals: Any) -> None:
    data = Message({}, {} if totals is None else {"totals": totals}).to_bytes()
    (tmp_path / checkpoint.NAME).write_bytes(sealed(data))
    with pytest.raises(InputError, match="totals"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("line", ['{"rxund": 1}', '{"round": {}}', '{"round": NaN}'])
def test_a_line_of_the_log_without_its_round_is_left_out(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"round": 1}}\n{line}\n{{"round": 2}}\n')
    folder = RunFolder(tmp_path)
    folder.start(2)
    folder.close()
    assert lines_of(tmp_path / "metrics.jsonl") == [{"round": 1}, {"round": 2}]


@pytest.mark.parametrize("member", ['"a"', "7", "[]", f'{{"name": "a", "macs": {HUGE}}}', DEEP])
def test_a_roster_with_a_member_that_is_none(tmp_path: Path, member: str) -> None:
    row = f'{{"counted": [], "client": 0, "seen": 0, "token": "a", "member": {member}}}'
    path = tmp_path / "roster.json"
    path.write_text(f'{{"run": "a", "start": 1, "clients": [{row}]}}')
    with pytest.raises(InputError, match=r"is damaged|cannot be read"):
        Roster(fleet(), path)


def test_a_roster_last_seen_never(tmp_path: Path) -> None:
    row = f'{{"counted": [1e999], "client": 0, "seen": {HUGE}, "token": "a", "member": {{}}}}'
    path = tmp_path / "roster.json"
    path.write_text(f'{{"run": "a", "start": 1, "clients": [{row}]}}')
    with pytest.raises(InputError, match="cannot be read"):
        Roster(fleet(), path)


def test_boards_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "boards.json").write_text(DEEP)
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "boards.json")


@pytest.mark.parametrize("change", [{"step": "3"}, {"loss": None}, {"step": True}])
def test_notes_of_a_wrong_type_are_none(tmp_path: Path, change: dict[str, Any]) -> None:
    entry = JournalEntry(tmp_path, "b", "ab" * 32, 5)
    entry.begin(State(2, np.ones(4, np.float32), None, 0.5))
    facts, arrays = bundle.unpack((tmp_path / "b.job").read_bytes())
    assert entry.find().state is not None
    (tmp_path / "b.job").write_bytes(bundle.pack({**facts, **change}, arrays))
    found = entry.find()
    assert isinstance(found, Found) and found.state is None and found.done is None


def zipped(path: Path, **members: np.ndarray | bytes) -> Path:
    """An archive of arrays, or of other bytes under their names."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in members.items():
            plain = io.BytesIO()
            if isinstance(member, np.ndarray):
                np.save(plain, member)
            archive.writestr(
                f"{name}.npy", member if isinstance(member, bytes) else plain.getvalue()
            )
    return path


X, Y = np.zeros((6, 1, 4, 4), np.float32), np.arange(6) % 2
NO_LETTERS = np.frombuffer(b"\xff\xff\xff\x7f" * 6, "U1")


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": b"not an array", "y": Y},
        {"x": X, "y": b"not an array"},
        {"x": X, "y": NO_LETTERS},
        {"x": X, "y": b"\x93NUMPY\x01\x00\x10\x00{'descr': ('<i8'"},
        {"x": np.zeros(()), "y": Y},
    ],
)
def test_archives_of_what_is_no_array(tmp_path: Path, arrays: dict[str, Any]) -> None:
    path = zipped(tmp_path / "a.npz", **arrays)
    welcome = Welcome("a" * 8, "", (1, 4, 4), 2, ("0", "1"), 60)
    for read in (read_npz, lambda p: read_rows(p, welcome), read_blob):
        with pytest.raises(InputError, match=r"npz|data"):
            read(path)


def test_a_device_is_told_that_its_archive_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK\5\6")
    with pytest.raises(InputError, match=r"not an \.npz file"):
        read_blob(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (X, Y.astype("U1")),
        (X, Y.astype("M8[s]")),
        (X, np.where(Y, np.nan, 0)),
        (X.astype("c8"), Y),
        (np.zeros((6, 0)), Y),
    ],
)
def test_samples_and_labels_of_a_board_are_numbers(x: np.ndarray, y: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"samples|label"):
        pack(x, y)


def test_a_batch_that_asks_for_a_long_name(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(b"c" + b"x" * 10000 + b"\ny\n.")
    with pytest.raises(InputError, match="not a CIFAR-10 batch") as refusal:
        read_batch(tmp_path / "batch")
    assert len(str(refusal.value)) < 2000


@pytest.mark.parametrize("text", [f"a = {DEEP}", "a = " + "9" * 5000])
def test_toml_too_deep_or_too_long(text: str) -> None:
    with pytest.raises(InputError, match="not valid TOML"):
        parse_toml(text, "a file")


def test_a_whole_number_too_large_for_a_float() -> None:
    with pytest.raises(InputError, match="finite number"):
        convert(float, HUGE, "time_budget")


def test_a_picture_that_is_to_fill_the_memory(tmp_path: Path) -> None:
    """A hundred bytes that say they are 16384 by 16384 points."""
    image = pytest.importorskip("PIL.Image")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        image.new("L", (8, 8)).save(tmp_path / name / "1.png")
    data = (tmp_path / "b/1.png").read_bytes()
    head = b"IHDR" + struct.pack(">II", 2**14, 2**13) + data[24:29]
    bomb = data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]
    (tmp_path / "b/1.png").write_bytes(bomb)
    with pytest.raises(InputError, match="16384×8192 points in"):
        load("images", path=str(tmp_path))


def test_a_sound_whose_reader_fails_in_its_own_way(tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "good"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(64))
    data = (tmp_path / "good").read_bytes()
    (tmp_path / "a").mkdir()
    for size in (0, 2**31, 2**32 - 1):  # of the part that says what the samples are
        (tmp_path / "a/1.wav").write_bytes(data[:16] + size.to_bytes(4, "little") + data[20:])
        with pytest.raises(InputError, match="cannot be read"):
            load("wavs", path=str(tmp_path))


@pytest.mark.parametrize("target", ['"a"', "[0.5]", "1" * 400, "true", "7"])
def test_a_sweep_s_target_that_is_no_accuracy(target: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"[sweep]\ntarget = {target}\n")
    with pytest.raises(InputError, match=r"sweep\.target"):
        read_sweep(tmp_path / "a.toml")


def test_seeds_that_are_to_fill_the_memory() -> None:
    with pytest.raises(InputError, match="are no seeds"):
        seeds_of(10**12)


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": ["x" * 5000]}))
    with pytest.raises(InputError, match="metrics"):
        compare(tmp_path)
    (tmp_path / "a.toml").write_text(f'[fleet]\npath = "{"x" * 5000}"\n')
    assert read_sweep(tmp_path / "a.toml").base.fleet.path == "x" * 5000  # refused when it is read
