"""Folders of files by class: pictures (with `nestling[images]`) and sounds.

FOLDER/CLASS/…/file, or FOLDER/train/CLASS/… and FOLDER/test/CLASS/…. Names that begin with "." or
"_" are left out. With `data.client = "folder"` the folders inside a class are clients, with
"prefix" what stands before the first "_" of a file's name is.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from nestling.data.log_mel import options_of
from nestling.data.recipe import AUTO, NONE, RawRows, Recipe
from nestling.errors import InputError, unknown

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
SOUNDS = (".wav",)
SMALL, DENSE = 2**22, 100
"""Points that any picture may have, and points for each of its bytes: no photograph has more, and
what has many more is a file that is to fill the memory."""
_CLIENTS = (AUTO, NONE, "folder", "prefix")


@dataclass(frozen=True)
class Listing:
    """Files in the order of their names, with the class, the client and the side of each."""

    files: list[Path]
    classes: np.ndarray
    clients: np.ndarray | None
    test: np.ndarray | None
    left_out: int


def read_images(folder: Path, recipe: Recipe) -> RawRows:
    """The pictures in a folder: grey where all are, with three colours otherwise."""
    size = recipe.take_options(size=[])["size"]
    if size and (len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size)):
        raise InputError(
            f"{size} is no size", field="data.options.size", fix="give [height, width]"
        )
    if find_spec("PIL") is None:
        raise InputError(
            "reading pictures needs Pillow", field="data.name", fix="pip install 'nestling[images]'"
        )
    listing = listed_by_class(folder, PICTURES, recipe)
    found = [_picture(file, size) for file in listing.files]
    colours = any(array.ndim == 3 for array in found)
    if colours:
        found = [a if a.ndim == 3 else np.repeat(a[..., None], 3, 2) for a in found]
    odd = next((at for at, array in enumerate(found) if array.shape != found[0].shape), None)
    if odd is not None:
        raise _bad(
            listing.files[odd],
            f"is {found[odd].shape[0]}×{found[odd].shape[1]}, {listing.files[0].name} is "
            f"{found[0].shape[0]}×{found[0].shape[1]}",
            "set data.options.size = [height, width], and all are resized",
        )
    told = f"resized to {size[0]}×{size[1]}" if size else ""
    return _rows(folder, np.stack(found), listing, "hwc" if colours else "hw", told)


def _picture(file: Path, size: Sequence[int]) -> np.ndarray:
    """The bytes of one picture, (H, W) of a grey one and (H, W, 3) of others."""
    from PIL import Image  # an extra

    try:
        with Image.open(file) as picture:
            wide, high = picture.size
            if wide * high > max(SMALL, DENSE * file.stat().st_size):
                raise ValueError(f"{wide}×{high} points in {file.stat().st_size} bytes")
            whole = picture.convert("L" if picture.mode in ("1", "L") else "RGB")
            return np.asarray(whole.resize((size[1], size[0])) if size else whole)
    except Exception as error:  # a damaged file may raise nearly anything
        raise _bad(file, f"cannot be read: {error}", "mend the file, or take it away") from error


def read_wavs(folder: Path, recipe: Recipe) -> RawRows:
    """The sounds in a folder as signals from -1 to 1, all of one length: `data.options.seconds`, or
    that of the longest."""
    seconds = recipe.take_options(seconds=0.0, **options_of(recipe))["seconds"]
    listing = listed_by_class(folder, SOUNDS, recipe)
    read = [_signal(file) for file in listing.files]
    rate = read[0][1]
    odd = next((at for at, (_, own) in enumerate(read) if own != rate), None)
    if odd is not None:
        raise _bad(
            listing.files[odd],
            f"has {read[odd][1]} samples a second, {listing.files[0].name} {rate}",
            "bring all files to one rate",
        )
    length = round(seconds * rate) or max(len(signal) for signal, _ in read)
    x = np.zeros((len(read), 1, length), np.float32)
    for row, (signal, _) in zip(x, read, strict=True):
        row[0, : len(signal)] = signal[:length]
    short, long = (sum(test(len(s)) for s, _ in read) for test in (length.__gt__, length.__lt__))
    told = f"{length / rate:.4g} s at {rate} Hz"
    told += f", {short} filled with silence" if short else ""
    told += f", {long} cut off" if long else ""
    return _rows(folder, x, listing, "cl", told, rate)


def listed_by_class(folder: Path, endings: Sequence[str], recipe: Recipe) -> Listing:
    """The files of some endings beneath the folders of classes."""
    if recipe.client not in _CLIENTS:
        raise unknown("rule for clients", recipe.client, _CLIENTS, field="data.client")
    if not folder.is_dir():
        raise _bad(folder, "there is no such folder", "give a folder that has one for each class")
    inside = {path.name: path for path in _seen(folder) if path.is_dir()}
    sides = [(False, folder)]
    if "train" in inside and "test" in inside:
        if len(inside) > 2:
            raise _bad(
                folder,
                f"has {', '.join(sorted(inside))}",
                "folders train and test and no other, or a folder for each class",
            )
        sides = [(False, inside["train"]), (True, inside["test"])]
    entries: list[tuple[Path, str, str, bool]] = []
    left_out = 0
    for is_test, side in sides:
        for home in [path for path in _seen(side) if path.is_dir()]:
            files = [path for path in sorted(home.rglob("*")) if path.is_file()]
            mine = [path for path in files if path.suffix.lower() in endings and _shown(path, home)]
            left_out += len(files) - len(mine)
            entries += [(f, home.name, _client(f, home, recipe.client), is_test) for f in mine]
    if not entries:
        raise _bad(folder, f"has no {endings[0]} files in folders by class", "see data.path")
    found, classes, clients, test = zip(*entries, strict=True)
    named = recipe.client in ("folder", "prefix")
    return Listing(
        list(found),
        np.array(classes),
        np.array(clients) if named else None,
        np.array(test) if len(sides) > 1 else None,
        left_out,
    )


def _seen(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name[0] not in "._")


def _shown(path: Path, home: Path) -> bool:
    return all(part[0] not in "._" for part in path.relative_to(home).parts)


def _client(file: Path, home: Path, rule: str) -> str:
    if rule == "prefix":
        return file.stem.partition("_")[0]
    parts = file.relative_to(home).parts
    if rule == "folder" and len(parts) < 2:
        raise _bad(
            file, "lies in no client's folder", "FOLDER/CLASS/CLIENT/file, or no data.client"
        )
    return parts[0]


def _signal(file: Path) -> tuple[np.ndarray, int]:
    """The samples of a .wav file, its channels averaged, and their rate."""
    try:
        with wave.open(str(file), "rb") as sound:
            width, channels, rate = (
                sound.getsampwidth(),
                sound.getnchannels(),
                sound.getframerate(),
            )
            data = sound.readframes(sound.getnframes())
        found = _samples(data[: len(data) // (width * channels) * width * channels], width)
        if not len(found):
            raise ValueError("it is empty")
    except Exception as error:  # a damaged file may raise nearly anything
        raise _bad(file, f"cannot be read: {error}", "give a PCM .wav file") from error
    return found.reshape(-1, channels).mean(1), rate


def _samples(data: bytes, width: int) -> np.ndarray:
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        whole = np.zeros((len(data) // 3, 4), np.uint8)
        whole[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, width = whole.tobytes(), 4
    if width not in (2, 4):
        raise ValueError(f"samples of {width} bytes")
    return np.frombuffer(data, f"<i{width}").astype(np.float32) / np.float32(2 ** (8 * width - 1))


def _rows(
    folder: Path, x: np.ndarray, listing: Listing, layout: str, told: str, rate: int = 0
) -> RawRows:
    raw = RawRows(
        x,
        listing.classes,
        listing.clients,
        listing.test,
        layout=layout,
        more=told,
        where=str(folder),
        field="data.path",
        rate=rate,
    )
    return raw.told(f"{listing.left_out} other files left out") if listing.left_out else raw


def _bad(path: Path, message: str, fix: str) -> InputError:
    return InputError(f"{path}: {message}", field="data.path", fix=fix)
