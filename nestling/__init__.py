"""Federated learning for fleets in which no two devices are alike.

    import nestling
    result = nestling.run(nestling.Experiment(method="heterofl"))
    print(result.summary["global_score"])

Names are loaded when first used, so that the command line answers without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nestling.version import __version__

if TYPE_CHECKING:
    from nestling import attacks
    from nestling.errors import InputError
    from nestling.experiment import (
        Attack,
        Data,
        EngineConfig,
        Evaluation,
        Experiment,
        FleetConfig,
        Named,
        Server,
        SplitConfig,
        Tier,
        Train,
    )
    from nestling.report.compare import Comparison, compare
    from nestling.runs.run import Result, Watcher, load, resume, run
    from nestling.runs.sweep import sweep
    from nestling.runs.sweep_cells import SweepWatcher

_HOME = {
    "InputError": "nestling.errors",
    **dict.fromkeys(
        (
            "Attack",
            "Data",
            "EngineConfig",
            "Evaluation",
            "Experiment",
            "FleetConfig",
            "Named",
            "Server",
            "SplitConfig",
            "Tier",
            "Train",
        ),
        "nestling.experiment",
    ),
    **dict.fromkeys(("Result", "Watcher", "load", "resume", "run"), "nestling.runs.run"),
    "attacks": "nestling.attacks",
    "SweepWatcher": "nestling.runs.sweep_cells",
    "sweep": "nestling.runs.sweep",
    **dict.fromkeys(("Comparison", "compare"), "nestling.report.compare"),
}
_MODULES = ("attacks",)

__all__ = [
    "Attack",
    "Comparison",
    "Data",
    "EngineConfig",
    "Evaluation",
    "Experiment",
    "FleetConfig",
    "InputError",
    "Named",
    "Result",
    "Server",
    "SplitConfig",
    "SweepWatcher",
    "Tier",
    "Train",
    "Watcher",
    "__version__",
    "attacks",
    "compare",
    "load",
    "resume",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nestling' has no attribute {name!r}")
    home = importlib.import_module(_HOME[name])
    return home if name in _MODULES else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
