"""What the shell offers when tab is pressed: names of methods and devices. It must answer at once,
so tables are read from their files, and what they name is not imported."""

from __future__ import annotations

import ast
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_FIELD = "method.name="


def method_names() -> list[str]:
    """The methods, as `nestling.methods.METHODS` has them; to import that takes torch, and a
    second."""
    for node in ast.parse((_PACKAGE / "methods" / "__init__.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "METHODS" and node.value:
            return list(ast.literal_eval(node.value))
    return []


def complete_method(incomplete: str) -> list[str]:
    """Methods with commas: of what is typed, the last one is completed."""
    before = incomplete[: incomplete.rfind(",") + 1]
    return [before + name for name in method_names()]


def complete_override(incomplete: str) -> list[str]:
    """The value of `--set method.name=`."""
    if not incomplete.startswith(_FIELD):
        return []
    return [_FIELD + name for name in method_names()]


def complete_device(incomplete: str) -> list[str]:
    """The devices of the catalogue."""
    from nestling.files import read_toml

    names = read_toml(_PACKAGE / "devices" / "catalogue.toml")
    return [name for name in names if name.startswith(incomplete)]
