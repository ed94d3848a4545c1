"""DraftFed's published counts that need no training."""

from __future__ import annotations

import pytest
import torch

from nestling.models import build, parameters, state_entries
from nestling.models.taps import find_taps, watching

SHAPE = (3, 32, 32)
RESNETS = {"resnet50": 8, "resnet101": 8, "resnet152": 4}
DENSENETS = {"densenet121": 5, "densenet161": 5, "densenet169": 5, "densenet201": 5}


@pytest.mark.parametrize(
    ("fleet", "entries", "trained"),
    [(RESNETS, 762_925_852, 761_050_568), (DENSENETS, 323_815_780, 320_357_320)],
)
def test_the_published_traffic_of_averaging_is_every_entry_of_twenty_states(
    fleet: dict[str, int], entries: int, trained: int
) -> None:
    """Running statistics and their counters included; parameters alone would be fewer."""
    with torch.device("meta"):
        networks = {name: build(name, shape=SHAPE, classes=10, norm="tracked") for name in fleet}
    assert sum(fleet.values()) == 20
    assert sum(many * state_entries(networks[name]) for name, many in fleet.items()) == entries
    assert sum(many * parameters(networks[name]) for name, many in fleet.items()) == trained


def test_the_published_traffic_of_drafts_is_one_batch_of_one_densenet121() -> None:
    """The norm behind the first convolution, the norm behind the last joining, and one number a row
    for the logits."""
    module = build("densenet121", shape=SHAPE, classes=10, norm="tracked").eval()
    taps = find_taps(module, SHAPE)
    with torch.no_grad(), watching(module, (taps.first, taps.last)) as seen:
        module(torch.zeros(1, *SHAPE))
    first, last = (tuple(seen[layer].shape[1:]) for layer in (taps.first, taps.last))
    assert (first, last) == ((64, 16, 16), (1024, 1, 1))
    assert 128 * (torch.Size(first).numel() + torch.Size(last).numel() + 1) == 2_228_352
