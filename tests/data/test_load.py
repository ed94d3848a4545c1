from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from nestling import data
from nestling.data import DATASETS, cifar, load
from nestling.errors import InputError

RNG = np.random.default_rng(0)
REAL = os.environ.get("NESTLING_DATA")


def mnist_like(folder: Path, write_idx, suffix: str = ".gz") -> None:
    for part, rows in (("train", 30), ("t10k", 20)):
        write_idx(
            folder / f"{part}-images-idx3-ubyte{suffix}", RNG.integers(0, 256, (rows, 28, 28))
        )
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", np.arange(rows) % 10)


def cifar_files(cifar_pickle) -> dict[str, bytes]:
    files = {
        name: cifar_pickle(RNG.integers(0, 256, (10, 3072), dtype=np.uint8), list(range(10)))
        for name in cifar.FILES
    }
    return {f"cifar-10-batches-py/{name}": body for name, body in files.items()}


def tar_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return buffer.getvalue()


# The embedded set


def test_the_embedded_set_is_balanced_and_normalised():
    digits = load("mnist12k")
    assert digits.x.shape == (10_000, 1, 28, 28)
    assert digits.x_test.shape == (2_000, 1, 28, 28)
    assert torch.bincount(digits.y).tolist() == [1_000] * 10
    assert torch.bincount(digits.y_test).tolist() == [200] * 10
    assert digits.classes == 10
    assert abs(digits.x.mean()) < 0.02
    assert abs(digits.x.std() - 1) < 0.02
    assert digits.y[:5].tolist() == [5, 0, 4, 1, 9], "MNIST's own first labels"
    assert torch.isclose(digits.x.min(), torch.tensor(-0.1307 / 0.3081))
    assert torch.isclose(digits.x.max(), torch.tensor((1 - 0.1307) / 0.3081))


def test_the_embedded_set_holds_different_digits():
    digits = load("mnist12k")
    assert len(torch.unique(torch.cat([digits.x, digits.x_test]).flatten(1), dim=0)) == 12_000
    means = torch.stack([digits.x[digits.y == label].mean(0).flatten() for label in range(10)])
    guess = torch.cdist(digits.x_test.flatten(1), means).argmin(1)
    assert (guess == digits.y_test).float().mean() > 0.75, (
        "even the nearest class mean must tell digits apart"
    )


def test_its_source_and_licence_are_stated_beside_it():
    text = (Path(data.__file__).parent / "embedded" / "README.md").read_text()
    assert "LeCun" in text
    assert "CC BY-SA 3.0" in text


# Sets in the data directory


@pytest.mark.parametrize(
    ("name", "folder", "mean", "std"),
    [("mnist", "MNIST", 0.1307, 0.3081), ("fashion-mnist", "FashionMNIST", 0.286, 0.353)],
)
@pytest.mark.parametrize("suffix", [".gz", ""])
def test_idx_sets_are_read_from_the_data_directory(
    tmp_path, write_idx, name, folder, mean, std, suffix
):
    mnist_like(tmp_path / folder / "raw", write_idx, suffix)
    got = load(name, data_dir=str(tmp_path), download=False)
    raw = (tmp_path / folder / "raw" / f"train-images-idx3-ubyte{suffix}").read_bytes()
    pixels = np.frombuffer(gzip.decompress(raw) if suffix else raw, np.uint8)[16:].reshape(
        30, 1, 28, 28
    )
    assert np.allclose(got.x, (pixels / 255 - mean) / std, atol=1e-5)
    assert got.y.tolist() == [i % 10 for i in range(30)]
    assert len(got.y_test) == 20


def test_idx_files_are_downloaded_once(tmp_path, site, write_idx):
    mnist_like(tmp_path / "origin", write_idx)
    files = sorted(
        (tmp_path / "origin").iterdir(), key=lambda file: (file.name[:2] != "tr", file.name)
    )
    for file in files:
        site.put(file.name, file.read_bytes())
    md5 = {file.stem: hashlib.md5(file.read_bytes()).hexdigest() for file in files}
    read = data._idx_reader("MNIST/raw", site.url, md5, data._MNIST_STATS, data._DIGITS)
    request = data.Request("mnist", "", tmp_path / "cache", data.Recipe(), download=True)
    first, second = read(request), read(request)
    assert torch.equal(first.x, second.x)
    assert len(site.asked) == 4
    assert sorted(file.name for file in (tmp_path / "cache" / "MNIST" / "raw").iterdir()) == sorted(
        file.name for file in files
    )


def test_cifar_is_downloaded_unpacked_and_read(tmp_path, site, cifar_pickle, monkeypatch):
    body = tar_bytes(cifar_files(cifar_pickle))
    monkeypatch.setattr(data, "_CIFAR_URL", site.put("cifar.tar.gz", body))
    monkeypatch.setattr(data, "_CIFAR_MD5", hashlib.md5(body).hexdigest())
    for _ in range(2):
        photos = load("cifar-10", data_dir=str(tmp_path))
    assert site.asked == ["/cifar.tar.gz"]
    assert photos.x.shape == (50, 3, 32, 32)
    assert photos.x_test.shape == (10, 3, 32, 32)
    assert photos.class_names[3] == "cat"


def test_a_cifar_archive_put_there_by_hand_is_used(tmp_path, cifar_pickle):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(tar_bytes(cifar_files(cifar_pickle)))
    assert len(load("cifar-10", data_dir=str(tmp_path), download=False).y) == 50


def test_cifar_channels_have_their_own_statistics(tmp_path, cifar_pickle):
    for name, body in cifar_files(cifar_pickle).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(body)
    raw, *_ = cifar.read_folder(tmp_path / "cifar-10-batches-py")
    got = load("cifar-10", data_dir=str(tmp_path), download=False).x
    mean, std = (
        np.array(stat).reshape(3, 1, 1)
        for stat in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    )
    assert np.allclose(got, (raw / 255 - mean) / std, atol=1e-5)


def test_named_npz_sets_are_read_from_the_data_directory(tmp_path, monkeypatch):
    np.savez(
        tmp_path / "har.npz",
        x=RNG.normal(size=(40, 8, 6)),
        y=np.arange(40) % 6,
        client=np.repeat([1, 2, 3, 4], 10),
    )
    monkeypatch.setenv("NESTLING_DATA", str(tmp_path))
    har = load("har")
    assert har.name == "har"
    assert har.shape == (6, 8)
    assert har.client is not None
    assert np.unique(har.client).tolist() == [0, 1, 2, 3]


def test_a_file_of_ones_own(tmp_path):
    np.savez(tmp_path / "mine.npz", x=RNG.normal(size=(40, 3)), y=np.arange(40) % 2)
    assert load("npz", path=str(tmp_path / "mine.npz")).shape == (3,)


# Where it looks, and what it says

SHIPPED = ("mnist12k", "mnist12k-8x8", "shakespeare")


@pytest.mark.parametrize(
    "name",
    [n for n, info in DATASETS.items() if info.shape and n not in SHIPPED],
)
def test_absent_data_says_where_it_looked(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NESTLING_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="NESTLING_DATA") as caught:
        load(name, download=False)
    assert caught.value.field == "data.name"
    assert str(tmp_path / "nowhere") in str(caught.value)
    assert not (tmp_path / "nowhere").exists()


def test_the_data_directory(monkeypatch):
    monkeypatch.setenv("NESTLING_DATA", "/from/environment")
    assert data.data_folder("/given") == Path("/given")
    assert data.data_folder() == Path("/from/environment")
    monkeypatch.delenv("NESTLING_DATA")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert data.data_folder() == Path("/home/somebody/.cache/nestling")


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("mnits", {}, "data.name"),
        ("npz", {}, "data.path"),
        ("csv", {}, "data.path"),
        ("parquet", {}, "data.path"),
        ("images", {}, "data.path"),
        ("wavs", {}, "data.path"),
        ("mnist12k", {"path": "x.npz"}, "data.path"),
        ("mnist12k", {"missing": "drop"}, "data.missing"),
    ],
)
def test_bad_requests_name_their_field(name, options, field):
    with pytest.raises(InputError) as caught:
        load(name, **options)
    assert caught.value.field == field


def test_a_misspelt_name_gets_a_hint():
    with pytest.raises(InputError, match="did you mean 'mnist'"):
        load("mnits")


# The real files


@pytest.mark.data
@pytest.mark.skipif(not REAL, reason="NESTLING_DATA is not set")
@pytest.mark.parametrize(
    ("name", "train", "test", "clients"),
    [
        ("mnist", 60_000, 10_000, None),
        ("fashion-mnist", 60_000, 10_000, None),
        ("cifar-10", 50_000, 10_000, None),
        ("har", 7_415, 2_996, 21),
        ("audiomnist", 24_000, 6_000, 48),
        ("wisdm", 4_377, 1_041, 29),
    ],
)
def test_the_real_sets(name, train, test, clients):
    got = load(name, data_dir=REAL, missing="mean", download=False)
    info = DATASETS[name]
    assert (len(got.y), len(got.y_test)) == (train, test)
    assert (got.shape, got.classes) == (info.shape, info.classes)
    assert (None if got.client is None else int(got.client.max()) + 1) == clients
    assert info.natural == (clients is not None)
    # 8-bit pictures from a user's file are scaled to 0..1, not standardised
    if name != "audiomnist":
        assert abs(got.x.mean()) < 0.01
        assert abs(got.x.std() - 1) < 0.02


@pytest.mark.data
@pytest.mark.skipif(not REAL, reason="NESTLING_DATA is not set")
@pytest.mark.parametrize(
    ("folder", "digests"), [("MNIST/raw", data._MNIST_MD5), ("FashionMNIST/raw", data._FASHION_MD5)]
)
def test_the_digests_are_those_of_the_real_files(folder, digests):
    for name, md5 in digests.items():
        path = data.data_folder(REAL) / folder / f"{name}.gz"
        if not path.is_file():
            pytest.skip(f"{path} is not there")
        assert hashlib.md5(path.read_bytes()).hexdigest() == md5


@pytest.mark.data
@pytest.mark.skipif(not REAL, reason="NESTLING_DATA is not set")
def test_the_embedded_set_is_the_first_of_each_class():
    small, full = load("mnist12k"), load("mnist", data_dir=REAL, download=False)
    for label in range(10):
        assert torch.equal(small.x[small.y == label], full.x[full.y == label][:1000])
        assert torch.equal(
            small.x_test[small.y_test == label], full.x_test[full.y_test == label][:200]
        )


@pytest.mark.data
@pytest.mark.skipif(not REAL, reason="NESTLING_DATA is not set")
def test_missing_values_of_the_real_set_are_refused_by_default():
    with pytest.raises(InputError, match="615 missing values"):
        load("wisdm", data_dir=REAL)
