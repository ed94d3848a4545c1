"""The device catalogue: what each machine has, and where every number comes from.

A number is a `Figure`: a value and its source. "datasheet" is the maker's figure, "measured" was
measured on real silicon by the party the note names, and "estimate" is neither: print it with its
mark, `mark(figure)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nestling.devices.units import quantity
from nestling.errors import InputError, unknown
from nestling.files import read_toml
from nestling.schema import check_keys

SOURCES = ("datasheet", "measured", "estimate")
KINDS = ("microcontroller", "board", "phone", "server")
RUNTIMES = ("c", "torch")
REFERENCE = "reference"  # the neutral profile of tiers that name no device

# key in the file -> (field of Profile, dimension)
NUMBERS = {
    "clock": ("clock_hz", "hertz"),
    "ram": ("ram_bytes", "bytes"),
    "flash": ("flash_bytes", "bytes"),
    "fp32_mac_per_cycle": ("fp32_mac_per_cycle", "number"),
    "cores": ("cores", "number"),
    "macs": ("macs_per_second", "MACs a second"),
    "power": ("power_w", "watts"),
    "up": ("up_bps", "bits a second"),
    "down": ("down_bps", "bits a second"),
    "radio": ("radio_w", "watts"),
}
MAY_BE_ZERO = ("radio",)
TEXTS = ("title", "kind", "core", "runtime")


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: str
    note: str = ""

    def __float__(self) -> float:
        """The value without its source."""
        return float(self.value)


def mark(figure: Figure) -> str:
    """What to print before the number: "~" for an estimate, nothing for a datasheet or measured
    figure."""
    return "~" if figure.source == "estimate" else ""


@dataclass(frozen=True)
class Profile:
    """One kind of device. Numbers are in bytes, hertz, MACs and bits per second, and watts."""

    name: str
    title: str
    kind: str
    core: str
    clock_hz: Figure
    # what one static arena can use: the largest contiguous bank of a microcontroller
    ram_bytes: Figure
    flash_bytes: Figure
    macs_per_second: Figure  # fp32, while training
    power_w: Figure
    up_bps: Figure
    down_bps: Figure
    radio_w: Figure
    # "c": static arena, batch by accumulation; "torch": Python process, the whole batch live
    runtime: str
    cores: Figure = Figure(1, "datasheet")  # those the runtime trains on
    fp32_mac_per_cycle: Figure | None = None

    def figures(self) -> dict[str, Figure]:
        """Every number of the profile by field name."""
        return {
            field: getattr(self, field)
            for field, _ in NUMBERS.values()
            if getattr(self, field) is not None
        }


@cache
def catalogue() -> dict[str, Profile]:
    """The built-in devices by name, in the order of the file (smallest first)."""
    return load_catalogue(Path(__file__).with_name("catalogue.toml"))


def device(name: str) -> Profile:
    """The built-in profile called `name`."""
    if name not in catalogue():
        raise unknown("device", name, catalogue(), field="fleet.tiers.device")
    return catalogue()[name]


def load_catalogue(path: str | Path) -> dict[str, Profile]:
    """The devices of a file in the format of catalogue.toml: one table per device, every number
    with its source."""
    tables = read_toml(path, "catalogue")
    if not tables:
        raise InputError(
            f"{path} holds no device",
            field="catalogue",
            fix="add one table a device, such as [my-board]",
        )
    return {name: _profile(name, table) for name, table in tables.items()}


def _profile(name: str, table: object) -> Profile:
    if not isinstance(table, Mapping):
        raise InputError(
            f"{table!r} is not a table",
            field=name,
            fix=f"write [{name}] and the device's numbers under it",
        )
    if name != name.lower() or not name.replace("-", "").isalnum():
        raise InputError(
            "a device name is lower-case letters, digits and hyphens",
            field=name,
            fix="rename the table",
        )
    check_keys(table, (*TEXTS, *NUMBERS), name)
    texts = {key: _text(table, key, name) for key in TEXTS}
    for key, allowed in (("kind", KINDS), ("runtime", RUNTIMES)):
        if texts[key] not in allowed:
            raise unknown(key, texts[key], allowed, field=f"{name}.{key}")
    figures = {key: _figure(table[key], key, f"{name}.{key}") for key in NUMBERS if key in table}
    _check_complete(figures, name)
    if "macs" not in figures:
        figures["macs"] = _throughput(figures)
    numbers = {NUMBERS[key][0]: figure for key, figure in figures.items()}
    return Profile(name=name, **texts, **numbers)  # type: ignore[arg-type]


def _text(table: Mapping[str, Any], key: str, name: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str) or not value:
        raise InputError("missing text", field=f"{name}.{key}", fix=f'add {key} = "..."')
    return value


def _figure(raw: object, key: str, field: str) -> Figure:
    example = 'write { value = ..., source = "datasheet" }'
    if not isinstance(raw, Mapping):
        raise InputError("a number needs its source", field=field, fix=example)
    check_keys(raw, ("value", "source", "note"), field)
    if "value" not in raw or "source" not in raw:
        missing = "value" if "value" not in raw else "source"
        raise InputError(f"missing {missing}", field=f"{field}.{missing}", fix=example)
    if raw["source"] not in SOURCES:
        raise unknown("source", raw["source"], SOURCES, field=f"{field}.source")
    value = quantity(raw["value"], NUMBERS[key][1], f"{field}.value")
    if value == 0 and key not in MAY_BE_ZERO:
        raise InputError(
            "must be more than 0", field=f"{field}.value", fix="give the device's own figure"
        )
    return Figure(value, raw["source"], str(raw.get("note", "")))


def _check_complete(figures: Mapping[str, Figure], name: str) -> None:
    optional = ("cores", "fp32_mac_per_cycle", "macs")
    for key in NUMBERS:
        if key not in figures and key not in optional:
            raise InputError(
                "missing",
                field=f"{name}.{key}",
                fix=f'add {key} = {{ value = ..., source = "datasheet" }}',
            )
    if "macs" not in figures and "fp32_mac_per_cycle" not in figures:
        raise InputError(
            "no throughput",
            field=f"{name}.macs",
            fix="give macs, or fp32_mac_per_cycle (and cores)",
        )


def _throughput(figures: Mapping[str, Figure]) -> Figure:
    per_cycle, clock = figures["fp32_mac_per_cycle"], figures["clock"]
    cores = figures.get("cores", Figure(1, "datasheet"))
    # MAC/cycle was at best measured at inference, so a training throughput made from it is an
    # estimate.
    note = (
        f"{per_cycle.value:g} MAC/cycle ({per_cycle.source}) x {clock.value / 1e6:g} MHz x "
        f"{cores.value:g} cores"
    )
    return Figure(per_cycle.value * clock.value * cores.value, "estimate", note)
