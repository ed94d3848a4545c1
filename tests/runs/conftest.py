"""What several tests of runs need."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the module `code_of_mine`, which is imported anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text: str) -> None:
        (tmp_path / "code_of_mine.py").write_text(text)
        sys.modules.pop("code_of_mine", None)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("code_of_mine", None)
