"""How a contestant that trains a network in place takes part: reads the plan, trains, tests,
reports."""

from __future__ import annotations

from collections.abc import Callable

from contest import Stopwatch, arguments, report
from local_training import accuracy
from networks import NETWORKS
from plan import Plan, read
from torch import nn


def enter(name: str, train: Callable[[nn.Module, Plan, Stopwatch], None]) -> None:
    """Runs the plan of the folder that the command line names."""
    options = arguments()
    watch = Stopwatch(options.device)
    plan = read(options.folder).on(options.device)
    network = NETWORKS[plan.network]().to(options.device)
    network.load_state_dict(plan.start)
    train(network, plan, watch)
    test = accuracy(network, plan.x_test, plan.y_test)
    report(watch, options.folder, name, test, network.state_dict(), watch.seconds())
