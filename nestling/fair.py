"""Which methods make a fair column, and by what they are measured.

Methods of one group answer the same question under the same terms. Across groups something else
differs as well (what is known of the test, which data the server holds, whose score is meant),
so that a common column would credit the method with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FairGroup:
    """Methods that may be compared: what they are, what must be equal, and what is measured."""

    title: str
    equal: str
    metric: str


GROUPS: dict[str, FairGroup] = {
    "A": FairGroup(
        "parts of one network, cut in width or in both ways",
        "the network, the split, the tiers' actual parameters and arithmetic, participants, "
        "local steps, norm and rounds",
        "score of the global model and of every tier, bytes, arithmetic",
    ),
    "B": FairGroup(
        "depth, matched by layer name",
        "the family of depths, layer-wise averaging, the optimiser, and whether there is a "
        "proximal term",
        "mean score of the clients' models on the global test set",
    ),
    "C": FairGroup(
        "personal sparse or split models",
        "the clients' test rows, the pruning target, the local epochs, and no use of test rows "
        "to decide on pruning",
        "mean personal score, parameters kept, bytes",
    ),
    "D": FairGroup(
        "distillation with public data",
        "the public set, its size, its labels, and who holds it",
        "personal score or the server model's score, never both in one column",
    ),
    "E": FairGroup(
        "distillation without data",
        "what clients tell the server, and what the server computes",
        "global score",
    ),
    "F": FairGroup(
        "exchanged statistics of features",
        "the width of features, the head, and who has which classes",
        "personal score",
    ),
    "G": FairGroup("networks made by a network", "the set of architectures", "personal score"),
}
"""Group → what it is."""


def unfair(groups: Sequence[str], norms: Sequence[str] = ()) -> list[str]:
    """Why methods of these groups, with these normalisations, are no fair column together; nothing
    where they are. A baseline that belongs to every table has an empty group and disturbs
    nobody."""
    reasons, found = [], sorted({group for group in groups if group})
    if len(found) > 1:
        parts = [
            f"{g} ({GROUPS[g].title}; measured by {GROUPS[g].metric})" for g in found if g in GROUPS
        ]
        reasons.append(
            f"Not one fair column: these methods belong to the groups {' and '.join(parts)}."
        )
    if len(mixed := sorted(_STATISTICS.intersection(norms))) > 1:
        reasons.append(
            f"Not one fair column: scores with norm {' and '.join(mixed)} are taken from "
            "different statistics."
        )
    return reasons


_STATISTICS = frozenset({"batch", "tracked", "sbn", "per-width"})
