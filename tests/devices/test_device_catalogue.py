"""The device catalogue: every number has a source, and the known ones are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestling.devices import Figure, catalogue, device, load_catalogue, mark
from nestling.devices.catalogue import KINDS, REFERENCE, RUNTIMES, SOURCES
from nestling.devices.units import KB, MB, quantity, show_bytes, show_number
from nestling.errors import InputError

# RAM that one static arena can use, and flash, of the chips on emulated boards; the RISC-V board's
# flash is external.
EMULATED = {
    "stm32f100": (8 * KB, 128 * KB),
    "nrf51822": (16 * KB, 256 * KB),
    "fe310": (16 * KB, None),
    "lm3s6965": (64 * KB, 256 * KB),
    "stm32f205": (128 * KB, 1 * MB),
    "stm32f405": (128 * KB, 1 * MB),
    "stm32l475": (96 * KB, 1 * MB),
}
# The only figures anybody measured: watts while inferring, and float MAC/cycle.
MEASURED = {
    ("stm32l4r5", "power_w"): (0.039, 0.044),
    ("stm32u575", "power_w"): (0.023, 0.026),
    ("stm32h7a3", "power_w"): (0.122, 0.160),
    ("stm32h7a3", "fp32_mac_per_cycle"): (0.36, 0.36),
}

BOARD = """
[my-board]
title = "My board"
kind = "microcontroller"
core = "Cortex-M4F"
runtime = "c"
clock = { value = "100 MHz", source = "datasheet" }
ram = { value = "128 KB", source = "datasheet" }
flash = { value = "1 MB", source = "datasheet" }
fp32_mac_per_cycle = { value = 0.5, source = "measured", note = "by me" }
cores = { value = 2, source = "datasheet" }
power = { value = "50 mW", source = "estimate" }
up = { value = "115.2 kbit/s", source = "estimate" }
down = { value = 250000, source = "estimate" }
radio = { value = 0, source = "estimate" }
"""


def test_a_catalogue_from_8_kb_to_a_gpu() -> None:
    devices = catalogue()
    assert len(devices) >= 25
    assert {profile.kind for profile in devices.values()} == set(KINDS)
    assert {profile.runtime for profile in devices.values()} == set(RUNTIMES)
    assert float(min(devices.values(), key=lambda p: float(p.ram_bytes)).ram_bytes) == 8 * KB
    assert {
        "stm32f446",
        "nrf52840",
        "esp32",
        "stm32h743",
        "raspberry-pi-zero-2w",
        "raspberry-pi-5",
        "gpu-box",
    } <= set(devices)
    assert catalogue() is devices


@pytest.mark.parametrize("name", list(catalogue()))
def test_every_number_has_a_source(name: str) -> None:
    profile = device(name)
    assert profile.name == name
    figures = profile.figures()
    assert {
        "clock_hz",
        "ram_bytes",
        "flash_bytes",
        "macs_per_second",
        "power_w",
        "up_bps",
        "down_bps",
        "radio_w",
    } <= set(figures)
    for field, figure in figures.items():
        assert figure.source in SOURCES, field
        assert float(figure) > 0, field
    for field in ("up_bps", "down_bps", "radio_w", "macs_per_second"):
        assert figures[field].source == "estimate", field
    for field, figure in figures.items():
        if figure.source == "measured":
            low, high = MEASURED[name, field]
            assert low <= figure.value <= high
            assert "MLPerf" in figure.note


def test_the_measured_figures_are_there() -> None:
    for (name, field), (low, high) in MEASURED.items():
        figure = device(name).figures()[field]
        assert figure.source == "measured"
        assert low <= figure.value <= high


@pytest.mark.parametrize("name", list(EMULATED))
def test_memory_of_the_emulated_boards(name: str) -> None:
    ram, flash = EMULATED[name]
    assert float(device(name).ram_bytes) == ram
    assert device(name).ram_bytes.source == "datasheet"
    if flash:
        assert float(device(name).flash_bytes) == flash


def test_throughput_is_derived() -> None:
    profile = device("stm32f446")
    assert profile.fp32_mac_per_cycle is not None
    assert float(profile.macs_per_second) == pytest.approx(0.06 * 180e6)
    four = device("raspberry-pi-4")
    assert float(four.macs_per_second) == pytest.approx(4 * 1.5e9 * 4)
    # Measured at inference is still an estimate for training.
    assert mark(device("stm32h7a3").macs_per_second) == "~"


def test_estimates_are_marked() -> None:
    assert mark(Figure(1, "estimate")) == "~"
    assert mark(Figure(1, "datasheet")) == mark(Figure(1, "measured")) == ""


def test_unknown_device() -> None:
    with pytest.raises(InputError, match="stm32f446") as caught:
        device("stm32f466")
    assert caught.value.field == "fleet.tiers.device"


def test_the_reference_is_all_estimates() -> None:
    figures = device(REFERENCE).figures()
    assert all(figure.source == "estimate" for name, figure in figures.items() if name != "cores")


def test_own_file(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(BOARD)
    board = load_catalogue(path)["my-board"]
    assert float(board.ram_bytes) == 131072
    assert float(board.macs_per_second) == pytest.approx(100e6)
    assert "measured" in board.macs_per_second.note
    assert (float(board.up_bps), float(board.down_bps), float(board.power_w)) == (
        115200,
        250000,
        pytest.approx(0.05),
    )


@pytest.mark.parametrize(
    ("old", "new", "field", "text"),
    [
        ('ram = { value = "128 KB", source = "datasheet" }', "", "my-board.ram", "missing"),
        (
            'ram = { value = "128 KB", source = "datasheet" }',
            'ram = "128 KB"',
            "my-board.ram",
            "source",
        ),
        ('"128 KB", source = "datasheet"', '"128 KB"', "my-board.ram.source", "missing"),
        (
            '"128 KB", source = "datasheet"',
            '"128 KB", source = "hearsay"',
            "my-board.ram.source",
            "hearsay",
        ),
        ("128 KB", "128 Kb", "my-board.ram.value", "Kb"),
        ("128 KB", "-1 KB", "my-board.ram.value", "at least 0"),
        ("128 KB", "0 KB", "my-board.ram.value", "more than 0"),
        ("128 KB", "lots", "my-board.ram.value", "lots"),
        ("250000", "true", "my-board.down.value", "quantity"),
        ("250000", "inf", "my-board.down.value", "finite"),
        ('"microcontroller"', '"toaster"', "my-board.kind", "toaster"),
        ('runtime = "c"', 'runtime = "rust"', "my-board.runtime", "rust"),
        ('title = "My board"', "", "my-board.title", "missing"),
        ("flash =", "flsh =", "my-board.flsh", "'flash'"),
        ('note = "by me"', 'nota = "by me"', "my-board.fp32_mac_per_cycle.nota", "'note'"),
        (
            'fp32_mac_per_cycle = { value = 0.5, source = "measured", note = "by me" }',
            "",
            "my-board.macs",
            "throughput",
        ),
        ("[my-board]", "[My_Board]", "My_Board", "lower-case"),
        ("[my-board]", "[my-board", "catalogue", "TOML"),
        (BOARD, "", "catalogue", "no device"),
        (BOARD, "board = 3", "board", "table"),
    ],
)
def test_bad_files_name_the_field(
    tmp_path: Path, old: str, new: str, field: str, text: str
) -> None:
    assert old in BOARD
    path = tmp_path / "devices.toml"
    path.write_text(BOARD.replace(old, new))
    with pytest.raises(InputError, match=text) as caught:
        load_catalogue(path)
    assert caught.value.field == field
    assert caught.value.fix


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        load_catalogue(tmp_path / "nowhere.toml")
    with pytest.raises(InputError, match="cannot read"):
        load_catalogue(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"title = '\xff'")
    with pytest.raises(InputError, match="cannot read"):
        load_catalogue(tmp_path / "latin.toml")


def test_quantities_both_ways() -> None:
    assert quantity("1.5 KB", "bytes", "x") == 1536
    assert quantity(7, "bytes", "x") == 7
    assert quantity("2 GHz", "hertz", "x") == 2e9
    assert quantity("3", "number", "x") == 3
    with pytest.raises(InputError, match="unit"):
        quantity("3 cores", "number", "x")
    assert [show_bytes(n) for n in (12, 1536, 3 * MB, 2**31)] == ["12 B", "1.5 KB", "3 MB", "2 GB"]
    assert [show_number(v, "s") for v in (0, 0.0123, 5, 12345)] == [
        "0 s",
        "12.3 ms",
        "5 s",
        "12.3 ks",
    ]
