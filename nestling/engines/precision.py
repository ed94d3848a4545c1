"""How a GPU may round: the switches that torch keeps for the whole process."""

from __future__ import annotations

from collections.abc import Callable

import torch


def allow(precision: str, search: bool = False) -> Callable[[], None]:
    """Lets convolutions and products use TF32 unless the precision is "float32" (torch itself allows it for convolutions by default);
    with `search`, the fastest kernel for every shape is looked for. Gives what puts the switches back."""
    fast = precision != "float32"
    before = _switches()
    _switch(fast, fast, search)
    return lambda: _switch(*before)


def _switches() -> tuple[bool, bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark


def _switch(products: bool, convolutions: bool, search: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions
    torch.backends.cudnn.benchmark = search
