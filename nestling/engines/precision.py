"""How a GPU may round: the switches that torch keeps for the whole process."""

from __future__ import annotations

from collections.abc import Callable

import torch


def allow(precision: str) -> Callable[[], None]:
    """Lets convolutions and products use TF32 unless the precision is "float32" (torch itself allows it for convolutions by default).
    Gives what puts the switches back."""
    fast = precision != "float32"
    before = _switches()
    _switch(fast, fast)
    return lambda: _switch(*before)


def _switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _switch(products: bool, convolutions: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions
