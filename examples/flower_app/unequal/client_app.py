"""The client: it trains what it is sent, on its share of the experiment's data. For data of its own: `client_app(data="rows.npz")`."""

from flwr.app import Context

from nestling.fleet.flower import client_app


def folder(context: Context) -> str:
    """Where a device keeps what stays on it."""
    return str(context.run_config["devices"])


app = client_app(folder=folder)
