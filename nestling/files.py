"""Files that are whole or not there, and configuration read with errors that say what to mend."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestling.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@contextmanager
def writing(what: object, field: str = "--out") -> Iterator[None]:
    """Turns what the system refuses while writing where the user asked into an `InputError` on
    `field`: the user can mend it."""
    try:
        yield
    except OSError as error:
        fix = "name a place that you may write to and that has room"
        raise InputError(
            f"cannot write {what}: {error.strerror or error}", field=field, fix=fix
        ) from error


def check_place(path: Path, field: str = "--out") -> None:
    """Refuses a path at which nothing can be made, as far as that can be seen without making it."""
    with writing(path, field):
        parent = next(
            p for p in [path.absolute(), *path.absolute().parents] if p.exists() or p.is_symlink()
        )
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            why = (
                "you may not write there"
                if parent.is_dir()
                else "it is not a folder"
                if parent.exists()
                else "it leads nowhere"
            )
            raise InputError(
                f"cannot write in {parent}: {why}",
                field=field,
                fix="name a folder you may write in",
            )


def write_atomic(
    path: Path, data: bytes | str, *, mode: int = 0o644, flush: bool = True, replace: bool = True
) -> None:
    """Writes beside the file, flushes to disk and renames: a reader, or a crash, sees the old file
    or the new one, never half.

    `mode` is who may read it, and nobody else could while it was written; without `flush` it does
    not wait for the disk; without `replace` a file that exists is an error.
    """
    raw = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.chmod(temporary, mode)
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)  # fails where the file exists, unlike a rename
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_toml(path: str | Path, field: str | None = None) -> dict[str, Any]:
    """The tables of a TOML file; a missing, unreadable or broken file is an `InputError` on
    `field`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(
            f"there is no file {path}",
            field=field,
            fix="check the path; it is relative to where you are",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {path}: {error}", field=field, fix="give a readable UTF-8 text file"
        ) from None
    return parse_toml(text, str(path), field)


def parse_toml(text: str, name: str, field: str | None = None) -> dict[str, Any]:
    """The tables of a text in TOML; `name` says where it came from."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            f"{name} is not valid TOML: {error}", field=field, fix="mend the line it names"
        ) from None


def cache_folder() -> Path:
    """Where things are kept that can be found out again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nestling"
