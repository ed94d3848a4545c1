"""What a row costs a model that says something else than its target.

A target says by its type what it is: class numbers are int64, flags bool, values float32. So an
objective needs no word about the task: it is the same pure function for all of them, in a stack, in
a recording, and in another process.

Where a sequence was filled up its targets say so: a token is `FILLING`, a value no number. They
count for nothing, and every row counts the same, however much of it is real.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FILLING = -100
"""The target of a step that is no real one, as PyTorch's own losses have it."""


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    """One loss a row: cross-entropy of classes, (rows,) or step by step (rows, steps); of flags
    (rows, flags) the mean binary cross-entropy; of values (rows, values) the mean squared error."""
    if y.is_floating_point():
        real = ~y.isnan()
        # the difference first: a gradient through what is no number would be none either
        return mean_over(torch.where(real, outputs - y.nan_to_num(), 0.0).square(), real)
    if y.dtype == torch.bool:
        flags = y.to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, flags, reduction="none").mean(-1)
    if y.dim() == 1:
        return F.cross_entropy(outputs, y, reduction="none")
    steps = F.cross_entropy(
        outputs.flatten(0, 1), y.flatten(), reduction="none", ignore_index=FILLING
    )
    return mean_over(steps.unflatten(0, y.shape), y != FILLING)


def mean_over(values: Tensor, real: Tensor) -> Tensor:
    """The mean of every row's last dimension over what is real there, where all else is zero."""
    return values.sum(-1) / real.sum(-1)
