"""The task in Flower's simulation: as many actors as workers, one core each."""

from __future__ import annotations

import os

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

from contest import Stopwatch, arguments, report
from flower_app.client_app import app
from flower_app.server_app import server_app
from flwr.simulation import run_simulation
from local_training import accuracy
from networks import NETWORKS
from plan import read
from torch import Tensor


def main() -> None:
    """Runs the plan of a folder."""
    options = arguments()
    watch = Stopwatch()
    plan = read(options.folder, mapped=True)
    found: dict[str, Tensor] = {}
    run_simulation(
        server_app=server_app(plan, options.folder.absolute(), watch, found),
        client_app=app,
        num_supernodes=plan.clients,
        backend_config={
            "init_args": {"num_cpus": options.workers},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    network = NETWORKS[plan.network]()
    network.load_state_dict(found)
    report(
        watch,
        options.folder,
        "flower",
        accuracy(network, plan.x_test, plan.y_test),
        found,
        watch.seconds(),
    )


if __name__ == "__main__":
    main()
