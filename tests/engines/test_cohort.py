"""The cohort engine: stacks of clients give what the clients give one by one, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nestling
from nestling import EngineConfig, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.engines import Cohort, Inline
from nestling.engines.cohort import chunks
from nestling.engines.cuda import CudaCohort, CudaSettings, ways
from nestling.engines.engine import ClientError
from nestling.methods import METHODS
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.training.client import ClientSide, Errand, Outcome, Site
from nestling.training.objectives import Batch, Given, Net, supervised
from nestling.training.phase import Hook, Phase
from nestling.training.stacks.group import Group, groups, token
from nestling.training.stacks.stacked import (
    CannotStack,
    Looks,
    honours_masks,
    looks_of,
    train_stack,
)
from nestling.training.stacks.together import Losses, work_together
from nestling.views.flat import Row
from nestling.where import CPU
from tests.small import errands_of, small

TIERS = (Tier(name="small", ratio=0.25, count=4), Tier(name="large", ratio=1.0, count=3))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"train": Train(epochs=1, batch=20, lr=0.01, momentum=0.5)},
    "full batches, two epochs": {"train": Train(epochs=2, batch=20, lr=0.01, augment="none")},
    "unequal sizes": {
        "split": SplitConfig(kind="quantity", alpha=8.0, min_size=5),
        "train": Train(epochs=1, batch=90, lr=0.01),
    },
    "adam, decay, clipping": {
        "train": Train(epochs=1, batch=16, optimizer="adam", lr=1e-3, weight_decay=1e-2, clip=1.0)
    },
    "adamw, crop, flip and cutout": {
        "train": Train(
            epochs=1,
            batch=16,
            optimizer="adamw",
            lr=1e-3,
            weight_decay=1e-1,
            augment="crop-flip-cutout",
        ),
    },
    "no norm": {
        "model": Named("tinycnn", {"channels": [8, 16, 16], "norm": "none"}),
        "train": Train(epochs=1, batch=20, lr=0.01, momentum=0.5),
    },
    "batch norm, short batches": {
        "model": Named("tinycnn", {"channels": [8, 16, 16], "norm": "tracked"}),
        "train": Train(epochs=1, batch=25, lr=0.005, momentum=0.0),
    },
}
WAYS = ("step by step", *ways.STACKS, ways.SLOTS, ways.SLOTS_LAST)


def federation_of(method: Any, **changes: Any) -> tuple[ClientSide, Federation, Site]:
    settings = {"fleet": FleetConfig(tiers=TIERS), "participants": 7, **changes}
    experiment, federation = assemble(small(method, **settings))
    return experiment.make_method(), federation, site_of(federation)


def alone(method: ClientSide, errands: list[Errand], site: Site) -> list[Outcome]:
    engine = Inline()
    engine.open(method, site)
    return list(engine.run(errands))


def tensors(outcome: Outcome) -> dict[str, Tensor]:
    parts = {
        f"{kind}/{n}": t for kind, part in outcome.reply.parts.items() for n, t in part.items()
    }
    return {**parts, **{f"memory/{n}": t for n, t in outcome.memory.items()}}


def assert_same(expected: list[Outcome], got: list[Outcome], tolerance: float = 1e-4) -> None:
    assert [o.client for o in expected] == [o.client for o in got]
    for one, other in zip(expected, got, strict=True):
        mine, theirs = tensors(one), tensors(other)
        assert (
            mine.keys() == theirs.keys()
            and mine.keys() | {"steps"}
            and one.steps == other.steps
            and one.samples == other.samples
        )
        assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-4, abs=1e-6)
        flat = [
            torch.cat([state[n].double().reshape(-1) for n in sorted(mine)] or [torch.zeros(1)])
            for state in (mine, theirs)
        ]
        assert float((flat[0] - flat[1]).norm()) <= tolerance * float(flat[0].norm())


def trainer(way: str) -> Callable[[list[Group]], list[Losses]]:
    if way == "step by step":
        return lambda found: [train_stack(group) for group in found]
    return recording(way)._train


def recording(way: str = "") -> CudaCohort:
    """The engine for a GPU, without one: the same decisions and the same arithmetic, without
    graphs. With a way, that is taken wherever it is possible."""
    engine = CudaCohort(CPU, CudaSettings("float32"), ways.Decisions(None))
    if way:
        engine._decide = lambda kind, group: way if _possible(way, group) else ways.SLOTS  # type: ignore[method-assign]
    return engine


def _possible(way: str, group: Group) -> bool:
    return way not in ways.STACKS or ways.can_stack(group)


PLAIN_REPLIES = (
    "all-large",
    "decoupled",
    "fedavg",
    "fedprox",
    "heterofl",
    "shared-average",
    "shared-distill",
)
"""Methods that send back what they trained as it is: there the rows of the stack."""


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_in_a_stack(method: str) -> None:
    made, federation, site = federation_of(method, **SETTINGS["plain"])
    errands = errands_of(federation, 7)
    got = work_together(made, errands, site, trainer("step by step"))
    assert_same(alone(made, errands, site), got)
    if method in PLAIN_REPLIES:
        assert all(isinstance(o.reply["weights"], Row) for o in got)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ["shared-average", "heterofl"])
def test_every_way_to_train_gives_the_same(method: str, setting: str, way: str) -> None:
    made, federation, site = federation_of(method, **SETTINGS[setting])
    errands, train = errands_of(federation, 7), trainer(way)
    expected = alone(made, errands, site)
    for _ in range(2):  # a program is made once and used again
        assert_same(expected, work_together(made, errands, site, train))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("images_as_they_are")
def test_the_engine_plays_whole_rounds(method: str) -> None:
    changes: dict[str, Any] = {
        "participants": 6,
        "fleet": FleetConfig(tiers=TIERS),
        "train": Train(epochs=1, batch=20, lr=0.01, momentum=0.0),
    }
    plain, stacked = (
        nestling.run(small(method, rounds=1, **changes, engine=EngineConfig(e, 1)))
        for e in ("inline", "cohort")
    )
    before, after = (r.federation.method.state() for r in (plain, stacked))
    for kind, part in before.items():
        for name, tensor in part.items():
            one, other = tensor.double(), after[kind][name].double()
            assert float((one - other).norm()) <= 1e-4 * float(one.norm()) + 1e-7, (kind, name)
    assert stacked.metrics[0]["loss"] == pytest.approx(plain.metrics[0]["loss"], rel=1e-4)
    assert stacked.metrics[0]["bytes_up"] == plain.metrics[0]["bytes_up"]


@pytest.mark.parametrize("way", WAYS)
def test_layers_left_in_the_mode_of_testing_are_trained(way: str) -> None:
    """A network may be made of parts that somebody has tested before."""
    made, federation, site = federation_of("fedavg", **SETTINGS["batch norm, short batches"])
    errands = errands_of(federation, 7)
    expected = alone(made, errands, site)
    reference = federation.world.main
    for errand in errands:
        for part in reference.network(reference.view(errand.spec)).children():
            part.eval()
    assert_same(expected, work_together(made, errands, site, trainer(way)))


def test_workers_change_nothing() -> None:
    made, federation, site = federation_of("shared-average", **SETTINGS["plain"])
    errands, found = errands_of(federation, 7), []
    for workers in (1, 2):
        engine = Cohort(workers)
        engine.open(made, site)
        try:
            found.append({o.client: tensors(o) for o in engine.run(errands)})
        finally:
            engine.close()
    assert found[0].keys() == found[1].keys()
    assert all(
        torch.equal(t, found[1][client][name])
        for client, state in found[0].items()
        for name, t in state.items()
    )


def test_large_networks_are_not_stacked_on_a_cpu() -> None:
    _, federation, site = federation_of("all-large", model=Named("cnn", {"channels": [64, 128]}))
    assert [len(chunk) for chunk in chunks(errands_of(federation, 7), site)] == [1] * 7
    _, federation, site = federation_of("all-large")
    assert [len(chunk) for chunk in chunks(errands_of(federation, 7), site)] == [7]


def test_an_error_in_a_stack_names_a_client() -> None:
    made, federation, site = federation_of("all-large")
    engine = Cohort(1)
    engine.open(made, site)
    broken = replace(errands_of(federation, 7)[2], message=nestling.message.Message({}))
    with pytest.raises(ClientError, match="client 2 failed in round 1"):
        list(engine.run([broken]))


# -- what a stack must notice ----------------------------------------------------------------------


def group_with(model: Any = None, **changes: Any) -> Group:
    made, federation, site = federation_of("all-large", **({"model": model} if model else {}))
    held: list[Group] = []

    class Method(type(made)):  # type: ignore[misc]
        def phases(self, client: Any, received: Any) -> list[Phase]:
            return [client.train.phase(1, augment="none", **changes)]

    def only_look(found: list[Group]) -> list[Losses]:
        held.extend(found)
        return [Losses(torch.zeros(2), [0, 0], [1, 1]) for _ in found]

    errands = errands_of(federation, 2)
    work_together(Method(), errands, site, only_look)
    return held[0]


def mean_of_all(net: Net, batch: Batch, given: Given) -> Tensor:
    return F.cross_entropy(net(batch.x), batch.y)


def by_number(net: Net, batch: Batch, given: Given) -> Tensor:
    return supervised(net, batch, given) * (1 + batch.number % 2)


def in_turn(net: Net, batch: Batch, given: Given) -> Tensor:
    return supervised(net, batch, given) * (1 + batch.turn(2))


def test_an_objective_that_ignores_masks_is_noticed() -> None:
    assert honours_masks(group_with(objective=supervised))
    assert not honours_masks(group_with(objective=mean_of_all))


@pytest.mark.parametrize("norm", ["batch", "sbn", "tracked", "per-width"])
def test_batch_statistics_honour_masks(norm: str) -> None:
    model = Named("tinycnn", {"channels": [8, 16, 16], "norm": norm})
    assert honours_masks(group_with(model=model, objective=supervised))
    assert not honours_masks(group_with(model=model, objective=mean_of_all))


def test_how_an_objective_looks_at_its_number_is_noticed() -> None:
    assert looks_of(group_with(objective=supervised)) == Looks(1, False)
    assert looks_of(group_with(objective=by_number)) == Looks(1, True)
    assert looks_of(group_with(objective=in_turn)) == Looks(2, False)


def test_dropout_is_refused() -> None:
    group = group_with()
    group.module.add_module("drop", nn.Dropout(0.5))
    try:
        with pytest.raises(CannotStack, match="dropout"):
            train_stack(group)
    finally:
        del group.module.drop


def test_functions_are_compared_by_what_they_do() -> None:
    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * factor

    assert token(scaled(2.0)) == token(scaled(2.0)) != token(scaled(3.0))
    assert (
        token(partial(mean_of_all, weight=1))
        == token(partial(mean_of_all, weight=1))
        != token(partial(mean_of_all, weight=2))
    )
    assert token(object()) != token(object())


def test_clients_with_other_hooks_or_given_shapes_are_other_groups() -> None:
    group = group_with()
    one, other = group.clients
    same = Phase(given={"a": torch.zeros(2)})
    assert len(groups([(one, same), (other, replace(same, given={"a": torch.ones(2)}))], 0)) == 1
    assert len(groups([(one, same), (other, replace(same, given={"a": torch.ones(3)}))], 0)) == 2
    hooked = replace(same, hooks=(Hook((nn.Conv2d,), partial(divide, rate=0.5)),))
    assert len(groups([(one, same), (other, hooked)], 0)) == 2
    assert (
        len(
            groups(
                [
                    (one, hooked),
                    (other, replace(same, hooks=(Hook((nn.Conv2d,), partial(divide, rate=0.5)),))),
                ],
                0,
            )
        )
        == 1
    )


def divide(layer: nn.Module, out: Tensor, *, rate: float) -> Tensor:
    return out / rate


def test_the_received_weights_are_never_written_to() -> None:
    for way in WAYS:
        made, federation, site = federation_of("all-large", **SETTINGS["plain"])
        errands = errands_of(federation, 1)
        before = {name: t.clone() for name, t in errands[0].message["weights"].items()}
        work_together(made, errands, site, trainer(way))
        assert all(
            torch.equal(t, errands[0].message["weights"][name]) for name, t in before.items()
        ), way
