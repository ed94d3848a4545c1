"""Noise for privacy: what a real device adds nobody else can draw again; a simulation can."""

from __future__ import annotations

from pathlib import Path

import torch

from nestling import Named
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.wire import Answer, JobDone, kind_of
from nestling.runs.assemble import assemble, site_of
from nestling.runs.loop import play
from nestling.seeds import stream
from nestling.training.client import client_of
from tests.fleet.loop import live, six, workers_of
from tests.small import errands_of

# Nobody learns from what others tell, so that all that differs in what is told is the noise.
STILL = Named("fedhkd", {"least": 1, "lam": 0.0, "gamma": 0.0})


def told_by(client: int, home: Path, epsilon: float = 8.0) -> list[torch.Tensor]:
    """What a device tells of its features in two rounds."""
    method = Named("fedhkd", {**STILL.options, "epsilon": epsilon})
    experiment = six(method, rounds=2)
    workers = workers_of(home)
    found: list[torch.Tensor] = []

    def heard(letter: bytes) -> bytes:
        answer = workers[client].handle(letter)
        if kind_of(letter) == "order":
            done = Answer.from_bytes(answer).results[0]
            assert isinstance(done, JobDone)
            found.append(done.parcel.open()["statistics"]["features"])
        return answer

    handles = {100 + c: w.handle for c, w in workers.items()}
    _, federation = live(experiment, LoopCourier({**handles, 100 + client: heard}))
    list(play(federation))
    return found


def test_the_noise_of_a_device_cannot_be_drawn_again(tmp_path: Path) -> None:
    first, again = told_by(2, tmp_path / "first"), told_by(2, tmp_path / "again")
    without = told_by(2, tmp_path / "without", epsilon=0.0)
    noise = [a - b for a, b in zip(first, without, strict=True)]
    # The same experiment, seed and rows: without noise the same first words, with it never.
    assert torch.equal(without[0], told_by(2, tmp_path / "once more", epsilon=0.0)[0])
    assert not torch.isclose(first[0], again[0]).any()
    assert not torch.isclose(noise[0], noise[1]).all()


def test_in_a_simulation_it_follows_from_the_seed() -> None:
    settled, federation = assemble(six(STILL))
    client = client_of(errands_of(federation)[2], site_of(federation))
    expected = stream(settled.seed, "hyper-knowledge", 2, 1).normal(size=9)
    assert client.secret_chance("hyper-knowledge").normal(size=9).tolist() == expected.tolist()
