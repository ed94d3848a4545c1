"""What a row costs a model that says something else than its target.

A target says by its type what it is: class numbers are int64, flags bool, values float32. So an
objective needs no word about the task: it is the same pure function for all of them, in a stack, in
a recording, and in another process.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    """One loss a row: cross-entropy of classes, (rows,) or step by step (rows, steps); of flags
    (rows, flags) the mean binary cross-entropy; of values (rows, values) the mean squared error."""
    if y.is_floating_point():
        return (outputs - y).square().mean(-1)
    if y.dtype == torch.bool:
        flags = y.to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, flags, reduction="none").mean(-1)
    if y.dim() == 1:
        return F.cross_entropy(outputs, y, reduction="none")
    steps = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none")
    return steps.unflatten(0, y.shape).mean(-1)
