"""Linear CKA (Kornblith et al., 2019): how alike two representations of the same inputs are,
whatever their widths.

A representation counts by which inputs it holds alike, that is by its Gram matrix over the inputs.
CKA is the cosine between two centred Gram matrices: turning or scaling the features changes
nothing. Where there are more features than inputs the plain form is always high; the unbiased form
(Song et al., 2012: the diagonal left out and the sums corrected for it) is not, and is zero on
average for unrelated features. It may then be slightly below zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from nestling.analysis.stages import STAGES, stage_outputs
from nestling.errors import InputError


def linear_cka(x: Tensor, y: Tensor, unbiased: bool = False) -> float:
    """CKA of two feature matrices (rows, features) of the same inputs; NaN where one of them is the
    same for every input."""
    if len(x) != len(y):
        raise InputError(
            f"features of {len(x)} and of {len(y)} inputs cannot be compared",
            fix="give both the same inputs",
        )
    if unbiased or max(x.flatten(1).shape[1], y.flatten(1).shape[1]) > len(x):
        return float(likeness([centred_gram(x, unbiased), centred_gram(y, unbiased)])[0, 1])
    # The same number from matrices of features by features, which are the smaller ones here.
    a, b = _centred(x), _centred(y)
    return float((a.T @ b).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm()))


def centred_gram(x: Tensor, unbiased: bool = False) -> Tensor:
    """The Gram matrix of features over inputs, centred."""
    a = _centred(x)
    return without_bias(a @ a.T) if unbiased else a @ a.T


def without_bias(gram: Tensor) -> Tensor:
    """A Gram matrix as the unbiased form takes it: without its diagonal, and centred again."""
    rows = len(gram)
    if rows < 4:
        raise InputError(
            f"the unbiased form needs at least 4 inputs, not {rows}",
            field="rows",
            fix="give more inputs",
        )
    bare = gram.clone().fill_diagonal_(0)
    sums = bare.sum(0)
    bare = (
        bare - (sums[:, None] + sums[None, :]) / (rows - 2) + sums.sum() / ((rows - 1) * (rows - 2))
    )
    return bare.fill_diagonal_(0)


def likeness(grams: Sequence[Tensor | None]) -> Tensor:
    """The cosine of every pair of centred Gram matrices; NaN where one is missing or zero."""
    known = [number for number, gram in enumerate(grams) if gram is not None]
    found = torch.full((len(grams), len(grams)), torch.nan, dtype=torch.float64)
    if known:
        flat = torch.stack([gram.flatten() for gram in grams if gram is not None])
        flat = flat / flat.norm(dim=1, keepdim=True)
        found[torch.tensor(known)[:, None], torch.tensor(known)] = (
            (flat @ flat.T).clamp(-1, 1).cpu()
        )
    return found


def client_cka(
    models: Iterable[nn.Module], x: Tensor, stages: Sequence[str] = STAGES, unbiased: bool = False
) -> dict[str, Tensor]:
    """For every stage that some network has, the CKA of every two clients; NaN where one of the two
    has no such stage.

    Each network is used up before the next is asked for, so that `models` may make them one by one.
    """
    grams = [
        {
            stage: centred_gram(seen, unbiased)
            for stage, seen in stage_outputs(model, x, stages).items()
        }
        for model in models
    ]
    present = [stage for stage in stages if any(stage in found for found in grams)]
    return {stage: likeness([found.get(stage) for found in grams]) for stage in present}


def _centred(x: Tensor) -> Tensor:
    values = x.flatten(1).double()
    return values - values.mean(0)
