"""Networks that learn from the smaller ones inside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from nestling.methods.api import Client, Phase, Reference, View
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.views.nested import forward, prepare


def taught(client: Client, teachers: Sequence[View], lam: float, temperature: float) -> Phase:
    """Local training of a client's network that also learns from smaller ones inside it, with the published λ."""
    prepare(client.reference, teachers)
    weight, own = lam / client.classes, client.view
    objective = partial(
        self_distilled, reference=client.reference, own=own, teachers=teachers, weight=weight, temperature=temperature
    )
    return client.train.phase(client.round, objective=objective)


def self_distilled(
    net: Net,
    batch: Batch,
    _given: Given,
    *,
    reference: Reference,
    own: View,
    teachers: Sequence[View],
    weight: float,
    temperature: float,
) -> Tensor:
    """Cross-entropy, and the mean distance to the smaller networks inside this one, which are not moved by it."""
    logits = net(batch.x)
    with torch.no_grad():
        state = net.state()
        said = [forward(reference, teacher, state, batch.x, inside=own, training=False) for teacher in teachers]
    apart = sum(distillation(target, logits, temperature, batch) for target in said) / len(said)
    return batch.mean(losses(logits, batch.y)) + weight * apart
