"""A process killed at its n-th step, for every n.

A step is whatever leaves a trace outside the process: a file opened for writing, a write (once
before it and once in its middle), a flush, a rename, a file or folder that is made or removed; and
every part of a round. The steps are numbered in a child by wrapping what Python itself offers, so
that the code that is tried has no hook for it.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

EVERY = int(os.environ.get("CRASH_POINTS_EVERY", "3"))
"""Of the steps of a run every so-manieth is tried in `make proof`; 1: each of them."""
BY_PATH = ("replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir", "chmod")
WRITING = frozenset("wax+")


class Steps:
    """Counts what a process does to the files under `root`, and kills it at step `last` (0: never).
    `names` says what the steps were."""

    def __init__(self, root: Path, last: int = 0) -> None:
        self.root, self.last, self.names = str(root), last, list[str]()
        self._open = io.open

    def step(self, name: str) -> None:
        """One step; the process ends before it is taken."""
        self.names.append(name)
        if len(self.names) == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, places: Iterable[tuple[Any, str]] = ()) -> None:
        """From now on counts, in this process for good: what is done to files, and calls of the
        functions at `places` (a module or class, and a name in it)."""
        for name in BY_PATH:
            self._around(os, name, self._ours)
        self._around(os, "fsync", lambda *_: True)
        for owner, name in places:
            self._around(owner, name, lambda *_, **__: True)
        builtins.open = io.open = self._opened  # type: ignore[assignment]

    def _around(self, owner: Any, name: str, counts: Callable[..., bool]) -> None:
        inner = getattr(owner, name)

        def outer(*given: Any, **named: Any) -> Any:
            if counts(*given, **named):
                what = Path(given[0]).name if isinstance(given[0], (str, Path)) else ""
                self.step(f"{name} {what}".strip())
            return inner(*given, **named)

        setattr(owner, name, outer)

    def _ours(self, path: Any, *_: Any, **__: Any) -> bool:
        return str(path).startswith(self.root)

    def _opened(self, path: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        # a number is a file that was just made beside its place, to be renamed
        ours = isinstance(path, int) or self._ours(path)
        if not ours or not WRITING & set(mode):
            return self._open(path, mode, *given, **named)
        name = Path(str(path)).name
        self.step(f"open {name}")
        return _Halves(self._open(path, mode, *given, **named), self, name)


class _Halves:
    """A file whose every write may end in its middle."""

    def __init__(self, file: Any, steps: Steps, name: str) -> None:
        self._file, self._steps, self._name = file, steps, name

    def write(self, data: Any) -> int:
        self._steps.step(f"write {self._name}")
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._steps.step(f"half of {self._name}")
        return half + int(self._file.write(data[half:]))

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _Halves:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def in_child(work: Callable[[], object]) -> bool:
    """Does something in a fork of this process; whether it came to its end. A child that fails is a
    failure here."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed: see above"
    assert not os.WIFSIGNALED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return not os.WIFSIGNALED(status)
