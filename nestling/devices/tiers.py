"""A fleet as the user describes it: tiers in code or in a TOML file, checked field by field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from nestling.devices.catalogue import Profile, catalogue, load_catalogue
from nestling.errors import InputError, unknown
from nestling.files import read_toml
from nestling.schema import check_keys
from nestling.settings import Bounds, NotNegative, OneOf, UnitShare, Whole, bounds_of

DEFAULT_SIZE, LARGEST = 20, 10**9
UNSAID_SIZE = f"the sum of the counts, the number of natural clients, or {DEFAULT_SIZE}"
CUTS = ("width", "depth")


@dataclass(frozen=True)
class Tier:
    """Devices of one kind, which train what fits `device`, a part of the model of size `ratio`, or
    a network of their own, `model`.

    name:          by default the device's or the board's name, "ratio-0.25", or the model's name.
    device:        one of the catalogue (`nestling devices`), or of `fleet.catalogue`.
    ratio:         the part of the model that its devices train, if no device says what fits.
    cut:           what `ratio` is of: the width of every layer, or the parameters, met by leaving
                   out depth.
    model:         a network of its own, by name or "package.module:callable".
    model_options: the options of that network (`nestling config model.NAME`).
    share:         of the fleet that is in this tier; all shares add up to 1.
    count:         how many devices are in this tier, in place of a share.
    memory_mean:   the memory that is free in a round is mean − |N(0, std)| percent of the device's
                   RAM, or of the full model's size where the tier names no device; with a device at
                   most 100.
    memory_std:    that deviation, in percent; of several, each device has one.
    availability:  the probability that a device can be reached in a round.
    dropout:       the probability that a device vanishes in the middle of a round.
    slow:          sigma of the log-normal slowdown of a round.
    board:         where its devices train: empty for the simulation, "host" for the firmware's C
                   compiled for this machine, or a board, of which every device of the tier is one
                   (docs/microcontrollers.md).
    """

    name: str = ""
    device: str = ""
    ratio: UnitShare = 0.0
    cut: Annotated[str, OneOf(CUTS)] = "width"
    model: str = ""
    model_options: dict[str, Any] = field(default_factory=dict)
    share: UnitShare = 0.0
    count: Whole = 0
    memory_mean: NotNegative = 100.0
    memory_std: tuple[NotNegative, ...] = (0.0,)
    availability: UnitShare = 1.0
    dropout: UnitShare = 0.0
    slow: NotNegative = 0.0
    board: str = ""

    def __post_init__(self) -> None:
        """Makes `memory_std` a tuple, and gives a tier without a name its default one."""
        std = self.memory_std
        object.__setattr__(
            self, "memory_std", tuple(std) if isinstance(std, (list, tuple)) else (std,)
        )
        if not self.name:
            object.__setattr__(self, "name", self._default_name())

    def _default_name(self) -> str:
        own = self.board if self.board != "host" and not (self.ratio or self.model) else ""
        return self.device or own or self.model or f"ratio-{_short(self.ratio)}"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


DEFAULT_TIERS: tuple[Tier, ...] = (
    Tier(device="lm3s6965", share=0.10),
    Tier(device="stm32f405", share=0.10),
    Tier(device="nrf52840", share=0.15),
    Tier(device="esp32", share=0.20),
    Tier(device="stm32h743", share=0.20),
    Tier(device="raspberry-pi-zero-2w", share=0.15),
    Tier(device="gpu-box", share=0.10),
)


@dataclass(frozen=True)
class FleetConfig:
    """A fleet as the user describes it: tiers here, or a file that holds them.

    path:      a TOML file with the fleet's other settings, in place of `tiers`.
    size:      how many devices there are.
    tiers:     kinds of devices, each a table (`[[fleet.tiers]]`); left out, seven kinds from a
               microcontroller of 64 KB to a GPU box.
    deadline:  the virtual seconds after which a reply is late and refused.
    catalogue: a file of devices of the user's own, beside the built-in ones.
    networks:  networks, each a table of name and options: a tier that names only a device trains
               the largest that fits it, instead of a part of the model.
    """

    path: str = ""
    size: Annotated[int, Bounds(0, LARGEST, zero=UNSAID_SIZE)] = 0
    tiers: tuple[Tier, ...] = ()
    deadline: Annotated[float, Bounds(0, zero="none")] = 0.0
    catalogue: str = ""
    networks: tuple[dict[str, Any], ...] = ()


def read_fleet(path: str | Path, defaults: FleetConfig | None = None) -> FleetConfig:
    """A fleet file: `size`, `deadline`, `catalogue` and [[tiers]] tables. Absent keys come from
    `defaults`."""
    defaults = defaults or FleetConfig()
    table = read_toml(path, "fleet.path")
    check_keys(table, ("size", "deadline", "catalogue", "networks", "tiers"), "fleet")
    raw = table.get("tiers", [])
    if not isinstance(raw, list) or not all(isinstance(tier, dict) for tier in raw):
        raise InputError(
            "tiers must be tables", field="fleet.tiers", fix="write [[tiers]] before each of them"
        )
    for index, tier in enumerate(raw):
        check_keys(tier, [one.name for one in fields(Tier)], f"fleet.tiers[{index}]")
    tiers = tuple(Tier(**tier) for tier in raw)
    own = table.get("catalogue", "")
    config = FleetConfig(
        size=table.get("size", 0 if any(tier.count for tier in tiers) else defaults.size),
        tiers=tiers,
        deadline=table.get("deadline", defaults.deadline),
        networks=tuple(table.get("networks", defaults.networks)),
        catalogue=str(Path(path).parent / own)
        if isinstance(own, str) and own
        else own or defaults.catalogue,
    )
    check_fleet(config)
    return config


def size_of(config: FleetConfig) -> int:
    """How many devices a checked configuration stands for."""
    return config.size or sum(tier.count for tier in config.tiers) or DEFAULT_SIZE


def check_fleet(config: FleetConfig) -> None:
    """Refuse a configuration that cannot be built; the error names the field."""
    _check_numbers(config, "fleet")
    if not isinstance(config.catalogue, str):
        raise InputError(
            f"{config.catalogue!r} is not a path",
            field="fleet.catalogue",
            fix="give the path of a TOML file",
        )
    for index, network in enumerate(config.networks):
        if not isinstance(network, dict) or not isinstance(network.get("name"), str):
            raise InputError(
                f"{network!r} names no network",
                field=f"fleet.networks[{index}]",
                fix='write { name = "resnet8", width = 0.5 }',
            )
    devices = devices_of(config)
    for index, tier in enumerate(config.tiers):
        _check_tier(tier, f"fleet.tiers[{index}]", devices)
    _check_names(config.tiers)
    _check_sizes(config.tiers, config.size)


def devices_of(config: FleetConfig) -> dict[str, Profile]:
    """The built-in devices and, where the configuration names a catalogue file, those in it, which
    win."""
    return {**catalogue(), **load_catalogue(config.catalogue)} if config.catalogue else catalogue()


def _check_tier(tier: Tier, where: str, devices: dict[str, Profile]) -> None:
    for name in ("device", "model", "name", "board"):
        if not isinstance(getattr(tier, name), str):
            raise InputError(
                f"{getattr(tier, name)!r} is not text",
                field=f"{where}.{name}",
                fix="write it in quotes",
            )
    if not isinstance(tier.model_options, dict):
        raise InputError(
            f"{tier.model_options!r} is not a table",
            field=f"{where}.model_options",
            fix="write { key = value }",
        )
    _check_numbers(tier, where)
    if tier.cut not in CUTS:
        raise unknown("cut", str(tier.cut), CUTS, field=f"{where}.cut")
    if tier.cut != "width" and not tier.ratio:
        raise InputError(
            "cut without a ratio",
            field=f"{where}.cut",
            fix="give ratio too: the share of the model's parameters",
        )
    if tier.ratio and tier.model:
        fix = "give the width of the shared model or a network of its own, not both"
        raise InputError("ratio and model are both set", field=f"{where}.ratio", fix=fix)
    if not (tier.device or tier.ratio or tier.model or tier.board not in ("", "host")):
        raise InputError(
            "nothing says what this tier trains",
            field=where,
            fix="give device, ratio or model, or a board",
        )
    if tier.model_options and not tier.model:
        raise InputError(
            "options without a model", field=f"{where}.model_options", fix="give model too"
        )
    if tier.device and tier.device not in devices:
        raise unknown("device", tier.device, devices, field=f"{where}.device")
    if tier.device:  # more than all of a chip's RAM cannot be free, more than a model's size can
        _check_number(tier.memory_mean, f"{where}.memory_mean", False, Bounds(0, 100))
    if not tier.memory_std:
        raise InputError(
            "no value", field=f"{where}.memory_std", fix="give at least one, such as [0]"
        )


def _check_numbers(config: Tier | FleetConfig, where: str) -> None:
    """Holds every number against what its type allows. A fleet file's may be no numbers at all."""
    for name, (whole, bounds) in bounds_of(type(config)).items():
        value = getattr(config, name)
        for each in value if isinstance(value, tuple) else (value,):
            _check_number(each, f"{where}.{name}", whole, bounds)


def _check_number(value: object, where: str, whole: bool, bounds: Bounds) -> None:
    kind = "a whole number" if whole else "a number"
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not good or not bounds.hold(value) or value == math.inf:  # type: ignore[arg-type]
        wanted = f"{kind}, {bounds}"
        raise InputError(f"{value!r} is not {wanted}", field=where, fix=f"give {wanted}")


def _check_names(tiers: Sequence[Tier]) -> None:
    seen: set[str] = set()
    for index, tier in enumerate(tiers):
        if tier.name in seen:
            fix = "give each tier a name of its own"
            raise InputError(
                f"two tiers are called {tier.name!r}", field=f"fleet.tiers[{index}].name", fix=fix
            )
        seen.add(tier.name)


def _check_sizes(tiers: Sequence[Tier], size: int) -> None:
    if not tiers or (len(tiers) == 1 and not tiers[0].share and not tiers[0].count):
        return
    by_count = any(tier.count for tier in tiers)
    for index, tier in enumerate(tiers):
        if by_count and tier.share:
            fix = "use share in every tier, or count in every tier"
            raise InputError(
                "some tiers give a share and some a count",
                field=f"fleet.tiers[{index}].share",
                fix=fix,
            )
        if not tier.share and not tier.count:
            key = "count" if by_count else "share"
            fix = f"say how large this tier is: {key} = ..., or leave the tier out"
            raise InputError("missing or 0", field=f"fleet.tiers[{index}].{key}", fix=fix)
    total = sum(tier.count for tier in tiers)
    if by_count and size and total != size:
        raise InputError(
            f"the counts add up to {total}, the fleet has {size}",
            field="fleet.tiers",
            fix=f"set size = {total}",
        )
    shares = math.fsum(tier.share for tier in tiers)
    if not by_count and abs(shares - 1) > 1e-6:
        raise InputError(
            f"the shares add up to {shares:g}", field="fleet.tiers", fix="make them add up to 1"
        )
