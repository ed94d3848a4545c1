"""The loss of a smaller network inside a larger one, both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from nestling.models import build
from nestling.seeds import torch_seeded
from nestling.training.inner import with_inner
from nestling.training.objectives import Batch, Net
from nestling.training.rules import masked_gradients
from nestling.views import Reference, View, prefix
from nestling.views.nested import common_head, nested_masks, prepare

SHAPE = (1, 12, 12)


class Nested:
    """A network under the masks of its three levels, and what `with_inner` is told about it."""

    def __init__(self, model: str) -> None:
        with torch_seeded(0, "test network"):
            self.reference = Reference("main", build(model, shape=SHAPE, classes=3), SHAPE)
        self.levels = [prefix(self.reference.axes, p) for p in (0.3, 0.6, 1.0)]
        self.own, self.smaller = self.levels[-1], tuple(self.levels[:-1])
        self.masks = nested_masks(self.reference.axes, self.levels)
        prepare(self.reference, self.smaller)
        state = self.reference.initial
        self.state = {
            name: t * self.masks[name] if name in self.masks else t.clone()
            for name, t in state.items()
        }
        self.head = common_head(self.reference, self.own, self.smaller)

    def objective(self, net: Net, batch: Batch, head: str) -> Tensor:
        return with_inner(
            net,
            batch,
            {},
            reference=self.reference,
            own=self.own,
            smaller=self.smaller,
            weight=0.5,
            head=head,
        )

    def gradients(self, number: int, head: str) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and what the mask leaves of the gradients."""
        module = self.reference.network(self.own, self.state).train()
        net = Net(module, dict(module.named_parameters()))
        loss = self.objective(net, batch(number), head)
        grads = torch.autograd.grad(loss, list(net.params.values()))
        return loss.detach(), dict(
            masked_gradients(net.params, dict(zip(net.params, grads, strict=True)), self.masks)
        )


def batch(number: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(number)
    x, y = torch.randn(6, *SHAPE, generator=draw), torch.randint(0, 3, (6,), generator=draw)
    return Batch(x, y, torch.arange(6), number)


@pytest.mark.parametrize("model", ["tinycnn", "resnet8", "mlp"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_smaller_network_read_off_the_larger_one_trains_the_same(model: str, number: int) -> None:
    nested = Nested(model)
    assert nested.head
    (apart, alone), (common, together) = (
        nested.gradients(number, ""),
        nested.gradients(number, nested.head),
    )
    torch.testing.assert_close(apart, common, rtol=1e-5, atol=1e-6)
    for name, expected in alone.items():
        torch.testing.assert_close(
            together[name],
            expected,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_the_smaller_networks_take_turns() -> None:
    nested, x = Nested("tinycnn"), batch()
    module = nested.reference.network(nested.own, nested.state).train()
    net = Net(module, dict(module.named_parameters()))
    first, second, third = (
        float(nested.objective(net, Batch(x.x, x.y, x.rows, n), nested.head).detach())
        for n in range(3)
    )
    assert first == third != second


def test_it_runs_for_many_clients_at_once() -> None:
    nested, one = Nested("tinycnn"), batch()
    module = nested.reference.network(nested.own, nested.state).train()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nested.objective(Net(self.inner, {}), Batch(x, y, one.rows, 0), nested.head)

    whole = Whole()
    state = {f"inner.{name}": t for name, t in nested.state.items()}
    many: Any = {name: torch.stack([t, t]) for name, t in state.items()}
    found = vmap(grad(lambda s, x, y: functional_call(whole, s, (x, y))), in_dims=(0, None, None))(
        many, one.x, one.y
    )
    expected = nested.gradients(0, nested.head)[1]
    for name, t in expected.items():
        mask = nested.masks.get(name, torch.ones_like(t))
        torch.testing.assert_close(found[f"inner.{name}"][1] * mask, t, rtol=1e-4, atol=1e-5)


def plain(view: View, reference: Reference) -> bool:
    return common_head(reference, reference.full, (view,)) == ""


class Mixed(nn.Module):
    """Its norm mixes channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(9, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x.flatten(1)))))


class Scaled(nn.Module):
    """Its head is not the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(9, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.b(torch.relu(self.a(x.flatten(1))))


class Convolved(nn.Module):
    """Its head is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))).flatten(1)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def counting() -> nn.Module:
    return build("tinycnn", shape=(1, 3, 3), classes=3, norm="tracked")


@pytest.mark.parametrize("make", [Mixed, Scaled, Convolved, dropping, counting])
def test_networks_whose_features_are_not_common_are_run_apart(make: Any) -> None:
    reference = Reference("main", make(), (1, 3, 3))
    assert plain(prefix(reference.axes, 0.5), reference)
