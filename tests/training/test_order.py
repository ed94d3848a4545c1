"""The order of rows: permutations by counting, batches of every length, equal alone and in
company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestling.training import device_order
from nestling.training.order import keys, order, orders, schedule


def test_every_order_is_a_permutation_of_its_own() -> None:
    found = [
        tuple(order(0, client, round, phase, epoch, 50))
        for client in (0, 7)
        for round in (1, 2)
        for phase in (0, 1)
        for epoch in (0, 1)
    ]
    assert all(sorted(o) == list(range(50)) for o in found)
    assert len(set(found)) == len(found)


def test_positions_are_uniform() -> None:
    many = orders(keys("order", 3, range(4000), 1, 0), 0, 10)
    counts = np.stack([np.bincount(many[:, place], minlength=10) for place in range(10)])
    assert abs(counts - 400).max() < 5 * np.sqrt(400 * 0.9)


@pytest.mark.parametrize("sizes", [[23], [23, 23, 23], [5, 23, 40, 23, 1], [3, 2]])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_group_is_its_clients_side_by_side(sizes: list[int], drop_last: bool, steps: int) -> None:
    clients = list(range(10, 10 + len(sizes)))
    settings = {"epochs": 2, "batch": 5, "steps": steps, "drop_last": drop_last, "least": 2}
    together = schedule(keys("order", 1, clients, 4, 0), sizes, **settings)
    for k, (client, size) in enumerate(zip(clients, sizes, strict=True)):
        alone = schedule(keys("order", 1, [client], 4, 0), [size], **settings)
        own = [
            row[:n].tolist() for row, n in zip(alone.rows[0], alone.lengths[0], strict=True) if n
        ]
        shared = [
            row[:n].tolist()
            for row, n in zip(together.rows[k], together.lengths[k], strict=True)
            if n
        ]
        assert own == shared
        assert all(len(batch) >= 2 for batch in own)
        epoch = [row for batch in own[: len(own) // 2 or None] for row in batch]
        assert len(set(epoch)) == len(epoch)


def test_even_means_that_all_batches_are_full() -> None:
    assert schedule(keys("order", 0, [1, 2], 1, 0), [20, 20], epochs=2, batch=5).even
    assert not schedule(keys("order", 0, [1, 2], 1, 0), [20, 21], epochs=2, batch=5).even
    assert not schedule(keys("order", 0, [1, 2], 1, 0), [20, 15], epochs=1, batch=5).even


@pytest.mark.parametrize(("epoch", "rows"), [(0, 50), (3, 50), (7, 33), (2**20, 5)])
def test_a_device_draws_the_same_order(epoch: int, rows: int) -> None:
    own = keys("order", 3, range(40), 5, 1)
    drawn = device_order.orders(torch.from_numpy(own.view(np.int64))[:, None], epoch, rows)
    assert np.array_equal(drawn.numpy(), orders(own, epoch, rows))
