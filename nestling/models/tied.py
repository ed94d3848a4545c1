"""Tied weights: one tensor that a network knows under several names.

An embedding that is also the output layer, or a block that stands in several places, appears in
`state_dict` once a name. Whoever cuts, sends, sums and writes states by name would make several
tensors of it. Here it gets one name, the first, and its network keeps it one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

Tied = Mapping[str, tuple[str, ...]]
"""The first name of each tied tensor, and its other names."""


def tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """The tensors that the module has under several names: the first name, and the others."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for name, tensor in _all_tensors(module):
        if id(tensor) in first:
            others.setdefault(first[id(tensor)], []).append(name)
        else:
            first[id(tensor)] = name
    return {name: tuple(found) for name, found in others.items()}


def tie_again(module: nn.Module, tied: Tied) -> None:
    """Makes the named tensors one again, after each was replaced by itself."""
    for first, others in tied.items():
        tensor = _holder(module, first)
        for name in others:
            owner, leaf = _owner(module, name)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor)


def name_once(module: nn.Module) -> nn.Module:
    """The module itself, whose `state_dict` names every tensor once from now on; states with one
    name and with all of them can be loaded."""
    tied = tied_names(module)
    if tied:
        _part_modules(module, {id(module)})
    if tied and "_tied" not in module.__dict__:
        module.__dict__["_tied"] = tied
        module._register_state_dict_hook(_leave_out)
        module.register_load_state_dict_pre_hook(_put_back)
    return module


def _part_modules(module: nn.Module, seen: set[int]) -> None:
    """Puts a twin with the same tensors wherever a module stands a second time: `functional_call`
    would put its tensors back in the wrong order."""
    for name, child in module._modules.items():
        if child is None:
            continue
        if id(child) in seen:
            child = module._modules[name] = _twin(child)
        seen.add(id(child))
        _part_modules(child, seen)


def _twin(module: nn.Module) -> nn.Module:
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    for kept in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[kept] = dict(module.__dict__[kept])
    if isinstance(twin, nn.RNNBase):
        twin._init_flat_weights()
    return twin


def _all_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _holder(module: nn.Module, name: str) -> Tensor:
    owner, leaf = _owner(module, name)
    tensor: Tensor = getattr(owner, leaf)
    return tensor


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for others in module.__dict__["_tied"].values():
        for name in others:
            state.pop(prefix + name, None)


def _put_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    present = {name for name, _ in _all_tensors(module)}
    for first, others in module.__dict__["_tied"].items():
        for name in others:
            if prefix + first in state and name in present:
                state.setdefault(prefix + name, state[prefix + first])
