"""Packages that only notebooks need, and how to get them."""

from __future__ import annotations

import importlib
from typing import Any

from nestling.errors import InputError


def pandas() -> Any:
    """The package pandas."""
    return _package("pandas")


def pyplot() -> Any:
    """matplotlib.pyplot."""
    return _package("matplotlib.pyplot")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"this needs {name.partition('.')[0]}, which is not installed",
            fix="pip install 'nestling[notebook]'",
        ) from error
