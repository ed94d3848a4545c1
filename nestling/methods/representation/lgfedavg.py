"""LG-FedAvg: personal representations under a common classifier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nestling.methods.api import Replies
from nestling.methods.heads import mean_head
from nestling.methods.representation.common_head import HEAD, INFO, CommonHead


@dataclass
class LGFedAvg(CommonHead):
    """LG-FedAvg (Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020).

    Idea: every client learns a representation of its own, and all share the classifier on top of it: FedPer turned round. What
    travels is small, and networks below the classifier may be of any kind.
    Loss: cross-entropy, of body and classifier together. Travels: the classifier, C·(d + 1) numbers, down and up. Merge: mean weighted
    by n_k. There is no global model: its column is the mean of the clients' models on the global test set.
    Differs from the paper: the released code shares as many last layers as one likes, and starts from a network that FedAvg has
    trained; here the classifier alone is shared, since it is all that unlike networks have in common, and bodies start as they
    are made. The auxiliary and adversarial losses of the paper's further experiments are left out. Networks with different numbers of
    features have them pooled to the fewest. The paper is from memory; the order of steps was read in HtFLlib.
    In our tests it is above the same networks alone, at the same learning rate, for bodies of one kind with few classes per client, and
    below them for bodies as unlike as an MLP, a CNN and a depth-wise CNN, whose features mean different things to one classifier.

    size:      d, the number of features (0: as many as the network with the fewest has).
    weighting: what a client counts in the mean: "samples" (n_k) or "uniform".
    predict:   what a client decides with: the "common" classifier as it is now, as published, or its "own" as it last trained it.
               The other one is reported beside it.
    """

    weighting: Literal["samples", "uniform"] = "samples"

    info = replace(INFO, any_task=True)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def merge(self, replies: Replies, round: int) -> None:
        """The mean of the classifiers, by samples or uniform."""
        if replies:
            weights = [float(r.samples) if self.weighting == "samples" else 1.0 for r in replies]
            self.head = mean_head([r.message[HEAD] for r in replies], weights)
