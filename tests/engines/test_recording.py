"""The engine for a GPU, where there is none: it is chosen, takes the same decisions and does the
same arithmetic, without graphs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import nestling
import nestling.runs.assemble
from nestling import EngineConfig, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.engines import Cohort, CudaCohort, Inline, Pool, choose_where, make_engine
from nestling.engines.cuda import CudaSettings, ways
from nestling.engines.cuda.cohort import MOST_SLOTS, _queues, _Result, height_for
from nestling.engines.cuda.slot import Slot
from nestling.engines.cuda.ways import _machine
from nestling.errors import InputError
from nestling.methods import METHODS
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play
from nestling.training.client import Errand
from nestling.training.objectives import Batch, Given, Net, supervised
from nestling.training.phase import Phase
from nestling.training.stacks.group import Group
from nestling.training.stacks.together import Losses, work_together
from nestling.where import CPU, Where
from tests.engines.test_cohort import alone, assert_same, federation_of, recording
from tests.small import errands_of, small

GPU = Where(torch.device("cuda", 0), "tf32", recorded=True)
RECORDED = replace(CPU, recorded=True)
UNEVEN = SplitConfig(kind="quantity", alpha=2.0, min_size=3)
TIERS = (Tier(name="small", ratio=0.25, count=5), Tier(name="large", ratio=1.0, count=4))


# -- which engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "cohort"])
def test_a_gpu_gets_the_recording_engine(name: str) -> None:
    engine = make_engine(name, 0, work_items=1000, where=GPU, compile=True)
    assert isinstance(engine, CudaCohort)
    assert engine.where == GPU and engine.settings == CudaSettings("tf32", True)


def test_in_process_on_a_gpu_is_what_it_says() -> None:
    engine = make_engine("inline", 0, work_items=1000, where=GPU)
    assert isinstance(engine, Inline) and engine.where == GPU


def test_the_engine_gets_the_device_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its name, nor another spelling of it: what `assemble` hands on is the very object."""
    chosen, given = replace(CPU, precision="tf32"), []

    def spy(*args: Any, **named: Any) -> Any:
        given.extend(a for a in (*args, *named.values()) if isinstance(a, (Where, torch.device)))
        return Inline()

    monkeypatch.setattr(nestling.runs.assemble, "choose_where", lambda *_: chosen)
    monkeypatch.setattr(nestling.runs.assemble, "make_engine", spy)
    _, federation = assemble(small("fedavg"))
    assert len(given) == 1 and given[0] is chosen
    assert federation.world.where is chosen and site_of(federation).where is chosen


def test_where_there_is_a_gpu_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name, device in (
        ("auto", "auto"),
        ("cohort", "auto"),
        ("cohort", "cuda"),
        ("auto", "cuda"),
    ):
        assert choose_where(name, device, "bf16") == Where(
            torch.device("cuda", 1), "bf16", recorded=True
        )
    assert choose_where("inline", "cuda") == Where(
        torch.device("cuda", 1), "float32", recorded=False
    )
    for name in ("inline", "pool", "ray"):
        assert choose_where(name, "auto") == CPU
    assert choose_where("auto", "cpu") == CPU
    with pytest.raises(InputError, match="works on CPU cores"):
        choose_where("pool", "cuda")


@pytest.mark.parametrize(
    "make", [Inline, Pool, Cohort, lambda: CudaCohort(GPU), lambda: Inline(GPU)]
)
def test_an_engine_refuses_data_on_another_device(make: Callable[[], Any]) -> None:
    experiment, federation = assemble(small("fedavg"))
    site = site_of(federation)
    engine = make()
    elsewhere = site if engine.where == GPU else replace(site, x=site.x.to("meta"))
    with pytest.raises(
        ValueError, match=r"the clients' data are on .*, and the engine computes on"
    ):
        engine.open(experiment.make_method(), elsewhere)


def test_a_run_says_what_it_used() -> None:
    result = nestling.run(small("fedavg", engine=EngineConfig("cohort", 1)))
    assert result.summary["engine"] == {
        "name": "cohort",
        "device": "cpu",
        "precision": "float32",
        "not_recorded": [],
    }


# -- what is the same work -------------------------------------------------------------------------


def recorded_federation(method: Any, **changes: Any) -> tuple[Federation, CudaCohort]:
    """A federation whose engine records, as on a GPU, and whose clients are told so."""
    settings = {"fleet": FleetConfig(tiers=TIERS), "participants": 0, "split": UNEVEN, **changes}
    experiment, federation = assemble(small(method, **settings))
    federation.world.where = RECORDED
    federation.engine = engine = recording()
    engine.where = RECORDED
    engine.open(experiment.make_method(), site_of(federation))
    return federation, engine


@pytest.mark.parametrize("method", METHODS)
def test_work_that_comes_back_is_known_again(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of work has the same key in every round, whichever channels a window holds and however
    many rows a client has."""
    federation, engine = recorded_federation(method, rounds=7)
    seen: list[set[Any]] = []

    def only_look(found: list[Group]) -> list[Losses]:
        seen[-1].update(group.key for group in found)
        return [
            Losses(torch.zeros(len(g.clients)), [1] * len(g.clients), [1] * len(g.clients))
            for g in found
        ]

    monkeypatch.setattr(engine, "_train_all", only_look)
    rounds = play(federation, halt=lambda: True)  # one round at a time
    for _ in range(7):
        seen.append(set())
        next(rounds)
    first, later = set().union(*seen[:4]), set().union(*seen[4:])
    assert later and later <= first
    # One kind a tier and phase: unequal numbers of rows are no other work. A client's first rounds
    # may have phases of their own.
    assert len(first) <= 4 * len(TIERS)


# -- what comes of it ------------------------------------------------------------------------------


def final(federation: Federation) -> dict[str, torch.Tensor]:
    for _ in play(federation):
        pass
    state = {
        f"{kind}/{n}": t
        for kind, part in federation.method.state().items()
        for n, t in part.items()
    }
    store = federation.world.store
    return {
        **state,
        **{f"client {c}/{n}": t for c in store.clients() for n, t in store.get(c).items()},
    }


def assert_close(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert one.keys() == other.keys()
    flat = [
        torch.cat([state[n].double().reshape(-1) for n in sorted(one)]) for state in (one, other)
    ]
    assert float((flat[0] - flat[1]).norm()) <= tolerance * float(flat[0].norm())


QUICK = {
    "fleet": FleetConfig(tiers=tuple(replace(tier, count=6 * tier.count) for tier in TIERS)),
    "participants": 4,
    "train": Train(epochs=1, batch=32, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_what_it_gives_in_process(method: str) -> None:
    """Clients of unequal sizes in slots and stacks, and the server's own training on tensors that
    never move."""
    federation, _ = recorded_federation(method, rounds=2, **QUICK)
    experiment, plain = assemble(small(method, rounds=2, split=UNEVEN, **QUICK))
    plain.engine.open(experiment.make_method(), site_of(plain))
    # What FedZKT's generator and student do to each other amplifies rounding.
    assert_close(final(plain), final(federation), 1e-2 if method == "fedzkt" else 1e-3)


@pytest.mark.parametrize("way", [ways.STACK, ways.SLOTS])
def test_one_client_with_one_row(way: str) -> None:
    made, federation, site = federation_of("heterofl", split=SplitConfig(kind="iid", size=1))
    engine = recording(way)
    engine.open(made, site)
    errands = errands_of(federation, 1)
    for _ in range(3):
        assert_same(alone(made, errands, site), list(engine.run(errands)))


def test_more_clients_than_slots_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made, federation, site = federation_of("all-large", split=UNEVEN, **QUICK)
    monkeypatch.setattr("nestling.engines.cuda.cohort.MOST_SLOTS", 2)
    engine = recording(ways.SLOTS)
    engine.open(made, site)
    errands = errands_of(federation, 5)
    # A kind of work that may not come back has one slot; when it does there are more.
    for slots in (1, 2, 2):
        assert_same(alone(made, errands, site), list(engine.run(errands)))
        assert [len(kind.programs[ways.SLOTS]) for kind in engine._kinds.values()] == [slots]


@pytest.mark.parametrize("norm", ["batch", "tracked", "group"])
def test_sizes_of_clients_do_not_multiply_what_is_recorded(norm: str) -> None:
    model = Named("tinycnn", {"channels": [8, 16, 16], "norm": norm})
    made, federation, site = federation_of("all-large", split=UNEVEN, model=model, **QUICK)
    engine = recording(ways.SLOTS)
    engine.open(made, site)
    errands = errands_of(federation, 6)
    assert len({site.split.size(errand.client) % 32 for errand in errands}) > 4
    # in the third round there are as many slots as clients, in the fourth all is recorded
    for _ in range(4):
        assert_same(alone(made, errands, site), list(engine.run(errands)), 1e-3)
    # One for full batches, one for short ones, one to load and one to store.
    assert {slot.lane.graphs for kind in engine._kinds.values() for slot in kind.all()} <= {3, 4}


def test_queues_are_balanced() -> None:
    _, federation, _ = federation_of("all-large", split=UNEVEN)
    groups = group_of(errands_of(federation, 7), federation)
    queues = _queues(groups, 3)
    assert sorted(k for queue in queues for k in queue) == list(range(7))
    samples = groups.schedule.samples
    loads = sorted(sum(samples[k] for k in queue) for queue in queues)
    assert loads[-1] - loads[0] <= max(samples)
    assert len(_queues(groups, MOST_SLOTS)) == 7


def group_of(errands: list[Errand], federation: Federation) -> Group:
    """The one group that the errands' clients are, before they are trained."""
    held: list[Group] = []

    def only_look(found: list[Group]) -> list[Losses]:
        held.extend(found)
        return [
            Losses(torch.zeros(len(g.clients)), [1] * len(g.clients), [1] * len(g.clients))
            for g in found
        ]

    work_together(federation.method, errands, site_of(federation), only_look)
    assert len(held) == 1
    return held[0]


def test_what_does_not_fit_into_memory_is_trained_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made, federation, site = federation_of("all-large", split=UNEVEN, **QUICK)
    errands, engine = errands_of(federation, 7), recording(ways.SLOTS)
    engine.open(made, site)
    alive: list[Slot] = []
    init = Slot.__init__

    def small_memory(self: Slot, *args: Any) -> None:
        if sum(len(own) for kind in engine._kinds.values() for own in kind.programs.values()) >= 3:
            raise torch.OutOfMemoryError("too large")
        init(self, *args)
        alive.append(self)

    monkeypatch.setattr(Slot, "__init__", small_memory)
    for _ in range(2):
        assert_same(alone(made, errands, site), list(engine.run(errands)))
    assert any("do not fit" in note for note in engine.notes)


def test_one_client_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made, federation, site = federation_of("all-large")
    engine = recording(ways.SLOTS)
    engine.open(made, site)

    def no_memory(self: Slot, *args: Any) -> None:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(Slot, "__init__", no_memory)
    with pytest.raises(Exception, match=r"one client of main .* does not fit"):
        list(engine.run(errands_of(federation, 4)))


def looks_at_values(net: Net, batch: Batch, given: Given) -> torch.Tensor:
    loss = supervised(net, batch, given)
    return loss * 2 if loss.item() > 100 else loss


def test_what_cannot_be_recorded_runs_and_says_so_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    made, federation, site = federation_of("all-large")

    class Stubborn(type(made)):  # type: ignore[misc]
        def phases(self, client: Any, received: Any) -> list[Phase]:
            return [client.train.phase(1, objective=looks_at_values)]

    def refuse(self: Any, kind: Any, action: Any) -> None:
        self.refusal = "RuntimeError: operation not permitted when stream is capturing"

    monkeypatch.setattr("nestling.training.lane.Lane._record", refuse)
    stubborn, errands, engine = Stubborn(), errands_of(federation, 7), recording()
    engine.open(stubborn, site)
    for _ in range(3):
        assert_same(alone(stubborn, errands, site), list(engine.run(errands)))
    assert any("NOT RECORDED" in note and "not permitted" in note for note in engine.notes)
    assert engine.recorded() == {"kinds_recorded": 0, "kinds_not_recorded": 1, "graphs": 0}


def test_what_cannot_be_stacked_is_trained_in_slots_and_says_why() -> None:
    made, federation, site = federation_of(
        "all-large", fleet=FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=20),))
    )

    class Stubborn(type(made)):  # type: ignore[misc]
        def phases(self, client: Any, received: Any) -> list[Phase]:
            return [client.train.phase(1, objective=looks_at_values)]

    stubborn, errands, engine = Stubborn(), errands_of(federation, 18), recording()
    engine.open(stubborn, site)
    for _ in range(2):
        assert_same(alone(stubborn, errands, site), list(engine.run(errands)))
    assert any("not stacked" in note for note in engine.notes)


def test_the_way_is_guessed_from_shapes() -> None:
    def likely(clients: int, compile: bool = False, **changes: Any) -> list[str]:
        fleet = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=40),))
        _, federation, _ = federation_of("all-large", fleet=fleet, **changes)
        return ways.candidates(
            group_of(errands_of(federation, clients), federation), CudaSettings("float32", compile)
        )

    wide = {"model": Named("cnn", {"channels": [32, 64], "norm": "none"})}
    huge = {"model": Named("cnn", {"channels": [128, 256]}), "train": Train(epochs=1, batch=60)}
    assert likely(20) == [ways.STACK]
    assert likely(10) == [ways.STACK, ways.SLOTS]
    assert likely(3) == [ways.SLOTS]
    assert likely(20, **wide) == [ways.STACK]
    assert likely(20, compile=True, **wide) == [ways.MATRICES]
    assert likely(20, **huge) == [ways.SLOTS_LAST]


def test_what_was_tried_is_remembered(tmp_path: Any) -> None:
    made, federation, site = federation_of(
        "all-large", fleet=FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=12),))
    )
    errands = errands_of(federation, 10)
    for tried in (True, False):
        engine = CudaCohort(
            CPU, CudaSettings("float32"), ways.Decisions(tmp_path / "cache" / "ways.json")
        )
        engine.open(made, site)
        assert_same(alone(made, errands, site), list(engine.run(errands)))
        assert any("tried" in note for note in engine.notes) == tried


@pytest.mark.parametrize("content", ["", "[]", "{", json.dumps({_machine(): 3})])
def test_a_spoilt_file_of_decisions_is_no_error(tmp_path: Any, content: str) -> None:
    path = tmp_path / "ways.json"
    path.write_text(content)
    found = ways.Decisions(path)
    assert found.get("something") is None
    found.put("something", ways.STACK)
    assert ways.Decisions(path).get("something") == ways.STACK


def test_stacks_are_made_to_measure_until_there_are_many() -> None:
    made, federation, site = federation_of(
        "all-large", fleet=FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=40),))
    )
    engine = recording(ways.STACK)
    engine.open(made, site)
    for count in (5, 5, 9, 6, 7, 10, 11, 12):
        errands = errands_of(federation, count)
        assert len(list(engine.run(errands))) == count
    (kind,) = engine._kinds.values()
    assert [program.height for program in kind.programs[ways.STACK]] == [5, 9, 6, 7, 12]


def test_heights_are_few_and_never_too_low() -> None:
    heights = [height_for(count) for count in range(1, 513)]
    assert all(count <= height < 2 * count for count, height in enumerate(heights, 1))
    assert len(set(heights)) <= 20


def test_a_reply_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, _ = recorded_federation("heterofl", rounds=3, **QUICK)
    spoilt, finish = federation.method.choose(2, 4)[0], _Result.finish

    def not_finite(self: _Result) -> Losses:
        for row, client in zip(self.out, self.group.clients, strict=True):
            if (client.round, client.id) == (2, spoilt):
                row[0] = math.nan
        return finish(self)

    monkeypatch.setattr(_Result, "finish", not_finite)
    rows = list(play(federation))
    assert [row["refused"] for row in rows] == [0, 1, 0]
    assert all(torch.isfinite(t).all() for t in federation.method.state()["weights"].values())
