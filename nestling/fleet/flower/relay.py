"""The ClientApp of a device with a resident worker: it gives the letter to the worker and goes.

Flower starts a process for every message, so that nothing heavy may be imported here.
"""

from __future__ import annotations

import os

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from nestling.errors import InputError
from nestling.fleet.flower.letters import ACTION, pack, unpack
from nestling.fleet.protocol.local import ask

SOCKET = "NESTLING_SOCKET"

app = ClientApp()


@app.train(ACTION)
@app.query(ACTION)
def relay(message: Message, context: Context) -> Message:
    """Hands a letter to the worker whose socket the node's configuration (or the environment)
    names."""
    path = str(context.node_config.get("socket") or os.environ.get(SOCKET, ""))
    if not path:
        raise InputError(
            "no worker is named",
            field="socket",
            fix="start the SuperNode with --node-config 'socket=\"PATH\"'",
        )
    return Message(pack(ask(path, unpack(message.content))), reply_to=message)
