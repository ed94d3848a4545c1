"""The task in BlazeFL (Apache-2.0; no dependency of Nestling): its FedAvg server and its clients in
threads, as many as workers.

Threads share one interpreter: without a free-threaded Python they take turns. BlazeFL 3.0.0a1 is
written for 3.13 and runs from 3.11; 3.0.0 needs 3.14, since annotations in a class name the class
itself.

Where BlazeFL leaves a choice, the lightest is taken: networks are copied, not initialised; batches
are slices of the client's rows, not put together sample by sample; there are no progress bars.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from types import ModuleType

from contest import Stopwatch, arguments
from entry import enter
from plan import Plan
from torch import Tensor, nn

# Its only need beside torch and numpy is a progress bar; with a stand-in for that, the folder with
# its code is enough.
sys.modules["tqdm"] = ModuleType("tqdm")
sys.modules["tqdm"].tqdm = lambda waited_for, **_: waited_for  # type: ignore[attr-defined]
try:
    from blazefl.contrib import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
except (SyntaxError, NameError) as error:
    raise ImportError(
        f"this BlazeFL is not written for Python {platform.python_version()} ({error})"
    ) from error
finally:
    del sys.modules["tqdm"]  # torch looks for the true one later

SEED = 0
"""Of its generators, from which nothing is drawn: the plan says who trains, and in which order."""


class Rows:
    """What a client trains on in a round: every pass over it gives the batches of the next
    epoch."""

    def __init__(self, plan: Plan, round: int, place: int) -> None:
        self._plan, self._round, self._place = plan, round, place
        self._epochs = iter(range(plan.epochs))
        self.dataset = plan.rows[plan.client(round, place)]  # its length is the client's weight

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self._plan.epoch(self._round, self._place, next(self._epochs))
        return zip(x.split(self._plan.batch), y.split(self._plan.batch), strict=True)


class Clients:
    """The rows of the clients of the round that was begun last."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._round = 0
        self._places: dict[int, int] = {}

    def begin(self, round: int) -> list[int]:
        """The clients of a round."""
        self._round = round
        self._places = {int(client): place for place, client in enumerate(self._plan.chosen[round])}
        return list(self._places)

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: object) -> Rows:
        """Called by BlazeFL, in the thread of a client."""
        return Rows(self._plan, self._round, self._places[cid])


class Copies:
    """Gives BlazeFL copies of one network, whatever name it asks for."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def select_model(self, model_name: str) -> nn.Module:
        """Called by BlazeFL: for the server once, for a client every time it trains."""
        return deepcopy(self._network)


class Server(FedAvgBaseServerHandler):
    """BlazeFL's server, which chooses the clients of the plan."""

    def sample_clients(self) -> list[int]:
        return self.dataset.begin(self.round)


def run(network: nn.Module, plan: Plan, watch: Stopwatch, workers: int) -> None:
    """Trains the network in place for all rounds of the plan."""
    shared = {
        "model_selector": Copies(network),
        "model_name": plan.network,
        "dataset": Clients(plan),
        "device": watch.device,
        "num_clients": plan.clients,
        "batch_size": plan.batch,
        "seed": SEED,
    }
    server = Server(
        **shared, global_round=plan.rounds, sample_ratio=plan.participants / plan.clients
    )
    server.num_clients_per_round = plan.participants  # a ratio may be rounded to one less
    clients = FedAvgThreadPoolClientTrainer(
        **shared, epochs=plan.epochs, lr=plan.lr, num_parallels=workers
    )
    watch.start()
    for _ in range(plan.rounds):
        chosen = server.sample_clients()
        clients.local_process(server.downlink_package(), chosen)
        for update in clients.uplink_package():
            server.load(update)
        watch.lap()
    network.load_state_dict(server.model.state_dict())


if __name__ == "__main__":
    enter("blazefl", partial(run, workers=arguments().workers))
