"""Files that are whole or not there, and configuration read with errors that say what to mend."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestling.errors import InputError, seen
from nestling.harmless import harmless

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ARRAYS = ("x", "y", "client", "test")
"""What an .npz file of data may hold."""
SUM = "sum"
"""Under this name a file of JSON that `summed` made has its digest."""


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


def sealed(data: bytes) -> bytes:
    """Data behind their digest, as `read_sealed` wants them in a file that a run goes on from."""
    return hashlib.sha256(data).digest() + data


def read_sealed(path: Path, field: str | None = None) -> bytes:
    """The data of a file that `sealed` made; an `InputError` where it is not what was written."""
    raw = path.read_bytes()
    size = hashlib.sha256().digest_size
    if hashlib.sha256(raw[size:]).digest() != raw[:size]:
        raise InputError(
            f"{path} is damaged, or of an earlier version",
            field=field,
            fix="restore the file, or start the run again",
        )
    return raw[size:]


def summed(table: Mapping[str, Any]) -> str:
    """A table as JSON for a file that people may read and a run goes on from: it begins with the
    SHA-256 of what it is without that, as `read_summed` wants it."""
    text = json.dumps({SUM: "", **table}, indent=1)
    return text.replace('""', f'"{hashlib.sha256(text.encode()).hexdigest()}"', 1)


def read_summed(
    path: Path, field: str | None = None, fix: str = "restore the file", by_hand: bool = False
) -> dict[str, Any]:
    """The table of a file that `summed` made; an `InputError` where it is not what was written.
    `by_hand`: whoever changes the file may take its sum out, and is believed."""
    raw = path.read_bytes()
    try:
        table = json.loads(raw)
        told = table.pop(SUM, None)
        if told is None and not by_hand:
            raise ValueError("it has no sum")
        if told is not None and summed(table).encode() != raw:
            raise ValueError("its sum is another")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}", field=field, fix=fix) from error
    return dict(table)


def append_whole(path: Path, text: str) -> None:
    """Adds a text to the end of a file, all of it or nothing."""
    data = text.encode()
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def path_in(given: object, field: str, what: str = "the path of a folder") -> Path:
    """The path that a caller gave."""
    if not isinstance(given, (str, os.PathLike)):
        raise InputError(f"expected {what}, got {seen(given)}", field=field)
    return Path(given)


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
    except (ValueError, RecursionError) as error:  # also numbers too long, lists too deep
        raise InputError(
            f"{name} is not valid TOML: {error}", field=field, fix="mend the line it names"
        ) from None


def cache_folder() -> Path:
    """Where things are kept that can be found out again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nestling"


def read_arrays(
    path: Path, field: str = "data.path", client: str = "client", targets: bool = True
) -> dict[str, Any]:
    """The arrays x and y (unless there need be no `targets`) of an .npz file, and client (or what
    it is called) and test where it has them; whatever is wrong with the file is an `InputError` on
    `field`."""
    import numpy as np

    if not path.is_file():
        raise _no_archive(path, "there is no such file", "give the path of an .npz file", field)
    if not zipfile.is_zipfile(path):
        fix = "write it with numpy.savez_compressed(path, x=..., y=...)"
        raise _no_archive(path, "not an .npz file", fix, field)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in (*ARRAYS, client) if key in file.files}
        for key, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise ValueError(f"{key} is no array")
            if array.dtype.kind == "U":
                array.tolist()  # letters that do not exist are found here, and nowhere later
    except Exception as error:  # a damaged archive may raise nearly anything
        fix = "write plain arrays (no objects) with numpy.savez_compressed"
        why = harmless(str(error)) or type(error).__name__
        raise _no_archive(path, f"cannot be read: {why}", fix, field) from error
    for key in ("x", "y") if targets else ("x",):
        if key not in arrays:
            raise _no_archive(
                path,
                f"has no array {key!r}",
                "the file needs x (samples) and y (labels); client and test are optional",
                field,
            )
    return arrays


def _no_archive(path: Path, what: str, fix: str, field: str) -> InputError:
    return InputError(f"{path}: {what}", field=field, fix=fix)
