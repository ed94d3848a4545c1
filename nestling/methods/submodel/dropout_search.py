"""The offline search of DISTREAL: which shares of filters to drop where, for every amount of arithmetic."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nestling.methods.api import InputError, Phase, World
from nestling.methods.proxy import Proxy
from nestling.seeds import derive
from nestling.training.trainer import train

Vector = tuple[float, ...]


def pymoo() -> Any:
    """The library of genetic algorithms, or an error that says how to get it."""
    try:
        import pymoo.algorithms.moo.nsga2
        import pymoo.core.problem
        import pymoo.optimize
    except ImportError as error:
        raise InputError(
            "the search for dropout vectors needs pymoo, which is not installed",
            field="method.pareto",
            fix="pip install 'nestling[search]', or preset method.pareto",
        ) from error
    return pymoo


def search(
    objectives: Callable[[Vector], tuple[float, float]], length: int, most: float, population: int, generations: int, seed: int
) -> list[Vector]:
    """The vectors of `length` rates in [0, most] that no other beats in both objectives (smaller is better), found by NSGA-II."""
    lib = pymoo()

    class Problem(lib.core.problem.ElementwiseProblem):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(n_var=length, n_obj=2, xl=0.0, xu=most)

        def _evaluate(self, x: np.ndarray, out: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            out["F"] = objectives(tuple(x.tolist()))

    # Beside random vectors the first generation holds equal rates everywhere, from none to the most: both ends of the front.
    rng = np.random.default_rng(derive(seed, "dropout search"))
    equal = np.linspace(0.0, most, max(2, population // 4))[:population, None].repeat(length, 1)
    first = np.concatenate([equal, rng.uniform(0.0, most, (population - len(equal), length))])
    algorithm = lib.algorithms.moo.nsga2.NSGA2(pop_size=population, sampling=first)
    found = lib.optimize.minimize(Problem(), algorithm, ("n_gen", generations), seed=derive(seed, "nsga2") % 2**31, verbose=False)
    return [tuple(float(rate) for rate in row) for row in np.atleast_2d(found.X)]


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The numbers of the points that no other beats, by rising first objective; of equal ones the first."""
    order = sorted(range(len(points)), key=lambda k: (*points[k], k))
    found, best = list[int](), math.inf
    for k in order:
        if points[k][1] < best:
            found.append(k)
            best = points[k][1]
    return found


def single(vectors: Sequence[Sequence[float]]) -> list[Vector]:
    """The vectors in single precision, as devices are told them: the server must not know them better."""
    return [tuple(np.asarray(vector, dtype=np.float32).tolist()) for vector in vectors]


def affordable(table: Sequence[Sequence[float]], budget: float) -> Vector:
    """The rates of the row (cost, rates) with the highest cost within the budget, or of the cheapest where none is."""
    within = [row for row in table if row[0] <= budget + 1e-6]
    return tuple(max(within, key=lambda row: row[0])[1:] if within else min(table, key=lambda row: row[0])[1:])


def loss_after(world: World, phase: Phase, steps: int, proxy: Proxy) -> float:
    """The loss on the second part of a proxy after so many steps of a phase on its first, from the initial network."""
    x, y, x_rest, y_rest = proxy
    module = copy.deepcopy(world.main.module)
    epochs = math.ceil(steps / max(1, len(x) // world.train.batch)) + 1
    train(module, replace(phase, epochs=epochs, steps=steps), x, y, world.seed)
    with torch.no_grad():
        loss = float(F.cross_entropy(module.eval()(x_rest), y_rest))
    return loss if math.isfinite(loss) else math.inf
