"""Commands of a page or a message, run as a person would type them: in a shell, in a folder, with
`nestling` on the path."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: Path, kind: str) -> list[str]:
    """The code of a kind that a page shows, block by block."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


class Shell:
    """A folder to type in. `home` has the package, which nothing else on the path hides; programs
    are put into `programs` and run by the interpreter `python`."""

    def __init__(
        self, folder: Path, programs: Path, home: Path = ROOT, python: Path = Path(sys.executable)
    ) -> None:
        self.folder, self.home = folder, home
        programs.mkdir()
        # As the script that pip installs: the folder it is started in is not on its path.
        _program(
            programs / "nestling",
            f"#!{python}\nimport sys\n\nsys.path.insert(1, {str(home)!r})\n"
            "from nestling.cli import main\n\nmain()\n",
        )
        # No link: an environment is known by where its interpreter lies.
        _program(programs / "python", f'#!/bin/sh\nexec {python} "$@"\n')
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "PYTHONPATH": str(home)}

    def type(self, line: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """What a line says; it must end with `code`."""
        done = subprocess.run(
            line,
            shell=True,
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == code, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done

    def kill(self, line: str, when: Callable[[], bool], seconds: float = 600) -> None:
        """Types a line, and kills all that it started as soon as `when` answers; it must not have
        ended by itself before."""
        with (self.folder.parent / "killed.log").open("wb") as said:
            started = subprocess.Popen(
                line,
                shell=True,
                cwd=self.folder,
                env=self.env,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its children can be killed with it
            )
        try:
            end = time.monotonic() + seconds
            while not when():
                assert started.poll() is None and time.monotonic() < end, line
                time.sleep(0.02)
            assert started.poll() is None, f"{line} ended before it could be killed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
