"""A pool of worker processes, spawned once.

Each worker has one torch thread and the data by shared memory. The errands of a round are cut into
chunks; a worker has one chunk at work and one waiting, and tensors travel in blocks of memory that
both sides see (see `shared_memory`). Which worker takes which chunk does not matter, since all
chance is derived from (seed, client, round): the result is bit for bit that of the in-process
engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as mp

from nestling.engines.allocator import keep_freed_memory
from nestling.engines.engine import ClientError, Engine, failed
from nestling.engines.shared_memory import Block, Channel, Page, PagePacket, Spare
from nestling.message import Message, payload
from nestling.training.client import ClientSide, Errand, Outcome, Site, work

Do = Callable[[ClientSide, Sequence[Errand], Site], "list[Outcome]"]
"""What a worker does with a chunk: a function of a module, since the worker imports it. It must not
write to what the errands hold, nor keep any of it; an error that is a `ClientError` says itself
whom it is about."""

Cut = Callable[[Sequence[Errand], Site], "list[list[Errand]]"]
"""How a round is cut into chunks: every errand in one of them."""

DEPTH = 2
"""Chunks a worker has at a time: one at work, one waiting."""


def each(method: ClientSide, errands: Sequence[Errand], site: Site) -> list[Outcome]:
    """One client after another."""
    outcomes = []
    for errand in errands:
        try:
            outcomes.append(work(method, errand, site))
        except Exception as error:  # noqa: PERF203 (the error names its own errand)
            raise failed(errand, f"{type(error).__name__}: {error}") from error
    return outcomes


def singly(errands: Sequence[Errand], _site: Site) -> list[list[Errand]]:
    """Every errand in a chunk of its own."""
    return [[errand] for errand in errands]


class Pool(Engine):
    """`workers` processes (0: one per core) that do `do` with the chunks that `chunks` makes of a
    round."""

    name = "pool"

    def __init__(self, workers: int = 0, do: Do = each, chunks: Cut = singly) -> None:
        """Only notes what to do: processes start when the pool is opened."""
        self.workers = workers or cores()
        self.notes: list[str] = []
        self._do, self._cut = do, chunks
        self._members: list[_Worker] = []

    def open(self, method: ClientSide, site: Site) -> None:
        """Moves the data into shared memory and starts all workers side by side."""
        self.where.require(site.x, "the clients' data")
        for tensor in (site.x, site.y, site.public):
            if tensor is not None:
                tensor.share_memory_()
        self._method, self._site = method, site
        self._common, self._spare = Block(DEPTH), Spare()
        # Side by side: a start waits until the new process has imported what it needs to read what
        # it is given.
        with main_script_hidden(), ThreadPoolExecutor(self.workers) as starting:
            started = [starting.submit(self._spawn) for _ in range(self.workers)]
        self._members = [one.result() for one in started]

    def _spawn(self) -> _Worker:
        return _Worker(self._method, self._site, self._do)

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        """Hands out chunks, the longest first; a chunk whose worker dies is tried once more on a
        fresh one."""
        chunks = self._chunks(errands)
        common = _Common(self._common, chunks)
        # The longest work first, so that no worker is left alone with it at the end.
        waiting = deque(sorted(chunks, key=lambda c: -c.cost))
        # a worker may still be busy with a chunk of a round that nobody waits for any more
        wanted = set(chunks)
        while wanted:
            if not self._members:
                raise RuntimeError("the pool is not open")
            self._hand_out(waiting, common)
            busy = {m.channel.connection: m for m in self._members if m.given}
            for connection in wait(list(busy)):
                member = busy[connection]  # type: ignore[index]
                chunk = member.given[0]
                try:
                    answer = member.take(self._spare)
                except (EOFError, OSError) as error:
                    again = [c for c in self._replace(member) if c in wanted]
                    if chunk in wanted and chunk.deaths > 1:
                        raise _died(chunk, member) from error
                    waiting.extendleft(reversed(again))
                    continue
                if chunk not in wanted:
                    continue
                if isinstance(answer, str):
                    raise ClientError(answer)
                wanted.discard(chunk)
                self._hand_out(waiting, common)  # the caller may take its time with what it gets
                yield from answer

    def close(self) -> None:
        """Closes the pipes of all workers and waits for them to end."""
        for member in self._members:
            # all of them first, so that they end at the same time
            member.channel.connection.close()
        for member in self._members:
            member.end()
        self._members = []

    def _chunks(self, errands: Sequence[Errand]) -> list[_Chunk]:
        sizes = {id(errand.message): errand.message.nbytes for errand in errands}

        def cost(errand: Errand) -> int:
            held = sizes[id(errand.message)] + sum(payload(t) for t in errand.memory.values())
            return (1 + held) * self._site.split.size(errand.client)

        return [
            _Chunk(part, sum(map(cost, part))) for part in self._cut(errands, self._site) if part
        ]

    def _hand_out(self, waiting: deque[_Chunk], common: _Common) -> None:
        """Gives every worker something to do and something to do next, the next chunk always to
        whoever has the least to do."""
        while waiting and (free := [m for m in self._members if len(m.given) < DEPTH]):
            least = min(free, key=lambda m: (sum(c.cost for c in m.given), len(m.given)))
            least.give(waiting.popleft(), common)

    def _replace(self, member: _Worker) -> list[_Chunk]:
        """A fresh worker in the place of one whose process is gone (killed, out of memory). Gives
        the chunks it had."""
        with main_script_hidden():
            self._members[self._members.index(member)] = self._spawn()
        member.end()
        member.given[0].deaths += 1
        return list(member.given)


@dataclass(eq=False)
class _Chunk:
    errands: list[Errand]
    cost: int
    deaths: int = 0


class _Common:
    """The messages that several chunks of a round share. They are written once, when the first of
    these chunks is given away."""

    def __init__(self, block: Block, chunks: Sequence[_Chunk]) -> None:
        self._page = Page(block)
        self._uses = Counter(
            number for c in chunks for number in {id(errand.message) for errand in c.errands}
        )
        self._packets: dict[int, PagePacket] = {}

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Where they lie; nothing as long as there are none."""
        return (self._page.block,) if self._packets else ()

    def packet(self, message: Message, page: Page) -> PagePacket:
        """Where the message lies: among those shared, or on a chunk's own page."""
        if self._uses[id(message)] < 2:
            return page.add(message.parts)
        if id(message) not in self._packets:
            self._packets[id(message)] = self._page.add(message.parts)
            self._page.flush()
        return self._packets[id(message)]


class _Worker:
    def __init__(self, method: ClientSide, site: Site, do: Do) -> None:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, method, site, do), daemon=True)
        self.process.start()
        theirs.close()
        self.channel = Channel(ours, DEPTH)
        self.given: deque[_Chunk] = deque()

    def give(self, chunk: _Chunk, common: _Common) -> None:
        page = self.channel.page()
        page.finish(_pack_errands(chunk.errands, page, common))
        self.given.append(chunk)
        # a dead worker is noticed when its answer is awaited
        with contextlib.suppress(OSError), self._in_step():
            self.channel.post(page, *common.blocks)

    def take(self, spare: Spare) -> list[Outcome] | str:
        """The outcomes of the oldest chunk, or what went wrong with it."""
        with self._in_step():
            answer = self.channel.fetch()
            found = (
                answer
                if isinstance(answer, str)
                else [_unpack_outcome(one, self.channel, spare) for one in answer]
            )
            self.given.popleft()
            return found

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Whatever breaks off an exchange leaves it unclear what was said: then the worker goes,
        and a fresh one will be taken."""
        try:
            yield
        except BaseException:
            self.process.kill()
            self.process.join(
                timeout=10
                # once it is gone the next round sees so at once, and not in the middle of something
                # else
            )
            raise

    def end(self) -> None:
        self.channel.connection.close()
        if self.given:
            self.process.kill()  # nobody waits for what it does
        self.process.join(timeout=2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, method: ClientSide, site: Site, do: Do) -> None:
    torch.set_num_threads(1)
    # Ctrl-C belongs to the main process; a worker ends when its pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    channel = Channel(connection, DEPTH)
    with contextlib.suppress(EOFError, OSError):
        while True:
            errands = _unpack_errands(channel.fetch(), channel)
            channel.post(_answer(errands, channel, method, site, do))


def _answer(
    errands: list[Errand], channel: Channel, method: ClientSide, site: Site, do: Do
) -> Page:
    page = channel.page()
    try:
        outcomes = do(method, errands, site)
        if sorted(o.client for o in outcomes) != sorted(t.client for t in errands):
            raise RuntimeError(f"the outcomes are those of clients {[o.client for o in outcomes]}")
        page.finish([_pack_outcome(outcome, page) for outcome in outcomes])
    except Exception as error:
        named = (
            error
            if isinstance(error, ClientError)
            else _blame(errands, f"{type(error).__name__}: {error}")
        )
        page = channel.page()
        page.finish(f"{named}\n{''.join(traceback.format_exception(error.__cause__ or error))}")
    return page


def _pack_errands(errands: Sequence[Errand], page: Page, common: _Common) -> dict[str, Any]:
    messages = {id(errand.message): errand.message for errand in errands}
    return {
        "messages": {
            number: (common.packet(m, page), dict(m.facts)) for number, m in messages.items()
        },
        "errands": [
            {**vars(t), "message": id(t.message), "memory": page.add({"memory": t.memory})}
            for t in errands
        ],
    }


def _unpack_errands(header: dict[str, Any], channel: Channel) -> list[Errand]:
    """The errands, their tensors where they lie; errands that shared a message share one here."""
    messages = {
        number: Message(channel.view(packet), facts)
        for number, (packet, facts) in header["messages"].items()
    }
    return [
        Errand(
            **{
                **one,
                "message": messages[one["message"]],
                "memory": dict(channel.view(one["memory"])["memory"]),
            }
        )
        for one in header["errands"]
    ]


def _pack_outcome(outcome: Outcome, page: Page) -> dict[str, Any]:
    reply = (page.add(outcome.reply.parts), dict(outcome.reply.facts))
    memory = page.add({"memory": outcome.memory})
    return {**vars(outcome), "reply": reply, "memory": memory, "loss": float(outcome.loss)}


def _unpack_outcome(packed: dict[str, Any], channel: Channel, spare: Spare) -> Outcome:
    """The outcome in memory of its own: the reply and what stays on the client apart, since one is
    kept longer than the other."""
    parts, facts = packed["reply"]
    memory = dict(channel.copy(packed["memory"], spare)["memory"])
    return Outcome(
        **{**packed, "reply": Message(channel.copy(parts, spare), facts), "memory": memory}
    )


def _died(chunk: _Chunk, member: _Worker) -> ClientError:
    return _blame(
        chunk.errands, f"its worker process died twice (exit code {member.process.exitcode})"
    )


def _blame(errands: Sequence[Errand], reason: str) -> ClientError:
    """The error of a chunk, where it is not known which of its clients it happened on."""
    if len(errands) == 1:
        return failed(errands[0], reason)
    return ClientError(
        f"one of the clients {', '.join(str(t.client) for t in errands)} failed in round "
        f"{errands[0].round}: {reason}"
    )


@contextlib.contextmanager
def main_script_hidden() -> Iterator[None]:
    """Keeps a spawned process from running the user's script again: workers need nothing of it."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__
    }
    for name in hidden:
        del main.__dict__[name]
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def cores() -> int:
    """The cores this process may use."""
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )
