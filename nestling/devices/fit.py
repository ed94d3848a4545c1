"""The largest piece of a model that trains on a device, with the numbers that prove it.

Training data is not counted: a device reads it sample by sample from a sensor or from storage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nestling.devices.catalogue import Profile, mark
from nestling.devices.cost import Cost
from nestling.devices.units import GB, MB, show_bytes, show_number
from nestling.errors import InputError, unknown

RATIOS: tuple[float, ...] = (1 / 64, *(k / 32 for k in range(1, 33)))

STATES = {"sgd": 0, "momentum": 1, "adam": 2}  # optimiser values a trained weight

# The C runtime: two link frames, the plan (a header and a record a layer), the deepest stack and the protocol state.
FRAMES, HEADER, LAYER, STACK, PROTOCOL = 2 * 512, 48, 68, 528, 36
FIRMWARE = 13_264  # the largest build, without an FPU; the weights follow it in flash so that they survive a power loss

# Estimates for a Python process that has imported torch, and for what is installed on disk.
TORCH_RAM, TORCH_DISK = 350 * MB, int(1.2 * GB)


@dataclass(frozen=True)
class Budget:
    """The work of one round on one device, and what may be spent on it."""

    batch: int
    samples: int
    epochs: int
    optimizer: str = "sgd"
    seconds: float = 0.0  # 0: no limit a round
    ram_share: float = 1.0  # the free share of RAM now

    def __post_init__(self) -> None:
        if self.optimizer not in STATES:
            raise unknown("optimizer", self.optimizer, STATES, field="budget.optimizer")
        for name, least in (("batch", 1), ("samples", 0), ("epochs", 0), ("seconds", 0), ("ram_share", 0)):
            value = getattr(self, name)
            if not value >= least:
                raise InputError(f"{value} is less than {least}", field=f"budget.{name}", fix=f"give at least {least}")
        if self.ram_share > 1:
            raise InputError(f"{self.ram_share} is more than all of it", field="budget.ram_share", fix="give a share from 0 to 1")


@dataclass(frozen=True)
class Need:
    """What one round's training takes."""

    ram: int  # bytes
    flash: int  # bytes
    seconds: float
    energy: float  # joules


@dataclass(frozen=True)
class Fit:
    """The piece a device trains. `binding` is the limit that forbids the next larger piece: "", "ram", "flash" or "time"."""

    device: str
    ratio: float  # 0 when nothing fits
    params: int
    need: Need | None
    limits: dict[str, float] = field(default_factory=dict)  # ram, flash, seconds (0: no limit)
    binding: str = ""
    reasons: tuple[str, ...] = ()


def need(profile: Profile, cost: Cost, budget: Budget) -> Need:
    """What one round's training of a network of `cost` takes on the device."""
    seconds = cost.train_macs * budget.samples * budget.epochs / float(profile.macs_per_second)
    return Need(
        ram=sum(ram_parts(profile, cost, budget).values()),
        flash=cost.weight_bytes + (FIRMWARE if profile.runtime == "c" else TORCH_DISK),
        seconds=seconds,
        energy=seconds * float(profile.power_w),
    )


def exceeded(profile: Profile, cost: Cost, budget: Budget) -> str:
    """The limit that a network of `cost` exceeds most ("ram", "flash" or "time"), or nothing where it trains."""
    return _exceeded(need(profile, cost, budget), limits_of(profile, budget))


def ram_parts(profile: Profile, cost: Cost, budget: Budget) -> dict[str, int]:
    """Where the RAM goes, in bytes."""
    on_c = profile.runtime == "c"
    return {
        "weights": cost.weight_bytes,
        "gradients": cost.trainable_bytes,
        "optimiser": cost.trainable_bytes * STATES[budget.optimizer],
        # The C runtime adds up the gradients of one sample after another; torch holds the whole batch.
        "activations": cost.activation_bytes * (1 if on_c else budget.batch),
        "runtime": FRAMES + HEADER + LAYER * cost.layers + STACK + PROTOCOL if on_c else TORCH_RAM,
    }


def fit(profile: Profile, cost_at: Callable[[float], Cost], budget: Budget, ratios: Sequence[float] = RATIOS) -> Fit:
    """The largest of `ratios` that trains inside the device's RAM, flash and time. `cost_at` must not fall as the ratio grows."""
    ladder = sorted(set(ratios))
    if not ladder or ladder[0] <= 0 or ladder[-1] > 1:
        raise InputError(f"ratios {tuple(ratios)!r}", field="ratios", fix="give width ratios above 0 and up to 1")
    limits = limits_of(profile, budget)
    costs: dict[float, Cost] = {}

    def over(place: int) -> str:
        ratio = ladder[place]
        costs[ratio] = costs[ratio] if ratio in costs else cost_at(ratio)
        return _exceeded(need(profile, costs[ratio], budget), limits)

    last = len(ladder) - 1
    # The whole model is the common case and takes one look.
    fitting, failing = (last, last + 1) if not over(last) else (-1, last)
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if over(middle):
            failing = middle
        else:
            fitting = middle
    binding = over(failing) if failing < len(ladder) else ""
    larger = (ladder[failing], costs[ladder[failing]]) if binding else None
    if fitting < 0:
        return Fit(profile.name, 0.0, 0, None, limits, binding, _reasons(profile, None, larger, budget, limits, binding))
    cost = costs[ladder[fitting]]
    reasons = _reasons(profile, cost, larger, budget, limits, binding)
    return Fit(profile.name, ladder[fitting], cost.params, need(profile, cost, budget), limits, binding, reasons)


def limits_of(profile: Profile, budget: Budget) -> dict[str, float]:
    """What the device has for one round: RAM and flash in bytes, and seconds (0: no limit)."""
    return {
        "ram": float(profile.ram_bytes) * budget.ram_share,
        "flash": float(profile.flash_bytes),
        "seconds": float(budget.seconds),
    }


def _exceeded(wanted: Need, limits: dict[str, float]) -> str:
    """The limit `wanted` exceeds by the largest factor, or nothing."""
    pairs: dict[str, tuple[float, float]] = {"ram": (wanted.ram, limits["ram"]), "flash": (wanted.flash, limits["flash"])}
    if limits["seconds"]:
        pairs["time"] = (wanted.seconds, limits["seconds"])
    over = {name: asked / limit if limit else float("inf") for name, (asked, limit) in pairs.items() if asked > limit}
    return max(over, key=lambda name: over[name]) if over else ""


def _reasons(
    profile: Profile, cost: Cost | None, larger: tuple[float, Cost] | None, budget: Budget, limits: dict[str, float], binding: str
) -> tuple[str, ...]:
    lines = []
    if cost:
        wanted = need(profile, cost, budget)
        lines += [_line(name, profile, wanted, limits) for name in ("ram", "flash", "time")]
        marks = {"runtime": _guess(profile)}
        sizes = ram_parts(profile, cost, budget).items()
        parts = ", ".join(f"{part} {marks.get(part, '')}{show_bytes(size)}" for part, size in sizes)
        lines.insert(1, f"of that RAM: {parts}")
        # Seconds and watts are both guesses on most devices, so their product always is.
        lines.append(f"energy: ~{show_number(wanted.energy, 'J')} a round")
    if larger:
        ratio, bigger = larger
        what = f"the next larger piece ({ratio:g})" if cost else f"nothing fits: even the smallest piece ({ratio:g})"
        lines.append(f"{what} is too much: {_line(binding, profile, need(profile, bigger, budget), limits)}")
    else:
        lines.append("the largest piece asked for fits")
    return (*lines, "training data is not counted: it comes from a sensor or from storage of its own")


def _line(name: str, profile: Profile, wanted: Need, limits: dict[str, float]) -> str:
    guess = _guess(profile)
    if name == "ram":
        free = f"{mark(profile.ram_bytes)}{show_bytes(limits['ram'])}"
        return f"RAM: needs {guess}{show_bytes(wanted.ram)} of {free}"
    if name == "flash":
        return f"flash: needs {guess}{show_bytes(wanted.flash)} of {mark(profile.flash_bytes)}{show_bytes(limits['flash'])}"
    allowed = f" of {show_number(limits['seconds'], 's')}" if limits["seconds"] else ", no limit set"
    return f"time: {mark(profile.macs_per_second)}{show_number(wanted.seconds, 's')} a round{allowed}"


def _guess(profile: Profile) -> str:
    """The mark of a sum that holds the runtime's own part: what torch takes is an estimate."""
    return "" if profile.runtime == "c" else "~"
