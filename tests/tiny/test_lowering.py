"""A phase as a job: the C runtime trains what PyTorch trains, and what it cannot is refused by
name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestling import Named, SplitConfig, Train
from nestling.message import Message
from nestling.methods import method_class
from nestling.methods.baselines.fedavg import FedAvg
from nestling.runs.assemble import assemble, site_of
from nestling.schema import from_table
from nestling.tiny.lowering import CannotLower, job_for, work_on
from nestling.tiny.runtime import native, toolchain
from nestling.tiny.runtime.data import pack as pack_data
from nestling.tiny.runtime.job import Done, Job
from nestling.training.client import Client, client_of, work
from nestling.training.objectives import Batch, Given, Net, supervised, with_targets
from nestling.training.phase import Hook, Phase
from nestling.training.rules import frozen_near_zero, masked_gradients
from tests.small import errands_of, small

pytestmark = pytest.mark.skipif(
    toolchain.host_compiler() is None,
    reason="there is no C compiler: apt-get install gcc, or pip install ziglang",
)
PLAIN = Named("tinycnn", {"channels": [8, 16], "norm": "none"})
GROUP = Named("tinycnn", {"channels": [16, 32]})
SIZES = {"8x8": "mnist12k-8x8", "28x28": "mnist12k"}
HARD = Train(epochs=2, batch=20, lr=0.05, momentum=0.9, weight_decay=1e-3, clip=1.0)
"""Everything the optimiser has; 50 rows make the last batch of an epoch a short one."""


def on_host(client: Client, job: Job) -> Done:
    return native.run_job(job, pack_data(client.x, client.y))


class Pair:
    """The first clients' round in PyTorch and in the C runtime."""

    def __init__(self, method: Any, **changes: Any) -> None:
        settings = {
            "train": HARD,
            "split": SplitConfig(kind="dirichlet", alpha=1.0, size=50),
            **changes,
        }
        experiment, federation = assemble(small(method, **settings))
        self.method, self.site = experiment.make_method(), site_of(federation)
        self.errands = errands_of(federation, 4)

    def check(self, tolerance: float = 1e-5) -> None:
        for errand in self.errands:
            torch_side, c_side = (
                work(self.method, errand, self.site),
                work_on(on_host, self.method, errand, self.site),
            )
            assert (c_side.steps, c_side.samples) == (torch_side.steps, torch_side.samples)
            assert float(c_side.loss) == pytest.approx(float(torch_side.loss), abs=1e-4)
            pairs = list(tensors(torch_side.reply.parts, c_side.reply.parts))
            assert torch_side.memory.keys() == c_side.memory.keys()
            pairs += [(t, c_side.memory[n]) for n, t in torch_side.memory.items()]
            assert pairs
            before = [t for part in errand.message.parts.values() for t in part.values()]
            moved = max(
                (float((a - b).abs().max()) for (a, _), b in zip(pairs, before, strict=False)),
                default=1.0,
            )
            assert moved > 1e-3 or not before, "nothing was trained"
            assert max(float((a.double() - b.double()).abs().max()) for a, b in pairs) <= tolerance


def tensors(
    a: Mapping[str, Mapping[str, Tensor]], b: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    assert a.keys() == b.keys()
    for kind, part in a.items():
        assert list(part) == list(b[kind])
        yield from zip(part.values(), b[kind].values(), strict=True)


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "local": {},
    "heterofl": {},
    "fedprox": {"mu": 0.5},
    "shared-average": {},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_a_board_trains_what_pytorch_trains(method: str, size: str) -> None:
    Pair(Named(method, METHODS[method]), data=SIZES[size], model=GROUP).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"train": replace(HARD, augment="none")},
        {"train": replace(HARD, momentum=0.0, drop_last=True)},
        {"model": PLAIN},
        {"model": Named("mlp", {"hidden": [16]})},
        {"model": Named("tinyresnet")},
        {"method": Named("shared-average", {"inner": 0.0, "nested": False})},
        {"method": Named("shared-average", {"inner": 0.5}), "model": PLAIN},
        {"method": Named("heterofl", {"mask_labels": False})},
        {"method": Named("fednova", {"mu": 0.1})},
    ],
    ids=lambda c: next(iter(c)),
)
def test_so_do_other_settings(changes: dict[str, Any]) -> None:
    changes = {"method": "heterofl", "model": GROUP, "data": "mnist12k-8x8", **changes}
    Pair(changes.pop("method"), **changes).check()


class Taught(FedAvg):
    """Training towards targets for one's own rows, the first layer left as it is."""

    def phases(self, client: Client, received: Message) -> Sequence[Phase]:
        targets = torch.sin(
            torch.arange(client.samples * client.classes, dtype=torch.float32)
        ).reshape(-1, client.classes)
        objective = partial(with_targets, ce=0.5, kd=0.7, mse=0.3, temperature=2.0)
        return [
            client.train.phase(
                client.round, objective=objective, given={"targets": targets}, freeze=("stages.0",)
            )
        ]


def test_targets_and_frozen_layers() -> None:
    Pair(Taught(), data="mnist12k-8x8", model=GROUP).check()


def own(objective: Any = supervised, **changes: Any) -> tuple[Client, Phase]:
    pair = Pair("fedavg", data="mnist12k-8x8", model=GROUP)
    client = client_of(pair.errands[0], pair.site)
    client.weights = pair.method.start(client, pair.errands[0].message)
    return client, client.train.phase(1, objective=objective, **changes)


def strange(net: Net, batch: Batch, given: Given) -> Tensor:
    return net(batch.x).sum()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"objective": strange}, "the objective strange"),
        ({"rule": frozen_near_zero}, "the gradient rule frozen_near_zero"),
        ({"source": "public"}, "public data"),
        ({"also": supervised}, "a second objective"),
        ({"hooks": (Hook((nn.Conv2d,), lambda layer, out: out),)}, "the hook"),
        ({"optim": Train(optimizer="adam").optim(1)}, "the optimiser adam"),
    ],
)
def test_what_the_runtime_lacks_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    client, phase = own(**changes)
    with pytest.raises(CannotLower, match=named):
        job_for(client, phase, 0)


def test_targets_that_are_no_classes_are_refused() -> None:
    """Their data hold classes or values, and a flag would be taken for one."""
    client, phase = own()
    client.site.y = client.site.y[:, None] > 4
    with pytest.raises(CannotLower, match="flags"):
        job_for(client, phase, 0)


def test_inner_parts_without_nesting_are_refused() -> None:
    pair = Pair(Named("shared-average", {"nested": False}), data="mnist12k-8x8", model=PLAIN)
    large = max(pair.errands, key=lambda errand: errand.message.nbytes)
    with pytest.raises(CannotLower, match="something else inside than alone") as error:
        work_on(on_host, pair.method, large, pair.site)
    assert "method.inner = 0" in str(error.value)
    without = from_table(method_class("shared-average"), {"nested": False, "inner": 0.0}, "method")
    assert work_on(on_host, without, large, pair.site).steps


class Masked(FedAvg):
    """Half of the weights held without a gradient; they still decay."""

    def phases(self, client: Client, received: Message) -> Sequence[Phase]:
        chance = torch.Generator().manual_seed(1)
        weights = received["weights"]
        given = {
            n: (torch.rand(t.shape, generator=chance) > 0.5).float()
            for n, t in weights.items()
            if t.dim() > 1
        }
        return [client.train.phase(client.round, given=given, rule=masked_gradients)]


def test_masks() -> None:
    Pair(Masked(), data="mnist12k-8x8", model=GROUP).check()


class Nothing:
    """A split in which nobody has a row."""

    def indices(self, client: int) -> np.ndarray:
        return np.zeros(0, dtype=np.int64)


def test_a_client_without_rows_trains_nothing() -> None:
    pair = Pair("fedavg", data="mnist12k-8x8", model=GROUP)
    errand, site = pair.errands[0], replace(pair.site, split=Nothing())  # type: ignore[arg-type]
    done = work_on(on_host, pair.method, errand, site)
    assert done.steps == 0 and done.samples == 0
    assert all(
        torch.equal(t, errand.message["weights"][n]) for n, t in done.reply["weights"].items()
    )
