"""Testing models: global score on the common test set, personal score on each client's own
mix of classes.

The two are never mixed. A client's personal score is that of the model it would use, with every
class of the test set weighted as in the client's own data; with `split.holdout` it is measured on
the client's own held-out rows instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from nestling.engines.pool import cores
from nestling.methods import Method
from nestling.models.norm import calibrate
from nestling.models.pixels import by_pixel
from nestling.models.taps import logits_and_features
from nestling.runfiles import SCORES
from nestling.tasks.own_metric import OwnMetric
from nestling.tasks.task import Answers, Task, joined, spread
from nestling.views import View
from nestling.views.nested import common_head, headed
from nestling.world import Device, Model, World


@dataclass
class Bench:
    """The test data, the clients whose personal score is measured, and the training rows that
    calibrate static batch norms."""

    x_test: Tensor
    y_test: Tensor
    x: Tensor
    y: Tensor
    batch: int
    calibration: Tensor
    panel: list[int]
    metrics: tuple[OwnMetric, ...] = ()
    kinds: Tensor | None = None  # of the test rows, where they have no classes

    @property
    def strata(self) -> Tensor:
        """What a client's own mix of rows is a mix of: classes, or kinds of rows."""
        return self.y_test if self.kinds is None else self.kinds

    @property
    def wants_logits(self) -> bool:
        """Whether a metric of the user's asks for outputs."""
        return any(metric.logits for metric in self.metrics)


MOST_WORST = 5
"""How many of the worst clients a round names."""

Tested = dict[Any, list[tuple[Model, Answers]]]
"""Models that were tested and what they said, by network and view."""


def panel(world: World, clients: int) -> list[int]:
    """At most that many clients, spread over the tiers, at least one of each."""
    fleet = world.fleet
    share = max(1, clients // len(world.plans))
    return sorted(
        fleet.member(name, k)
        for name in world.plans
        for k in range(min(share, fleet.count_of(name)))
    )


def evaluate(method: Method, world: World, bench: Bench) -> dict[str, Any]:
    """Scores now: global, personal, both by tier, and those of the other models that a method
    names; and the further metrics, all from the same passes."""
    tested: Tested = {}
    if method.as_set.personal and bench.x_test.is_cuda:
        _test_together(method, world, bench, tested)
    if method.nests:
        _test_nested(method, world, bench, tested)
    devices = [world.device(client) for client in bench.panel]
    rows = [
        _test_model(method.model_for(device), world, bench, device, tested) for device in devices
    ]
    whole = method.global_model()
    said = (
        _known_answers(whole, tested, world, bench)
        if whole
        else joined([r["said"] for r in rows])
        if rows
        else None
    )
    by_tier = {}
    for tier in world.plans:
        own = [r for r in rows if r["tier"] == tier]
        by_tier[tier] = {key: _mean(r[key] for r in own) for key in SCORES}
    others: dict[str, list[dict[str, Any]]] = {}
    for device in devices:
        for name, model in method.other_models(device).items():
            others.setdefault(name, []).append(_test_model(model, world, bench, device, tested))
    return {
        "global_score": _score(world.task.right(said, bench.y_test))
        if whole and said
        else _mean(r["global_score"] for r in rows),
        "personal_score": _mean(r["personal_score"] for r in rows),
        "by_tier": by_tier,
        "worst_clients": _worst(bench.panel, [r["personal_score"] for r in rows]),
        **_further(said, [r["personal_score"] for r in rows], world, bench),
        **(
            {
                "others": {
                    name: {key: _mean(r[key] for r in own) for key in SCORES}
                    for name, own in others.items()
                }
            }
            if others
            else {}
        ),
    }


def _worst(clients: Sequence[int], personal: Sequence[float]) -> list[dict[str, Any]]:
    """Who is worst of the clients that are tested, with its personal score; the worst first."""
    found = sorted(zip(personal, clients, strict=True))[:MOST_WORST]
    return [{"client": client, "personal_score": value} for value, client in found]


def _further(
    said: Answers | None, personal: Sequence[float], world: World, bench: Bench
) -> dict[str, Any]:
    """The metrics beside the score: of the global model, or of the clients' models together where
    there is none."""
    if said is None:
        return {"metrics": {}, "by_class": {}}
    models = len(said.found) // len(bench.y_test)
    y = bench.y_test.repeat(models, *(1 for _ in bench.y_test.shape[1:]))
    metrics, by_class = world.task.measured(said, y)
    metrics |= spread(personal)
    if bench.metrics:
        logits = None if said.outputs is None else said.outputs.float().cpu().numpy()
        known, found = y.cpu().numpy(), said.found.cpu().numpy()
        metrics |= {own.name: own.value(known, found, logits) for own in bench.metrics}
    return {"metrics": metrics, "by_class": by_class}


def _test_together(method: Method, world: World, bench: Bench, tested: Tested) -> None:
    """Tests the clients' own models, those of one network as one stack."""
    kinds: dict[Any, list[Model]] = {}
    for client in bench.panel:
        model = method.model_for(world.device(client))
        kinds.setdefault((model.reference.name, model.view.key()), []).append(model)
    for key, models in kinds.items():
        network = models[0].reference.network(models[0].view)
        if len(models) > 1 and not _calibrated(network) and not _recurrent(network):
            said = stacked_answers(models, world.task, bench)
            tested[key] = list(zip(models, said.each(), strict=True))


def _recurrent(network: nn.Module) -> bool:
    """Recurrent layers run in a stack only where there are gradients."""
    return any(isinstance(layer, nn.RNNBase) for layer in network.modules())


def _test_nested(method: Method, world: World, bench: Bench, tested: Tested) -> None:
    """Tests the parts of the global model by its own features, where its network lets them be read
    off."""
    whole = method.global_model()
    views = {
        view.key(): view
        for view in (method.model_for(world.device(client)).view for client in bench.panel)
    }
    if (
        whole is None
        or _calibrated(whole.reference.module)
        or not all(whole.view.contains(view) for view in views.values())
    ):
        return
    views[whole.view.key()] = whole.view
    head = common_head(whole.reference, whole.view, tuple(views.values()))
    if head:
        ask = partial(_parts_logits, head=head, views=tuple(views.values()), own=whole.view)
        said = _answers_of_all(ready(whole, bench), world.task, bench, ask)
        for (key, view), own in zip(views.items(), said.each(), strict=True):
            tested[whole.reference.name, key] = [
                (Model(whole.reference, view, view.extract(whole.state)), own)
            ]


@torch.no_grad()
def stacked_answers(models: Sequence[Model], task: Task, bench: Bench) -> Answers:
    """What each model of one network says of each test row."""
    module = models[0].reference.network(models[0].view).eval()
    stacked = {
        name: torch.stack([m.state[name].to(bench.x_test.device) for m in models])
        for name in models[0].state
    }
    forward = vmap(lambda state, x: functional_call(module, state, (x,)), in_dims=(0, None))
    batches = zip(bench.x_test.split(bench.batch), bench.y_test.split(bench.batch), strict=True)
    # Outputs of all models at once would be large: what is kept of a batch is a few numbers a row.
    said = [task.answers(forward(stacked, x), y, bench.wants_logits) for x, y in batches]
    return joined(said, along=1)


def _known_answers(model: Model, tested: Tested, world: World, bench: Bench) -> Answers:
    """What a model says; one with the very same weights is not tested again."""
    known = tested.setdefault((model.reference.name, model.view.key()), [])
    for other, said in known:
        if other is model or all(
            torch.equal(other.state[name], t) for name, t in model.state.items()
        ):
            return said
    known.append((model, _tested(model, world, bench)))
    return known[-1][1]


def _test_model(
    model: Model, world: World, bench: Bench, device: Device, tested: Tested
) -> dict[str, Any]:
    said = _known_answers(model, tested, world, bench)
    right = world.task.right(said, bench.y_test)
    held_out = world.split.holdout(device.id)
    if len(held_out) and world.task.alone:
        index = torch.from_numpy(np.asarray(held_out)).to(bench.x.device)
        own = _answers(ready(model, bench), world.task, bench.x[index], bench.y[index], bench.batch)
        personal = _score(world.task.right(own, bench.y[index]))
    else:
        personal = _personal(right, bench.strata, world.split.counts(device.id))
    return {
        "tier": device.tier,
        "global_score": _score(right),
        "personal_score": personal,
        "said": said,
    }


def _tested(model: Model, world: World, bench: Bench) -> Answers:
    return _answers_of_all(ready(model, bench), world.task, bench, _outputs)


def _answers_of_all(module: nn.Module, task: Task, bench: Bench, ask: Ask) -> Answers:
    """What a network says of all test rows."""
    return _answers(module, task, bench.x_test, bench.y_test, bench.batch, ask, bench.wants_logits)


def _answers(
    module: nn.Module,
    task: Task,
    x: Tensor,
    y: Tensor,
    batch: int,
    ask: Ask | None = None,
    keep: bool = False,
) -> Answers:
    # Several models asked at once have a dimension before that of the rows.
    along = -len(task.shape(y[:1], 1))
    return task.answers(_predict(module, x, batch, ask or _outputs, along), y, keep)


def ready(model: Model, bench: Bench) -> nn.Module:
    """A model's network as it is tested: calibrated where it must be. The next model of the same
    view takes it over."""
    module = model.reference.network(model.view, model.state)
    if _calibrated(module):
        module = calibrate(module, (bench.x[rows] for rows in bench.calibration.split(bench.batch)))
    return module.eval()


def _calibrated(module: nn.Module) -> bool:
    """Whether a network needs statistics of training rows before it is tested."""
    return any(getattr(layer, "kind", "") == "sbn" for layer in module.modules())


Ask = Callable[[nn.Module, Tensor], Tensor]
"""From a network and a batch to (…, rows, …) outputs."""


def _predict(module: nn.Module, x: Tensor, batch: int, ask: Ask, along: int) -> Tensor:
    """What is asked of a network; `along` is the dimension of the rows. On a CPU its batches are
    shared among the cores, each computed by one thread as always."""
    parts = x.split(batch)
    threads = 1 if x.is_cuda else min(len(parts), cores())
    if threads == 1:
        return torch.cat(_ask_all(module, parts, ask), along)
    # A copy for everyone: a network's code may keep something between its layers.
    networks = [module, *(copy.deepcopy(module) for _ in range(threads - 1))]
    with ThreadPoolExecutor(threads) as pool:
        found = list(
            pool.map(
                _ask_all, networks, (parts[k::threads] for k in range(threads)), [ask] * threads
            )
        )
    return torch.cat([found[k % threads][k // threads] for k in range(len(parts))], along)


@torch.no_grad()
def _ask_all(module: nn.Module, parts: Sequence[Tensor], ask: Ask) -> list[Tensor]:
    return [ask(module, by_pixel(module, part)) for part in parts]


def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def _parts_logits(
    module: nn.Module, x: Tensor, head: str, views: Sequence[View], own: View
) -> Tensor:
    """The outputs of the networks of some views inside a network, one layer per view."""
    features = logits_and_features(module, head, x)[1]
    return torch.stack([headed(module, head, view, own, features) for view in views])


def _score(right: Tensor) -> float:
    return float(right.float().mean())


def _personal(right: Tensor, kinds: Tensor, counts: np.ndarray) -> float:
    """The score by class (or kind of row), weighted by the client's own; classes that the test set
    lacks are left out."""
    whole = _score(right)
    tested = torch.bincount(kinds, minlength=len(counts)).cpu().numpy()
    sums = torch.bincount(kinds.cpu(), weights=right.double().cpu(), minlength=len(counts)).numpy()
    weight = np.where(tested > 0, counts, 0).astype(np.float64)
    if weight.sum() == 0:
        return whole
    return float((weight / weight.sum() * sums / np.maximum(tested, 1)).sum())


def _mean(values: Iterator[float] | Any) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None
