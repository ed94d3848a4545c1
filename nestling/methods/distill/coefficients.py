"""How much every client learns from every other: the matrix of KT-pFL, and what its rows are fitted to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.store import Records
from nestling.training.distiller import Loss

SHARPEN, STEP = 5.0, 0.01
"""The released code's factor in front of its softmax, and the mean size of its step."""


@dataclass
class Coefficients:
    """The matrix c: row k says how much client k learns from whom. Entries that never moved are 1/K and are not stored."""

    records: Records
    size: int
    place: torch.device

    def row(self, client: int, others: Sequence[int]) -> Tensor:
        """A client's coefficients towards some others."""
        known = self._known(client)
        return torch.tensor([known.get(other, 1 / self.size) for other in others], dtype=torch.float64, device=self.place)

    def put(self, client: int, others: Sequence[int], row: Tensor, round: int) -> None:
        """Writes down a client's coefficients towards some others; the rest stays."""
        known = dict(sorted({**self._known(client), **dict(zip(others, row.tolist(), strict=True))}.items()))
        values = torch.tensor(list(known.values()), dtype=torch.float64)
        self.records.put(client, {"clients": torch.tensor(list(known)), "row": values}, round)

    def _known(self, client: int) -> dict[int, float]:
        noted = self.records.get(client)
        return dict(zip(noted["clients"].tolist(), noted["row"].tolist(), strict=True)) if noted else {}


def row_loss(rows: Tensor, products: Tensor, rho: float) -> Tensor:
    """The sum over rows k of MSE(q_k, Σ_l c_kl·q_l) + ρ·MSE(c_k, 1/K), by the scalar products of what the clients said."""
    away = rows - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    apart = ((away @ products) * away).sum(1)
    return (apart + rho * (rows - 1 / len(rows)).square().mean(1)).sum()


def released_step(rows: Tensor, products: Tensor, loss: Loss) -> Tensor:
    """The rows after the released code's step: along the gradient, rescaled by powers of 5, and through a sharp softmax."""
    leaf = rows.clone().requires_grad_()
    grad = torch.autograd.grad(loss(leaf, products), leaf)[0]
    sizes = grad.abs().mean(1, keepdim=True).clamp_min(1e-30)
    scale = 5 ** (torch.log(STEP / sizes) / math.log(5)).round()
    return (SHARPEN * (rows - scale * grad)).softmax(-1)
