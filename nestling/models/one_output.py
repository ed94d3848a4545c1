"""Networks that give a dict or a tuple: the one output that is asked of them.

Nothing is wrapped, so names of weights stay: a hook of the network's own picks the output, and goes
wherever the network is copied to.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from nestling.errors import InputError

LOGITS = "logits"
"""The name that is taken where several outputs would do, as most libraries have it."""


def pick_output(module: nn.Module, said: Any, wanted: tuple[int, ...]) -> None:
    """Makes a network that said this, a dict or a tuple of outputs, give the one of the wanted
    shape; nothing is done to one that gives a tensor."""
    if isinstance(said, Tensor) or not isinstance(said, (Mapping, tuple, list)):
        return
    named = dict(said) if isinstance(said, Mapping) else dict(enumerate(said))
    fit = [k for k, t in named.items() if isinstance(t, Tensor) and tuple(t.shape) == wanted]
    if LOGITS in fit:
        fit = [LOGITS]
    if len(fit) != 1:
        shapes = {k: tuple(t.shape) for k, t in named.items() if isinstance(t, Tensor)}
        found = ", ".join(f"{key!r} {shape}" for key, shape in shapes.items()) or "no tensor"
        which = "none" if not fit else "more than one"
        raise InputError(
            f"of the network's outputs ({found}) {which} has the shape {wanted}",
            field="model.name",
            fix=f"let it give one of that shape, or call it {LOGITS!r}",
        )
    module.register_forward_hook(partial(_picked, key=fit[0]))


def _picked(_module: nn.Module, _inputs: Any, said: Any, *, key: Hashable) -> Any:
    return said if isinstance(said, Tensor) else said[key]
