from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from nestling.data.npz import read_npz
from nestling.errors import InputError

N = 20
RNG = np.random.default_rng(0)
Y = np.arange(N) % 2
TEST = np.arange(N) >= 15
VECTORS = RNG.normal(3, 5, (N, 4))


def save(folder: Path, **arrays: np.ndarray) -> Path:
    path = folder / "mine.npz"
    np.savez_compressed(path, **arrays)
    return path


def refused(path: Path, word: str, **options: object) -> None:
    with pytest.raises(InputError, match=word) as caught:
        read_npz(path, **options)
    assert caught.value.field == "data.path"
    assert caught.value.fix
    assert str(path) in str(caught.value)


# Layouts


@pytest.mark.parametrize(
    ("shape", "dtype", "sample"),
    [
        ((N, 7), np.float32, (7,)),
        ((N, 7), np.uint8, (7,)),
        ((N, 5, 6), np.uint8, (1, 5, 6)),
        ((N, 24, 6), np.float64, (6, 24)),
        ((N, 24, 6), np.int16, (6, 24)),
        ((N, 5, 6, 1), np.uint8, (1, 5, 6)),
        ((N, 5, 6, 3), np.uint8, (3, 5, 6)),
        ((N, 5, 6, 4), np.float32, (4, 5, 6)),
        ((N, 3, 5, 6), np.uint8, (3, 5, 6)),
        ((N, 2, 5, 6), np.float16, (2, 5, 6)),
    ],
)
def test_layout_follows_dimensions_and_type(tmp_path, shape, dtype, sample):
    x = RNG.integers(0, 100, shape).astype(dtype)
    data = read_npz(save(tmp_path, x=x, y=Y, test=TEST))
    assert data.shape == sample
    assert data.x.is_contiguous()
    assert data.x_test.is_contiguous()
    assert (len(data.y), len(data.y_test)) == (15, 5)
    first = (
        x
        if len(sample) == 1 or sample == shape[1:]
        else np.moveaxis(x, -1, 1)
        if sample[0] == shape[-1]
        else x[:, None]
    )
    for channel in range(sample[0]):
        # Scaling a channel keeps the order of its values, so that a wrong transposition shows.
        before, after = first[~TEST][:, channel].ravel(), np.asarray(data.x)[:, channel].ravel()
        assert np.array_equal(before.argsort(kind="stable"), after.argsort(kind="stable"))


def test_byte_images_are_scaled_to_one(tmp_path):
    x = RNG.integers(0, 256, (N, 5, 6), dtype=np.uint8)
    data = read_npz(save(tmp_path, x=x, y=Y, test=TEST))
    assert torch.allclose(data.x[:, 0] * 255, torch.from_numpy(x[~TEST].astype(np.float32)))
    assert torch.allclose(data.x_test[:, 0] * 255, torch.from_numpy(x[TEST].astype(np.float32)))


def test_numbers_are_standardised_by_the_training_rows(tmp_path):
    data = read_npz(save(tmp_path, x=VECTORS, y=Y, test=TEST))
    mean, std = VECTORS[~TEST].mean(0), VECTORS[~TEST].std(0)
    assert np.allclose(data.x, (VECTORS[~TEST] - mean) / std, atol=1e-5)
    assert np.allclose(data.x_test, (VECTORS[TEST] - mean) / std, atol=1e-5)


def test_sequences_are_standardised_per_channel(tmp_path):
    x = RNG.normal([0, 50, -3], [1, 10, 0.1], (N, 30, 3))
    data = read_npz(save(tmp_path, x=x, y=Y, test=TEST))
    assert np.allclose(data.x.mean((0, 2)), 0, atol=1e-5)
    assert np.allclose(data.x.std((0, 2), unbiased=False), 1, atol=1e-5)


def test_a_constant_feature_becomes_zero_and_a_large_offset_survives(tmp_path):
    x = VECTORS.copy()
    x[:, 0] = 1e8 / 3
    x[:, 1] = 1.7e9 + np.arange(N)
    data = read_npz(save(tmp_path, x=x, y=Y, test=TEST))
    assert data.x[:, 0].abs().max() < 1e-6
    assert np.isclose(data.x[:, 1].std(unbiased=False), 1)


# Labels, clients, held-out rows


def test_labels_are_renumbered_in_sorted_order(tmp_path):
    data = read_npz(save(tmp_path, x=VECTORS, y=np.where(Y == 0, 40, -7), test=TEST))
    assert data.class_names == ("-7", "40")
    assert data.y.tolist() == [1 - label for label in Y[~TEST]]


@pytest.mark.parametrize("kind", ["U", "S"])
def test_strings_are_class_names(tmp_path, kind):
    names = np.array(["walk", "run"]).astype(kind)[Y]
    data = read_npz(save(tmp_path, x=VECTORS, y=names, test=TEST))
    assert data.class_names == ("run", "walk")
    assert data.y.tolist() == [1 - label for label in Y[~TEST]]


def test_clients_are_renumbered_over_the_training_rows(tmp_path):
    client = np.repeat([30, 10, 20, 5], 5)
    data = read_npz(save(tmp_path, x=VECTORS, y=Y, client=client, test=client == 20))
    assert data.client is not None
    assert data.client.dtype == np.int64
    assert data.client.tolist() == [2] * 5 + [1] * 5 + [0] * 5


def test_without_a_mask_a_fifth_of_each_client_is_held_out(tmp_path):
    client = np.repeat(["a", "b", "c"], [5, 10, 25])
    x = np.arange(40)[:, None].astype(float)
    path = save(tmp_path, x=x, y=np.arange(40) % 2, client=client)
    data = read_npz(path, seed=3)
    assert np.bincount(data.client).tolist() == [4, 8, 20]
    again, other = read_npz(path, seed=3), read_npz(path, seed=4)
    assert torch.equal(data.x, again.x)
    assert not torch.equal(data.x, other.x)
    rows = np.concatenate([data.x, data.x_test]).ravel()
    assert len(np.unique(rows)) == 40, "each row is used exactly once"


def test_without_mask_and_clients_a_fifth_is_held_out(tmp_path):
    assert len(read_npz(save(tmp_path, x=VECTORS, y=Y)).y_test) == 4


def test_the_automatic_mask_leaves_every_class_a_training_row(tmp_path):
    y = np.arange(N)
    y[10:] = 0
    path = save(tmp_path, x=VECTORS, y=y)
    for seed in range(20):
        data = read_npz(path, seed=seed)
        assert data.classes == 10
        assert len(torch.unique(data.y)) == 10


# Missing values


def with_gaps() -> np.ndarray:
    x = VECTORS.copy()
    x[2, 0] = x[17, 1] = np.nan
    return x


def test_missing_values_are_refused_by_default(tmp_path):
    refused(save(tmp_path, x=with_gaps(), y=Y, test=TEST), "2 missing values")


def test_missing_values_become_the_training_mean(tmp_path):
    data = read_npz(save(tmp_path, x=with_gaps(), y=Y, test=TEST), missing="mean")
    assert abs(data.x[2, 0]) < 1e-6
    assert abs(data.x_test[2, 1]) < 1e-6
    known = np.delete(VECTORS[~TEST][:, 0], 2)
    assert np.isclose(
        data.x[0, 0],
        (VECTORS[0, 0] - known.mean()) / np.insert(known, 2, known.mean()).std(),
        atol=1e-5,
    )


def test_missing_values_become_zero(tmp_path):
    filled = np.nan_to_num(with_gaps())
    data = read_npz(save(tmp_path, x=with_gaps(), y=Y, test=TEST), missing="zero")
    assert np.isclose(
        data.x[2, 0], -filled[~TEST][:, 0].mean() / filled[~TEST][:, 0].std(), atol=1e-5
    )


def test_a_feature_without_any_value_is_zero(tmp_path):
    x = VECTORS.copy()
    x[:15, 3] = np.nan
    assert read_npz(save(tmp_path, x=x, y=Y, test=TEST), missing="mean").x[:, 3].abs().max() == 0


@pytest.mark.parametrize("missing", ["refuse", "mean", "zero"])
def test_infinite_values_are_always_refused(tmp_path, missing):
    x = VECTORS.copy()
    x[0, 0] = -np.inf
    refused(save(tmp_path, x=x, y=Y), "infinite", missing=missing)


def test_an_unknown_rule_names_its_field(tmp_path):
    with pytest.raises(InputError, match="mean") as caught:
        read_npz(save(tmp_path, x=VECTORS, y=Y), missing="meen")
    assert caught.value.field == "data.missing"


# Everything else that can be wrong


@pytest.mark.parametrize(
    ("arrays", "word"),
    [
        ({"x": VECTORS}, "no y"),
        ({"y": Y}, "no array 'x'"),
        ({"x": VECTORS[:19], "y": Y}, "x has 19 rows but y has 20"),
        ({"x": VECTORS, "y": Y, "client": Y[:3]}, "client has 3"),
        ({"x": VECTORS[:0], "y": Y[:0]}, "empty"),
        ({"x": VECTORS[:, :0], "y": Y}, "empty"),
        ({"x": VECTORS, "y": Y * 0}, "label 0"),
        ({"x": VECTORS, "y": Y, "test": Y.astype(bool)}, "no training row has: 1"),
        ({"x": VECTORS, "y": Y * 0.5}, "y has type float64"),
        ({"x": VECTORS, "y": Y[:, None]}, "y has shape"),
        ({"x": VECTORS, "y": Y, "client": Y + 0.5}, "client has type"),
        ({"x": VECTORS, "y": Y, "test": TEST.astype(int)}, "test is int64"),
        ({"x": VECTORS, "y": Y, "test": TEST[:4]}, "test is bool"),
        ({"x": VECTORS, "y": Y, "test": TEST & False}, "marks 0 of 20"),
        ({"x": VECTORS, "y": Y, "test": TEST | True}, "marks 20 of 20"),
        ({"x": VECTORS[:2], "y": Y[:2]}, "too few"),
        ({"x": VECTORS.ravel(), "y": Y}, "x has shape"),
        ({"x": np.zeros((N, 2, 2, 2, 2)), "y": Y}, "x has shape"),
        ({"x": VECTORS.astype(str), "y": Y}, "x has type"),
        ({"x": VECTORS.astype(complex), "y": Y}, "x has type"),
        ({"x": VECTORS.astype(object), "y": Y}, "cannot be read"),
        ({"x": VECTORS * 1e300, "y": Y}, "too large"),
    ],
)
def test_bad_arrays_are_refused(tmp_path, arrays, word):
    refused(save(tmp_path, **arrays), word)


def test_an_absent_file_and_a_wrong_format_are_refused(tmp_path):
    refused(tmp_path / "absent.npz", "no such file")
    refused(tmp_path, "no such file")
    text = tmp_path / "text.npz"
    text.write_text("x,y\n1,2\n")
    refused(text, "not an .npz file")
    np.save(tmp_path / "one.npy", VECTORS)
    refused(tmp_path / "one.npy", "not an .npz file")


def test_a_damaged_member_is_refused(tmp_path):
    path = save(tmp_path, x=RNG.normal(size=(N, 400)), y=Y)
    raw = bytearray(path.read_bytes())
    raw[200:20_000] = bytes(19_800)
    path.write_bytes(raw)
    refused(path, "cannot be read")


def test_a_header_that_promises_terabytes_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**50, 4)}
    )
    path = tmp_path / "huge.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue())
    refused(path, "cannot be read")
