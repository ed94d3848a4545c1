"""Firmware for every board: its size is the forecast, it runs in QEMU, and it trains to the bits of
the host build."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nestling.devices.catalogue import device
from nestling.errors import InputError
from nestling.models import build
from nestling.planning import forecast
from nestling.planning.descriptor import DescriptorSettings
from nestling.planning.firmware import FIRMWARE
from nestling.planning.plan import plan
from nestling.tiny.boards import children
from nestling.tiny.boards import table as boards
from nestling.tiny.boards.emulator import emulator
from nestling.tiny.link import timing
from nestling.tiny.link.line import BoardRefused, LineTiming
from nestling.tiny.runtime import elf, native, toolchain
from nestling.tiny.runtime.data import pack
from nestling.tiny.runtime.job import Job, Step
from tests.tiny.emulated import compiler, job, job_for, need, running, until
from tests.tiny.nets import OPERATIONS, Residual

ALL = list(boards.TABLE)
MARGIN = 96  # bytes of stack that no test may touch


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_board_has_the_memory_of_its_device(name: str) -> None:
    board, profile = boards.board(name), device(boards.board(name).device)
    assert (board.ram_bytes, board.flash_bytes) == (
        int(profile.ram_bytes.value),
        int(profile.flash_bytes.value),
    )


def test_any_memory_map_is_a_board() -> None:
    board = boards.board("unicorn:ram=20K,flash=64K,cpu=m3")
    assert (board.ram_bytes, board.flash_bytes, board.core, board.fpu, board.machine) == (
        20480,
        65536,
        "cortex-m3",
        False,
        None,
    )
    assert boards.region(board) == 20480 - FIRMWARE.statics


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("microbits", "did you mean 'microbit'"),
        ("unicorn:ram=20K", "cannot read"),
        ("unicorn:ram=20K,flash=64K,cpu=m3,", "cannot read"),
        ("unicorn:ram=20K,flash=64K,cpu=m9", "unknown cpu"),
        ("unicorn:ram=20,flash=64K,cpu=m3", "no size of memory"),
        ("unicorn:ram=20K,flash=64G,cpu=m3", "no size of memory"),
    ],
)
def test_no_board(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        boards.board(name)


# -- building --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_compiler", ["gcc", "zig"])
@pytest.mark.parametrize("name", ALL)
def test_the_firmware_takes_what_the_forecast_says(name: str, with_compiler: str) -> None:
    image = boards.firmware(name, compiler=compiler(with_compiler))
    sections = elf.read(image.path).sections
    assert image.static_bytes == FIRMWARE.statics
    assert (sections[".stack"], sections.get(".data", 0) + sections[".bss"]) == (
        FIRMWARE.stack,
        FIRMWARE.data,
    )
    assert image.region_bytes == boards.region(name) and image.ram_bytes == image.board.ram_bytes
    assert image.flash_bytes <= FIRMWARE.flash
    assert (
        image.flash_bytes + image.blob_bytes
        <= image.board.flash_bytes
        < image.flash_bytes + image.blob_bytes + 1024
    )


@pytest.mark.parametrize("name", ALL)
def test_an_arena_that_does_not_fit_cannot_be_linked(name: str) -> None:
    need("ARM compiler")
    most = boards.region(name)
    assert boards.firmware(name, arena_bytes=most).ram_bytes == boards.board(name).ram_bytes
    with pytest.raises(InputError, match=r"RAM.*overflow|overflow.*RAM"):
        boards.firmware(name, arena_bytes=most + 1)


def test_what_the_compiler_says_reaches_the_user(tmp_path: Path) -> None:
    need("C compiler")
    source = tmp_path / "broken.c"
    source.write_text("int nestling(void) { return nothing_of_that_name; }\n")
    with pytest.raises(InputError, match="nothing_of_that_name"):
        toolchain.build("broken", [source])


def test_a_build_is_made_once_for_each_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("C compiler")
    monkeypatch.setenv("NESTLING_CACHE", str(tmp_path / "cache"))
    (tmp_path / "number.h").write_text("#define NUMBER 1\n")
    source = tmp_path / "a.c"
    source.write_text('#include "number.h"\nint main(void) { return NUMBER; }\n')
    first = toolchain.build("a", [source])
    made = first.stat().st_mtime_ns
    assert toolchain.build("a", [source]) == first and first.stat().st_mtime_ns == made
    assert toolchain.build("a", [source], (*toolchain.FLAGS, "-O3")) != first
    (tmp_path / "number.h").write_text("#define NUMBER 2\n")
    second = toolchain.build("a", [source])
    assert [subprocess.run([path], check=False).returncode for path in (first, second)] == [1, 2]
    assert not list((tmp_path / "cache" / "build").glob("part-*"))


def test_without_compilers_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert set(toolchain.missing_tools()) == {
        "C compiler",
        "ARM compiler",
        "qemu-system-arm",
        "unicorn",
    }
    with pytest.raises(InputError, match="apt-get install gcc-arm-none-eabi"):
        boards.firmware("microbit")
    with pytest.raises(InputError, match=r"pip install nestling\[tiny\]"):
        toolchain.build("a", [])


def test_a_wrapped_blob_is_a_program_that_holds_it(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(elf.wrap(b"data of a client", 0x08006400))
    with pytest.raises(ValueError, match="not a 32-bit ARM program"):
        (tmp_path / "not").write_bytes(bytes(100))
        elf.read(tmp_path / "not")
    raw = (tmp_path / "blob").read_bytes()
    assert (
        len(raw) == 84 + 16
        and raw.endswith(b"data of a client")
        and (0x08006400).to_bytes(4, "little") in raw
    )


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_board_trains_to_the_bits_of_the_host_in_exactly_the_forecast_ram(name: str) -> None:
    need("ARM compiler", "qemu-system-arm", "C compiler")
    todo, blob = job_for(name)
    region = len(todo.plan.descriptor) + todo.plan.arena
    image = boards.firmware(name, arena_bytes=region)
    assert image.ram_bytes == sum(forecast.ram(todo.plan).values())
    expected = native.run_job(todo, blob)
    with running(image, blob) as (_, session):
        done = session.run(todo)
        info = session.hello()
    assert (
        np.array_equal(done.weights.view(np.uint32), expected.weights.view(np.uint32))
        and done.loss == expected.loss
    )
    assert np.abs(done.weights - todo.weights).max() > 0.01
    assert info.region == region and info.rows == 40
    assert info.stack_reserved == FIRMWARE.stack and 0 < info.stack <= FIRMWARE.stack - MARGIN


def test_half_a_keyword_spotter_trains_in_less_than_240_kb() -> None:
    """DS-CNN at half width, all layers, plain SGD: stack, node, descriptor and arena together."""
    need("ARM compiler", "qemu-system-arm", "C compiler")
    torch.manual_seed(0)
    net = build("dscnn", shape=(1, 49, 10), classes=12, width=0.5, norm="none")
    planned = plan(net, (1, 49, 10))
    assert planned.trained == sum(parameter.numel() for parameter in net.parameters())
    image = boards.firmware("mps2-an386", arena_bytes=len(planned.descriptor) + planned.arena)
    assert image.ram_bytes == sum(forecast.ram(planned).values()) < 240_000
    random = np.random.default_rng(0)
    blob = pack(
        torch.from_numpy(random.standard_normal((4, 1, 49, 10), np.float32)), torch.arange(4)
    )
    todo = Job(
        planned,
        planned.pack(net.state_dict()),
        DescriptorSettings(lr=0.05),
        [Step(np.arange(4))] * 2,
    )
    with running(image, blob) as (_, session):
        assert np.array_equal(session.run(todo).weights, native.run_job(todo, blob).weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stm32vldiscovery", "microbit", "mps2-an386"])
def test_a_board_with_the_other_compiler_trains_to_the_same_bits(name: str) -> None:
    need("ziglang", "qemu-system-arm", "C compiler")
    todo, blob = job_for(name)
    expected = native.run_job(todo, blob)
    with running(boards.firmware(name, compiler=toolchain.zig()), blob) as (_, session):
        done = session.run(todo)
        info = session.hello()
    assert np.array_equal(done.weights, expected.weights)
    assert info.stack <= FIRMWARE.stack - MARGIN


def test_a_plan_beyond_the_ram_is_refused_by_the_board_itself() -> None:
    need("ARM compiler", "qemu-system-arm")
    todo, blob = job_for("stm32vldiscovery")
    region = len(todo.plan.descriptor) + todo.plan.arena
    with running(boards.firmware("stm32vldiscovery", arena_bytes=region - 4), blob) as (_, session):
        session.hello()
        with pytest.raises(BoardRefused):
            session.load(todo.plan.descriptor)  # past the gateway's own check
        assert not session.hello().loaded


def test_an_image_linked_beyond_the_ram_faults() -> None:
    need("ARM compiler", "qemu-system-arm")
    chip = boards.board("stm32vldiscovery")
    todo, blob = job(1.0)
    assert len(todo.plan.descriptor) + todo.plan.arena > chip.ram_bytes
    with running(
        boards.firmware(replace(chip, ram_bytes=64 * 1024)),
        blob,
        LineTiming(patience=3.0, revival=0.5),
    ) as (
        board,
        session,
    ):
        assert session.hello().region > chip.ram_bytes
        with pytest.raises(ConnectionError):
            session.run(todo)
        assert until(lambda: not board.alive)


def all_operations() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.GroupNorm(2, 4), nn.ReLU6(), nn.Conv2d(4, 4, 1)
    )
    layers = [
        nn.Conv2d(1, 4, (4, 3), 2, (1, 1)),
        nn.ReLU(),
        Residual(block),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
    ]
    return nn.Sequential(*layers, nn.AvgPool2d((2, 1)), nn.Flatten(), nn.Linear(8, 5))


@pytest.mark.parametrize("with_compiler", ["gcc", "zig"])
@pytest.mark.parametrize("name", ["microbit", "lm3s6965evb", "mps2-an386", "mps2-an500"])
def test_the_stack_holds_every_operation_and_every_loss(name: str, with_compiler: str) -> None:
    need("qemu-system-arm", "C compiler")
    random = np.random.default_rng(0)
    net = all_operations()
    planned = plan(net, (1, 8, 8), momentum=True, anchor=True, mask=True, target=True, present=True)
    weights = planned.pack(net.state_dict())
    todo = Job(
        planned,
        weights,
        DescriptorSettings(
            lr=0.05,
            momentum=0.9,
            decay=1e-3,
            clip=1.0,
            mu=0.1,
            ce=0.5,
            mse=0.2,
            kd=0.3,
            temperature=2.0,
            inner=0.5,
        ),
        [
            Step(random.integers(0, 12, 4), random.integers(-2, 3, (4, 2)), inner=4)
            for _ in range(2)
        ],
        anchor=weights[: planned.trained] * np.float32(0.9),
        mask=random.random(planned.trained) < 0.8,
        present=np.array([1, 1, 0, 1, 1], np.float32),
        targets=random.standard_normal((12, 5)).astype(np.float32),
    )
    blob = pack(
        torch.from_numpy(random.standard_normal((12, 1, 8, 8), np.float32)),
        torch.from_numpy(random.integers(0, 5, 12)),
    )
    expected = native.run_job(todo, blob)
    with running(boards.firmware(name, compiler=compiler(with_compiler)), blob) as (_, session):
        done = session.run(todo)
        info = session.hello()
    assert np.array_equal(done.weights, expected.weights) and done.loss == expected.loss
    assert info.stack <= FIRMWARE.stack - MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unicorn:ram=64K,flash=256K,cpu=m0", "netduinoplus2"])
def test_every_operation_gives_the_same_bits_on_a_board(name: str) -> None:
    need(
        "ARM compiler", "unicorn" if name.startswith("unicorn") else "qemu-system-arm", "C compiler"
    )
    image = boards.firmware(name)
    for shape, make in OPERATIONS.values():
        _compare_operation(image, shape, make())


def _compare_operation(image: boards.Firmware, shape: tuple[int, ...], net: nn.Module) -> None:
    random = np.random.default_rng(1)
    planned = plan(net, shape, momentum=True)
    blob = pack(
        torch.from_numpy(random.standard_normal((6, *shape), np.float32)),
        torch.arange(6) % planned.header.classes,
    )
    todo = Job(
        planned,
        planned.pack(net.state_dict()),
        DescriptorSettings(lr=0.05, momentum=0.9),
        [Step(np.arange(6))] * 2,
    )
    expected = native.run_job(todo, blob)
    with running(image, blob) as (_, session):
        assert np.array_equal(session.run(todo).weights, expected.weights)
        assert session.hello().stack <= FIRMWARE.stack - MARGIN


# -- processes -------------------------------------------------------------------------------------


def test_a_board_without_power_forgets_and_starts_again() -> None:
    need("ARM compiler", "qemu-system-arm", "C compiler")
    todo, blob = job_for("lm3s6965evb")
    expected = native.run_job(todo, blob)
    with running(boards.firmware("lm3s6965evb"), blob) as (board, session):
        first = board.pid
        session.run(todo)
        assert session.hello().loaded
        board.kill()
        assert not board.alive
        board.restart()
        assert board.alive and board.pid != first
        assert not session.hello().loaded
        assert np.array_equal(session.run(todo).weights, expected.weights)
    assert not board.alive


def test_more_data_than_the_flash_holds() -> None:
    need("ARM compiler", "qemu-system-arm")
    image = boards.firmware("stm32vldiscovery")
    with (
        tempfile.TemporaryDirectory(prefix="nst") as folder,
        pytest.raises(InputError, match="do not fit"),
    ):
        emulator(image, bytes(image.blob_bytes + 1), Path(folder) / "board")


SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]
PARENT = """
import sys, threading, time
from pathlib import Path
from nestling.tiny.boards import children
pids = []
sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
thread = threading.Thread(target=lambda: pids.append(children.start(sleep)))
thread.start()
thread.join()
print(pids[0].pid, flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux kills the children of a killed process"
)
def test_a_board_does_not_outlive_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        # the thread that asked for it is long gone
        assert until(lambda: _command(child).startswith(" ".join(SLEEP)))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert until(lambda: not _command(child))
    finally:
        parent.kill()
        if _command(child).startswith(" ".join(SLEEP)):
            os.kill(child, signal.SIGKILL)


def _command(pid: int) -> str:
    """The command of a process that runs; nothing when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def test_a_child_is_gone_when_it_is_killed_or_forgotten() -> None:
    one, two = (children.start(SLEEP) for _ in range(2))
    children.kill(one)
    assert one.returncode == -signal.SIGKILL
    pid = two.pid
    del two
    assert until(lambda: not _command(pid))


# -- counting --------------------------------------------------------------------------------------


def test_instructions_are_counted_exactly() -> None:
    need("ARM compiler", "qemu-system-arm")
    todo, blob = job(1.0, steps=1)
    once = timing.instructions("mps2-an386", todo, blob, shift=7)
    assert once == timing.instructions("mps2-an386", todo, blob, shift=7)
    coarse = timing.instructions("netduinoplus2", todo, blob)  # the same core at another clock
    assert abs(coarse - once) < 0.001 * once


@pytest.mark.slow
def test_a_training_step_takes_at_most_five_instructions_a_mac() -> None:
    need("ARM compiler", "qemu-system-arm")
    import tiny_instructions as benchmark

    few, many = (timing.instructions("mps2-an386", *benchmark.job(samples)) for samples in (4, 12))
    assert benchmark.macs() == 813_792
    assert 1 < (many - few) / 8 / benchmark.macs() <= 5


def test_time_and_energy_are_marked_as_estimates() -> None:
    cost = timing.round_cost("mps2-an386", 64_000_000, bytes_down=1000, bytes_up=500)
    assert {cost.compute_s.source, cost.link_s.source, cost.energy_j.source} == {"estimate"}
    profile = device("nrf52840")
    assert float(cost.compute_s) == pytest.approx(1.82)  # at 64 MHz
    assert float(cost.link_s) == pytest.approx(12_000 / float(profile.up_bps))
    assert float(cost.energy_j) == pytest.approx(
        1.82 * float(profile.power_w) + float(cost.link_s) * float(profile.radio_w)
    )


def test_no_clock_no_count() -> None:
    todo, blob = job(0.25)
    with pytest.raises(InputError, match="no clock"):
        timing.instructions("unicorn:ram=20K,flash=64K,cpu=m3", todo, blob)
