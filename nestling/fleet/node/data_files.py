"""Where a device's data are: .npz files that are there and whole. No torch is needed to look."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from nestling.errors import InputError

EXPERIMENT = "experiment"
"""The data of a worker that takes its share of the experiment's own."""

BROKEN = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)
"""What is raised by reading a file that is not a whole .npz file."""

_FIX = "write it with numpy.savez(file, x=..., y=...)"


def data_files(path: str | Path) -> list[Path]:
    """An .npz file, or all of a folder in the order of their names; refused where there is none."""
    place = Path(path).expanduser()
    files = sorted(place.glob("*.npz")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise InputError(
            f"there is no .npz file at {place}",
            field="--data",
            fix="give an .npz file with arrays x and y, or a folder",
        )
    return files


def check_data(path: str | Path) -> None:
    """Refuses data that are missing or damaged before anybody waits for them. Whether they fit the
    experiment is seen when it is known."""
    for file in data_files(path):
        try:
            with zipfile.ZipFile(file) as archive:
                damaged, names = archive.testzip(), archive.namelist()
        except BROKEN as error:
            raise unreadable(file, error) from None
        if damaged is not None:
            raise unreadable(file, f"{damaged} is damaged")
        if "x.npy" not in names:  # whether there must be a y, the run's task says
            raise unreadable(file, "it has no array x")


def unreadable(file: Path, why: object) -> InputError:
    """What is said of a file that cannot be read."""
    return InputError(f"{file}: cannot be read: {why}", field="--data", fix=_FIX)
