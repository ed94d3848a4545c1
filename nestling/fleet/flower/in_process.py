"""A Grid without a SuperLink, SuperNodes or Ray: any Flower strategy and ClientApp in this
process."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

SUPERLINK = 1
RUN = 1
_APP_FAILED = 2  # Flower's code of a ClientApp that raised


class InProcessGrid(Grid):
    """Nodes of one ClientApp in this process. A message is worked on when it is pushed, in the
    order in which messages come.

    nodes: how many, or the configuration of each (Flower's `node_config`); without one a node has
           `partition-id` and `num-partitions`, as in Flower's simulation.

    Since Flower 1.40 a `Message` can only be made in a process that knows its task, so the first
    grid tells this process who it is, unless it knows. That is the one thing done to Flower here
    that is not in its public modules; where Flower has no such notion (before 1.40, or should it go
    again) nothing is done.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int | Sequence[Mapping[str, Any]] = 2,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Gives each node a context of its own; all have the same `run_config`."""
        _know_who_we_are()
        configs = (
            [{"partition-id": k, "num-partitions": nodes} for k in range(nodes)]
            if isinstance(nodes, int)
            else nodes
        )
        self.app, self.run_config = app, dict(run_config or {})
        self.contexts = {
            SUPERLINK + 1 + k: Context(
                RUN, SUPERLINK + 1 + k, dict(config), RecordDict(), dict(self.run_config)
            )
            for k, config in enumerate(configs)
        }
        self._numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}
        self._run: Any = None

    def play(self, server: ServerApp) -> Context:
        """Runs a ServerApp on the grid; gives the context it ran in."""
        context = Context(RUN, SUPERLINK, {}, RecordDict(), dict(self.run_config))
        server(self, context)
        return context

    def set_run(self, run: Any) -> None:
        """Remembers the run, which only `run` gives back."""
        self._run = run

    @property
    def run(self) -> Any:
        """The run that was set, or None."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node; it gets its number when it is pushed."""
        return Message(
            content=content,
            message_type=message_type,
            dst_node_id=dst_node_id,
            group_id=group_id,
            ttl=ttl,
        )

    def get_node_ids(self) -> Iterable[int]:
        """All nodes: none of them ever goes away."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Has each message answered at once, keeps the reply, and gives the messages' numbers."""
        tickets = []
        for message in messages:
            numbered = self._numbered(message)
            tickets.append(numbered.metadata.message_id)
            self._replies[tickets[-1]] = self._numbered(self._reply(numbered))
        return tickets

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to messages of these numbers, each given once."""
        return [self._replies.pop(ticket) for ticket in message_ids if ticket in self._replies]

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002 (Flower's)
    ) -> Iterable[Message]:
        """The replies to messages, which are there at once: `timeout` changes nothing."""
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message:
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return Message(Error(code=5, reason="there is no such node"), reply_to=message)
        try:
            return self.app(message, context)
        except Exception as error:
            return Message(
                Error(code=_APP_FAILED, reason=f"{type(error).__name__}: {error}"), reply_to=message
            )

    def _numbered(self, message: Message) -> Message:
        """The message with a number of its own, as a SuperLink gives it."""
        old = message.metadata
        metadata = Metadata(
            run_id=RUN,
            message_id=f"message {next(self._numbers)}",
            src_node_id=old.src_node_id or SUPERLINK,
            dst_node_id=old.dst_node_id,
            reply_to_message_id=old.reply_to_message_id,
            group_id=old.group_id,
            created_at=old.created_at or time.time(),
            ttl=old.ttl,
            message_type=old.message_type,
        )
        # Flower's own grids make messages so; its types do not say that one may.
        make: Any = Message
        if message.has_error():
            return make(error=message.error, metadata=metadata)
        return make(content=message.content, metadata=metadata)


def _know_who_we_are() -> None:
    try:
        identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    except (ImportError, AttributeError):
        return
    for name, value in (("task_id", 1), ("run_id", RUN), ("node_id", SUPERLINK)):
        try:
            getattr(identity, name)
        except RuntimeError:  # noqa: PERF203 (each may be unknown by itself)
            setattr(identity, name, value)
