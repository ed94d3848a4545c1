"""Child processes that do not outlive the process that started them, however it ends."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Between fork and exec of a process with threads nothing safe can be done in Python, so a second,
# small interpreter asks the kernel (prctl PR_SET_PDEATHSIG) and becomes the command. Where there is
# no prctl, `Child` and `_kill_all` are all.
_LAUNCHER = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except AttributeError:
    pass
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
_starters: dict[int, ThreadPoolExecutor] = {}  # by process: a fork takes no threads along


class Child(subprocess.Popen[bytes]):
    """A child that ends when nobody holds it any more."""

    owner = 0

    def __del__(self) -> None:
        """Kills the child when the last reference to it goes."""
        # Only its own parent may: after a fork the other process has a copy of this object.
        if self.owner == os.getpid():
            kill(self)
        super().__del__()


def start(command: Sequence[str], log: Path | None = None) -> Child:
    """Starts `command`, what it prints going to `log`. It is killed when nobody holds the process
    object, when this process ends and, on Linux, even when this process is killed."""
    # The kernel's promise is tied to the thread that starts the child, so all of them are started
    # by one that stays.
    starter = _starters.setdefault(
        os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="nestling-children")
    )
    return starter.submit(_start, command, log).result()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a child at once, as a power cut would, and waits for it to be gone."""
    if process.poll() is None:
        process.kill()
    process.wait()


def _start(command: Sequence[str], log: Path | None) -> Child:
    launch = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    with open(log or os.devnull, "ab") as output:
        process = Child(launch, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    process.owner = os.getpid()
    _children.add(process)
    return process


def _kill_all() -> None:
    for child in list(_children):
        if child.owner == os.getpid():
            kill(child)


_children: weakref.WeakSet[Child] = weakref.WeakSet()
atexit.register(_kill_all)
