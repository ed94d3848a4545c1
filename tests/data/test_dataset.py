from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nestling.data.dataset import Dataset, normalise
from nestling.errors import InputError


def small() -> Dataset:
    return Dataset(
        "small",
        torch.zeros(4, 3),
        torch.tensor([0, 1, 0, 1]),
        torch.zeros(2, 3),
        torch.tensor([0, 1]),
        2,
        np.array([0, 0, 1, 1]),
    )


def test_a_good_dataset_passes_and_knows_its_shape():
    small().check()
    assert small().shape == (3,)
    assert replace(small(), x=torch.zeros(4, 1, 5, 6)).shape == (1, 5, 6)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x": torch.zeros(4, 3, dtype=torch.float64)}, "float64"),
        ({"y": torch.tensor([0, 1, 0, 1], dtype=torch.int32)}, "int32"),
        ({"x": torch.zeros(5, 3)}, "5 training samples but 4 labels"),
        ({"y_test": torch.tensor([0])}, "2 test samples but 1 labels"),
        ({"x": torch.zeros(0, 3), "y": torch.zeros(0, dtype=torch.int64)}, "no training rows"),
        ({"x": torch.zeros(4)}, "training samples are"),
        ({"x": torch.zeros(3, 4).T}, "not contiguous"),
        ({"x_test": torch.zeros(2, 4)}, "test samples"),
        ({"y": torch.tensor([0, 1, 2, 1])}, "from 0 to 2"),
        ({"y_test": torch.tensor([-1, 1])}, "from -1 to 1"),
        ({"x": torch.tensor([[0.0, float("nan"), 1.0]] * 4)}, "NaN"),
        ({"x_test": torch.tensor([[0.0, float("-inf"), 1.0]] * 2)}, "NaN or infinite"),
        ({"classes": 1}, "1 class"),
        ({"class_names": ("a",)}, "1 class names"),
        ({"client": np.array([0, 0, 2, 2])}, "gaps"),
        ({"client": np.array([0, 1])}, "clients are"),
        ({"client": np.array([0, 0, 1, 1], np.int32)}, "int32"),
    ],
)
def test_each_fault_is_named(change, word):
    with pytest.raises(InputError, match=word):
        replace(small(), **change).check()


def test_normalise_scales_each_channel():
    images = np.zeros((2, 2, 1, 1), np.uint8)
    images[1] = 255
    got = normalise(images, (0.5, 0.25), (0.5, 0.25))
    assert got.dtype == torch.float32
    assert got.flatten(1).tolist() == [[-1, -1], [1, 3]]
