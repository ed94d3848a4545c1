"""Lanes, tensors that never move, and the server's own training on them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from nestling.training.distiller import Distillation, distil, proxy, whole
from nestling.training.kept import Kept
from nestling.training.lane import Lane
from nestling.training.optimisers import Optim
from nestling.training.recorder import Recorder
from nestling.where import CPU, Where

RECORDED = Where(torch.device("cpu"), recorded=True)


def test_a_lane_runs_first_records_then_and_replays() -> None:
    lane, done = Lane(torch.device("cpu")), []
    for number in range(4):
        lane.do("kind", partial(done.append, number))
    # Recorded the second time, so that what it did then is what comes back.
    assert done == [0, 1, 1, 1]
    assert lane.graphs == 1


def test_after_a_refusal_a_lane_runs_everything_as_it_is() -> None:
    lane, done = Lane(torch.device("cpu")), []
    lane.refusal = "cannot be recorded"
    for number in range(3):
        lane.do("kind", partial(done.append, number))
    assert done == [0, 1, 2] and lane.graphs == 0


def test_kept_tensors_stay_where_they_are_and_follow_what_is_given() -> None:
    given = torch.arange(3.0)
    kept = Kept({"a": given})
    place = kept.tensors["a"]
    for value in (given, given + 1, given.mul_(5), torch.zeros(3)):
        kept.take({"a": value})
        assert kept.tensors["a"] is place and torch.equal(place, value)


def test_what_is_there_already_is_not_copied_again() -> None:
    given = torch.arange(3.0)
    kept = Kept({"a": given})
    kept.take({"a": given})
    kept.tensors["a"].fill_(7)
    kept.take({"a": given})
    assert torch.equal(kept.tensors["a"], torch.full((3,), 7.0))


@pytest.mark.parametrize("optim", [Optim("adam", 1e-2), Optim("sgd", 0.1, 0.9, clip=1.0)])
@pytest.mark.parametrize("cosine", [False, True])
def test_distillation_on_tensors_that_never_move_gives_the_same(optim: Optim, cosine: bool) -> None:
    torch.manual_seed(0)
    x, targets, module = torch.randn(30, 4), torch.randn(30, 3), nn.Linear(4, 3)
    settings = Distillation(steps=7, batch=8, optim=optim, cosine=cosine)
    found = []
    for where in (CPU, RECORDED):
        work = Recorder(where)
        for round in range(2):  # the second round takes the same student again
            state = {name: t + round for name, t in module.state_dict().items()}
            student = work.student("student", state, state.keys(), whole(module), optim)
            found.append(
                distil(student, proxy(x, targets, 8, 0, round), settings, 0, round, work=work)
            )
    for one, other in zip(found[:2], found[2:], strict=True):
        assert all(torch.allclose(t, other[name], atol=1e-6) for name, t in one.items())


def test_bodies_read_their_inputs_and_what_is_kept() -> None:
    work, seen = Recorder(RECORDED), []

    def body(kept: Tensor, given: Tensor) -> None:
        seen.append(float(kept.sum() + given.sum()))

    with work.session():
        for number in range(3):
            kept = work.keep("kept", {"a": torch.tensor([10.0 * number])})["a"]
            work.do("kind", partial(body, kept), torch.tensor([float(number)]))
    assert seen == [0.0, 11.0, 22.0] and not work.refusal
