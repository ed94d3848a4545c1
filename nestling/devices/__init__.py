"""What devices have, what a network costs, which piece of it fits where, and who takes part in a
round."""

from nestling.devices.catalogue import Figure, Profile, catalogue, device, load_catalogue, mark
from nestling.devices.clock import Timing, round_time
from nestling.devices.cost import Cost, cost_of
from nestling.devices.fit import RATIOS, Budget, Fit, Need, fit, need
from nestling.devices.fleet import Fleet, make_fleet
from nestling.devices.tiers import DEFAULT_TIERS, FleetConfig, Tier, check_fleet, read_fleet

__all__ = [
    "DEFAULT_TIERS",
    "RATIOS",
    "Budget",
    "Cost",
    "Figure",
    "Fit",
    "Fleet",
    "FleetConfig",
    "Need",
    "Profile",
    "Tier",
    "Timing",
    "catalogue",
    "check_fleet",
    "cost_of",
    "device",
    "fit",
    "load_catalogue",
    "make_fleet",
    "mark",
    "need",
    "read_fleet",
    "round_time",
]
