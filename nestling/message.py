"""What travels between server and clients: named tensors, grouped by what they are, and a few plain
facts.

A message has an exact size and a serial form without pickle (safetensors). Nothing that came over a
wire is trusted: `from_bytes` bounds sizes and refuses what it cannot read, and `faults` says what
is wrong with a reply before anybody uses it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, SupportsFloat

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as _load
from safetensors.torch import save as _save
from torch import Tensor

from nestling.errors import InputError

MAX_BYTES = 2**31
"""The largest message that is read (2 GiB)."""

LARGEST = 1e18
"""The largest norm of values that are merged. Its square, which optimisers take, is still far from
the end of float32; a network with such weights has long been lost."""

TRANSPORTS = ("float32", "fp16", "int8")
"""How float tensors travel to real devices: as they are, as 16-bit floats, or matrices as 8-bit
integers with one scale each (the rest as 16-bit floats)."""

_SEPARATOR = "/"
_PACKED = "bits:"


@dataclass(eq=False)
class Message:
    """Parts by kind (`weights`, `logits`, `prototypes`, `mask`, `control`, …), each a set of named
    tensors, and plain facts."""

    parts: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> Mapping[str, Tensor]:
        """The named tensors of one kind."""
        return self.parts[kind]

    def __contains__(self, kind: str) -> bool:
        """Whether the message has a part of this kind."""
        return kind in self.parts

    @cached_property
    def nbytes(self) -> int:
        """The exact payload: every tensor's bytes, flags packed to bits. Names and facts are the
        header and not counted."""
        # A state in one piece of memory knows its size without making its tensors.
        return sum(
            getattr(part, "nbytes", None) or sum(payload(t) for t in part.values())
            for part in self.parts.values()
        )

    def to_bytes(self) -> bytes:
        """The serial form."""
        tensors, shapes, order = {}, {}, []
        for kind, part in self.parts.items():
            for name, tensor in part.items():
                key = f"{kind}{_SEPARATOR}{name}"
                order.append(key)
                if tensor.dtype == torch.bool:
                    shapes[key] = list(tensor.shape)
                    tensors[_PACKED + key] = pack_bits(tensor)
                else:
                    tensors[key] = tensor.detach().cpu().contiguous()
        tensors = _apart(tensors)
        # The format keeps names in no order, and a sum over them is rounded by it.
        told = {
            "facts": dict(self.facts),
            "bits": shapes,
            "kinds": list(self.parts),
            "order": order,
        }
        return _save(tensors, metadata={name: json.dumps(value) for name, value in told.items()})

    @staticmethod
    def from_bytes(data: bytes) -> Message:
        """The message that `to_bytes` wrote; anything else is refused with an `InputError`."""
        if len(data) > MAX_BYTES:
            raise InputError(f"a message of {len(data)} bytes is over the limit of {MAX_BYTES}")
        try:
            meta = _metadata(data)
            facts, shapes, kinds, order = (
                json.loads(meta[k]) for k in ("facts", "bits", "kinds", "order")
            )
            if not isinstance(facts, dict):
                raise ValueError("the facts are no table")
            parts: dict[str, dict[str, Tensor]] = {str(kind): {} for kind in kinds}
            found = {
                key.removeprefix(_PACKED): (key, tensor) for key, tensor in _load(data).items()
            }
            if sorted(found) != sorted(order):
                raise ValueError("the tensors are not those that the header names")
            for key in order:
                stored, tensor = found[key]
                if stored.startswith(_PACKED):
                    tensor = unpack_bits(tensor, shapes[key])
                kind, _, name = key.partition(_SEPARATOR)
                parts[kind][name] = tensor
        except (
            SafetensorError,
            KeyError,
            ValueError,
            TypeError,
            UnicodeDecodeError,
            RuntimeError,  # among them what is nested too deeply
            OverflowError,
            AttributeError,
        ) as error:
            raise InputError(f"not a readable message: {type(error).__name__}: {error}") from error
        return Message(parts, facts)


def payload(tensor: Tensor) -> int:
    """Bytes of one tensor on the wire."""
    return (
        math.ceil(tensor.numel() / 8)
        if tensor.dtype == torch.bool
        else tensor.numel() * tensor.element_size()
    )


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each in storage of its own, as safetensors wants them."""
    found, taken = {}, set[int]()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shared = storage.nbytes() != tensor.nbytes or storage.data_ptr() in taken
        found[name] = tensor.clone() if shared else tensor
        taken.add(storage.data_ptr())
    return found


def pack_bits(flags: Tensor) -> Tensor:
    """Flags as bytes, eight to one."""
    return torch.from_numpy(np.packbits(flags.detach().cpu().numpy().reshape(-1)))


def unpack_bits(packed: Tensor, shape: list[int]) -> Tensor:
    """The flags that `pack_bits` packed."""
    if not isinstance(shape, list) or any(type(side) is not int or side < 0 for side in shape):
        raise ValueError("a shape that cannot be")
    count = math.prod(shape)
    if packed.numel() != -(-count // 8):
        raise ValueError("packed flags do not match their shape")
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).astype(bool)).reshape(shape)


def faults(message: Message, like: Mapping[str, Mapping[str, Tensor]]) -> str | None:
    """Why a reply must be refused, or None: wrong kinds, names, shapes or types against `like`, or
    values that are not finite or too large."""
    for kind, expected in like.items():
        if kind not in message:
            return f"the part {kind!r} is missing"
        got = message[kind]
        if set(got) != set(expected):
            strange = sorted(set(got) ^ set(expected))
            return f"{kind}: names differ from what was sent ({', '.join(strange[:3])})"
        for name, tensor in got.items():
            if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
                want = f"{tuple(expected[name].shape)} {expected[name].dtype}"
                return (
                    f"{kind}/{name}: {tuple(tensor.shape)} {tensor.dtype} where {want} was expected"
                )
    floats = {
        (kind, name): t
        for kind, part in message.parts.items()
        for name, t in part.items()
        if t.is_floating_point()
    }
    if not small_enough(norms(list(floats.values()))):
        for (kind, name), tensor in floats.items():
            if not torch.isfinite(tensor).all():
                return f"{kind}/{name}: values that are not finite"
        return f"values that are too large to be merged, beyond {LARGEST:g}"
    return None


def norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The norm of all values together, for each place that some of them are on; not finite where a
    value is not. One number a place, because reading it waits for what computes there."""
    plain = [tensor if tensor.dtype == torch.float32 else tensor.float() for tensor in tensors]
    places = {tensor.device for tensor in plain}
    own = [[tensor for tensor in plain if tensor.device == place] for place in places]
    return [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(those))) for those in own]


def small_enough(found: Iterable[SupportsFloat]) -> bool:
    """Whether norms are finite, and below what the server can still reckon with."""
    return all(float(norm) <= LARGEST for norm in found)


def _metadata(data: bytes) -> dict[str, str]:
    """The header's metadata, which safetensors' in-memory loader does not give."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("the header is longer than the message")
    return dict(json.loads(data[8 : 8 + length])["__metadata__"])
