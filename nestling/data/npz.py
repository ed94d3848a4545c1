"""Reader for a user's own data: one .npz file with `x`, `y` and, if wanted, `client`, `test`
and `length`.

| key | content |
|---|---|
| `x` | the samples, see the table below |
| `y` | (N,) integers or strings; re-numbered 0..C-1 in sorted order, named by their values |
| `client` | (N,) integers or strings: each row's natural client; re-numbered 0..K-1 like `y` |
| `test` | (N,) booleans: the held-out rows |
| `length` | (N,) integers: how many steps of a sequence are real, the first ones |

`y` may be missing where the task needs none.

| `x` | read as | values |
|---|---|---|
| 2-d (N, F), bytes or float | vectors | standardised per feature |
| 3-d (N, H, W), uint8 | grey images -> (N, 1, H, W) | scaled to 0..1 |
| 3-d (N, L, C), others, L ≥ 4 C or C ≤ 4 | sequences -> (N, C, L) | standardised per channel |
| 4-d, last one 1, 3 or 4 | images (N, H, W, C) -> (N, C, H, W) | uint8 to 0..1, else as above |
| 4-d otherwise | images (N, C, H, W) | the same |

What could be read in two ways (`layout.py`) is refused until `data.layout` says which it is.

Standardised means (value - mean) / standard deviation, both of the training rows alone; a constant
feature becomes zero.

Without `test`, 20 % of the rows (of each client, if there are clients) are held out at random, but
never all rows of a class.

Missing values (NaN) are refused unless `missing` is "mean" (the training mean of that feature or
channel) or "zero"; infinite values are refused always.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestling.data.dataset import Dataset
from nestling.data.log_mel import options_of
from nestling.data.prepare import prepare
from nestling.data.recipe import AUTO, NONE, RawRows, Recipe
from nestling.files import read_arrays


def read_npz(
    path: Path, recipe: Recipe | None = None, *, name: str = "npz", layout: str = AUTO, **how: Any
) -> Dataset:
    """The data set in one .npz file, by the rules above; `layout` is that of a file which is known,
    `how` the fields of a recipe where none is given."""
    recipe = recipe or Recipe(**how)
    recipe.check()
    rows = ("layout", "scale", "missing", "client", "task", "normal", "horizon")
    recipe.check_only(*rows, "transform", "options", reader=name)
    recipe.take_options(**options_of(recipe))
    whose = "client" if recipe.client in (AUTO, NONE) else recipe.client
    arrays = read_arrays(path, client=whose, need=("x",))
    raw = RawRows(
        arrays["x"],
        arrays.get("y"),
        arrays.get(whose),
        arrays.get("test"),
        length=arrays.get("length"),
        layout=layout,
        where=str(path),
        field="data.path",
    )
    if recipe.client not in (AUTO, NONE) and raw.client is None:
        raise raw.bad(f"has no array {whose!r}", "name another in data.client, or leave it out")
    return prepare(name, raw, recipe)
