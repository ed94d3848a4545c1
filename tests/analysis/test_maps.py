"""Maps: that the points mean what is said of them, and that the plane keeps near what is near."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import Tensor

from nestling.analysis import (
    centred_gram,
    client_map,
    embed,
    gram_points,
    linear_cka,
    pca,
    score_points,
)
from nestling.analysis.maps import WITHOUT_SKLEARN
from nestling.errors import InputError

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn"
)


def clusters(seed: int, width: int, rows: int = 45) -> Tensor:
    """Features of three classes, far apart, in directions of the client's own."""
    made = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, width, generator=made, dtype=torch.float64) * 10
    return centres.repeat_interleave(rows // 3, 0) + torch.randn(
        rows, width, generator=made, dtype=torch.float64
    )


def test_points_of_two_clients_lie_as_far_apart_as_cka_says() -> None:
    x, y = clusters(0, 8), clusters(1, 100)
    one, other = gram_points([centred_gram(x), centred_gram(y)])
    assert float((one - other).square().sum()) == pytest.approx(2 - 2 * linear_cka(x, y))


def test_points_of_scores_lie_at_hellinger_distances() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.1, 0.4, 0.5]])
    one, other = score_points([p.clamp_min(1e-30).log(), q.log()])
    assert float((one - other).norm() ** 2) / 2 == pytest.approx(
        1 - float((p * q).sqrt().sum()), abs=1e-6
    )


def test_pca_keeps_distances_of_points_in_a_plane() -> None:
    turn, _ = torch.linalg.qr(
        torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    )
    flat = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    points = torch.nn.functional.pad(flat, (0, 18)) @ turn + 5
    found = pca(points)
    assert torch.allclose(torch.cdist(found, found), torch.cdist(flat, flat), atol=1e-6)
    assert torch.allclose(pca(points @ turn), found) and found[:, 0].var() > found[:, 1].var()
    assert pca(points[:1]).tolist() == [[0, 0]] and pca(points[:, :1]).shape == (30, 2)


@needs_sklearn
def test_tsne_keeps_classes_together_over_clients_of_unlike_widths() -> None:
    seen = [clusters(seed, width) for seed, width in enumerate((6, 40, 200))]
    places, how = client_map(seen, "features")
    assert how == "t-SNE" and places.shape == (3, 45, 2)
    label = torch.arange(3).repeat_interleave(15).repeat(3)
    flat = places.flatten(0, 1)
    near = torch.cdist(flat, flat).fill_diagonal_(torch.inf).argmin(1)
    assert (label[near] == label).double().mean() > 0.95
    again, _ = client_map(seen, "features")
    assert torch.equal(places, again)


def test_without_scikit_learn_it_is_pca_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    places, how = client_map([clusters(0, 5), clusters(1, 9)], "features")
    assert how == WITHOUT_SKLEARN and "not installed" in how and places.isfinite().all()
    with pytest.raises(InputError, match=r"nestling\[analysis\]"):
        embed(clusters(0, 5), way="t-sne")


@pytest.mark.parametrize("points", [torch.ones(50, 4), torch.rand(3, 4), torch.rand(1, 4)])
def test_too_few_different_points_still_make_a_map(points: Tensor) -> None:
    places, _ = embed(points)
    assert places.shape == (len(points), 2) and places.isfinite().all()


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(InputError, match="allowed: auto, pca, t-sne"):
        embed(torch.rand(5, 2), way="umap")
