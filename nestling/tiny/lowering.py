"""From a phase to a job: a client's training in the words that a board understands.

A phase is Python: any objective, any rule. The C runtime knows a fixed set of them, and this file
says which function is which. What it does not know is refused by name; nothing is trained otherwise
than the method asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.planning.descriptor import DescriptorSettings
from nestling.planning.plan import MemoryPlan, plan
from nestling.seeds import numbers
from nestling.tiny.runtime.job import Done, Job, Step
from nestling.training.augment import AUGMENTATIONS, REACH, shift
from nestling.training.client import (
    Client,
    ClientSide,
    Errand,
    Outcome,
    Site,
    carry_out,
    working,
)
from nestling.training.inner import with_inner
from nestling.training.objectives import (
    Given,
    present_cross_entropy,
    proximal,
    supervised,
    with_targets,
)
from nestling.training.order import counters, keys
from nestling.training.phase import Hook, Phase, divide
from nestling.training.rules import masked_gradients
from nestling.training.trainer import Trained, phase_schedule, trained
from nestling.views import Reference, State, View
from nestling.views.flat import pack
from nestling.views.nested import forward, within

Runner = Callable[[Client, Job], Done]
"""Runs a client's job somewhere."""


class CannotLower(InputError):
    """The C runtime has no word for what a phase asks for."""


def work_on(runner: Runner, method: ClientSide, errand: Errand, site: Site) -> Outcome:
    """One client's round, its training done by `runner`."""

    def train(client: Client, phase: Phase, number: int) -> Trained:
        job = job_for(client, phase, number)
        return board_trained(client, job, runner(client, job) if job.steps else None)

    return carry_out(working(method, errand, site), train)


def board_trained(client: Client, job: Job, done: Done | None) -> Trained:
    """Gives the client the weights that its job left (None: there was nothing to train on)."""
    if done is None:
        return Trained(0.0, 0, 0)
    moved = job.plan.unpack(done.weights, client.weights)
    order = client.reference.network(client.view).state_dict()
    client.weights = pack(
        {name: moved.get(name, client.weights[name]).to(client.place) for name in order}
    )
    return Trained(done.loss / max(done.samples, 1), done.steps, done.samples)


def job_for(client: Client, phase: Phase, number: int) -> Job:
    """The phase as a job, exactly as `training.trainer.train` would run it: the same rows, order,
    moves and updates."""
    _check(phase)
    loss = _loss_of(phase, client.site.y)
    masks = _masks_of(phase, trained(client.reference.network(client.view), phase))
    made = _plan_of(client, phase, loss, bool(masks))
    state = dict(client.weights)
    parts = [_inner_inputs(client, made, part, masks) for part in loss.smaller]
    return Job(
        plan=made,
        weights=made.pack(state),
        settings=_settings(phase, loss),
        steps=_steps(client, phase, number, parts),
        anchor=None if loss.anchor is None else _anchor(made, state, loss.anchor),
        mask=made.mask(masks) if masks else None,
        present=None if loss.present is None else _array(loss.present),
        targets=None if loss.targets is None else _array(loss.targets),
    )


# -- what the phase asks for -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Loss:
    """An objective as weights of the terms that the C runtime knows, and the tensors they need."""

    ce: float = 1.0
    mse: float = 0.0
    kd: float = 0.0
    temperature: float = 1.0
    mu: float = 0.0
    inner: float = 0.0
    values: bool = False  # the rows' own targets are values, and lie in the board's data
    smaller: Sequence[View] = ()
    present: Tensor | None = None
    targets: Tensor | None = None
    anchor: Mapping[str, Tensor] | None = None


def _plain(_given: Mapping[str, Tensor]) -> _Loss:
    return _Loss()


def _present(given: Mapping[str, Tensor]) -> _Loss:
    return _Loss(present=given["present"])


def _proximal(given: Mapping[str, Tensor], mu: float) -> _Loss:
    return _Loss(mu=mu, anchor=given) if mu else _Loss()


def _targets(
    given: Mapping[str, Tensor],
    ce: float = 1.0,
    kd: float = 0.0,
    mse: float = 0.0,
    temperature: float = 1.0,
) -> _Loss:
    return _Loss(ce, mse, kd, temperature, targets=given["targets"])


def _inner(
    _: Given,
    reference: Reference,  # noqa: ARG001 (as `with_inner`)
    own: View,  # noqa: ARG001
    smaller: Sequence[View],
    weight: float,
    head: str = "",  # noqa: ARG001
) -> _Loss:
    if not smaller or not weight:
        return _Loss()
    return _Loss(ce=1 / (1 + weight), inner=weight / (1 + weight), smaller=smaller)


_OBJECTIVES: dict[Any, Callable[..., _Loss]] = {
    supervised: _plain,
    present_cross_entropy: _present,
    proximal: _proximal,
    with_targets: _targets,
    with_inner: _inner,
}
"""The one table of objectives that a board can minimise."""


def check_targets(y: Tensor) -> None:
    """Refuses by name what the firmware cannot learn: a target is a class, or a row of values."""
    if y.dtype == torch.bool:
        raise _refused("targets that are flags (multi-label)", _NO_TASK, "data.task")
    if not y.is_floating_point() and y.dim() > 1:
        raise _refused("a target at every step (next-token)", _NO_TASK, "data.task")


_NO_TASK = (
    "boards learn classification, regression, forecast and reconstruction: give the tier no board"
)


def _loss_of(phase: Phase, y: Tensor) -> _Loss:
    """The phase's objective on rows with such targets."""
    check_targets(y)
    loss = _of_classes(phase)
    if not y.is_floating_point():
        return loss
    if loss.present is not None:
        raise _refused("classes that are present, where targets are values", "give no label mask")
    if loss.targets is not None and loss.ce:
        raise _refused("given targets beside the values of the data", "give the tier no board")
    return loss if loss.targets is not None else replace(loss, ce=0.0, mse=loss.ce, values=True)


def _of_classes(phase: Phase) -> _Loss:
    function, keywords = _unwrapped(phase.objective)
    if function not in _OBJECTIVES:
        raise _refused(
            f"the objective {_name(function)}",
            f"those it has are {', '.join(f.__name__ for f in _OBJECTIVES)}; "
            "take a method of that kind (fedavg, heterofl, fedprox, shared-average, …), or give "
            "the tier no board",
        )
    return _OBJECTIVES[function](phase.given, **keywords)


def _check(phase: Phase) -> None:
    if phase.source != "private":
        raise _refused(
            "training on public data", "a board holds its own data only: give the tier no board"
        )
    if phase.optim.name != "sgd":
        raise _refused(f"the optimiser {phase.optim.name}", 'set train.optimizer = "sgd"')
    if phase.optim.lazy:
        raise _refused(
            "an optimiser that leaves entries without a gradient alone", "give the tier no board"
        )
    if phase.also is not None:
        raise _refused("a second objective", "give the tier no board")
    if phase.rule is not None and phase.rule is not masked_gradients:
        raise _refused(
            f"the gradient rule {_name(_unwrapped(phase.rule)[0])}",
            "the one it has is masked_gradients: give the tier no board",
        )
    augment = AUGMENTATIONS[phase.augment]
    if augment is not None and augment.change is not shift:
        raise _refused(
            f"the augmentation {phase.augment!r}", 'set train.augment = "shift" or "none"'
        )
    for hook in phase.hooks:
        _rate(hook)


def _rate(hook: Hook) -> float:
    """What a hook divides the outputs of convolutions by."""
    function, keywords = _unwrapped(hook.change)
    if function is not divide or not set(hook.layers) <= {nn.Conv1d, nn.Conv2d}:
        raise _refused(
            f"the hook {_name(function)}",
            "the one it has divides what convolutions put out: give the tier no board",
        )
    return float(keywords["by"])


def _masks_of(phase: Phase, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if phase.rule is None:
        return {}
    masks = {name: phase.given[name] for name in names if name in phase.given}
    for name, mask in masks.items():
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise _refused(
                f"a mask of other values than 0 and 1 ({name})", "give the tier no board"
            )
    return masks


def _unwrapped(thing: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function that a partial is of, and its keywords."""
    return (
        (thing.func, thing.keywords)
        if isinstance(thing, partial) and not thing.args
        else (thing, {})
    )


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", type(thing).__name__)


def _refused(what: str, fix: str, field: str = "") -> CannotLower:
    return CannotLower(f"the C runtime has no word for {what}", field=field, fix=fix)


# -- plan, settings, steps -------------------------------------------------------------------------

_PLANS: WeakKeyDictionary[Reference, dict[Any, MemoryPlan]] = WeakKeyDictionary()
_KEPT = 64


def _plan_of(client: Client, phase: Phase, loss: _Loss, masked: bool) -> MemoryPlan:
    """The plan of the client's view for a phase of this kind, remembered."""
    known = _PLANS.setdefault(client.reference, {})
    scales = tuple((hook.names, 1 / _rate(hook)) for hook in phase.hooks)
    options: dict[str, Any] = {
        "freeze": tuple(phase.freeze),
        "momentum": phase.optim.momentum > 0,
        "anchor": loss.anchor is not None,
        "mask": masked,
        "target": loss.targets is not None or loss.values,
        "present": loss.present is not None,
        "scales": scales,
    }
    key = (client.view.key(), *options.values())
    if key not in known:
        if len(known) >= _KEPT:
            known.clear()
        known[key] = plan(client.reference.network(client.view), client.reference.shape, **options)
    return known[key]


def _settings(phase: Phase, loss: _Loss) -> DescriptorSettings:
    optim = phase.optim
    return DescriptorSettings(
        optim.lr,
        optim.momentum,
        optim.weight_decay,
        optim.clip,
        loss.mu,
        loss.ce,
        loss.mse,
        loss.kd,
        loss.temperature,
        loss.inner,
    )


def _steps(client: Client, phase: Phase, number: int, parts: Sequence[int]) -> list[Step]:
    """The batches with all their chance drawn, as `training.trainer` draws it."""
    module, site = client.reference.network(client.view), client.site
    drawn = phase_schedule(
        phase, module, [client.samples], site.seed, [client.id], client.round, number
    )
    augment = AUGMENTATIONS[phase.augment] if site.x.dim() == 4 else None
    chance = keys("augment", site.seed, [client.id], client.round, number)
    steps = []
    for k, (row, length) in enumerate(zip(drawn.rows[0], drawn.lengths[0], strict=True)):
        shifts = None
        if augment is not None:
            shifts = (
                augment.draws(numbers(chance, counters(k * phase.batch, length))) - REACH
            ).astype(np.int8)
        steps.append(
            Step(np.ascontiguousarray(row[:length]), shifts, parts[k % len(parts)] if parts else 0)
        )
    return steps


def _anchor(made: MemoryPlan, state: State, anchor: Mapping[str, Tensor]) -> np.ndarray:
    """What the proximal term pulls the trained parameters towards, in the order of the plan."""
    missing = [entry.name for entry in made.names if entry.trained and entry.name not in anchor]
    if missing:
        raise _refused(f"a pull that leaves out {missing[0]}", "give the tier no board")
    return made.pack({name: anchor.get(name, tensor) for name, tensor in state.items()})[
        : made.trained
    ]


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().numpy(), dtype=np.float32)


# -- the smaller network inside --------------------------------------------------------------------

_INSIDE: WeakKeyDictionary[Reference, dict[bytes, int]] = WeakKeyDictionary()


def _inner_inputs(client: Client, made: MemoryPlan, part: View, masks: Mapping[str, Tensor]) -> int:
    """How many inputs of the last layer are the smaller part's, where its network is the client's
    own with that layer cut to them.

    It is where channels of the part read none outside it and no layer mixes them; that is tried
    out, once for every kind.
    """
    last, state = made.graph.nodes[-1], client.weights
    if last.kind != "dense" or last.weight is None:
        raise _no_inner("the last layer is not linear")
    for name, mask in masks.items():
        if bool(state[name][mask == 0].any()):
            raise _no_inner("the received weights lead from outside the smaller part into it")
    seen = hashlib.sha256(client.view.key() + b"/" + part.key())
    for name, mask in sorted(masks.items()):
        seen.update(name.encode() + np.packbits(mask.cpu().numpy().astype(bool)).tobytes())
    known, key = _INSIDE.setdefault(client.reference, {}), seen.digest()
    if key not in known:
        known[key] = _tried(client.reference, client.view, part, masks, state, last.weight)
    return known[key]


def _tried(
    reference: Reference,
    own: View,
    part: View,
    masks: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    head: str,
) -> int:
    place = within(part, own, head)[1]
    inputs = range(place.start, place.stop) if isinstance(place, slice) else place.tolist()
    if list(inputs) != list(range(len(inputs))):
        raise _no_inner("the smaller part's features are not the first ones")
    chance = torch.Generator().manual_seed(0)
    state = {name: torch.randn(t.shape, generator=chance) * 0.3 for name, t in like.items()}
    state.update({name: state[name] * mask.cpu() for name, mask in masks.items()})
    x = torch.randn(2, *reference.shape, generator=chance)
    state, x = {name: t.to(like[name].device) for name, t in state.items()}, x.to(like[head].device)
    cut = {**state, head: state[head].clone()}
    cut[head][:, len(inputs) :] = 0
    with torch.no_grad():
        alone = forward(reference, part, state, x, inside=own)
        inside = torch.func.functional_call(reference.network(own).train(), cut, (x,))
    if not torch.allclose(alone, inside, rtol=1e-4, atol=1e-5):
        raise _no_inner("the smaller part computes something else inside than alone")
    return len(inputs)


def _no_inner(reason: str) -> CannotLower:
    return _refused(f"this inner loss: {reason}", "set method.inner = 0, or method.nested = true")
