"""Agreement of what clients say."""

from __future__ import annotations

import pytest
import torch

from nestling.analysis import agreement
from nestling.errors import InputError


def logits(seed: int, rows: int = 30, classes: int = 5) -> torch.Tensor:
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed)) * 3


def test_a_client_agrees_with_itself() -> None:
    found = agreement([logits(0), logits(0) + 7, logits(1)])  # a shift of the logits says nothing
    assert (
        found.equal[0, 1] == 1
        and found.equal.diag().tolist() == [1, 1, 1]
        and found.equal[0, 2] < 1
    )
    for apart in (found.kl, found.js):
        assert apart.diag().abs().max() < 1e-12 and apart[0, 1] < 1e-6 and apart[0, 2] > 0.01
    assert found.right is None


def test_the_divergences_are_those_of_their_definitions() -> None:
    distance = pytest.importorskip("scipy.spatial.distance")
    stats = pytest.importorskip("scipy.stats")
    given = [logits(s) for s in range(3)]
    p = [one.double().softmax(-1).numpy() for one in given]
    found = agreement(given)
    for a in range(3):
        for b in range(3):
            assert float(found.js[a, b]) == pytest.approx(
                (distance.jensenshannon(p[a], p[b], 2, axis=1) ** 2).mean(), abs=1e-9
            )
            assert float(found.kl[a, b]) == pytest.approx(
                stats.entropy(p[a], p[b], 2, axis=1).mean(), abs=1e-9
            )
    assert torch.allclose(found.js, found.js.T) and not torch.allclose(found.kl, found.kl.T)


def test_clients_with_nothing_in_common_are_one_bit_apart() -> None:
    sure = torch.full((4, 2), -500.0)
    one, other = sure.clone(), sure.clone()
    one[:, 0], other[:, 1] = 500.0, 500.0
    found = agreement([one, other], torch.tensor([0, 0, 0, 1]))
    assert (
        found.equal[0, 1] == 0 and found.js[0, 1] == pytest.approx(1) and found.kl.isfinite().all()
    )
    assert found.right is not None and found.right.tolist() == [0.75, 0.25]


def test_different_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="differ in shape"):
        agreement([logits(0), logits(0, rows=29)])
