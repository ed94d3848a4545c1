"""Places that unlike networks have in common: the first, the middle and the last convolution, the
features, the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nestling.errors import unknown
from nestling.models.taps import Taps, find_taps, watching

STAGES = ("first", "middle", "last", "features", "logits")


@torch.no_grad()
def stage_outputs(
    module: nn.Module, x: Tensor, stages: Sequence[str] = STAGES, batch: int = 250
) -> dict[str, Tensor]:
    """What a network puts out at each of the stages that it has, as (rows of x, values); one
    without convolutions has the last two."""
    for stage in stages:
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES, field="stages")
    taps = taps_of(module, x.shape[1:])
    layers = {stage: name for stage, name in _convolutions(taps).items() if stage in stages}
    parts: dict[str, list[Tensor]] = {
        stage: [] for stage in stages if stage in layers or stage in ("features", "logits")
    }
    training = module.training
    module.eval()
    try:
        for rows in x.split(batch):
            with watching(module, list(layers.values()), taps.head) as seen:
                out = module(rows)
            values = {
                **{stage: seen[name] for stage, name in layers.items()},
                "features": seen["features"],
                "logits": out,
            }
            for stage, found in parts.items():
                found.append(values[stage].flatten(1).clone())
    finally:
        module.train(training)
    return {stage: torch.cat(found) for stage, found in parts.items()}


def taps_of(module: nn.Module, shape: Sequence[int]) -> Taps:
    """The taps of a network as it is: a cut one may lack layers that its full network names as its
    taps."""
    named = getattr(module, "taps", {})
    there = dict(module.named_modules())
    convs = [
        name
        for name in named.get("convs", ())
        if name in there and not isinstance(there[name], nn.Identity)
    ]
    head = named.get("head", "")
    return find_taps(module, shape, convs, head if head in there else "")


def _convolutions(taps: Taps) -> dict[str, str]:
    if not taps.convs:
        return {}
    return {"first": taps.first, "middle": taps.convs[taps.depth // 2], "last": taps.last}
