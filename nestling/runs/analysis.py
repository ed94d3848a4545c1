"""The analysis of a run: its clients' models, looked at with the same rows of the test set, written
down as `analysis.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nestling.analysis import (
    STAGES,
    agreement,
    centred_gram,
    embed,
    gram_points,
    likeness,
    score_points,
    stage_outputs,
    without_bias,
)
from nestling.analysis.maps import WITHOUT_SKLEARN
from nestling.errors import InputError
from nestling.files import write_atomic
from nestling.runfiles import ANALYSIS
from nestling.runs.evaluation import ready
from nestling.runs.federation import Federation
from nestling.runs.run import Result, need_models, opened
from nestling.schema import require
from nestling.seeds import stream
from nestling.world import Device, World

MAPPED = ("features", "logits", "first", "last")
MOST_POINTS = 600
"""A map holds at most about this many points, so that it can be read, and a page be opened."""
MOST_CLASSES = 10
"""A map shows at most the first so many classes: more colours cannot be told apart."""

Step = Callable[[str, int, int], None]
"""Hears what is being done: (what, done, of)."""


@dataclass(frozen=True)
class _Sight:
    """What one client's model makes of the rows: which it holds alike, stage by stage, and what it
    says."""

    device: Device
    params: int
    grams: dict[str, Tensor]
    logits: Tensor

    @property
    def finite(self) -> bool:
        return all(bool(values.isfinite().all()) for values in (*self.grams.values(), self.logits))


def write_analysis(
    run: Result | str | Path,
    *,
    clients: int = 10,
    rows: int = 250,
    step: Step | None = None,
    trust: Iterable[str] = (),
) -> dict[str, Any]:
    """Analyses a run and writes `analysis.json` into its folder."""
    with _result(run, trust) as result:
        if result.folder is None:
            raise InputError(
                "the run has no folder to write to",
                field="run",
                fix="call analyse, or run with out=...",
            )
        found = analyse(result, clients=clients, rows=rows, step=step)
        try:
            write_atomic(result.folder / ANALYSIS, json.dumps(found))
        except OSError as error:
            raise InputError(
                f"cannot be written: {error.strerror}", field=str(result.folder / ANALYSIS)
            ) from error
    return found


def analyse(
    run: Result | str | Path,
    *,
    clients: int = 10,
    rows: int = 250,
    step: Step | None = None,
    trust: Iterable[str] = (),
) -> dict[str, Any]:
    """The content of `analysis.json`: of some clients' models the CKA at every stage, the
    agreement, and maps. `run` is a result or the folder of a run; `trust` names the code that such
    a folder may have imported, as for `resume`."""
    require(clients >= 2, "a comparison needs at least 2 clients", "clients")
    require(rows >= 8, "a comparison needs at least 8 rows", "rows")
    tell = step or (lambda *_: None)
    with _result(run, trust) as result:
        need_models(result)
        federation = result.federation
        picked = sample_rows(federation, rows)
        x, labels = federation.bench.x_test[picked], federation.bench.strata[picked]
        chosen = spread(federation.world, clients)
        sights = []
        for done, (device, network) in enumerate(client_networks(federation, chosen)):
            tell("looking at clients", done, len(chosen))
            sights.append(_sight(device, network, x, federation.bench.batch))
        whole = [sight for sight in sights if sight.finite]
        if len(whole) < 2:
            raise InputError(
                f"{len(whole)} of the clients' models can be compared",
                field="RUN",
                fix="it takes two; none that diverged",
            )
        of_classes = federation.world.task.has_classes
        maps = _maps(whole, labels.cpu(), federation.world.seed, of_classes, tell)
        return {
            "round": federation.totals.round,
            "kinds": list(federation.world.kind_names),
            "rows": picked.tolist(),
            "labels": labels.tolist(),
            "clients": [
                {"id": s.device.id, "tier": s.device.tier, "params": s.params} for s in whole
            ],
            "cka": {
                stage: _cka(whole, stage)
                for stage in STAGES
                if any(stage in s.grams for s in whole)
            },
            "agreement": _agreement(whole, labels.cpu()) if of_classes else {},
            "maps": maps,
            "notes": _notes(sights, maps),
        }


def client_networks(
    federation: Federation, clients: Sequence[int]
) -> Iterator[tuple[Device, nn.Module]]:
    """The clients' models, one by one, as they would be tested. Clients of one kind take turns in
    one network, so that each must be done with before the next is asked for; who keeps one copies
    it."""
    method = federation.shown
    for client in clients:
        device = federation.world.device(client)
        yield device, ready(method.model_for(device), federation.bench)


def spread(world: World, clients: int) -> list[int]:
    """That many clients, or all there are: as evenly over the tiers as they allow, in the tiers'
    order."""
    fleet = world.fleet
    by_tier = [range(min(clients, fleet.count_of(tier))) for tier in world.plans]
    turns = [(t, k) for ks in zip_longest(*by_tier) for t, k in enumerate(ks) if k is not None]
    names = list(world.plans)
    return [fleet.member(names[t], k) for t, k in sorted(turns[:clients])]


def sample_rows(federation: Federation, rows: int) -> Tensor:
    """Rows of the test set, spread over the classes (or kinds) as evenly as there are rows of
    them, in their order."""
    y = federation.bench.strata.cpu()
    order = torch.from_numpy(stream(federation.world.seed, "analysed rows").permutation(len(y)))
    kinds = range(len(federation.world.kind_names))
    by_kind = [order[y[order] == kind][:rows].tolist() for kind in kinds]
    turns = [
        (label, row)
        for some in zip_longest(*by_kind)
        for label, row in enumerate(some)
        if row is not None
    ]
    return torch.tensor([row for _, row in sorted(turns[:rows], key=lambda turn: turn[0])])


def _result(run: Result | str | Path, trust: Iterable[str]) -> AbstractContextManager[Result]:
    return nullcontext(run) if isinstance(run, Result) else opened(run, trust)


def _sight(device: Device, network: nn.Module, x: Tensor, batch: int) -> _Sight:
    seen = stage_outputs(network, x, batch=batch)
    params = sum(p.numel() for p in network.parameters())
    return _Sight(
        device,
        params,
        {stage: centred_gram(values).cpu() for stage, values in seen.items()},
        seen["logits"].cpu(),
    )


def _cka(sights: Sequence[_Sight], stage: str) -> Any:
    """In the unbiased form: early convolutions have many more values than there are rows."""
    return _numbers(
        likeness([without_bias(s.grams[stage]) if stage in s.grams else None for s in sights])
    )


def _agreement(sights: Sequence[_Sight], labels: Tensor) -> dict[str, Any]:
    said = agreement([sight.logits for sight in sights], labels)
    return {name: _numbers(getattr(said, name)) for name in ("equal", "kl", "js", "right")}


def _maps(
    sights: Sequence[_Sight], labels: Tensor, seed: int, of_classes: bool, tell: Step
) -> list[dict[str, Any]]:
    maps = []
    for done, stage in enumerate(MAPPED):
        tell("drawing maps", done, len(MAPPED))
        who = [number for number, sight in enumerate(sights) if stage in sight.grams]
        if len(who) < 2:
            continue
        points = (
            score_points([sights[n].logits for n in who])
            if stage == "logits" and of_classes
            else gram_points([sights[n].grams[stage] for n in who])
        )
        rows = _mapped_rows(labels, MOST_POINTS // len(who))
        places, how = embed(points[:, rows].flatten(0, 1), seed)
        at = [
            [[round(float(v), 3) for v in place] for place in one]
            for one in places.view(len(who), len(rows), 2)
        ]
        maps.append({"stage": stage, "how": how, "clients": who, "rows": rows, "at": at})
    return maps


def _notes(sights: Sequence[_Sight], maps: Sequence[dict[str, Any]]) -> list[str]:
    notes = [
        f"Client {s.device.id} is left out: not all its model puts out is finite."
        for s in sights
        if not s.finite
    ]
    if any(one["how"] == WITHOUT_SKLEARN for one in maps):
        notes.append(
            "The maps are PCA, for want of scikit-learn; for t-SNE: pip install "
            "'nestling[analysis]'."
        )
    return notes


def _mapped_rows(labels: Tensor, most: int) -> list[int]:
    """Rows of the first classes, evenly."""
    shown = labels.unique()[:MOST_CLASSES]
    share = max(1, most // len(shown))
    return sorted(
        int(row) for label in shown for row in (labels == label).nonzero().flatten()[:share]
    )


def _numbers(values: Tensor) -> Any:
    """As JSON has it: rounded, and null for what is not a number."""
    if values.dim() == 0:
        return round(float(values), 5) if math.isfinite(float(values)) else None
    return [_numbers(part) for part in values]
