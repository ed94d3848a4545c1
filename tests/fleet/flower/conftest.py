"""Flower is an extra: without it these tests are skipped, and nothing here calls home."""

from __future__ import annotations

import os

import pytest

for _name, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1"),
):
    os.environ[_name] = _value

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")
