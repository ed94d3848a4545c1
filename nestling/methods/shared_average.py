"""Shared-average: unequal clients fused by averaging over shared sub-structures."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.methods.method import Info, SharedWeights


@dataclass
class SharedAverage(SharedWeights):
    """Shared-average: the TinyML architecture this project starts from, fused by averaging.

    Idea: one super-network; a device trains the largest part of it that fits its memory (pruned on small ones, expanded on large
    ones), and parts are nested. Every weight of the global model becomes the mean over the clients that trained it.
    Loss: cross-entropy. Travels: the device's part down and up. Merge: per entry, mean weighted by n_k over the views that hold it;
    entries that nobody trained keep their value.
    Differs from the paper: its abstract fixes no more than the above; nested prefixes, n_k weights and `fit` are our reading.
    """

    info = Info(
        title="Shared-average",
        family="fusion",
        heterogeneity="width: nested parts that fit each device",
        auxiliary="none",
        global_model=True,
        paper="TinyML model-heterogeneous FL (abstract)",
        evidence="from paper (abstract only); the design is ours",
    )
