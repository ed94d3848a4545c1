"""torch.compile as programs use it: few helpers, and what it made is kept for the next run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from nestling.files import cache_folder

HELPERS = 4
"""Processes that compile kernels. By default torch starts one per core, each of half a gigabyte:
more than all the training."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is first called."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    import torch._inductor.config as inductor

    inductor.compile_threads = min(inductor.compile_threads or HELPERS, HELPERS)
    return torch.compile(function)
