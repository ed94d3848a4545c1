"""Our optimisers take the steps of torch's."""

from __future__ import annotations

import pytest
import torch

from nestling.training.optimisers import Buffers, Optim, clip, step

CASES = {
    "sgd": (Optim("sgd", 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum and decay": (
        Optim("sgd", 0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
    "adamw": (
        Optim("adamw", 0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
    "adam": (
        Optim("adam", 0.01, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_torch(case: str) -> None:
    optim, make = CASES[case]
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(4, 3, generator=generator), torch.randn(5, generator=generator)]
    theirs = [p.clone().requires_grad_() for p in ours]
    reference, buffers = make(theirs), Buffers()
    for _ in range(7):
        grads = [torch.randn(p.shape, generator=generator) for p in ours]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        reference.step()
        step(optim, ours, grads, buffers)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_adamw_is_adam_without_decay_and_takes_a_rate_in_a_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    start, grads = (
        torch.randn(4, 3, generator=generator),
        [torch.randn(4, 3, generator=generator) for _ in range(3)],
    )

    def gone(optim: Optim, lr: torch.Tensor | None = None) -> torch.Tensor:
        params, buffers = [start.clone()], Buffers.zeros(optim, [start])
        for grad in grads:
            step(optim, params, [grad], buffers, lr=lr)
        return params[0]

    assert torch.equal(gone(Optim("adamw", 0.01)), gone(Optim("adam", 0.01)))
    decayed = Optim("adamw", 0.01, weight_decay=0.1)
    assert not torch.allclose(gone(decayed), gone(Optim("adam", 0.01, weight_decay=0.1)), atol=1e-4)
    assert torch.allclose(
        gone(decayed), gone(decayed, torch.tensor(0.01, dtype=torch.float64)), atol=1e-6
    )


def test_adamw_leaves_alone_what_has_no_gradient_where_it_is_lazy() -> None:
    params, grad = [torch.ones(4)], torch.tensor([1.0, 0.0, 1.0, 0.0])
    optim = Optim("adamw", 0.1, weight_decay=0.5, lazy=True)
    buffers = Buffers.zeros(optim, params)
    for _ in range(3):
        step(optim, params, [grad], buffers)
    assert torch.equal(params[0] == 1, grad == 0)


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_clipping_equals_torch(scale: float) -> None:
    grads = [torch.randn(4, 3) * scale, torch.randn(5) * scale]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    assert all(
        torch.allclose(c, p.grad)
        for c, p in zip(clip(grads, 1.0), params, strict=True)
        if p.grad is not None
    )
