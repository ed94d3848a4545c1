"""The task in pfl-research: FederatedAveraging on its SimulatedBackend, in one process, as its own
benchmarks do it.

Clients come in the order of the plan, each with its rows in the order of its first pass; pfl keeps
that order in further passes.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from contest import Stopwatch
from entry import enter
from local_training import TEST_BATCH
from plan import Plan
from torch import Tensor, nn


def run(network: nn.Module, plan: Plan, watch: Stopwatch) -> None:
    """Trains the network in place for all rounds of the plan."""
    # pfl asks for its device while it is imported.
    os.environ["PFL_PYTORCH_DEVICE"] = watch.device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Learner(nn.Module):
        """The network with the two functions that pfl calls."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            self.train()
            return F.cross_entropy(self.network(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
            self.eval()
            return {
                "loss": Weighted(
                    F.cross_entropy(self.network(x), y, reduction="sum").item(), len(y)
                )
            }

    class Laps(TrainingProcessCallback):
        """Notes the end of every round."""

        def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
            watch.start()
            return Metrics()

        def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
            watch.lap()
            return False, Metrics()

    def client_data(user: tuple[int, int]) -> Dataset:
        return Dataset(plan.epoch(*user, 0))

    visits = iter(
        [(round, place) for round in range(plan.rounds) for place in range(plan.participants)]
    )
    clients = FederatedDataset(client_data, lambda: next(visits))
    learner = Learner()
    central = torch.optim.SGD(learner.parameters(), lr=1.0)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=plan.rounds,
            evaluation_frequency=plan.rounds,  # that is, in the first round only
            train_cohort_size=plan.participants,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=clients, val_data=clients, postprocessors=[WeightByDatapoints()]
        ),
        model=PyTorchModel(
            model=learner, local_optimizer_create=torch.optim.SGD, central_optimizer=central
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=plan.epochs, local_learning_rate=plan.lr, local_batch_size=plan.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=TEST_BATCH),
        callbacks=[Laps()],
    )


if __name__ == "__main__":
    enter("pfl", run)
