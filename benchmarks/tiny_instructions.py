"""Instructions of a training step on a Cortex-M4F: the 28x28 CNN on the emulated board mps2-an386.

    python benchmarks/tiny_instructions.py [BOARD]

Counts are exact: two runs give the same number. The difference of two batches leaves out what is
done once a step. Needs qemu-system-arm and an ARM compiler. Prints the instructions a MAC last.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn

from nestling.devices.catalogue import mark
from nestling.planning.descriptor import DescriptorSettings
from nestling.planning.plan import plan
from nestling.tiny.boards import table as boards
from nestling.tiny.link import timing
from nestling.tiny.runtime.data import pack
from nestling.tiny.runtime.job import Job, Step

SIDE, CLASSES = 28, 10
FEW, MANY = 8, 24
EXACT = 7  # an instruction is 128 ns, 3.2 ticks of the board's 25 MHz


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * (SIDE // 4) ** 2, CLASSES))


def macs() -> int:
    """Of training on one sample: forward, gradients of the weights, and gradients of the inputs but
    for the first layer's."""
    first, second, last = (
        9 * 8 * SIDE**2,
        9 * 8 * 16 * (SIDE // 2) ** 2,
        16 * (SIDE // 4) ** 2 * CLASSES,
    )
    return 2 * first + 3 * second + 3 * last


def job(samples: int, momentum: float = 0.9) -> tuple[Job, bytes]:
    """One step of so many samples, and the board's data."""
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.random((MANY, 1, SIDE, SIDE), dtype=np.float32))
    net = network()
    planned = plan(net, (1, SIDE, SIDE), momentum=momentum > 0)
    step = Step(np.arange(samples))
    settings = DescriptorSettings(lr=0.05, momentum=momentum)
    return Job(planned, planned.pack(net.state_dict()), settings, [step]), pack(
        images, torch.arange(MANY) % CLASSES
    )


def main(name: str) -> None:
    shift = EXACT if boards.board(name).clock_hz * 2**EXACT > 2e9 and boards.board(name).fpu else 0
    few, many = (timing.instructions(name, *job(samples), shift=shift) for samples in (FEW, MANY))
    sample = (many - few) / (MANY - FEW)
    cost = timing.round_cost(name, round(sample))
    print(f"{name}: {few} instructions for a step of {FEW} samples, {many} for one of {MANY}")
    print(
        f"a sample: {sample:.0f} instructions; what is done once a step: {few - FEW * sample:.0f}"
    )
    print(f"on silicon: {mark(cost.compute_s)}{1e3 * float(cost.compute_s):.1f} ms and "
          f"{mark(cost.energy_j)}"
          f"{1e3 * float(cost.energy_j):.2f} mJ a sample ({cost.compute_s.note})")  # fmt: skip
    print(f"{sample / macs():.2f} instructions a MAC ({macs()} MACs a sample)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "mps2-an386")
