"""The command that writes a starting point of one's own: a method, a network, data or a fleet,
each with a test that passes."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from nestling.errors import InputError, unknown

STARTS: dict[str, tuple[str, str]] = {
    "method": (".py", "PYTHONPATH=. nestling run --set method.name={name}:{cls} --set rounds=5"),
    "model": (".py", "PYTHONPATH=. nestling run --set model.name={name}:{cls} --set rounds=5"),
    "data": (
        ".py",
        "PYTHONPATH=. nestling run --set data.name={name}:load --set split.kind=natural "
        "--set rounds=5",
    ),
    "fleet": (".toml", "nestling run --set fleet.path={name}.toml --set rounds=5"),
}
"""What can be begun → how its file ends, and the command that runs it."""

LONGEST = 30
"""The most letters of a name: lines of what is written stay readable."""


def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="method, model, data or fleet.",
            autocompletion=lambda: list(STARTS),
        ),
    ],
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Its file's name: small letters, digits and _."),
    ],
) -> None:
    """Write a small method, network, data set or fleet of your own into this folder, with a test
    that passes."""
    if kind not in STARTS:
        raise unknown("kind", kind, STARTS, field="KIND")
    end, command = STARTS[kind]
    _check_name(name, hides=end == ".py")
    cls = "".join(word.capitalize() for word in name.split("_"))
    files = {
        Path(f"{name}{end}"): f"{kind}{end}.jinja",
        Path(f"test_{name}.py"): f"test_{kind}.py.jinja",
    }
    _write(files, name=name, cls=cls, title=name.replace("_", " ").capitalize())
    print("written: " + ", ".join(str(file) for file in files))
    print(f"test it: python -m pytest test_{name}.py")
    print(f"run it:  {command.format(name=name, cls=cls)}")


def _check_name(name: str, hides: bool) -> None:
    """Refuses what cannot be imported, or would be imported in the place of another package."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name, re.ASCII) or keyword.iskeyword(name):
        raise InputError(
            f"{name!r} cannot be the name of a file that Python imports",
            field="NAME",
            fix="small letters, digits and _, a letter first: my_method",
        )
    if len(name) > LONGEST:
        raise InputError(
            f"{name!r} is too long", field="NAME", fix=f"take at most {LONGEST} letters"
        )
    # What is there already as a file of this folder is refused as such, by `_write`.
    if hides and not Path(f"{name}.py").exists() and importlib.util.find_spec(name) is not None:
        raise InputError(
            f"a package {name!r} is installed, and {name}.py would hide it",
            field="NAME",
            fix=f"take another name: my_{name}",
        )


def _write(files: dict[Path, str], **words: str) -> None:
    """All of the files, or none; a file that exists is never written over."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from nestling.files import writing

    # No HTML: names were checked, and Python and TOML are written as they stand.
    pages = Environment(
        loader=PackageLoader("nestling.cli", "starts"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    for file in files:
        if file.exists() or file.is_symlink():
            raise InputError(
                f"{file} exists already, and nothing is written over it",
                field="NAME",
                fix="take another name or another folder",
            )
    for file, template in files.items():
        with writing(file, "NAME"), file.open("x", encoding="utf-8") as opened:
            opened.write(pages.get_template(template).render(words))
