"""Boards of any memory map in Unicorn: with nothing but what pip brings, the same bits as the host,
and no memory that is not there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nestling.tiny.boards import table as boards
from nestling.tiny.boards.emulator import emulator
from nestling.tiny.boards.unicorn import UnicornBoard
from nestling.tiny.link.line import LineTiming
from nestling.tiny.runtime import native
from tests.tiny.emulated import compiler, job, need, running, until

BLUE_PILL = "unicorn:ram=20K,flash=64K,cpu=m3"
MAPS = [
    (BLUE_PILL, 0.5),
    ("unicorn:ram=9K,flash=48K,cpu=m0", 0.25),
    ("unicorn:ram=36K,flash=1M,cpu=m4", 1.0),
    ("unicorn:ram=512K,flash=2M,cpu=m7", 1.0),
]


@pytest.mark.parametrize("with_compiler", ["zig", "gcc"])
@pytest.mark.parametrize(("name", "width"), MAPS)
def test_any_board_trains_to_the_bits_of_the_host(
    name: str, width: float, with_compiler: str
) -> None:
    need("unicorn", "C compiler")
    todo, blob = job(width)
    expected = native.run_job(todo, blob)
    with running(boards.firmware(name, compiler=compiler(with_compiler)), blob) as (board, session):
        assert isinstance(board, UnicornBoard)
        done = session.run(todo)
    assert (
        np.array_equal(done.weights.view(np.uint32), expected.weights.view(np.uint32))
        and done.loss == expected.loss
    )
    assert np.abs(done.weights - todo.weights).max() > 0.01


ALONE = """
import sys
from nestling.tiny.boards import table as boards
from nestling.tiny.runtime import native, toolchain
from tests.tiny.emulated import job, running
assert toolchain.is_zig(toolchain.host_compiler()) and toolchain.is_zig(toolchain.arm_compiler())
todo, blob = job(0.5, steps=2)
with running(boards.firmware(sys.argv[1]), blob) as (_, session):
    done = session.run(todo)
print(done.samples, bool((done.weights == native.run_job(todo, blob).weights).all()))
"""


def test_pip_alone_is_enough(tmp_path: Path) -> None:
    """No program of the system's can be found: ziglang builds the host's library and the firmware,
    Unicorn runs it."""
    need("unicorn", "ziglang")
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, BLUE_PILL],
        env={**os.environ, "PATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.stdout.split() == ["16", "True"], ran.stderr[-2000:]


def test_memory_that_is_not_there_ends_the_board_with_a_message() -> None:
    need("unicorn", "ARM compiler")
    chip = boards.board(BLUE_PILL)
    todo, blob = job(1.0)
    assert len(todo.plan.descriptor) + todo.plan.arena > chip.ram_bytes
    image = replace(
        boards.firmware(replace(chip, name="too-large", ram_bytes=64 * 1024)), board=chip
    )
    with running(image, blob, LineTiming(patience=3.0, revival=0.5)) as (board, session):
        with pytest.raises(ConnectionError):
            session.run(todo)
        assert until(lambda: not board.alive)
        assert "fault: there is no such memory: 0x2000" in board.words()


def test_a_board_keeps_its_state_from_one_peer_to_the_next() -> None:
    need("unicorn", "ARM compiler")
    todo, blob = job(0.5)
    with running(boards.firmware(BLUE_PILL), blob) as (board, session):
        session.run(todo)
        session.close()
        with socket.socket(socket.AF_UNIX) as passer_by:
            passer_by.connect(str(board.socket))
            passer_by.sendall(b"\x00\x07nonsense\x00")
        info = session.hello()
        assert info.loaded and info.steps == len(todo.steps)


def test_a_program_that_is_none_is_a_message(tmp_path: Path) -> None:
    need("unicorn", "ARM compiler")
    image = boards.firmware(BLUE_PILL)
    with tempfile.TemporaryDirectory(prefix="nst") as folder:
        board = emulator(
            replace(image, blob=image.blob + image.blob_bytes), b"data", Path(folder) / "board"
        )
        with pytest.raises(Exception, match="do not lie in the flash"):
            board.start()
        assert not board.alive
