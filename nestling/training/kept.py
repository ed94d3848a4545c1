"""Tensors that never move, for work that was recorded on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Rate:
    """A learning rate on the device, sent only when it changes."""

    def __init__(self, device: torch.device) -> None:
        """Starts at 0."""
        self.tensor, self._value = torch.zeros((), device=device), 0.0

    def set(self, value: float) -> None:
        """Sets the rate; nothing is sent where it is the same as before."""
        if value != self._value:
            self.tensor.fill_(value)
            self._value = value


class Kept:
    """Tensors that a program is given, in places that never move; what is there already is not
    copied again."""

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        """Copies what is given into contiguous tensors of its own."""
        self.tensors = {
            name: t.clone(memory_format=torch.contiguous_format) for name, t in given.items()
        }
        # Those who gave are held, so that nobody else can be taken for them.
        self._from: dict[str, tuple[Tensor, int]] = {}

    def take(self, given: Mapping[str, Tensor]) -> None:
        """Copies what is not here yet. What was given is never written to, or its version would
        tell."""
        new = [name for name, tensor in given.items() if not self._same(name, tensor)]
        if new:
            torch._foreach_copy_(
                [self.tensors[name] for name in new], [given[name] for name in new]
            )
            self._from.update({name: (given[name], given[name]._version) for name in new})

    def _same(self, name: str, tensor: Tensor) -> bool:
        known = self._from.get(name)
        return known is not None and known[0] is tensor and known[1] == tensor._version
