"""What the server runs: the rounds."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """The whole run, from where its folder says it stands."""
    from nestling.fleet.flower.hosting import host

    host(grid, str(context.run_config["home"]))
