"""Who owns which row when rows are divided among clients: one function per kind, which returns each
row's owner (-1: nobody)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nestling.errors import InputError

_TRIES = 20
NOBODY = -1


def iid(rows: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Equal shares (within one row) of the shuffled rows."""
    return rng.permutation(np.arange(rows) % clients)


def quantity(
    rows: int, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Shuffled rows in shares of unequal size: `min_size` each, and Dirichlet(alpha) shares of the
    remainder."""
    spare = rows - clients * min_size
    sizes = min_size + np.diff(_cuts(proportions(alpha, clients, rng), spare))
    return rng.permutation(np.repeat(np.arange(clients), sizes))


def dirichlet(
    y: np.ndarray, clients: int, alpha: float, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Each class divided by its own Dirichlet(alpha) proportions, re-drawn until everyone has
    `min_size` rows.

    A client that already has its fair share (rows / clients) takes no part in the classes that
    follow, as published experiments have it: client sizes stay comparable and the skew is in the
    labels. If no draw suffices, the largest clients give rows away.
    """
    groups = [rng.permutation(rows) for rows in class_rows(y)]
    for _ in range(_TRIES):
        owner, sizes = _divide_classes(groups, len(y), clients, alpha, rng)
        if sizes.min() >= min_size:
            return owner
    return _top_up(owner, sizes, min_size, rng)


def classes(
    y: np.ndarray, clients: int, per_client: int, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Exactly `per_client` classes per client; the rows of a class are divided evenly among its
    holders.

    Larger classes get more holders, so that client sizes stay comparable. With fewer places
    (clients x classes) than classes some classes have no holder and their rows no owner.
    """
    groups = [rng.permutation(rows) for rows in class_rows(y)]
    per_client = min(per_client, len(groups))
    holders = _holders(np.array([len(rows) for rows in groups]), clients, per_client, rng)
    for _ in range(_TRIES):
        owner = np.full(len(y), NOBODY)
        sizes = np.zeros(clients, np.int64)
        for rows, holding in zip(groups, _deal(holders, clients, per_client, rng).T, strict=True):
            own = np.flatnonzero(holding)
            if len(own):
                shares = np.diff(len(rows) * np.arange(len(own) + 1) // len(own))
                owner[rows] = np.repeat(own, shares)
                sizes[own] += shares
        if sizes.min() >= min_size:
            return owner
    raise InputError(
        f"with {per_client} classes a client the smallest client would get {sizes.min()} of its "
        f"{min_size} rows",
        field="split.min_size",
        fix="lower it, use fewer clients, or give each client more classes",
    )


def natural(client: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """The data's own clients: all of them under their own numbers, or the first `clients` of a
    shuffle."""
    known = int(client.max()) + 1
    if clients > known:
        raise InputError(
            f"{clients} clients wanted, the data has {known}",
            field="clients",
            fix=f"use at most {known}, or another split.kind",
        )
    if clients == known:
        return client.copy()
    number = np.full(known, NOBODY)
    number[rng.permutation(known)[:clients]] = np.arange(clients)
    return number[client]


def class_rows(y: np.ndarray) -> list[np.ndarray]:
    """The rows of each class that occurs, in order of class."""
    order = np.argsort(y, kind="stable")
    counts = np.bincount(y)
    return np.split(order, np.cumsum(counts[counts > 0])[:-1])


def proportions(alpha: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Dirichlet(alpha) shares of `n` parties."""
    # Beyond these limits the shares are one-hot or equal anyway, and the sampler runs out of
    # digits.
    return rng.dirichlet(np.full(n, min(max(alpha, 1e-6), 1e6)))


def shared_out(total: int, weight: np.ndarray) -> np.ndarray:
    """`total` as whole numbers in proportion to `weight`: rounded down, the largest remainders get
    what is left."""
    exact = total * (weight / weight.sum())
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - whole.sum()]] += 1
    return whole


def _cuts(shares: np.ndarray, rows: int) -> np.ndarray:
    cuts = np.concatenate(([0], np.floor(np.cumsum(shares) * rows).astype(np.int64)))
    cuts[-1] = rows  # rounding must not lose the last row
    return np.minimum(cuts, rows)


def _divide_classes(
    groups: list[np.ndarray], rows: int, clients: int, alpha: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    owner = np.empty(rows, np.int64)
    sizes = np.zeros(clients, np.int64)
    # In a random order, since the classes that come last find fewer clients below their fair share.
    for group in rng.permutation(len(groups)):
        members = groups[group]
        takers = np.flatnonzero(sizes * clients < rows)
        shares = np.diff(_cuts(proportions(alpha, len(takers), rng), len(members)))
        owner[members] = np.repeat(takers, shares)
        sizes[takers] += shares
    return owner, sizes


def _top_up(
    owner: np.ndarray, sizes: np.ndarray, min_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Rows move from the largest clients, lowered to one common level, to those below
    `min_size`."""
    wanted = np.maximum(min_size - sizes, 0)
    given = _level(sizes, int(wanted.sum()))
    order = rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = order[place < given[owner[order]]]
    owner = owner.copy()
    owner[rng.permutation(moved)] = np.repeat(np.arange(len(sizes)), wanted)
    return owner


def _level(sizes: np.ndarray, total: int) -> np.ndarray:
    """How many rows each of the largest gives, `total` in all, so that they end on one level
    (within one row)."""
    low, high = 0, int(sizes.max())
    while low < high:  # the highest level that yields enough
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if np.maximum(sizes - middle, 0).sum() >= total else (low, middle - 1)
        )
    given = np.maximum(sizes - low, 0)
    given[np.flatnonzero(given)[: given.sum() - total]] -= 1
    return given


def _holders(
    counts: np.ndarray, clients: int, per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """How many clients hold each class: in proportion to its rows, at least one if the places
    suffice, at most its rows."""
    places = clients * per_client
    most = np.minimum(counts, clients)
    if most.sum() < places:
        raise InputError(
            f"the classes have too few rows to give each of {clients} clients {per_client} of them",
            field="split.classes",
            fix="lower it, or use fewer clients",
        )
    order = rng.permutation(len(counts))  # so that ties do not always favour the first classes
    counts, most = counts[order], most[order]
    holders = np.full(len(counts), int(places >= len(counts)))
    while left := places - int(holders.sum()):
        room = most - holders
        weight = np.where(
            room > 0, np.maximum(counts * (places / counts.sum()) - holders, 1e-9), 0.0
        )
        holders += np.minimum(shared_out(left, weight), room)
    back = np.empty_like(holders)
    back[order] = holders
    return back


def _deal(
    holders: np.ndarray, clients: int, per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """A random clients x classes table of booleans with `per_client` in each row and `holders` in
    each column."""
    table = np.zeros((clients, len(holders)), bool)
    for client, hand in zip(
        rng.permutation(clients), _hands(holders, clients, per_client, rng), strict=True
    ):
        table[client, hand] = True
    return table


def _hands(
    holders: np.ndarray, clients: int, per_client: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    left = holders.copy()
    for remaining in range(clients, 0, -1):
        # Weighted draw without replacement; a class with as many places as there are clients left
        # must be taken now.
        score = np.where(left > 0, rng.random(len(left)) ** (1 / np.maximum(left, 1)), -1.0)
        score[left == remaining] = 2.0
        hand = np.argpartition(-score, per_client - 1)[:per_client]
        left[hand] -= 1
        yield hand
