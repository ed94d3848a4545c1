"""Fetching public files: checked against a known digest, and complete or not there at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from nestling.errors import InputError

_CHUNK = 1 << 18
_TIMEOUT = 30.0


def fetch(
    urls: Sequence[str],
    path: Path,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    progress: bool = True,
) -> Path:
    """Download the first of `urls` that answers with the right digest to `path`, and return `path`.

    The bytes go to a temporary file beside `path`, which takes its name only once the digest
    agrees.
    """
    algorithm, expected = ("sha256", sha256) if sha256 else ("md5", md5)
    if not expected:
        raise ValueError("fetch needs a sha256 or an md5")
    tried = []
    for url in urls:
        try:
            _download(url, path, algorithm, expected, progress)
            return path
        except (OSError, http.client.HTTPException, ValueError) as error:  # noqa: PERF203 (each address may fail by itself)
            tried.append(f"{url}: {error}")
    raise InputError(
        f"{path} is not there and could not be downloaded; tried {'; '.join(tried) or 'nothing'}",
        field="data.name",
        fix="put the file there, or set NESTLING_DATA to a folder that holds the data set",
    )


def extract(archive: Path, folder: Path, members: Iterable[str]) -> None:
    """Copy the named regular files of a .tar.gz into `folder`; nothing else in the archive is
    written anywhere."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in members:
                _copy_member(tar, member, folder / member)
    except (tarfile.TarError, zlib.error, EOFError, OSError, KeyError) as error:
        raise InputError(
            f"{archive} could not be unpacked: {error}",
            field="data.name",
            fix="delete the archive, so that it is fetched again",
        ) from error


def _download(url: str, path: Path, algorithm: str, expected: str, progress: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    try:
        digest = hashlib.new(algorithm, usedforsecurity=False)
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT) as response,
            part.open("wb") as file,
            _bar(progress) as bar,
        ):
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
            task = bar.add_task(path.name, total=total)
            done = 0
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                bar.update(task, completed=done)
        if total is not None and done != total:
            raise OSError(f"the connection broke after {done} of {total} bytes")
        if digest.hexdigest() != expected.lower():
            raise OSError(f"wrong {algorithm} {digest.hexdigest()}, expected {expected}")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _copy_member(tar: tarfile.TarFile, member: str, path: Path) -> None:
    info = tar.getmember(member)
    source = tar.extractfile(info) if info.isreg() else None
    if source is None:
        raise OSError(f"{member} is not a regular file")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part(path)
    try:
        with source, part.open("wb") as file:
            shutil.copyfileobj(source, file)
        if part.stat().st_size != info.size:
            raise OSError(f"{member} is truncated")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    # The process number keeps two runs that fetch the same file out of each other's way.
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def _bar(progress: bool) -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    return Progress(
        *columns, console=console, disable=not (progress and console.is_terminal), transient=True
    )
