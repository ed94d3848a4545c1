"""A pool of worker processes, spawned once.

Each worker has one torch thread and the data by shared memory; tasks and outcomes travel as bytes. Which worker takes which task
does not matter, since all chance is derived from (seed, client, round): the result is bit for bit that of the in-process engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as mp

from nestling.engines.engine import failed
from nestling.message import Message
from nestling.training.client import ClientSide, Outcome, Site, Task, work


class Pool:
    """`workers` processes (0: one a core)."""

    def __init__(self, workers: int = 0) -> None:
        self.workers = workers or cores()
        self._members: list[_Worker] = []

    def open(self, method: ClientSide, site: Site) -> None:
        for tensor in (site.x, site.y, site.public):
            if tensor is not None:
                tensor.share_memory_()
        self._method, self._site = method, site
        self._members = [self._spawn() for _ in range(self.workers)]

    def _spawn(self) -> _Worker:
        return _Worker(self._method, self._site)

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        # The longest work first, so that no worker is left alone with it at the end.
        waiting = deque(sorted(tasks, key=lambda t: -t.message.nbytes * self._site.split.size(t.client)))
        tried: dict[int, int] = {}
        while waiting or any(m.task for m in self._members):
            for member in self._members:
                if member.task is None and waiting:
                    member.give(waiting.popleft())
            busy = {m.connection: m for m in self._members if m.task is not None}
            for connection in wait(list(busy)):
                member = busy[connection]  # type: ignore[index]
                task = member.task
                assert task is not None
                try:
                    yield member.take()
                except (EOFError, OSError) as error:
                    # The process is gone (killed, out of memory). A fresh one gets the task once more.
                    self._members[self._members.index(member)] = self._spawn()
                    member.end()
                    tried[task.client] = tried.get(task.client, 0) + 1
                    if tried[task.client] > 1:
                        raise failed(task, f"its worker process died twice (exit code {member.process.exitcode})") from error
                    waiting.appendleft(task)

    def close(self) -> None:
        for member in self._members:
            member.end()
        self._members = []


class _Worker:
    def __init__(self, method: ClientSide, site: Site) -> None:
        context = mp.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, method, site), daemon=True)
        with _main_script_hidden():
            self.process.start()
        theirs.close()
        self.task: Task | None = None

    def give(self, task: Task) -> None:
        self.task = task
        with contextlib.suppress(OSError):  # a dead worker is noticed when its answer is awaited
            self.connection.send(_pack_task(task))

    def take(self) -> Outcome:
        answer = self.connection.recv()
        task, self.task = self.task, None
        assert task is not None
        if "error" in answer:
            raise failed(task, answer["error"])
        return Outcome(**{**answer, "reply": Message.from_bytes(answer["reply"]), "memory": _unpack(answer["memory"])})

    def end(self) -> None:
        self.connection.close()
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, method: ClientSide, site: Site) -> None:
    torch.set_num_threads(1)
    # Ctrl-C belongs to the main process; a worker ends when its pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            packed = connection.recv()
        except EOFError:
            return
        try:
            outcome = work(method, _unpack_task(packed), site)
            connection.send({**vars(outcome), "reply": outcome.reply.to_bytes(), "memory": _pack(outcome.memory)})
        except OSError:
            return
        except Exception as error:
            connection.send({"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"})


def _pack(state: dict[str, torch.Tensor]) -> bytes:
    return Message({"memory": state}).to_bytes() if state else b""


def _unpack(data: bytes) -> dict[str, torch.Tensor]:
    return dict(Message.from_bytes(data)["memory"]) if data else {}


def _pack_task(task: Task) -> dict[str, Any]:
    return {**vars(task), "message": task.message.to_bytes(), "memory": _pack(task.memory)}


def _unpack_task(packed: dict[str, Any]) -> Task:
    return Task(**{**packed, "message": Message.from_bytes(packed["message"]), "memory": _unpack(packed["memory"])})


@contextlib.contextmanager
def _main_script_hidden() -> Iterator[None]:
    """Keeps a spawned process from running the user's script again: workers need nothing of it."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__}
    for name in hidden:
        del main.__dict__[name]
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
