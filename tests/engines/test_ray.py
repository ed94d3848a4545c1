"""The Ray engine gives the result of the plain loop, bit for bit, survives the loss of workers and
cleans up after itself."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import EngineConfig
from nestling.engines.engine import ClientError
from nestling.engines.inline import Inline
from nestling.engines.ray import Ray, _Letters
from nestling.errors import InputError
from nestling.message import Message
from nestling.methods.submodel.shared_average import SharedAverage
from nestling.runs.assemble import assemble, site_of
from nestling.training.client import Client, Errand, Outcome
from nestling.training.phase import Phase
from tests.small import errands_of, small

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed (nestling[ray])"
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray of the caller's own, which the engine must use and leave alone."""
    import ray

    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield ray
    ray.shutdown()


def states(experiment: nestling.Experiment) -> dict[str, torch.Tensor]:
    result = nestling.run(experiment)
    method, store = result.federation.method, result.federation.world.store
    kept = {f"client {c}/{n}": t for c in store.clients() for n, t in store.get(c).items()}
    return {
        **{f"{kind}/{n}": t for kind, part in method.state().items() for n, t in part.items()},
        **kept,
    }


def opened(engine: Any, method: Any = "shared-average") -> list[Errand]:
    experiment, federation = assemble(small(method))
    engine.open(experiment.make_method(), site_of(federation))
    return errands_of(federation, 4)


def same(got: Sequence[Outcome], wanted: Sequence[Outcome]) -> bool:
    ours, theirs = ({o.client: o for o in outcomes} for outcomes in (got, wanted))
    return ours.keys() == theirs.keys() and all(
        ours[c].loss == float(o.loss)
        and all(torch.equal(ours[c].reply["weights"][n], t) for n, t in o.reply["weights"].items())
        for c, o in theirs.items()
    )


def plain() -> list[Outcome]:
    inline = Inline()
    errands = opened(inline)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return list(inline.run(errands))
    finally:
        torch.set_num_threads(before)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"nestling\[ray\]") as caught:
        opened(Ray(2))
    assert caught.value.field == "engine.name"


@needs_ray
@pytest.mark.parametrize(
    ("method", "workers"), [("shared-average", 2), ("local", 3), ("shared-distill", 2)]
)
def test_ray_equals_the_plain_loop(cluster: Any, method: str, workers: int) -> None:
    """Also with more workers than the cluster has room for: those that never start get nothing to
    do."""
    alone = states(small(method))
    spread = states(small(method, engine=EngineConfig("ray", workers)))
    assert alone.keys() == spread.keys() and alone
    assert all(torch.equal(alone[k], spread[k]) for k in alone)
    assert cluster.is_initialized()  # it was there before


@needs_ray
def test_a_killed_worker_is_replaced_and_an_error_names_the_client(cluster: Any) -> None:
    engine = Ray(2)
    errands = opened(engine)
    try:
        killed = cluster.get([member.hello for member in engine._members])
        for process in killed:
            os.kill(process, signal.SIGKILL)
        found, waiting = [], []
        for outcome in engine.run(errands):
            found.append(outcome)
            waiting.append(max(len(member.given) for member in engine._members))
        assert same(found, plain()) and max(waiting) <= 2
        again = cluster.get([member.hello for member in engine._members])
        assert not set(again) & set(killed)
        broken = Errand(2, 1, "main", errands[2].spec, Message({"weights": {}}))
        with pytest.raises(ClientError, match="client 2 failed in round 1"):
            list(engine.run([broken]))
        assert same(list(engine.run(errands)), plain())  # and the engine goes on
    finally:
        engine.close()
    assert not any(_alive(process) for process in _gone_soon(again))


@dataclass
class Deadly(SharedAverage):
    """Takes the worker of client 1 down with it."""

    def phases(self, client: Client, received: Message) -> Sequence[Phase]:
        if client.id == 1:
            os._exit(3)
        return super().phases(client, received)


@needs_ray
def test_a_task_that_kills_its_worker_is_tried_once_more(cluster: Any) -> None:
    engine = Ray(1)
    errands = opened(engine, Deadly())
    done = []
    try:
        with pytest.raises(
            ClientError, match="client 1 failed in round 1: its worker process died twice"
        ):
            done.extend(outcome.client for outcome in engine.run(errands[1:]))
    finally:
        engine.close()
    assert 1 not in done


@needs_ray
def test_a_message_that_tasks_share_is_put_once(cluster: Any) -> None:
    shared, own = (
        Message({"weights": {"w": torch.ones(3)}}),
        Message({"weights": {"w": torch.zeros(3)}}),
    )
    errands = [
        Errand(client, 1, "main", {}, message)
        for client, message in enumerate((shared, own, shared))
    ]
    letters = _Letters(cluster, errands)
    first, second, third = (letters.of(errand) for errand in errands)
    assert first == third and torch.equal(
        Message.from_bytes(cluster.get(first))["weights"]["w"], shared["weights"]["w"]
    )
    assert torch.equal(Message.from_bytes(second)["weights"]["w"], own["weights"]["w"])
    letters.done(errands[0])
    assert letters.of(errands[2]) == first
    letters.done(errands[2])
    assert not letters._put


@needs_ray
def test_it_joins_a_cluster_by_its_address(cluster: Any) -> None:
    address = cluster.get_runtime_context().gcs_address
    _elsewhere(f"join({address!r})")
    assert cluster.is_initialized() and cluster.get(cluster.remote(lambda: 7).remote()) == 7


@needs_ray
def test_closing_a_local_ray_leaves_no_process_behind() -> None:
    _elsewhere("come_and_go()")


@needs_ray
def test_an_address_where_nobody_answers_is_told() -> None:
    _elsewhere("nobody_there()")


# -- what runs in processes of their own, so that each has a Ray of its own ------------------------


def join(address: str) -> None:
    engine = Ray(2, address)
    errands = opened(engine)
    try:
        assert same(list(engine.run(errands)), plain())
    finally:
        engine.close()
    import ray

    assert not ray.is_initialized()


def come_and_go() -> None:
    engine = Ray(2)
    errands = opened(engine)
    started = _descendants(os.getpid())
    try:
        assert len(started) > 2 and not _listening(started, beyond_loopback=True)
        assert same(list(engine.run(errands)), plain())
    finally:
        engine.close()
    left = [process for process in _gone_soon(started) if _alive(process)]
    assert not left and not _descendants(os.getpid())


def nobody_there() -> None:
    for address in ("127.0.0.1:1", "nonsense"):
        with pytest.raises(InputError) as caught:
            opened(Ray(1, address))
        assert caught.value.field == "engine.address"


def _elsewhere(call: str) -> None:
    code = f"from tests.engines.test_ray import *; {call}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _gone_soon(processes: Sequence[int]) -> Sequence[int]:
    """The same, after they had time to end."""
    deadline = time.monotonic() + 20
    while any(map(_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return processes


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _descendants(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for process in found:
        found.extend(
            child for child, parent in parents.items() if parent == process and _alive(child)
        )
    return found[1:]


def _listening(processes: Sequence[int], beyond_loopback: bool) -> list[str]:
    """The local addresses on which these processes listen."""
    sockets = set()
    for process in processes:
        for handle in Path(f"/proc/{process}/fd").glob("*"):
            try:
                sockets.add(os.readlink(handle))
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and f"socket:[{parts[9]}]" in sockets:
                found.append(parts[1])
    loopback = (
        "0100007F:",
        "0000000000000000FFFF00000100007F:",
        "00000000000000000000000001000000:",
    )
    return [address for address in found if not (beyond_loopback and address.startswith(loopback))]
