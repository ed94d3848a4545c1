"""Batch statistics of filled-up batches are those of the rows that count."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from nestling.training.stacks.masked import masked_statistics

ROWS, MASK = 5, torch.tensor([True, True, False, True, False])


def networks(tracked: bool) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, track_running_stats=tracked),
        nn.Flatten(),
        nn.BatchNorm1d(27),
    )
    return net, copy.deepcopy(net)


@pytest.mark.parametrize("tracked", [True, False])
def test_outputs_gradients_and_statistics_are_those_of_the_short_batch(tracked: bool) -> None:
    whole, short = networks(tracked)
    x = torch.randn(ROWS, 2, 5, 5)
    with masked_statistics(MASK):
        filled = whole(x)[MASK]
    alone = short(x[MASK])
    assert torch.allclose(filled, alone, atol=1e-5)
    grads = [
        torch.autograd.grad((out**3).sum(), list(n.parameters()))
        for out, n in ((filled, whole), (alone, short))
    ]
    assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for a, b in zip(*grads, strict=True))
    for (name, a), b in zip(whole.named_buffers(), short.buffers(), strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-5), name


def test_what_the_filling_holds_does_not_matter() -> None:
    whole, other = networks(True)
    x = torch.randn(ROWS, 2, 5, 5)
    strange = torch.where(MASK[:, None, None, None], x, 1e4 * torch.ones_like(x))
    with masked_statistics(MASK):
        assert torch.allclose(whole(x)[MASK], other(strange)[MASK], atol=1e-4)


def test_evaluation_and_other_numbers_of_rows_are_left_alone() -> None:
    whole, other = networks(True)
    x = torch.randn(3, 2, 5, 5)
    with masked_statistics(MASK):
        assert torch.equal(whole(x), other(x))
        full = torch.randn(ROWS, 2, 5, 5)
        assert torch.equal(whole.eval()(full), other.eval()(full))


def test_a_stack_of_networks_has_masks_of_its_own() -> None:
    net, _ = networks(False)
    x, masks = torch.randn(2, ROWS, 2, 5, 5), torch.stack([MASK, ~MASK])
    params = {name: torch.stack([t, 2 * t]) for name, t in net[:2].state_dict().items()}

    def run(own: dict[str, torch.Tensor], x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with masked_statistics(mask):
            return functional_call(net[:2], own, (x,))

    both = vmap(run)(params, x, masks)
    for k in range(2):
        alone = functional_call(
            net[:2], {name: t[k] for name, t in params.items()}, (x[k][masks[k]],)
        )
        assert torch.allclose(both[k][masks[k]], alone, atol=1e-5)
