"""Flower's own command line, several calls in one process: `flwr` needs seconds to start, and a
fleet has many devices to register.

python -m nestling.fleet.flower.commands   reads a JSON list of argument lists from standard input,
prints one JSON line per call
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib.metadata import entry_points
from typing import Any


def main() -> None:
    """The command."""
    (command,) = entry_points(group="console_scripts", name="flwr")
    flwr, out = command.load(), sys.stdout
    for arguments in json.load(sys.stdin):
        print(json.dumps(_one(flwr, [*arguments, "--format", "json"])), file=out, flush=True)


def _one(flwr: Any, arguments: list[str]) -> dict[str, Any]:
    said = io.StringIO()
    real = sys.__stdout__
    sys.__stdout__ = said  # type: ignore[misc,assignment]  # where Flower prints its JSON whatever happens to sys.stdout
    text = ""
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            flwr(arguments, standalone_mode=False)
    except SystemExit as stop:
        text = f"exit code {stop.code}"
    except Exception as error:
        text = str(error) or type(error).__name__
    finally:
        sys.__stdout__ = real  # type: ignore[misc]
    found = said.getvalue()
    try:
        answer = json.loads(found[found.index("{") :])
        return {**answer, "success": bool(answer.get("success"))}
    except ValueError:
        return {"success": False, "error-message": (text + " " + found).strip()[-500:]}


if __name__ == "__main__":
    main()
