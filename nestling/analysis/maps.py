"""Maps: what every client makes of every input, as points in the plane.

Features of two clients have unlike widths and unlike axes, so they cannot be drawn in one picture
as they are. What they have in common are the inputs: an input is therefore described by how alike
the client holds it to each of the inputs, which is its row of the client's centred Gram matrix,
divided by the matrix's norm. The squared distances between two clients' points then add up to 2 - 2
CKA: clients lie as close as CKA says they are. Class scores have the same axes everywhere and are
taken as they are: points are the square roots of the softmax, whose distances are Hellinger
distances.

The plane is found by t-SNE where scikit-learn is installed (`nestling[analysis]`), else by the two
main directions (PCA).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from nestling.analysis.cka import centred_gram
from nestling.errors import InputError, unknown
from nestling.seeds import derive

WAYS = ("auto", "t-sne", "pca")
WITHOUT_SKLEARN = "PCA, since scikit-learn is not installed"
_FIRST_CUT = 50  # directions that t-SNE is given, as its authors do it


def client_map(
    seen: Sequence[Tensor], stage: str, seed: int = 0, way: str = "auto"
) -> tuple[Tensor, str]:
    """The places (clients, inputs, 2) of what clients put out at a stage (see
    `stages.stage_outputs`), and how they were found."""
    points = (
        score_points(seen)
        if stage == "logits"
        else gram_points([centred_gram(one) for one in seen])
    )
    places, how = embed(points.flatten(0, 1), seed, way)
    return places.view(len(seen), -1, 2), how


def gram_points(grams: Sequence[Tensor]) -> Tensor:
    """Clients' centred Gram matrices as points with the same axes for all, the inputs: (clients,
    inputs, inputs)."""
    return torch.stack(
        [gram / gram.norm().clamp_min(torch.finfo(gram.dtype).tiny) for gram in grams]
    )


def score_points(logits: Sequence[Tensor]) -> Tensor:
    """Clients' class scores as points: (clients, inputs, classes)."""
    return torch.stack([one.double().softmax(-1).sqrt() for one in logits])


def embed(points: Tensor, seed: int = 0, way: str = "auto") -> tuple[Tensor, str]:
    """Places in the plane (points, 2), and how they were found. `auto` takes t-SNE where
    scikit-learn is installed."""
    if way not in WAYS:
        raise unknown("way", way, WAYS, field="way")
    installed = importlib.util.find_spec("sklearn") is not None
    if way == "t-sne" and not installed:
        raise InputError(
            "t-SNE needs scikit-learn",
            field="way",
            fix="pip install 'nestling[analysis]', or take \"pca\"",
        )
    if way == "pca":
        return pca(points), "PCA"
    if not installed:
        return pca(points), WITHOUT_SKLEARN
    shortened = pca(points, _FIRST_CUT)
    # t-SNE scales its start by the points' spread: without any, or with hardly a neighbour, there
    # is nothing to arrange.
    if len(points) < 4 or not float(shortened.std()) > 0:
        return pca(points), "PCA, since there are too few different points for t-SNE"
    return _tsne(shortened, seed), "t-SNE"


def pca(points: Tensor, size: int = 2) -> Tensor:
    """The points along their main directions, as (points, size); directions that the points do not
    have are zero."""
    values = points.double() - points.double().mean(0)
    along, sizes, _ = torch.linalg.svd(values, full_matrices=False)
    found = (along * sizes)[:, :size]
    # A direction may be found either way round: the point that lies furthest out decides.
    furthest = found.abs().argmax(0)
    found = found * found[furthest, torch.arange(found.shape[1], device=found.device)].sign()
    return torch.nn.functional.pad(found, (0, size - found.shape[1]))


def _tsne(points: Tensor, seed: int) -> Tensor:
    manifold = importlib.import_module("sklearn.manifold")
    found = manifold.TSNE(
        perplexity=min(30.0, (len(points) - 1) / 3),
        init="pca",
        learning_rate="auto",
        random_state=derive(seed, "t-sne") % 2**32,
    ).fit_transform(points.cpu().numpy())
    return torch.from_numpy(found).double()
