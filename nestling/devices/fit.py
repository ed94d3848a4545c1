"""The largest piece of a model that trains on a device, with the numbers that prove it.

On a microcontroller the numbers are those of the plan that its firmware would be given. Where the C
runtime lacks something that the network or the optimiser needs they are an estimate, and the
reasons say so: such a fleet can still be simulated.

Training data is not counted: a device reads it sample by sample from a sensor or from storage of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nestling.devices.catalogue import Profile, mark
from nestling.devices.cost import Cost
from nestling.devices.units import GB, MB, show_bytes, show_number
from nestling.errors import InputError, unknown
from nestling.planning import forecast
from nestling.planning.descriptor import HEADER_BYTES, OP_BYTES
from nestling.planning.firmware import FIRMWARE
from nestling.planning.forecast import BLOCKS

RATIOS: tuple[float, ...] = (1 / 64, *(k / 32 for k in range(1, 33)))

STATES = {"sgd": 0, "momentum": 1, "adam": 2}  # optimiser values per trained weight

# Estimates for a Python process that has imported torch, and for what is installed on disk.
TORCH_RAM, TORCH_DISK = 350 * MB, int(1.2 * GB)


@dataclass(frozen=True)
class Budget:
    """The work of one round on one device, and what may be spent on it."""

    batch: int
    samples: int
    epochs: int
    optimizer: str = "sgd"
    seconds: float = 0.0  # 0: no limit per round
    ram_share: float = 1.0  # the free share of RAM now
    # what the method keeps on a microcontroller beside: "anchor", "mask", "target", "present"
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses an unknown optimiser or block, and numbers out of range."""
        if self.optimizer not in STATES:
            raise unknown("optimizer", self.optimizer, STATES, field="budget.optimizer")
        for name, least in (
            ("batch", 1),
            ("samples", 0),
            ("epochs", 0),
            ("seconds", 0),
            ("ram_share", 0),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise InputError(
                    f"{value} is less than {least}",
                    field=f"budget.{name}",
                    fix=f"give at least {least}",
                )
        for name in self.blocks:
            if name not in BLOCKS:
                raise unknown("block", name, BLOCKS, field="budget.blocks")
        if self.ram_share > 1:
            raise InputError(
                f"{self.ram_share} is more than all of it",
                field="budget.ram_share",
                fix="give a share from 0 to 1",
            )


@dataclass(frozen=True)
class Need:
    """What one round's training takes."""

    ram: int  # bytes
    flash: int  # bytes
    seconds: float
    energy: float  # joules


@dataclass(frozen=True)
class Fit:
    """The piece a device trains. `binding` is the limit that forbids the next larger piece: "",
    "ram", "flash" or "time"."""

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
        flash=forecast.flash() if profile.runtime == "c" else cost.weight_bytes + TORCH_DISK,
        seconds=seconds,
        energy=seconds * float(profile.power_w),
    )


def exceeded(profile: Profile, cost: Cost, budget: Budget) -> str:
    """The limit that a network of `cost` exceeds most ("ram", "flash" or "time"), or nothing where
    it trains."""
    return _exceeded(need(profile, cost, budget), limits_of(profile, budget))


def ram_parts(profile: Profile, cost: Cost, budget: Budget) -> dict[str, int]:
    """Where the RAM goes, in bytes."""
    on_c = profile.runtime == "c"
    if on_c and cost.planned is not None and not _lacks(cost, budget):
        return forecast.ram(cost.planned, _blocks(budget))
    return {
        "weights": cost.weight_bytes,
        "gradients": cost.trainable_bytes,
        "optimiser": cost.trainable_bytes * STATES[budget.optimizer],
        # The C runtime adds up the gradients of one sample after another; torch holds the whole
        # batch.
        "activations": cost.activation_bytes if on_c else cost.torch_bytes * budget.batch,
        "runtime": _statics(cost) if on_c else TORCH_RAM,
    }


def _blocks(budget: Budget) -> tuple[str, ...]:
    return ("momentum", *budget.blocks) if budget.optimizer == "momentum" else budget.blocks


def _statics(cost: Cost) -> int:
    return FIRMWARE.statics + HEADER_BYTES + OP_BYTES * cost.layers


def _lacks(cost: Cost, budget: Budget) -> str:
    """What the C runtime lacks for this training, in words, or nothing."""
    if budget.optimizer == "adam":
        return "adam optimiser"
    return "" if cost.planned else cost.lacks or "plan for it"


def fit(
    profile: Profile,
    cost_at: Callable[[float], Cost],
    budget: Budget,
    ratios: Sequence[float] = RATIOS,
) -> Fit:
    """The largest of `ratios` that trains inside the device's RAM, flash and time. `cost_at` must
    not fall as the ratio grows."""
    ladder = sorted(set(ratios))
    if not ladder or ladder[0] <= 0 or ladder[-1] > 1:
        raise InputError(
            f"ratios {tuple(ratios)!r}", field="ratios", fix="give width ratios above 0 and up to 1"
        )
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
        return Fit(
            profile.name,
            0.0,
            0,
            None,
            limits,
            binding,
            _reasons(profile, None, larger, budget, limits, binding),
        )
    cost = costs[ladder[fitting]]
    reasons = _reasons(profile, cost, larger, budget, limits, binding)
    return Fit(
        profile.name,
        ladder[fitting],
        cost.params,
        need(profile, cost, budget),
        limits,
        binding,
        reasons,
    )


def limits_of(profile: Profile, budget: Budget) -> dict[str, float]:
    """What the device has for one round: RAM and flash in bytes, and seconds (0: no limit)."""
    return {
        "ram": float(profile.ram_bytes) * budget.ram_share,
        "flash": float(profile.flash_bytes),
        "seconds": float(budget.seconds),
    }


def _exceeded(wanted: Need, limits: dict[str, float]) -> str:
    """The limit `wanted` exceeds by the largest factor, or nothing."""
    pairs: dict[str, tuple[float, float]] = {
        "ram": (wanted.ram, limits["ram"]),
        "flash": (wanted.flash, limits["flash"]),
    }
    if limits["seconds"]:
        pairs["time"] = (wanted.seconds, limits["seconds"])
    over = {
        name: asked / limit if limit else float("inf")
        for name, (asked, limit) in pairs.items()
        if asked > limit
    }
    return max(over, key=lambda name: over[name]) if over else ""


def _reasons(
    profile: Profile,
    cost: Cost | None,
    larger: tuple[float, Cost] | None,
    budget: Budget,
    limits: dict[str, float],
    binding: str,
) -> tuple[str, ...]:
    lines = []
    if cost:
        lines += [_line(name, profile, cost, budget, limits) for name in ("ram", "flash", "time")]
        lines.insert(1, f"of that RAM: {_parts(profile, cost, budget)}")
        # Seconds and watts are both guesses on most devices, so their product always is.
        lines.append(f"energy: ~{show_number(need(profile, cost, budget).energy, 'J')} a round")
    if larger:
        ratio, bigger = larger
        what = (
            f"the next larger piece ({ratio:g})"
            if cost
            else f"nothing fits: even the smallest piece ({ratio:g})"
        )
        lines.append(f"{what} is too much: {_line(binding, profile, bigger, budget, limits)}")
        if not cost:
            lines.append(f"of that RAM: {_parts(profile, bigger, budget)}")
    else:
        lines.append("the largest piece asked for fits")
    judged = cost or (larger[1] if larger else None)
    if judged and profile.runtime == "c" and _lacks(judged, budget):
        lines.append(f"estimate: the C runtime has no {_lacks(judged, budget)}")
    return (
        *lines,
        "training data is not counted: it comes from a sensor or from storage of its own",
    )


def _parts(profile: Profile, cost: Cost, budget: Budget) -> str:
    guess = _guess(profile, cost, budget)
    marks = {"runtime": guess, "activations": guess if profile.runtime == "c" else ""}
    sizes = ram_parts(profile, cost, budget).items()
    return ", ".join(f"{part} {marks.get(part, '')}{show_bytes(size)}" for part, size in sizes)


def _line(name: str, profile: Profile, cost: Cost, budget: Budget, limits: dict[str, float]) -> str:
    guess, wanted = _guess(profile, cost, budget), need(profile, cost, budget)
    if name == "ram":
        free = f"{mark(profile.ram_bytes)}{show_bytes(limits['ram'])}"
        return f"RAM: needs {guess}{show_bytes(wanted.ram)} of {free}"
    if name == "flash":
        return (
            f"flash: needs {guess}{show_bytes(wanted.flash)} of "
            f"{mark(profile.flash_bytes)}{show_bytes(limits['flash'])}"
        )
    allowed = (
        f" of {show_number(limits['seconds'], 's')}" if limits["seconds"] else ", no limit set"
    )
    return (
        f"time: {mark(profile.macs_per_second)}{show_number(wanted.seconds, 's')} a round{allowed}"
    )


def _guess(profile: Profile, cost: Cost, budget: Budget) -> str:
    """The mark of a sum that no plan proves: what torch takes, or a network that the C runtime
    cannot train."""
    return "" if profile.runtime == "c" and not _lacks(cost, budget) else "~"
