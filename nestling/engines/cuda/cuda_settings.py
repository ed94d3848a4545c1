"""How programs compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nestling.training.objectives import Batch, Given, Net
from nestling.training.phase import Phase


@dataclass(frozen=True)
class CudaSettings:
    """precision: "float32", "tf32" or "bf16". compile: whether torch.compile fuses the stacked
    step."""

    precision: str = "tf32"
    compile: bool = False

    def apply(self, phase: Phase) -> Phase:
        """The phase in this precision."""
        if self.precision != "bf16":
            return phase
        also = None if phase.also is None else partial(_autocast, objective=phase.also)
        return replace(phase, objective=partial(_autocast, objective=phase.objective), also=also)


def _autocast(
    net: Net, batch: Batch, given: Given, *, objective: Callable[[Net, Batch, Given], Tensor]
) -> Tensor:
    with torch.autocast(batch.x.device.type, torch.bfloat16, cache_enabled=False):
        return objective(net, batch, given)
