"""The middle of a network: what lies between its stem and its classifier, found by watching a pass
through it.

The middle begins at the input of one layer, its entry: the first of the stages that a network of
stages has, the first repeated block of any other, or the layer that the user names. It ends with
the features that the head is given. Which parameters lie in it is asked of the gradients. A pass
through the middle alone is a pass through all of it in which the entry is given something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.norm import WidthNorm
from nestling.models.parts import Network
from nestling.models.record import blank_inputs
from nestling.models.taps import find_taps
from nestling.views.depth import columns
from nestling.views.reference import Reference
from nestling.views.view import View

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Middle:
    """entry and head by name, the parameters between them, and the shapes, of one sample, of what
    goes in and what comes out."""

    entry: str
    head: str
    parameters: tuple[str, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


@lru_cache(maxsize=256)
def middle_of(reference: Reference, view: View, entry: str = "") -> Middle:
    """The middle of a view's network."""
    module, shape = reference.network(view), reference.shape
    entry = entry or _entry(reference)
    if entry not in dict(module.named_modules()):
        raise InputError(
            f"the network has no layer {entry!r}",
            field="method.entry",
            fix="name one that all devices train",
        )
    head = find_taps(module, shape, head=getattr(module, "taps", {}).get("head", "")).head
    params = dict(module.named_parameters())
    with torch.enable_grad():
        x = blank_inputs(module, shape)
        before, after = features(module.train(), entry, head, x)
        if not _reached(before, params):
            raise InputError(
                f"nothing is trained before {entry!r}: what would be sent are the clients' "
                "inputs themselves",
                field="model.name",
                fix="take a network with a stem (tinyresnet, resnet18, …), or name a later layer "
                "with method.entry",
            )
        between = _reached(through(module, entry, head, before.detach(), shape), params)
    return Middle(entry, head, between, tuple(before.shape[1:]), tuple(after.shape[1:]))


def _entry(reference: Reference) -> str:
    if isinstance(reference.module, Network):
        return "stages"
    try:
        return columns(reference)[0][0]
    except InputError:
        raise InputError(
            "the network has no stages and no repeated blocks: where does its middle begin?",
            field="method.entry",
            fix="name the layer whose input is to be exchanged",
        ) from None


def _reached(out: Tensor, params: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The parameters that a tensor was made with."""
    if not out.requires_grad:
        return ()
    grads = torch.autograd.grad(out.sum(), list(params.values()), allow_unused=True)
    return tuple(name for name, grad in zip(params, grads, strict=True) if grad is not None)


def features(
    module: nn.Module, entry: str, head: str, x: Tensor, change: Change | None = None
) -> tuple[Tensor, Tensor]:
    """What the entry and the head are given in a pass, after `change` where there is one. No
    statistics move."""
    seen: list[Tensor] = []

    def hook(given: Tensor) -> Tensor:
        seen.append(given if change is None else change(given))
        return seen[-1]

    with still(module), changed(module, entry, hook), changed(module, head, hook):
        module(x)
    return seen[0], seen[1]


def through(
    module: nn.Module, entry: str, head: str, given: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """What the head would be given if the entry were given this. No statistics move."""
    seen: list[Tensor] = []

    def hook(out: Tensor) -> Tensor:
        seen.append(out)
        return out

    # What precedes the entry has to run on something; two rows are the fewest that every
    # normalisation takes.
    x = blank_inputs(module, shape)
    x = x.to(given.device, given.dtype) if x.is_floating_point() else x
    with still(module), changed(module, entry, lambda _: given), changed(module, head, hook):
        module(x)
    return seen[0]


@contextlib.contextmanager
def changed(module: nn.Module, layer: str, change: Change) -> Iterator[None]:
    """The module with the input of one layer changed inside the block."""
    take = module.get_submodule(layer).register_forward_pre_hook
    handle = take(lambda _, inputs: (change(inputs[0]), *inputs[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def still(module: nn.Module) -> Iterator[None]:
    """The module with running statistics that do not move inside the block: batches are normalised
    by themselves as in training."""
    tracking = [
        m
        for m in module.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    # Those of every width move in any pass that trains, so these layers use what they know instead.
    by_width = [m for m in module.modules() if isinstance(m, WidthNorm) and m.training]
    for layer in tracking:
        layer.track_running_stats = False
    for layer in by_width:
        layer.eval()
    try:
        yield
    finally:
        for layer in tracking:
            layer.track_running_stats = True
        for layer in by_width:
            layer.train()
