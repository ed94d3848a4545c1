"""A gate behind the merge: the best state comes back where a round ruins the model.

After every merge the global model is tested on the server's public rows, which no client trains on.
If its loss is more than `server.gate` times the smallest so far (that of the first weights counts),
the server goes on from the state that had it: the replies of the round are lost, and so are those
of the rounds since. Both are part of the checkpoint, so that a run that is resumed returns to the
same state.
"""

from __future__ import annotations

from typing import Any

import torch

from nestling.methods.server import KEPT, Kept
from nestling.runs.evaluation import ready
from nestling.runs.federation import Federation
from nestling.tasks import losses
from nestling.training.distiller import logits_of

BEST, GOOD = f"{KEPT}best", f"{KEPT}good:"
"""Where the smallest loss is kept, and the state that had it."""


def begin(federation: Federation) -> None:
    """Before the first round the state is the best there is."""
    if BEST not in federation.kept:
        federation.kept = _with_best(federation, _loss(federation))


def guard(federation: Federation) -> dict[str, Any]:
    """Tests what a merge made, and goes back to the best state if it must; says what it found."""
    best, now = float(federation.kept[BEST]["loss"]), _loss(federation)
    if now <= best:
        federation.kept = _with_best(federation, now)
    back = now > best * federation.server.gate
    if back:
        own = {name: s for name, s in federation.kept.items() if name.startswith((BEST, GOOD))}
        federation.restore({name.removeprefix(GOOD): s for name, s in own.items() if name != BEST})
        federation.kept |= own
    return {"loss": now, "best": min(now, best), "returned": back}


def news(round: int, found: dict[str, Any] | None) -> list[str]:
    """What a run says where the gate sent it back."""
    if not (found and found["returned"]):
        return []
    return [
        f"round {round}: a loss of {found['loss']:.3g} on the public rows where it was "
        f"{found['best']:.3g}: the server went back to its best state"
    ]


@torch.no_grad()
def _loss(federation: Federation) -> float:
    """The global model's mean loss on the public rows; infinite where it has none."""
    world, model = federation.world, federation.method.global_model()
    x, y = world.public, world.public_labels
    assert model is not None
    assert x is not None
    assert y is not None
    found = losses(logits_of(ready(model, federation.bench), x), y).mean()
    return float(found.nan_to_num(torch.inf, torch.inf))


def _with_best(federation: Federation, loss: float) -> Kept:
    """What the server keeps, with its state as it is now as the best."""
    rest = {n: s for n, s in federation.kept.items() if not n.startswith((BEST, GOOD))}
    now = {**federation.method.state(), **rest}
    good = {f"{GOOD}{name}": state.copy() for name, state in now.items()}
    return {**rest, **good, BEST: {"loss": torch.tensor(loss, dtype=torch.float64)}}
