"""Data sets by name, and how a fleet of clients divides one.

`load` reads a data set from the data directory: `data_dir`, else the environment's NESTLING_DATA,
else ~/.cache/nestling. Public files that are not there yet are downloaded into it once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nestling.data import cifar, columns, folders, idx, log_mel, npz, plays
from nestling.data.called import call_rows
from nestling.data.dataset import Dataset, as_labels, normalise
from nestling.data.download import extract, fetch
from nestling.data.given import digest_of, raw_rows
from nestling.data.prepare import prepare
from nestling.data.recipe import AUTO, NONE, RawRows, Reading, Recipe
from nestling.data.split import Split, SplitConfig, make_split, take_public
from nestling.data.targets import for_task, refuse_values
from nestling.errors import InputError, unknown

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetInfo",
    "RawRows",
    "Reading",
    "Recipe",
    "Split",
    "SplitConfig",
    "data_folder",
    "digest_of",
    "image_statistics",
    "load",
    "make_split",
    "normalise",
    "prepare_given",
    "raw_rows",
    "take_public",
]


@dataclass(frozen=True)
class Request:
    """Everything a reader may need to know."""

    name: str
    path: str
    folder: Path
    recipe: Recipe
    download: bool


@dataclass(frozen=True)
class DatasetInfo:
    """One row of `DATASETS`. `shape` and `classes` are None where only the user's file tells."""

    summary: str
    licence: str
    shape: tuple[int, ...] | None
    classes: int | None
    natural: bool  # whether rows carry the client they came from
    read: Callable[[Request], Dataset]


def load(
    name: str,
    *,
    path: str = "",
    data_dir: str | None = None,
    download: bool = True,
    **how: Any,
) -> Dataset:
    """The data set `name` of `DATASETS`, or what the callable "package.module:name" gives, checked
    and ready to train on. `path` is the file of those that read one of the user's; `how` are the
    fields of a `Recipe`."""
    recipe = Recipe(**how)
    recipe.check()
    if ":" in name:
        recipe.check_only(*_ROWS, "transform", "options", reader=name)
        if recipe.client not in (AUTO, NONE):
            raise InputError(
                "the callable says itself whose a row is",
                field="data.client",
                fix="let it return client, and leave this out",
            )
        return prepare(name, call_rows(name, _own_options(recipe)), recipe)
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS, field="data.name")
    info = DATASETS[name]
    if path and info.shape is not None:
        raise InputError(
            f"a path is given, but {name!r} has its own place",
            field="data.path",
            fix='remove it, or set data.name to "npz"',
        )
    if not path and info.shape is None:
        raise InputError(
            f'"{name}" reads a file of yours', field="data.path", fix=f"give {info.summary}"
        )
    dataset = info.read(Request(name, path, data_folder(data_dir), recipe, download))
    dataset.check()
    return dataset


def prepare_given(name: str, rows: RawRows, recipe: Recipe) -> Dataset:
    """The data set of rows that were given as objects."""
    recipe.check_only(*_ROWS, "transform", "options", reader="Data.of")
    recipe.take_options(**log_mel.options_of(recipe))
    return prepare(name, rows, recipe)


def _own_options(recipe: Recipe) -> dict[str, Any]:
    """The options of the user's own callable: those of the transform are not for it."""
    theirs = log_mel.options_of(recipe)
    return {key: value for key, value in recipe.options.items() if key not in theirs}


def data_folder(data_dir: str | None = None) -> Path:
    """Where data sets lie: `data_dir`, else NESTLING_DATA, else ~/.cache/nestling."""
    return Path(data_dir or os.environ.get("NESTLING_DATA") or "~/.cache/nestling").expanduser()


_EMBEDDED = Path(__file__).parent / "embedded" / "mnist12k.npz"
_DIGITS = tuple("0123456789")
_GARMENTS = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_MNIST_STATS = ((0.1307,), (0.3081,))
_FASHION_STATS = ((0.2860,), (0.3530,))
_CIFAR_STATS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MNIST_MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_FASHION_MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_CIFAR_MD5 = "c58f30108f718f92721af3b95e74349a"
_CIFAR_FOLDER = "cifar-10-batches-py"

_Stats = tuple[tuple[float, ...], tuple[float, ...]]


def image_statistics(name: str) -> _Stats | None:
    """The mean and the standard deviation of each channel that a data set's pictures are prepared
    with, or None."""
    by_name = {"fashion-mnist": _FASHION_STATS, "cifar-10": _CIFAR_STATS}
    return _MNIST_STATS if name in ("mnist", "mnist12k", "mnist12k-8x8") else by_name.get(name)


def _images(
    request: Request,
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    *,
    stats: _Stats,
    names: tuple[str, ...],
) -> Dataset:
    refuse_values(request.name, request.recipe.task)
    # which has nothing missing
    request.recipe.check_only("missing", *_LEARNED, reader=request.name)
    usual = " and ".join(", ".join(map(str, figures)) for figures in stats)
    reading = Reading(
        request.name,
        len(y),
        len(y_test),
        "its own",
        tuple(x.shape[1:]),
        "chw",
        tuple(x.shape[1:]),
        float(x.min()),
        float(x.max()),
        f"divided by 255, standardised by its usual mean and deviation {usual}",
        len(names),
        0,
    )
    found = Dataset(
        request.name,
        normalise(x, *stats),
        as_labels(y),
        normalise(x_test, *stats),
        as_labels(y_test),
        len(names),
        None,
        names,
        reading,
    )
    return for_task(found, request.recipe)


@cache
def _embedded() -> tuple[np.ndarray, ...]:
    with np.load(_EMBEDDED, allow_pickle=False) as file:
        return tuple(file[key] for key in ("x_train", "y_train", "x_test", "y_test"))


def _read_embedded(request: Request) -> Dataset:
    x, y, x_test, y_test = _embedded()
    return _images(
        request, x[:, None], y, x_test[:, None], y_test, stats=_MNIST_STATS, names=_DIGITS
    )


def _read_small(request: Request) -> Dataset:
    """The embedded digits without their empty border, every 3×3 pixels one."""
    x, y, x_test, y_test = _embedded()
    return _images(
        request, _thirds(x), y, _thirds(x_test), y_test, stats=_MNIST_STATS, names=_DIGITS
    )


def _thirds(x: np.ndarray) -> np.ndarray:
    inner = x[:, 2:-2, 2:-2].reshape(len(x), 8, 3, 8, 3)
    return np.rint(inner.mean((2, 4))).astype(np.uint8)[:, None]


def _read_plays(request: Request) -> Dataset:
    refuse_values(request.name, request.recipe.task)
    request.recipe.check_only("client", "options", *_LEARNED, reader=request.name)
    return prepare(request.name, plays.read_plays(request.recipe), request.recipe)


def _idx_reader(
    folder: str, url: str, md5: dict[str, str], stats: _Stats, names: tuple[str, ...]
) -> Callable[[Request], Dataset]:
    def read(request: Request) -> Dataset:
        files = [_idx_file(request, folder, file, url, digest) for file, digest in md5.items()]
        (x, y), (x_test, y_test) = idx.read_images(*files[:2]), idx.read_images(*files[2:])
        return _images(request, x[:, None], y, x_test[:, None], y_test, stats=stats, names=names)

    return read


def _idx_file(request: Request, folder: str, file: str, url: str, md5: str) -> Path:
    plain = request.folder / folder / file
    zipped = plain.with_name(f"{file}.gz")
    for path in (zipped, plain):
        if path.is_file():
            return path
    if not request.download:
        raise _absent(request, zipped)
    return fetch([f"{url}{file}.gz"], zipped, md5=md5)


def _read_cifar(request: Request) -> Dataset:
    folder, archive = request.folder / _CIFAR_FOLDER, request.folder / "cifar-10-python.tar.gz"
    if not all((folder / file).is_file() for file in cifar.FILES):
        if not archive.is_file():
            if not request.download:
                raise _absent(request, folder)
            fetch([_CIFAR_URL], archive, md5=_CIFAR_MD5)
        extract(archive, request.folder, [f"{_CIFAR_FOLDER}/{file}" for file in cifar.FILES])
    return _images(request, *cifar.read_folder(folder), stats=_CIFAR_STATS, names=cifar.CLASS_NAMES)


def _read_npz(request: Request) -> Dataset:
    return npz.read_npz(Path(request.path).expanduser(), request.recipe, name=request.name)


def _named_npz(layout: str) -> Callable[[Request], Dataset]:
    def read(request: Request) -> Dataset:
        refuse_values(request.name, request.recipe.task)
        path = request.folder / f"{request.name}.npz"
        if not path.is_file():
            raise _absent(request, path)
        return npz.read_npz(path, request.recipe, name=request.name, layout=layout)

    return read


_LEARNED = ("task", "normal", "horizon")


def _door(read: Callable[[Path, Recipe], RawRows], *used: str) -> Callable[[Request], Dataset]:
    def through(request: Request) -> Dataset:
        request.recipe.check_only(*used, *_ROWS, reader=request.name)
        rows = read(Path(request.path).expanduser(), request.recipe)
        return prepare(request.name, rows, request.recipe)

    return through


_ROWS = ("layout", "scale", "missing", "client", *_LEARNED)
_TABLE = ("label", "features", "test", "options")


def _absent(request: Request, path: Path) -> InputError:
    return InputError(
        f"{request.name} is not in the data directory: looked for {path}",
        field="data.name",
        fix="put it there, or set NESTLING_DATA to the folder that holds it",
    )


DATASETS: dict[str, DatasetInfo] = {
    "mnist12k": DatasetInfo(
        "10 000 + 2 000 handwritten digits, balanced, part of this package",
        "CC BY-SA 3.0",
        (1, 28, 28),
        10,
        False,
        _read_embedded,
    ),
    "mnist12k-8x8": DatasetInfo(
        "the same digits in 8×8 pixels, for the smallest devices",
        "CC BY-SA 3.0",
        (1, 8, 8),
        10,
        False,
        _read_small,
    ),
    "shakespeare": DatasetInfo(
        "what 24 roles say in plays, as rows of characters, part of this package",
        "public domain",
        (plays.STEPS,),
        24,
        True,
        _read_plays,
    ),
    "mnist": DatasetInfo(
        "60 000 + 10 000 handwritten digits",
        "CC BY-SA 3.0",
        (1, 28, 28),
        10,
        False,
        _idx_reader("MNIST/raw", _MNIST_URL, _MNIST_MD5, _MNIST_STATS, _DIGITS),
    ),
    "fashion-mnist": DatasetInfo(
        "60 000 + 10 000 pictures of garments",
        "MIT",
        (1, 28, 28),
        10,
        False,
        _idx_reader("FashionMNIST/raw", _FASHION_URL, _FASHION_MD5, _FASHION_STATS, _GARMENTS),
    ),
    "cifar-10": DatasetInfo(
        "50 000 + 10 000 colour photographs",
        "none stated; cite Krizhevsky 2009",
        (3, 32, 32),
        10,
        False,
        _read_cifar,
    ),
    "har": DatasetInfo(
        "smartphone motion, windows of 128 steps, 30 people",
        "CC BY 4.0",
        (6, 128),
        6,
        True,
        _named_npz("lc"),
    ),
    "audiomnist": DatasetInfo(
        "spoken digits as log-mel pictures, 60 speakers",
        "MIT",
        (1, 32, 32),
        10,
        True,
        _named_npz("hw"),
    ),
    "wisdm": DatasetInfo(
        "accelerometer features, 36 people, some missing",
        "none stated; cite Kwapisz 2010",
        (43,),
        6,
        True,
        _named_npz("f"),
    ),
    "npz": DatasetInfo(
        "an .npz file of yours (data.path) with x, y and, if wanted, client and test",
        "yours",
        None,
        None,
        False,
        _read_npz,
    ),
    "csv": DatasetInfo(
        "a .csv file of yours (data.path) with named columns; data.label names the classes",
        "yours",
        None,
        None,
        False,
        _door(columns.read_csv, *_TABLE),
    ),
    "parquet": DatasetInfo(
        "a .parquet file of yours (data.path) with named columns (nestling[tables])",
        "yours",
        None,
        None,
        False,
        _door(columns.read_parquet, *_TABLE),
    ),
    "images": DatasetInfo(
        "a folder of yours (data.path) with a folder of pictures for each class (nestling[images])",
        "yours",
        None,
        None,
        False,
        _door(folders.read_images, "options"),
    ),
    "wavs": DatasetInfo(
        "a folder of yours (data.path) with a folder of .wav files for each class",
        "yours",
        None,
        None,
        False,
        _door(folders.read_wavs, "options", "transform"),
    ),
}
