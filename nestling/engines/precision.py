"""How a GPU may round: the switches that torch keeps for the whole process."""

from __future__ import annotations

from collections.abc import Callable

import torch


def allow(precision: str) -> Callable[[], None]:
    """Lets convolutions and products use TF32 unless the precision is "float32" (torch itself
    allows it for convolutions by default), and never an algorithm whose sums depend on which of its
    threads comes first: two runs give the same bits. Gives what puts the switches back."""
    fast = precision != "float32"
    before = _switches()
    _switch(fast, fast, True)
    return lambda: _switch(*before)


def _switches() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic


def _switch(products: bool, convolutions: bool, repeatable: bool) -> None:
    cudnn = torch.backends.cudnn
    torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = (
        products,
        convolutions,
        repeatable,
    )
