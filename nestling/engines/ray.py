"""Workers on Ray: on this machine, or on all machines of a cluster.

One actor per worker, with one torch thread. The data lies once in each machine's object store, and
actors read it there. Which actor takes which errand does not matter, since all chance is derived
from (seed, client, round): the result is bit for bit that of the in-process engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

from nestling.engines.engine import Engine, failed
from nestling.engines.pool import cores
from nestling.errors import InputError
from nestling.message import Message, payload
from nestling.training.client import ClientSide, Errand, Outcome, Site, work
from nestling.views import State

DEPTH = 2
"""Errands an actor has at a time: one at work, one waiting."""


class Ray(Engine):
    """`workers` actors (0: one per core of this machine, or of the whole cluster) on the cluster at
    `address` (empty: a local Ray that is started for the run, or the one that this process already
    uses)."""

    name = "ray"

    def __init__(self, workers: int = 0, address: str = "") -> None:
        """Only notes the cluster: Ray is imported and joined when the engine is opened."""
        self.workers, self.address = workers, address
        self.notes: list[str] = []
        self._members: list[_Member] = []
        self._started = False

    def open(self, method: ClientSide, site: Site) -> None:
        """Joins the cluster, puts method and data into its object store, and starts the actors."""
        self.where.require(site.x, "the clients' data")
        self._ray = _ray()
        self._connect()
        self._site = site
        tensors = {
            f.name: getattr(site, f.name)
            for f in fields(site)
            if isinstance(getattr(site, f.name), Tensor)
        }
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        without: dict[str, Any] = dict.fromkeys(arrays)
        self._shared = [self._ray.put(part) for part in (method, replace(site, **without), arrays)]
        self._actor = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Actor)
        workers = self.workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._members = [self._spawn() for _ in range(workers)]

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        """Hands out errands, the longest first; an errand whose actor dies is tried once more on a
        fresh one."""
        # The longest work first, so that no worker is left alone with it at the end.
        waiting = deque(sorted(errands, key=self._cost, reverse=True))
        letters, deaths = _Letters(self._ray, errands), Counter[int]()
        for member in self._members:
            member.given.clear()  # nobody waits for what an earlier round left behind
        while waiting or any(member.given for member in self._members):
            self._hand_out(waiting, letters)
            for member in self._heard_of():
                try:
                    answer = self._ray.get(member.awaited)
                except self._ray.exceptions.RayError as error:
                    again = self._replace(member, error)
                    # the others were only waiting behind it
                    deaths.update(errand.client for errand in again[:1])
                    if again and deaths[again[0].client] > 1:
                        raise failed(
                            again[0], f"its worker process died twice ({error})"
                        ) from error
                    waiting.extendleft(reversed(again))
                    continue
                if not member.ready:
                    member.ready = True
                    continue
                errand, _ = member.given.popleft()
                letters.done(errand)
                if isinstance(answer, str):
                    raise failed(errand, answer)
                self._hand_out(waiting, letters)  # the caller may take its time with what it gets
                yield _unpack_outcome(answer)

    def close(self) -> None:
        """Ends the actors, and Ray itself where this engine started it."""
        for member in self._members:
            self._end(member)
        self._members, self._shared = [], []
        if self._started:
            self._ray.shutdown()
        self._started = False

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.address:
            try:
                _knock(self.address)
                self._ray.init(self.address, **quiet)
            except (OSError, ValueError, RuntimeError) as error:
                raise InputError(
                    f"no Ray cluster answers at {self.address!r}: {error}",
                    field="engine.address",
                    fix="check the address, or leave it out for a local Ray",
                ) from error
        else:
            with _on_loopback(self._ray):
                self._ray.init(
                    "local",
                    num_cpus=self.workers or cores(),
                    num_gpus=0,
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",
                    **quiet,
                )
        self._started = True

    def _cost(self, errand: Errand) -> int:
        return (
            1 + errand.message.nbytes + sum(payload(t) for t in errand.memory.values())
        ) * self._site.split.size(errand.client)

    def _spawn(self, failures: int = 0) -> _Member:
        actor = self._actor.remote(*self._shared)
        return _Member(actor, actor.hello.remote(), deque(), failures)

    def _end(self, member: _Member) -> None:
        with contextlib.suppress(Exception):  # it, or the whole cluster, may be gone
            self._ray.kill(member.actor)

    def _hand_out(self, waiting: deque[Errand], letters: _Letters) -> None:
        """Gives every actor something to do and something to do next. One that its machine has not
        started yet gets nothing, since a busy cluster may never start it."""
        while waiting and (free := [m for m in self._members if m.ready and len(m.given) < DEPTH]):
            member, errand = min(free, key=lambda m: len(m.given)), waiting.popleft()
            member.given.append(
                (
                    errand,
                    member.actor.work.remote(_pack_errand(errand), letters.of(errand)),
                )
            )

    def _heard_of(self) -> list[_Member]:
        """The actors that have something to say, at least one of them."""
        expected = {m.awaited: m for m in self._members if m.given or not m.ready}
        heard, _ = self._ray.wait(list(expected), num_returns=1)
        return [expected[reference] for reference in heard]

    def _replace(self, member: _Member, error: Exception) -> list[Errand]:
        """A fresh actor in the place of one that is gone (killed, out of memory, its machine lost).
        Gives the errands it had."""
        failures = 0 if member.ready else member.failures + 1
        if failures > 1:
            raise RuntimeError(f"a Ray worker died twice while it started: {error}") from error
        self._end(member)
        self._members[self._members.index(member)] = self._spawn(failures)
        return [errand for errand, _ in member.given]


@dataclass(eq=False)
class _Member:
    """An actor as we know it: whether it runs, and the errands it has, each with the reference of
    its answer, oldest first."""

    actor: Any
    hello: Any
    given: deque[tuple[Errand, Any]]
    failures: int = 0
    ready: bool = False

    @property
    def awaited(self) -> Any:
        return self.given[0][1] if self.ready else self.hello


class _Letters:
    """The messages of a round as bytes. One that several errands share is put into the object store
    once, and taken out again after the last of them."""

    def __init__(self, ray: Any, errands: Sequence[Errand]) -> None:
        self._ray = ray
        self._left = Counter(id(errand.message) for errand in errands)
        self._shared = {number for number, uses in self._left.items() if uses > 1}
        self._put: dict[int, Any] = {}

    def of(self, errand: Errand) -> Any:
        """The bytes of an errand's message, or where they lie."""
        number = id(errand.message)
        if number not in self._shared:
            return errand.message.to_bytes()
        if number not in self._put:
            self._put[number] = self._ray.put(errand.message.to_bytes())
        return self._put[number]

    def done(self, errand: Errand) -> None:
        """A errand has its answer."""
        self._left[id(errand.message)] -= 1
        if not self._left[id(errand.message)]:
            self._put.pop(id(errand.message), None)


class _Actor:
    """What runs in a worker process."""

    def __init__(self, method: ClientSide, site: Site, arrays: dict[str, np.ndarray]) -> None:
        torch.set_num_threads(1)
        tensors: dict[str, Any] = {name: _borrowed(array) for name, array in arrays.items()}
        self.method, self.site = method, replace(site, **tensors)

    def hello(self) -> int:
        """Says that the process is there, and its number."""
        return os.getpid()

    def work(self, errand: dict[str, Any], message: bytes) -> dict[str, Any] | str:
        """The outcome of an errand, packed, or what went wrong with it."""
        try:
            return _pack_outcome(work(self.method, _unpack_task(errand, message), self.site))
        except Exception as error:
            return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def _borrowed(array: np.ndarray) -> Tensor:
    """A tensor over an array of the object store, without a copy. Torch warns that it must not be
    written to, which nobody does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _pack_errand(errand: Errand) -> dict[str, Any]:
    """All of an errand but its message, which travels apart."""
    return {**vars(errand), "message": None, "memory": _pack(errand.memory)}


def _unpack_task(packed: dict[str, Any], message: bytes) -> Errand:
    return Errand(
        **{**packed, "message": Message.from_bytes(message), "memory": _unpack(packed["memory"])}
    )


def _pack_outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        **vars(outcome),
        "reply": outcome.reply.to_bytes(),
        "memory": _pack(outcome.memory),
        "loss": float(outcome.loss),
    }


def _unpack_outcome(packed: dict[str, Any]) -> Outcome:
    return Outcome(
        **{
            **packed,
            "reply": Message.from_bytes(packed["reply"]),
            "memory": _unpack(packed["memory"]),
        }
    )


def _pack(state: State) -> bytes:
    return Message({"memory": state}).to_bytes() if state else b""


def _unpack(data: bytes) -> State:
    return dict(Message.from_bytes(data)["memory"]) if data else {}


def _ray() -> Any:
    """The package, which few need."""
    try:
        import ray
    except ImportError:
        raise InputError(
            'engine "ray" needs the package ray',
            field="engine.name",
            fix="pip install 'nestling[ray]'",
        ) from None
    return ray


def _knock(address: str) -> None:
    """Raises `OSError` where nobody listens: Ray itself would try for minutes before it says so."""
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.hostname and place.port:
        socket.create_connection((place.hostname, place.port), timeout=10).close()


@contextlib.contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Has a Ray that starts inside the block be reached from this machine only, and report nothing
    to its makers. Whoever reaches a Ray can run anything in it, and on Linux it would listen on all
    networks."""
    constants = ray._private.ray_constants
    before, environment = (
        getattr(constants, "ENABLE_RAY_CLUSTER", True),
        os.environ.get("RAY_USAGE_STATS_ENABLED"),
    )
    constants.ENABLE_RAY_CLUSTER = False
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if environment is None:
            del os.environ["RAY_USAGE_STATS_ENABLED"]
        else:
            os.environ["RAY_USAGE_STATS_ENABLED"] = environment
