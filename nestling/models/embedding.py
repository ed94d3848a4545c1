"""Features of one size for networks that have nothing in common: what their classifiers see is
brought to a common form."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from nestling.errors import unknown
from nestling.models.parts import named
from nestling.models.taps import Taps

BOUNDS: dict[str, type[nn.Module]] = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


class Pooled(nn.Module):
    """The means of `after` stretches of neighbouring features, as adaptive pooling has them. There
    is nothing to learn in it."""

    bins: Tensor

    def __init__(self, before: int, after: int) -> None:
        """Makes the matrix that averages `before` features into `after`; it is not part of the
        state."""
        super().__init__()
        bins = torch.zeros(before, after)
        for k in range(after):
            start, end = k * before // after, -(-(k + 1) * before // after)
            bins[start:end, k] = 1 / (end - start)
        # A product with a constant: its gradient is a product too, the same in every run, which
        # pooling's on a GPU is not.
        self.register_buffer("bins", bins, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The pooled features, of every step where there are steps."""
        return x @ self.bins


def with_features(module: nn.Module, taps: Taps, size: int, bound: str = "none") -> nn.Module:
    """A network whose classifier sees `size` features: the given one where it does already, else a
    copy with its features pooled to the size (repeated, where it is larger) that gives the same
    outputs as far as possible. The classifier then has one form in all networks."""
    if bound not in BOUNDS:
        raise unknown("bound", bound, BOUNDS, field="method.bound")
    if taps.features == size and bound == "none":
        return module
    head = module.get_submodule(taps.head)
    assert isinstance(head, nn.Linear)
    if taps.features == size:
        return _with_top(module, taps, named(bound=BOUNDS[bound](), out=copy.deepcopy(head)))
    pool = Pooled(head.in_features, size)
    return _with_top(module, taps, named(pool=pool, bound=BOUNDS[bound](), out=_behind(pool, head)))


@torch.no_grad()
def _behind(pool: Pooled, head: nn.Linear) -> nn.Linear:
    """The classifier that says of pooled features what the given one says of the features, as
    nearly as it can: exactly, where there are no fewer of them."""
    out = nn.Linear(pool.bins.shape[1], head.out_features, bias=head.bias is not None)
    out.weight.copy_(head.weight @ torch.linalg.pinv(pool.bins.to(head.weight)).T)
    if head.bias is not None:
        out.bias.copy_(head.bias)
    return out


def with_embedding(module: nn.Module, taps: Taps, size: int) -> nn.Module:
    """A copy of the network with a linear layer to `size` features in front of a new classifier:
    for parts of one network, whose own features are as many as they are wide."""
    head = module.get_submodule(taps.head)
    assert isinstance(head, nn.Linear)
    return _with_top(
        module,
        taps,
        named(embed=nn.Linear(head.in_features, size), out=nn.Linear(size, head.out_features)),
    )


def _with_top(module: nn.Module, taps: Taps, top: nn.Module) -> nn.Module:
    changed = copy.deepcopy(module)
    parent, _, last = taps.head.rpartition(".")
    place = next(changed.get_submodule(taps.head).parameters()).device
    setattr(changed.get_submodule(parent), last, top.to(place))
    own = getattr(changed, "taps", {})
    if "head" in own:  # a network that names its head itself
        vars(changed)["taps"] = {**own, "head": f"{taps.head}.out"}
    return changed
