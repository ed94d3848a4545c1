"""In which order images lie in memory. A CPU convolves, pools and reads them faster with the
channels of a pixel side by side."""

from __future__ import annotations

import copy
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

LARGEST = 2**22
"""Networks of more parameters are given images as they are: their weights would be turned over in
every step, which costs more than is gained."""

_READY: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def by_pixel(module: nn.Module, x: Tensor) -> Tensor:
    """The images, channels last where the network should be given them so: then all its maps are.
    Weights stay as they are, since other code may want to see them as vectors."""
    if x.dim() != 4 or x.device.type != "cpu" or not takes_pixels(module, x):
        return x
    # Not `contiguous`: images of one channel count as ordered either way, and convolutions would
    # not know which is meant.
    return x.clone(memory_format=torch.channels_last)


def takes_pixels(module: nn.Module, x: Tensor) -> bool:
    """Whether it pays for a network, and it runs on such images at all: tried out once, since its
    code may look at a map as a vector without copying it."""
    known = _READY.get(module)
    if known is None:
        known = _READY[module] = _pays(module) and _try(module, x)
    return known


def _pays(module: nn.Module) -> bool:
    convolves = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
    return (
        convolves
        and torch.backends.mkldnn.is_available()
        and sum(p.numel() for p in module.parameters()) <= LARGEST
    )


@torch.no_grad()
def _try(module: nn.Module, x: Tensor) -> bool:
    try:
        copy.deepcopy(module).eval()(
            torch.zeros_like(x[:1].expand(2, *x.shape[1:]), memory_format=torch.channels_last)
        )
    except Exception:  # the run itself will say what is wrong
        return False
    return True
