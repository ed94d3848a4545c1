"""The C library's allocator, told what training is like."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM, _MAP = -1, -3
"""The names of two settings in malloc.h: from which free size memory is given back, and from which
size it is mapped apart."""


def keep_freed_memory() -> None:
    """Has this process hold on to what one batch gave back: the next one needs as much, and fresh
    pages are expensive."""
    with contextlib.suppress(OSError, AttributeError):  # where the C library is another one
        change = ctypes.CDLL(None).mallopt
        for setting, size in ((_TRIM, 2**28), (_MAP, 2**25)):
            change(setting, size)
