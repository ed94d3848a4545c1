"""A data set, a network and a metric of your own, on devices of three sizes."""

import numpy as np
import torch
from torch import nn

import nestling


class Rings(torch.utils.data.Dataset):  # points on three rings; each client has a noise of its own
    def __init__(self, rows: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.y, self.client = rng.integers(0, 3, rows), rng.integers(0, 6, rows)
        angle, radius = rng.uniform(0, 2 * np.pi, rows), 1 + self.y + rng.normal(0, 0.05 * (1 + self.client))
        self.x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[np.ndarray, int, int]:
        return self.x[row], int(self.y[row]), int(self.client[row])


def rings_apart(y: np.ndarray, found: np.ndarray) -> float:  # how many rings an answer is off
    return float(np.abs(y - found).mean())


if __name__ == "__main__":
    network = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
    result = nestling.run(nestling.Experiment(
        method="heterofl", model=network, data=nestling.Data.of(Rings(1200, 0), test=Rings(300, 1)), rounds=15, participants=0,
        split=nestling.SplitConfig(kind="natural"), fleet=[nestling.Tier(ratio=r, count=2) for r in (0.25, 0.5, 1.0)],
        train=nestling.Train(lr=0.1), evaluate=nestling.Evaluation(metrics=[rings_apart])))  # fmt: skip
    print(f"accuracy {result.summary['global_score']['last']:.1%}, {result.metrics[-1]['metrics']['rings_apart']:.2f} rings off")
