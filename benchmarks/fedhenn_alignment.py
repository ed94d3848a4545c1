"""What FedHeNN's term does to clients of unlike networks: how alike their kernels become, and their
accuracy.

    python benchmarks/fedhenn_alignment.py [--lines 0,0.01,1] [--seeds 3] [--workers 2]
        [--cache FILE]

Nine clients with 40 of the embedded digits each, three with a perceptron, three with a TinyCNN,
three with a depth-wise CNN; four rounds of five epochs, everybody in every round. A line is an η₀;
0 is training alone. Alignment is the mean over every two clients of the centred kernel alignment on
200 public rows, after the last round.
"""

from __future__ import annotations

import statistics
from itertools import combinations
from typing import Any

import torch
from tables import options, played, spread

import nestling
from nestling import (
    EngineConfig,
    Evaluation,
    Experiment,
    FleetConfig,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.methods.representation.fedhenn import cka, linear_kernel
from nestling.models.taps import logits_and_features

RATES, ROWS = "0,0.01,1", 200
FLEET = FleetConfig(
    tiers=(
        Tier(name="mlp", model="mlp", model_options={"hidden": [32]}, count=3),
        Tier(name="cnn", ratio=1.0, count=3),
        Tier(name="depthwise", model="dscnn", model_options={"width": 0.25}, count=3),
    )
)


def main() -> None:
    chosen = options(__doc__ or "", "fedhenn_alignment.json", "values of η₀")
    rates = [float(eta) for eta in (chosen.lines or RATES).split(",")]
    found = played(
        play,
        {f"eta {eta:g}, {seed}": (eta, seed) for eta in rates for seed in range(chosen.seeds)},
        chosen,
    )
    print("| η₀ | alignment | personal accuracy |\n|---|---|---|")
    for eta in rates:
        rows = [found[f"eta {eta:g}, {seed}"] for seed in range(chosen.seeds)]
        print(
            f"| {eta:g} | {statistics.mean(r['alignment'] for r in rows):.2f} | "
            f"{spread([r['personal'] for r in rows])} |"
        )


def play(eta: float, seed: int) -> dict[str, Any]:
    """One run."""
    result = nestling.run(experiment(eta, seed))
    summary = result.summary
    return {
        "alignment": alignment(result),
        "personal": summary["personal_score"]["last"],
        "seconds": summary["seconds"],
    }


def experiment(eta: float, seed: int) -> Experiment:
    """The experiment of one line."""
    return Experiment(
        method=Named("fedhenn", {"align": ROWS, "eta": eta}),
        model=Named("tinycnn", {"channels": [8, 16, 32]}),
        seed=seed,
        rounds=4,
        participants=0,
        fleet=FLEET,
        split=SplitConfig(kind="dirichlet", alpha=1.0, size=40, public=0.02),
        train=Train(epochs=5, batch=10, lr=0.03),
        engine=EngineConfig("inline"),
        evaluate=Evaluation(every=4, clients=9),
    )


@torch.no_grad()
def alignment(result: nestling.Result) -> float:
    """The mean over every two clients' kernels on the public rows."""
    world, method = result.federation.world, result.federation.method
    assert world.public is not None
    kernels = []
    for client in range(len(world.fleet)):
        model = method.model_for(world.device(client))
        module = model.reference.network(model.view, model.state).eval()
        kernels.append(
            linear_kernel(
                logits_and_features(module, model.reference.taps.head, world.public[:ROWS])[1]
            )
        )
    return statistics.mean(float(cka(one, other)) for one, other in combinations(kernels, 2))


if __name__ == "__main__":
    main()
