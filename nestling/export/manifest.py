"""What an exported folder says of its own files: their digests, and the exporter's signature of
them, for whoever gets the folder from elsewhere."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path

from nestling.errors import InputError
from nestling.keys import public_key

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"


class NotAsExported(Exception):
    """A folder is not what was exported, or not by the holder of the key; the text says why."""


def manifest_of(files: Mapping[str, bytes]) -> bytes:
    """The digests of files, by name."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return json.dumps({"sha256": digests}, indent=1, sort_keys=True).encode()


def verify(folder: Path, key: Path | None = None) -> int:
    """Compares a folder with its manifest, and with a public key the manifest with its signature;
    gives the number of files. `NotAsExported` names the first thing that differs."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", field="FOLDER", fix="check the path")
    manifest = _part(folder / MANIFEST, "the folder was not exported whole")
    if key is not None:
        _check_signature(folder, manifest, key)
    wanted = _digests(folder / MANIFEST, manifest)
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    } - {MANIFEST, SIGNATURE}
    for name in sorted(found ^ set(wanted)):
        why = f"is not in {MANIFEST}" if name in found else "is missing"
        raise NotAsExported(f"{folder / name} {why}")
    for name, digest in sorted(wanted.items()):
        if not stat.S_ISREG((folder / name).lstat().st_mode):  # a pipe would never end
            raise NotAsExported(f"{folder / name} is no plain file")
        if _digest(folder / name) != digest:
            raise NotAsExported(f"{folder / name} differs from what was exported")
    return len(wanted)


def _check_signature(folder: Path, manifest: bytes, key: Path) -> None:
    public = public_key(key)
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(_part(folder / SIGNATURE, "the folder was exported unsigned"), manifest)
    except InvalidSignature:
        raise NotAsExported(
            f"{folder / MANIFEST} is not what the holder of {key} signed in {SIGNATURE}"
        ) from None


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            found.update(piece)
    return found.hexdigest()


def _part(path: Path, why: str) -> bytes:
    if not path.is_file():
        raise NotAsExported(f"{path} is missing: {why}")
    return path.read_bytes()


def _digests(path: Path, manifest: bytes) -> dict[str, str]:
    try:
        return {str(name): str(digest) for name, digest in json.loads(manifest)["sha256"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotAsExported(f"{path} is no manifest") from None
