"""The client's side inside a Flower ClientApp."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from nestling.fleet.flower.letters import ACTION, pack, unpack
from nestling.fleet.node.data_files import EXPERIMENT

Handler = Callable[[Message, Context], Message]

FOLDER = "~/.cache/nestling/fleet"


def client_app(**settings: Any) -> ClientApp:
    """A ClientApp that works for a nestling server; the settings are those of `client_fn`."""
    app, handler = ClientApp(), client_fn(**settings)
    app.train(ACTION)(handler)
    app.query(ACTION)(handler)
    return app


def client_fn(
    data: str | Callable[[Context], str] = "",
    device: str = "",
    folder: str | Path | Callable[[Context], str | Path] = "",
    experiment: Any = None,
) -> Handler:
    """What a ClientApp does with our messages. In an app of the user's own:
    `app.train("nestling")(handler)` and `app.query("nestling")(handler)`, beside whatever else it
    does.

    data:       an .npz file or a folder of them, or "experiment": the node's share of the
                experiment's own data.
    device:     the kind of device, or the tier of the experiment; empty: any.
    folder:     where the client keeps what stays on the device.
    experiment: the `Experiment`, where its method or network is an object of the user's own code.

    What is not given is taken from the node's configuration: `data`, `device`, `folder`, `name`,
    `client` (or `partition-id`, which Flower's simulation sets).
    """

    def handle(message: Message, context: Context) -> Message:
        config = context.node_config
        number = config.get("client", config.get("partition-id"))
        name = str(config.get("name") or f"client {context.node_id if number is None else number}")
        source = (data(context) if callable(data) else data) or str(
            config.get("data") or EXPERIMENT
        )
        given = folder(context) if callable(folder) else folder
        home = Path(given or str(config.get("folder") or FOLDER)).expanduser() / name.replace(
            "/", "_"
        )
        kind = device or str(config.get("device") or "")
        worker = _worker(
            str(home), name, None if number is None else int(number), kind, source, experiment
        )
        return Message(pack(worker.handle(unpack(message.content))), reply_to=message)

    return handle


@lru_cache(maxsize=64)
def _worker(
    home: str, name: str, client: int | None, device: str, data: str, experiment: Any
) -> Any:
    """A process that goes on keeps its workers, so that networks are built once."""
    from nestling.fleet.node.profile import memory
    from nestling.fleet.node.worker import Worker
    from nestling.fleet.protocol.wire import Member

    found = memory()
    member = Member(name, client, device, ram=found.total, free=found.available)
    return Worker(home, [member], data, lambda: memory().available, experiment)
