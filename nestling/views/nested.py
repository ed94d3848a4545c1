"""A view's network run on the reference's own parameters, so that gradients reach them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nestling.views.reference import Reference
from nestling.views.view import View, take


def forward(reference: Reference, view: View, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The output of the view's network, its weights cut out of `state` on the way."""
    local = {name: take(state[name], view.where(name)) for name in view.members}
    return torch.func.functional_call(reference.network(view).train(), local, (x,))
