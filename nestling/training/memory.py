"""What a client keeps between rounds: named sections of its memory, and states of its network,
though the piece it trains may change.

A kept state of the network stands beside the view that it is of (as the name of an empty tensor).
Asked for under another view, it is cut and filled up; as long as one view holds the other nothing
is forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from nestling.views import Reference, State, View, to_spec
from nestling.views.view import put


def section(memory: Mapping[str, Tensor], kind: str) -> State:
    """The tensors of a section, by their own names; none where nothing was put there."""
    return {name[len(kind) + 1 :]: t for name, t in memory.items() if name.startswith(f"{kind}/")}


def sectioned(**sections: Mapping[str, Tensor]) -> State:
    """A memory of some sections."""
    return {f"{kind}/{name}": t for kind, state in sections.items() for name, t in state.items()}


def keep(
    memory: State, kind: str, reference: Reference, view: View, state: Mapping[str, Tensor]
) -> State:
    """The memory with a state of the view's network under `kind`."""
    old = _view_of(memory, kind, reference)
    if old is not None and old.key() != view.key() and old.contains(view):
        known = section(memory, kind)
        state = {
            n: _onto(reference, n, [(old, t), (view, state[n])], old) if n in state else t
            for n, t in known.items()
        }
        view = old
    return {
        **drop(memory, kind),
        f"{kind} {json.dumps(to_spec(view))}": torch.zeros(0),
        **sectioned(**{kind: state}),
    }


def recall(
    memory: State, kind: str, reference: Reference, view: View, otherwise: Mapping[str, Tensor]
) -> State:
    """What was kept under `kind`, for the view's network; entries that were not are those of
    `otherwise`, which also says which tensors are wanted."""
    old = _view_of(memory, kind, reference)
    if old is None:
        return dict(otherwise)
    known = {name: t for name, t in section(memory, kind).items() if name in otherwise}
    if old.key() == view.key():
        return {name: known.get(name, t) for name, t in otherwise.items()}
    return {
        name: _onto(reference, name, [(view, t), (old, known[name])], view) if name in known else t
        for name, t in otherwise.items()
    }


def drop(memory: State, kind: str) -> State:
    """The memory without what is kept under `kind`."""
    return {name: t for name, t in memory.items() if not name.startswith((f"{kind} ", f"{kind}/"))}


def _view_of(memory: State, kind: str, reference: Reference) -> View | None:
    spec = next((name[len(kind) + 1 :] for name in memory if name.startswith(f"{kind} ")), None)
    return None if spec is None else reference.view(json.loads(spec))


def _onto(
    reference: Reference, name: str, layers: list[tuple[View, Tensor]], wanted: View
) -> Tensor:
    """A tensor in the shape of the wanted view, put together from the others, later ones on top."""
    whole = torch.zeros(
        reference.axes.shapes[name], dtype=layers[0][1].dtype, device=layers[0][1].device
    )
    for view, tensor in layers:
        put(whole, view.where(name), tensor)
    return wanted.cut(name, whole)
