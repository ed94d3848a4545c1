"""Smaller networks of the same kind: a module rebuilt around sliced tensors.

The class of the module and its forward stay as they are; only tensors, the sizes that layers keep
as attributes, and the units that a view leaves out change. It works for any module made of the
layers below, because it follows the tensors' shapes.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.tied import name_once, tie_again, tied_names
from nestling.views.view import View

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def sub_module(module: nn.Module, view: View) -> nn.Module:
    """The network that a view describes, with the view's weights of `module`."""
    state = module.state_dict()
    shapes = {name: view.shape(name) for name in view.members}
    small = resize(module, shapes, view.dropped, view.sizes)
    small.load_state_dict({name: view.cut(name, state[name]) for name in view.members})
    return small


def resize(
    module: nn.Module,
    shapes: Mapping[str, Sequence[int]],
    dropped: Iterable[str] = (),
    counts: Mapping[str, int] | None = None,
) -> nn.Module:
    """A copy of `module` with tensors of the given shapes (values unset), without the dropped
    units, and with new values of the attributes that count channels."""
    small = name_once(copy.deepcopy(module))
    for unit in sorted(dropped, key=_reversed_position):
        _drop(small, unit)
    tied = tied_names(small)
    _refuse_half_of_a_tie(module, small)
    first = {name: key for key, others in tied.items() for name in others}
    for name, layer in small.named_modules():
        own = {leaf: f"{name}.{leaf}" if name else leaf for leaf in _leaves(layer)}
        keys = {leaf: first.get(key, key) for leaf, key in own.items()}
        _resize_layer(
            layer,
            {leaf: tuple(shapes[key]) for leaf, key in keys.items() if key in shapes},
            {key.rpartition(".")[2] for key in counts or {} if key.rpartition(".")[0] == name},
        )
    tie_again(small, tied)
    for key, size in (counts or {}).items():
        path, _, attribute = key.rpartition(".")
        with contextlib.suppress(AttributeError):  # it was in a unit that is left out
            setattr(small.get_submodule(path), attribute, size)
    return small


def _refuse_half_of_a_tie(module: nn.Module, small: nn.Module) -> None:
    """A unit cannot be left out whose weights are those of one that stays."""
    present = {name for name, _ in small.named_parameters(remove_duplicate=False)}
    for name, others in tied_names(module).items():
        left = [other for other in others if other in present]
        if name not in present and left:
            raise InputError(
                f"{name!r} is tied to {left[0]!r}: one cannot be left out without the other",
                field="method",
                fix="take a method that cuts the width, or a network whose units share no weights",
            )


def _reversed_position(unit: str) -> tuple[int, str]:
    """Later items of a list go first, so that positions of the earlier ones stay valid."""
    last = unit.rsplit(".", 1)[-1]
    return (-int(last) if last.isdigit() else 0, unit)


def _drop(module: nn.Module, unit: str) -> None:
    parent_name, _, leaf = unit.rpartition(".")
    parent = module.get_submodule(parent_name) if parent_name else module
    if isinstance(parent, nn.ModuleList) and int(leaf) == len(parent) - 1:
        del parent[int(leaf)]
    else:
        # A residual block in the middle of a stage: its place is taken by the identity.
        setattr(parent, leaf, nn.Identity())


def _leaves(layer: nn.Module) -> list[str]:
    return [*dict(layer.named_parameters(recurse=False)), *dict(layer.named_buffers(recurse=False))]


def _resize_layer(
    layer: nn.Module, shapes: Mapping[str, tuple[int, ...]], counted: Collection[str]
) -> None:
    before = {name: tuple(getattr(layer, name).shape) for name in shapes}
    changed = {name: shape for name, shape in shapes.items() if shape != before[name]}
    if not changed:
        return
    for name, shape in changed.items():
        _replace(layer, name, shape)
    weight = shapes.get("weight")
    if isinstance(layer, _CONVOLUTIONS) and weight:
        layer.groups = layer.groups * weight[0] // before["weight"][0] if layer.groups > 1 else 1
        layer.out_channels, layer.in_channels = weight[0], weight[1] * layer.groups
    elif isinstance(layer, _TRANSPOSED) and weight:
        layer.in_channels, layer.out_channels = weight[0], weight[1]
    elif isinstance(layer, nn.Linear) and weight:
        layer.out_features, layer.in_features = weight
    elif isinstance(layer, nn.Embedding) and weight:
        layer.embedding_dim = weight[1]
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
        layer.num_features = next(shape[-1] for shape in changed.values())
    elif isinstance(layer, nn.GroupNorm) and weight:
        _resize_group_norm(layer, weight[0])
    elif isinstance(layer, nn.LayerNorm) and weight:
        layer.normalized_shape = weight
    elif isinstance(layer, nn.RNNBase):
        _resize_recurrent(layer, shapes)
    elif isinstance(layer, nn.RNNCellBase):
        layer.input_size, layer.hidden_size = shapes["weight_ih"][1], shapes["weight_hh"][1]
    elif isinstance(layer, nn.MultiheadAttention):
        _resize_attention(layer, shapes)
    elif not _plain(layer, counted):
        raise InputError(
            f"a layer of type {type(layer).__name__} cannot be made smaller",
            field="model.name",
            fix="build the network from convolutions, linear, recurrent and attention layers and "
            "norms, or give every tier ratio = 1",
        )


def _plain(layer: nn.Module, counted: Collection[str]) -> bool:
    """A module that only holds parameters (a scale, a token) keeps no sizes of its own, or such as
    are known to count channels."""
    sizes = ("in_features", "in_channels", "num_channels", "hidden_size", "embed_dim")
    return not any(hasattr(layer, name) for name in sizes if name not in counted)


def _resize_recurrent(layer: nn.RNNBase, shapes: Mapping[str, tuple[int, ...]]) -> None:
    layer.input_size = shapes["weight_ih_l0"][1]
    gates = {"LSTM": 4, "GRU": 3}.get(layer.mode, 1)
    layer.hidden_size = shapes["weight_ih_l0"][0] // gates
    if layer.proj_size:
        layer.proj_size = shapes["weight_hh_l0"][1]
    layer._init_flat_weights()


def _resize_attention(layer: nn.MultiheadAttention, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Heads keep their size, so there are fewer of them."""
    if "in_proj_weight" in shapes:
        layer.embed_dim = layer.kdim = layer.vdim = shapes["in_proj_weight"][1]
    else:
        layer.embed_dim = shapes["q_proj_weight"][1]
        layer.kdim, layer.vdim = shapes["k_proj_weight"][1], shapes["v_proj_weight"][1]
    layer.num_heads = layer.embed_dim // layer.head_dim


def _resize_group_norm(norm: nn.GroupNorm, channels: int) -> None:
    """Groups keep their size, so that a prefix of whole groups normalises exactly as in the wide
    network."""
    size = norm.num_channels // norm.num_groups
    norm.num_channels, norm.num_groups = channels, channels // math.gcd(channels, size)


def _replace(layer: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    old: Tensor = getattr(layer, name)
    fresh = torch.zeros(shape, dtype=old.dtype, device=old.device)
    if isinstance(old, nn.Parameter):
        setattr(layer, name, nn.Parameter(fresh, requires_grad=old.requires_grad))
    else:
        layer.register_buffer(name, fresh)
