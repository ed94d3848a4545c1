"""A lane: a stream of the device, and the graphs that were recorded on it.

Launching the kernels of a small step costs far more than running them; a graph launches them all at once. What is done on a lane for
the first time runs as it is, which is real work and readies whatever recording needs; the second time it is recorded, and replayed from
then on. So recording costs the time of one launch and no work is done twice.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator

import torch

Action = Callable[[], None]


class Lane:
    """Work on a lane starts after what was queued on the current stream before, and is waited for at the end.

    Graphs are recorded on the lane and replayed there and nowhere else. Matrix products keep counters in a workspace that belongs to
    the stream they were recorded on, so two graphs recorded on one stream and replayed side by side spoil each other's, up to never
    ending.
    """

    def __init__(self, device: torch.device) -> None:
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
        """What is queued from now on goes to the lane. For a round of hundreds of steps: a block for each, which asks for the stream to
        go back to, costs as much as launching the step."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    def begin(self) -> None:
        """The lane waits for the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def end(self) -> None:
        """The current stream waits for the lane."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def do(self, kind: Hashable, action: Action) -> None:
        """Does the action on the lane. Actions of one kind do the same to the same tensors, whatever these hold. Where there are no
        graphs every action runs as it is: slow, but the same arithmetic, which is how tests reach it."""
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
                    # What went wrong first is what is told.
                    with contextlib.suppress(Exception):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.refusal = first_line(error)
            return None
        self._graphs[kind] = graph.replay
        return self._graphs[kind]


@contextlib.contextmanager
def back_to_this_stream() -> Iterator[None]:
    """Whatever lanes are entered inside the block, after it the current stream is what it was."""
    home = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if home is not None:
            torch.cuda.set_stream(home)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside the block: what it would destroy on the device may not be destroyed while recording."""
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
