"""The plain trainer: what a phase says is what happens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.training.optimisers import Optim
from nestling.training.phase import Hook, Phase, Train
from nestling.training.trainer import batches, train

X, Y = torch.randn(23, 6, generator=torch.Generator().manual_seed(0)), torch.arange(23) % 3


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def state_after(phase: Phase, *purpose: str | int) -> dict[str, Tensor]:
    module = net()
    train(module, phase, X, Y, 0, *purpose)
    return module.state_dict()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


def test_chance_comes_from_the_seed_and_purpose_only() -> None:
    torch.manual_seed(5)
    first = state_after(Phase(batch=4), 3, 1)
    torch.manual_seed(99)
    torch.rand(100)
    assert same(first, state_after(Phase(batch=4), 3, 1))
    assert not same(first, state_after(Phase(batch=4), 3, 2))


def test_every_epoch_sees_every_row_once_in_an_order_of_its_own() -> None:
    phase = Phase(batch=5, epochs=3)
    rows = list(batches(23, phase, net(), 0, 7))
    epochs = [torch.cat(rows[i : i + 5]) for i in range(0, 15, 5)]
    assert [len(b) for b in rows[:5]] == [5, 5, 5, 5, 3]
    assert all(sorted(e.tolist()) == list(range(23)) for e in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_short_batches_can_be_dropped_and_steps_bounded() -> None:
    assert [len(b) for b in batches(23, Phase(batch=5, drop_last=True), net(), 0)] == [5] * 4
    assert len(list(batches(23, Phase(batch=5, epochs=9, steps=7), net(), 0))) == 7
    # all a small client has
    assert [len(b) for b in batches(3, Phase(batch=5, drop_last=True), net(), 0)] == [3]


def test_a_batch_norm_never_sees_a_single_row() -> None:
    normed = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    assert [len(b) for b in batches(21, Phase(batch=5), normed, 0)] == [5] * 4
    assert [len(b) for b in batches(21, Phase(batch=5), net(), 0)] == [5] * 4 + [1]


def test_frozen_parameters_do_not_move() -> None:
    before, after = net().state_dict(), state_after(Phase(freeze=("0",)))
    assert torch.equal(before["0.weight"], after["0.weight"]) and not torch.equal(
        before["3.weight"], after["3.weight"]
    )


def test_the_gradient_rule_decides_what_is_applied() -> None:
    frozen = state_after(
        Phase(rule=lambda params, grads, given: {n: g * 0 for n, g in grads.items()})
    )
    assert same(frozen, net().state_dict())


def test_objectives_read_what_was_given() -> None:
    def pull(module: Net, batch: Batch, given: Given) -> Tensor:
        return (
            sum((p - given[n]).pow(2).sum() for n, p in module.params.items())
            + 0 * module(batch.x).sum()
        )

    target = {n: torch.ones_like(p) for n, p in net().named_parameters()}
    phase = Phase(pull, Optim("sgd", 0.2), epochs=20, batch=23, given=target)
    assert all(
        torch.allclose(t, torch.ones_like(t), atol=1e-3) for t in state_after(phase).values()
    )


def test_hooks_change_layers_while_the_phase_runs_and_no_longer() -> None:
    module = net()
    hook = Hook((nn.Linear,), lambda layer, out: out * 0)
    done = train(module, Phase(hooks=(hook,)), X, Y, 0)
    assert done.loss == pytest.approx(float(torch.log(torch.tensor(3.0))), abs=1e-6)
    assert not module[0]._forward_hooks


def test_train_settings_make_the_schedule() -> None:
    settings = Train(lr=1.0, decay=0.5, milestones=(2,), factor=0.1)
    assert [settings.optim(r).lr for r in (1, 2, 3)] == pytest.approx([1.0, 0.5, 0.025])
    with pytest.raises(InputError, match=r"train\.lr"):
        Train(lr=0)


@pytest.mark.filterwarnings("ignore:reduction")
def test_distillation_is_batch_mean_with_temperature_squared() -> None:
    """Against the definition written out, and against torch's element-mean, which is smaller by the
    number of classes."""
    teacher, student = torch.randn(4, 10), torch.randn(4, 10)
    p, q = F.softmax(teacher / 3, 1), F.softmax(student / 3, 1)
    expected = 9 * (p * (p / q).log()).sum(1).mean()
    got = distillation(teacher, student, 3.0)
    assert torch.allclose(got, expected, atol=1e-6)
    element_mean = nn.KLDivLoss()(F.log_softmax(student / 3, 1), p) * 9
    assert torch.allclose(got / element_mean, torch.tensor(10.0), rtol=1e-4)


@pytest.mark.parametrize("rows", [3, 23, 40])
def test_how_many_rows_are_fetched_together_changes_nothing(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, 2, 6, 6, generator=draw), torch.arange(rows) % 3
    found, seen = [], []

    def noting(net: Net, batch: Batch, given: Given) -> Tensor:
        seen.append((batch.number, batch.rows.tolist(), batch.x.clone(), batch.y.clone()))
        return F.cross_entropy(net(batch.x), batch.y)

    for at_once in (1, 12, 512):
        monkeypatch.setattr("nestling.training.trainer.AT_ONCE", at_once)
        torch.manual_seed(1)
        module = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 3)
        )
        done = train(module, Phase(noting, batch=5, epochs=2, augment="shift"), x, y, 0, 4, 2, 1)
        found.append((module.state_dict(), done, list(seen)))
        seen.clear()
    (first, told, batched), *others = found
    plan = batches(rows, Phase(batch=5, epochs=2), module, 0, 4, 2, 1)
    assert [r for _, r, _, _ in batched] == [r.tolist() for r in plan] and [
        n for n, *_ in batched
    ] == list(range(told.steps))
    assert all(torch.equal(labels, y[r]) for _, r, _, labels in batched)
    for state, done, same_batches in others:
        assert same(first, state) and done == told
        assert all(torch.equal(a[2], b[2]) for a, b in zip(batched, same_batches, strict=True))
