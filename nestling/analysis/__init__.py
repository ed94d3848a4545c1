"""How alike the clients' models are: what they see (CKA, maps of their features) and what they say
(agreement).

Everything here takes plain networks and tensors, so that it serves any models;
`nestling.runs.analysis` applies it to a run.
"""

from __future__ import annotations

from nestling.analysis.agreement import Agreement, agreement
from nestling.analysis.cka import centred_gram, client_cka, likeness, linear_cka, without_bias
from nestling.analysis.maps import client_map, embed, gram_points, pca, score_points
from nestling.analysis.stages import STAGES, stage_outputs

__all__ = [
    "STAGES",
    "Agreement",
    "agreement",
    "centred_gram",
    "client_cka",
    "client_map",
    "embed",
    "gram_points",
    "likeness",
    "linear_cka",
    "pca",
    "score_points",
    "stage_outputs",
    "without_bias",
]
