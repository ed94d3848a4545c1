"""A lane: a stream of the device, and the graphs that were recorded on it.

Launching the kernels of a small step costs far more than running them; a graph launches them all at
once. What is done on a lane for the first time runs as it is, which is real work and readies
whatever recording needs; the second time it is recorded, and replayed from then on. So recording
costs the time of one launch and no work is done twice.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

Action = Callable[[], None]


class Lane:
    """Graphs are recorded on the lane and replayed there and nowhere else. Matrix products keep
    counters in a workspace that belongs to the stream they were recorded on, so two graphs recorded
    on one stream and replayed side by side spoil each other's, and may never end.
    """

    def __init__(self, device: torch.device) -> None:
        """Opens a stream and a pool for graphs; on a CPU there is neither, and nothing is
        recorded."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.refusal = ""  # why something could not be recorded
        self._pool = torch.cuda.graph_pool_handle() if self.stream else None
        self._graphs: dict[Hashable, Action] = {}
        self._seen: set[Hashable] = set()

    @property
    def graphs(self) -> int:
        """How many graphs were recorded."""
        return len(self._graphs)

    def enter(self) -> None:
        """What is queued from now on goes to the lane (see `beside`). A block for every step, which
        would ask for the stream to go back to, would cost as much as launching the step."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    def do(self, kind: Hashable, action: Action) -> None:
        """Does the action on the lane. Actions of one kind do the same to the same tensors,
        whatever these hold. Where there are no graphs every action runs as it is: slow, but the
        same arithmetic, which is how tests reach it."""
        graph = self._graphs.get(kind)
        if graph is None and kind in self._seen and not self.refusal:
            graph = self._record(kind, action)
        if graph is not None:
            graph()
            return
        self._seen.add(kind)
        action()

    def _record(self, kind: Hashable, action: Action) -> Action | None:
        if self.stream is None:
            self._graphs[kind] = action
            return action
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    action()
                except BaseException:
                    # The first error is the one that is raised.
                    with contextlib.suppress(Exception):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.refusal = first_line(error)
            _free_the_generator()
            return None
        self._graphs[kind] = graph.replay
        return self._graphs[kind]


def _free_the_generator() -> None:
    """A capture that failed leaves the device's generator as if it still went on, and whoever then
    draws without a graph (dropout, in this run or the next one of the process) is refused. One that
    succeeds ends that."""
    ticks = torch.zeros((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    ticks += 1
    graph.capture_end()


@contextlib.contextmanager
def beside(lanes: Sequence[Lane]) -> Iterator[None]:
    """The block in which lanes are entered: their work starts after what was queued before the
    block on the stream that is the current one here, and what is queued there after the block waits
    for it."""
    streams = [lane.stream for lane in lanes if lane.stream is not None]
    if not streams:
        yield
        return
    home = torch.cuda.current_stream(streams[0].device)
    before = home.record_event()
    for stream in streams:
        stream.wait_event(before)
    try:
        yield
    finally:
        torch.cuda.set_stream(home)
    for stream in streams:
        home.wait_event(stream.record_event())


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside the block: what it would destroy on the device may not be
    destroyed while recording."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def first_line(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:200]
