"""The virtual clock: how long a round takes on a device, and what it costs in energy."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.devices.catalogue import Profile
from nestling.devices.cost import Cost
from nestling.devices.fit import Budget, need
from nestling.errors import InputError


@dataclass(frozen=True)
class Timing:
    """Virtual seconds and joules of one device's round."""

    down_s: float
    compute_s: float
    up_s: float
    energy_j: float
    total_s: float  # download, training and upload, one after another


def round_time(
    profile: Profile,
    cost: Cost,
    budget: Budget,
    bytes_down: int,
    bytes_up: int,
    slowdown: float = 1.0,
) -> Timing:
    """The round of one device: receive, train, send.

    `slowdown` stretches all three, as on a busy or badly connected device; its energy grows with
    the time.
    """
    if bytes_down < 0 or bytes_up < 0 or not slowdown > 0:
        fix = "give byte counts of at least 0 and a slowdown above 0"
        raise InputError(
            f"bytes {bytes_down}/{bytes_up}, slowdown {slowdown}", field="round_time", fix=fix
        )
    down = 8 * bytes_down / float(profile.down_bps) * slowdown
    up = 8 * bytes_up / float(profile.up_bps) * slowdown
    compute = need(profile, cost, budget).seconds * slowdown
    energy = compute * float(profile.power_w) + (down + up) * float(profile.radio_w)
    return Timing(down, compute, up, energy, down + compute + up)
