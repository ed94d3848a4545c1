"""CKA: what it must not depend on, what it must be, and that the two ways of computing it agree."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nestling.analysis import STAGES, centred_gram, client_cka, likeness, linear_cka
from nestling.errors import InputError
from nestling.models import build
from nestling.seeds import torch_seeded

BOTH = pytest.mark.parametrize("unbiased", [False, True])


def features(seed: int, rows: int = 40, width: int = 7) -> Tensor:
    with torch_seeded(seed, "features"):
        return torch.randn(rows, width, dtype=torch.float64)


def hsic(x: Tensor, y: Tensor) -> float:
    """The unbiased estimate, written out as sums."""
    a, b, n = x @ x.T, y @ y.T, len(x)
    a, b = a - a.diag().diag(), b - b.diag().diag()
    one = torch.ones(n, dtype=x.dtype)
    found = (
        torch.trace(a @ b)
        + (one @ a @ one) * (one @ b @ one) / ((n - 1) * (n - 2))
        - 2 / (n - 2) * (one @ a @ b @ one)
    )
    return float(found) / (n * (n - 3))


@BOTH
def test_the_same_features_are_alike(unbiased: bool) -> None:
    x = features(0)
    assert linear_cka(x, x, unbiased) == pytest.approx(1)


@BOTH
@pytest.mark.parametrize("width", [7, 60])
def test_turning_scaling_and_shifting_change_nothing(unbiased: bool, width: int) -> None:
    x, y = features(1, width=width), features(2, width=5) + features(1, width=width)[:, :5]
    turn, _ = torch.linalg.qr(features(3, width, width))
    before = linear_cka(x, y, unbiased)
    assert linear_cka(x @ turn * 3.7 + 11, y, unbiased) == pytest.approx(before)
    assert linear_cka(x, x @ turn * 0.01, unbiased) == pytest.approx(1)
    stretched = x * torch.linspace(0.1, 5, width, dtype=x.dtype)  # no rotation: this one must count
    assert linear_cka(stretched, y, unbiased) != pytest.approx(before, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 30), st.integers(1, 40), st.integers(1, 40))
def test_it_is_symmetric_between_0_and_1_and_equals_the_kernel_form(
    seed: int, rows: int, wide: int, narrow: int
) -> None:
    x, y = features(seed, rows, wide), features(seed + 1, rows, narrow)
    centre = torch.eye(rows, dtype=x.dtype) - 1 / rows
    a, b = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    kernel = float(torch.trace(a @ b) / (torch.trace(a @ a) * torch.trace(b @ b)).sqrt())
    found = linear_cka(x, y)
    assert found == pytest.approx(kernel, abs=1e-9) and found == pytest.approx(
        linear_cka(y, x), abs=1e-9
    )
    assert -1e-9 <= found <= 1 + 1e-9


def test_the_unbiased_form_is_what_the_sums_say() -> None:
    x, y = features(4, 12, 6), features(5, 12, 30) + features(4, 12, 30)
    assert linear_cka(x, y, unbiased=True) == pytest.approx(
        hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))
    )


def test_only_the_unbiased_form_finds_nothing_in_unrelated_wide_features() -> None:
    pairs = [(features(2 * s, 30, 400), features(2 * s + 1, 30, 400)) for s in range(10)]
    assert min(linear_cka(x, y) for x, y in pairs) > 0.8
    assert abs(sum(linear_cka(x, y, unbiased=True) for x, y in pairs) / len(pairs)) < 0.03


def test_what_cannot_be_compared_is_refused_or_not_a_number() -> None:
    with pytest.raises(InputError, match="40 and of 39"):
        linear_cka(features(0), features(0)[1:])
    with pytest.raises(InputError, match="at least 4"):
        linear_cka(features(0, 3), features(0, 3), unbiased=True)
    assert math.isnan(linear_cka(torch.ones(40, 3), features(0)))
    assert likeness([None, centred_gram(features(0))]).isnan().tolist() == [
        [True, True],
        [True, False],
    ]


def network(name: str, seed: int, **options: object) -> nn.Module:
    with torch_seeded(seed, "network"):
        return build(name, shape=(1, 28, 28), classes=10, **options)


def test_equal_networks_are_alike_everywhere_and_others_are_not() -> None:
    x = features(6, 32, 784).float().view(32, 1, 28, 28)
    models = [network("tinycnn", 0), network("tinycnn", 0), network("tinycnn", 1)]
    found = client_cka(models, x)
    assert tuple(found) == STAGES
    for matrix in found.values():
        assert (
            matrix[0, 1] == pytest.approx(1)
            and torch.allclose(matrix, matrix.T)
            and matrix[0, 2] < 0.999
        )
        assert torch.allclose(matrix.diag(), torch.ones(3, dtype=matrix.dtype))


def test_unlike_networks_are_compared_where_they_have_something_in_common() -> None:
    x = features(7, 20, 784).float().view(20, 1, 28, 28)
    models = [
        network("tinycnn", 0),
        network("mlp", 1, hidden=[32]),
        network("dscnn", 2, width=0.25),
    ]
    found = client_cka((model for model in models), x, unbiased=True)
    assert not found["features"].isnan().any() and not found["logits"].isnan().any()
    gaps = found["first"].isnan()
    assert gaps[1].all() and gaps[:, 1].all() and int(gaps.sum()) == 5  # the MLP has no convolution
    assert list(client_cka(models[1:2], x)) == ["features", "logits"]
    with pytest.raises(InputError, match="did you mean 'first'"):
        client_cka(models, x, stages=["frist"])
