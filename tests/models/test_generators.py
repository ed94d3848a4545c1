"""Generators: any shape of data, inputs scaled as data is, classes that matter, no buffers."""

from __future__ import annotations

import pytest
import torch

from nestling.models.generators import codes, diversity, generator

SHAPES = [(1, 28, 28), (3, 32, 32), (3, 1, 7), (2, 5, 9), (6, 50), (1, 1), (12,), (2, 3, 4, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_of_data_can_be_made(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    made = generator(shape, nz=7, channels=4)(torch.randn(6, 7)).detach()
    assert made.shape == (6, *shape)
    assert abs(float(made.mean())) < 1e-4  # as normalised data has it
    assert not list(generator(shape, nz=7, channels=4).buffers())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 10), (5,)])
def test_the_class_that_is_asked_for_makes_a_difference(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network, z = generator(shape, nz=4, channels=4, classes=3), torch.randn(6, 4)
    first, second = (
        network(codes(z, torch.tensor(labels), 3))
        for labels in ([0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 0])
    )
    assert not torch.allclose(first[5], second[5], atol=1e-3)


def test_codes_are_noise_and_one_flag() -> None:
    made = codes(torch.tensor([[0.5, -1.0]]), torch.tensor([2]), 4)
    assert made.tolist() == [[0.5, -1.0, 0.0, 0.0, 1.0, 0.0]]


def test_diversity_by_hand() -> None:
    """Two inputs: noise 1 apart in one of two places (mean square 0.5), inputs 3 apart in one of
    three (mean 1): half of the pairs are the inputs themselves, so exp(−0.25)."""
    z, x = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    assert torch.isclose(diversity(z, x), torch.tensor(-0.25).exp())
    assert diversity(z, torch.zeros(2, 3)) == 1
