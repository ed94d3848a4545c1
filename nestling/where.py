"""Where a run computes: one type for it, so that a device is never compared as text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Where:
    """A device, how it may round, and whether work on it is recorded and replayed instead of
    launched step by step."""

    device: torch.device
    precision: str = "float32"
    recorded: bool = False

    def require(self, tensor: Tensor, what: str) -> None:
        """Refuses a tensor that lies on another device."""
        if tensor.device != self.device:
            raise ValueError(
                f"{what} are on {tensor.device}, and the engine computes on {self.device}"
            )


CPU = Where(torch.device("cpu"))
