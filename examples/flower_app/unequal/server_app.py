"""The server: a strategy that gives every device the part of the network that is meant for it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from nestling import SplitConfig, Tier
from nestling.fleet.flower import Strategy

DEVICES = (Tier(name="small", ratio=0.5, count=1), Tier(name="large", ratio=1.0, count=1))

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs all rounds; nothing here is told of shapes."""
    config = context.run_config
    settings = {"method": config["method"], "rounds": config["rounds"], "participants": 0, "fleet": DEVICES}
    strategy = Strategy(**settings, split=SplitConfig(size=100), folder=config["out"] or None, min_clients=len(DEVICES))
    result = strategy.start(grid)
    print("accuracy by round:", {n: metrics["global_score"] for n, metrics in result.evaluate_metrics_serverapp.items()})
