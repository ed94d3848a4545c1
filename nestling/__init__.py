"""Federated learning for fleets in which no two devices are alike.

import nestling
result = nestling.run(nestling.Experiment(method="heterofl"))
print(result.summary["global_accuracy"])
"""

from nestling.errors import InputError
from nestling.experiment import Data, EngineConfig, Evaluation, Experiment, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.running import Result, Watcher, resume, run
from nestling.version import __version__

__all__ = [
    "Data",
    "EngineConfig",
    "Evaluation",
    "Experiment",
    "FleetConfig",
    "InputError",
    "Named",
    "Result",
    "SplitConfig",
    "Tier",
    "Train",
    "Watcher",
    "__version__",
    "resume",
    "run",
]
