"""What Shakespeare's roles say, as rows of characters; every role is a client."""

from __future__ import annotations

import gzip
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np

from nestling.data.recipe import RawRows, Recipe
from nestling.data.targets import needs_classes
from nestling.errors import InputError

TEXT = Path(__file__).parent / "embedded" / "shakespeare.txt.gz"
STEPS = 64
"""Characters a row, unless `data.options.steps` says otherwise."""
HELD_OUT = 5
"""One row in so many is the test's: the last of what each role says."""


@cache
def speeches() -> dict[str, str]:
    """What each role says, one speech after another, in the order of the plays."""
    found = defaultdict[str, list[str]](list)
    for speech in gzip.decompress(TEXT.read_bytes()).decode("ascii").rstrip("\n").split("\n\n"):
        role, _, words = speech.partition(":\n")
        found[role].append(words)
    return {role: "\n\n".join(said) for role, said in found.items()}


def read_plays(recipe: Recipe) -> RawRows:
    """Rows of characters as token ids, one after another. Where classes are learned they are the
    roles; where the next character is, it belongs to the row."""
    steps = int(recipe.take_options(steps=STEPS)["steps"])
    names = sorted({letter for said in speeches().values() for letter in said})
    number = {letter: at for at, letter in enumerate(names)}
    of_roles = needs_classes(recipe.task)
    size, shortest = steps + (not of_roles), min(map(len, speeches().values()))
    if not 1 < size <= shortest // HELD_OUT:
        fix = f"give 2 to {shortest // HELD_OUT - 1}"
        raise InputError(f"rows of {steps} characters", field="data.options.steps", fix=fix)
    parts, client, test = [], [], []
    for role, said in speeches().items():
        rows = len(said) // size
        ids = np.array([number[letter] for letter in said[: rows * size]])
        parts.append(ids.reshape(rows, size))
        client += [role] * rows
        test += [at >= rows - rows // HELD_OUT for at in range(rows)]
    return RawRows(
        np.concatenate(parts),
        np.array(client) if of_roles else None,
        np.array(client),
        np.array(test),
        class_names=() if of_roles else tuple(names),
        layout="tokens",
        more=f"rows of {steps} characters, of every role the last fifth to test with",
        where="shakespeare",
        field="data",
    )
