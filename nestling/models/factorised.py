"""Networks of factors: chosen layers replaced by two smaller ones whose product is the layer's
weight.

A layer computes u(v(x)). Two forms of its weight as a matrix, whose singular value decomposition
gives the factors:

    separable  (O·h)×(I·w): v is a 1×w convolution to r channels, u an h×1 one from them (FedHM);
    columns    O×(I·h·w):   v is an h×w convolution to r channels, u a 1×1 one from them (PriSM).

For linear layers and 1-D convolutions both are the same. The singular values go into both factors
by their roots, largest first, and each pair of singular vectors has its sign fixed, so that the
same weights always give the same factors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestling.models.parts import named
from nestling.models.tied import tied_names

FORMS = ("separable", "columns")


def factorable(
    module: nn.Module, *, dense: int = 1, pointwise: bool = False, linear: bool = False
) -> dict[str, tuple[int, ...]]:
    """The layers that may be factorised and the shapes of their weights, in order: convolutions
    without groups, but for the `dense` first ones and, unless `pointwise`, those with a kernel of
    one pixel; linear layers but for the last if `linear`. Layers whose weight is another one's too
    stay as they are."""
    tied = {name for first, others in tied_names(module).items() for name in (first, *others)}
    layers = {name: layer for name, layer in module.named_modules() if f"{name}.weight" not in tied}
    convolutions = [
        name for name, layer in layers.items() if isinstance(layer, (nn.Conv1d, nn.Conv2d))
    ]
    chosen = {
        name
        for name in convolutions[dense:]
        if _plain(layers[name]) and (pointwise or layers[name].weight[0, 0].numel() > 1)
    }
    if linear:
        every = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
        chosen |= set((every if convolutions else every[dense:])[:-1])
    return {name: tuple(layers[name].weight.shape) for name in layers if name in chosen}


def _plain(layer: nn.Module) -> bool:
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    return (
        layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )


def full_rank(shape: Sequence[int], form: str) -> int:
    """The most components a weight of this shape can have."""
    return min(_matrix(torch.empty(tuple(shape), device="meta"), form).shape)


def factorise(module: nn.Module, ranks: Mapping[str, int], form: str) -> nn.Module:
    """A copy of `module` in which each named layer is two of that rank, with the factors of its
    weight."""
    small, state = copy.deepcopy(module), module.state_dict()
    for name, rank in ranks.items():
        parent, _, leaf = name.rpartition(".")
        setattr(small.get_submodule(parent), leaf, _pair(small.get_submodule(name), rank, form))
    small.load_state_dict(to_factors(state, ranks, form))
    return small


def _pair(layer: nn.Module, rank: int, form: str) -> nn.Sequential:
    if isinstance(layer, nn.Linear):
        biased = layer.bias is not None
        return named(
            v=nn.Linear(layer.in_features, rank, bias=False),
            u=nn.Linear(rank, layer.out_features, bias=biased),
        )
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
    own = {
        "kernel_size": layer.kernel_size,
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
    }
    # A factor that does not look along a dimension leaves it as it is.
    still: dict[str, tuple[int, ...]] = {
        key: (int(key != "padding"),) * len(layer.stride) for key in own
    }
    down, up = own, still
    if form == "separable" and len(layer.stride) == 2:
        down = {key: (still[key][0], own[key][1]) for key in own}  # type: ignore[misc]
        up = {key: (own[key][0], still[key][1]) for key in own}  # type: ignore[misc]
    convolution: Any = type(layer)
    return named(
        v=convolution(layer.in_channels, rank, **down, bias=False),
        u=convolution(rank, layer.out_channels, **up, bias=layer.bias is not None),
    )


def to_factors(
    state: Mapping[str, Tensor], ranks: Mapping[str, int], form: str
) -> dict[str, Tensor]:
    """A state with the weights of the named layers as their first `rank` components; the bias goes
    with u."""
    found = {}
    for name, tensor in state.items():
        layer, _, leaf = name.rpartition(".")
        if layer not in ranks:
            found[name] = tensor
        elif leaf == "weight":
            found[f"{layer}.v.weight"], found[f"{layer}.u.weight"] = (
                t.contiguous() for t in split(tensor, form, ranks[layer])[::-1]
            )
        else:
            found[f"{layer}.u.{leaf}"] = tensor
    return found


def to_dense(
    state: Mapping[str, Tensor], layers: Sequence[str] | Mapping[str, object]
) -> dict[str, Tensor]:
    """The inverse of `to_factors`: factors multiplied into the weights they stand for."""
    found = {}
    for name, tensor in state.items():
        factor, _, leaf = name.rpartition(".")
        layer, _, side = factor.rpartition(".")
        if layer not in layers or side not in ("u", "v"):
            found[name] = tensor
        elif side == "u" and leaf == "weight":
            found[f"{layer}.weight"] = recompose(tensor, state[f"{layer}.v.weight"])
        elif side == "u":
            found[f"{layer}.{leaf}"] = tensor
    return found


def split(weight: Tensor, form: str, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """The factors (u, v) of a weight, in the shapes of their layers."""
    # In float64 and on the host: a decomposition differs from one kind of hardware to the next, and
    # clients never compute it.
    rows, values, columns = torch.linalg.svd(
        _matrix(weight.detach().double().cpu(), form), full_matrices=False
    )
    largest = rows.gather(0, rows.abs().argmax(0, keepdim=True))
    roots = values.sqrt() * torch.where(largest < 0, -1.0, 1.0)[0]
    left, right = ((rows * roots)[:, :rank], (columns * roots[:, None])[:rank])
    out, size = weight.shape[0], left.shape[1]
    v_kernel = list(weight.shape[2:])
    if form == "separable" and weight.dim() == 4:
        v_kernel[0] = 1
    u_kernel = [k // own for k, own in zip(weight.shape[2:], v_kernel, strict=True)]
    u = left.reshape(out, *u_kernel, size).movedim(-1, 1)
    v = right.reshape(size, weight.shape[1], *v_kernel)
    return u.to(weight), v.to(weight)


def singular_values(u: Tensor) -> Tensor:
    """The singular values that `split` put into a factor u, as one for every component."""
    return u.double().flatten(2).square().sum((0, 2)) if u.dim() > 2 else u.double().square().sum(0)


def recompose(u: Tensor, v: Tensor) -> Tensor:
    """The weight that two factors stand for."""
    tall, product = u.movedim(1, -1), _product(u, v)
    shape = [max(a, b) for a, b in zip(u.shape[2:], v.shape[2:], strict=True)]
    each = product.reshape(u.shape[0], tall[0, ..., 0].numel(), v.shape[1], -1).transpose(1, 2)
    return each.reshape(u.shape[0], v.shape[1], *shape)


def _product(u: Tensor, v: Tensor) -> Tensor:
    left, right = factor_matrices(u, v)
    return (left.double() @ right.double()).to(u.dtype)


def factor_matrices(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors as matrices whose product is the weight's matrix."""
    return u.movedim(1, -1).reshape(-1, u.shape[1]), v.reshape(v.shape[0], -1)


def frobenius_decay(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    given: Mapping[str, Tensor],  # noqa: ARG001 (a rule's signature)
    *,
    layers: tuple[str, ...],
    weight: float,
    plain: float = 0.0,
) -> Mapping[str, Tensor]:
    """A gradient rule: adds the gradient of weight/2·‖u·v‖², the decay of the product and not of
    the factors, and of plain/2·‖p‖² for all other parameters."""
    changed = dict(grads)
    factors: set[str] = set()
    for layer in layers:
        names = f"{layer}.u.weight", f"{layer}.v.weight"
        u, v = (params[name] for name in names)
        left, right = factor_matrices(u, v)
        tall = u.movedim(1, -1)
        changed[names[0]] = grads[names[0]] + weight * (left @ (right @ right.T)).reshape(
            tall.shape
        ).movedim(-1, 1)
        changed[names[1]] = grads[names[1]] + weight * ((left.T @ left) @ right).reshape(v.shape)
        factors.update(names)
    if plain:
        changed.update(
            {
                name: grad + plain * params[name]
                for name, grad in grads.items()
                if name not in factors
            }
        )
    return changed


def _matrix(weight: Tensor, form: str) -> Tensor:
    if form == "separable" and weight.dim() == 4:
        return weight.permute(0, 2, 1, 3).reshape(weight.shape[0] * weight.shape[2], -1)
    return weight.reshape(weight.shape[0], -1)
