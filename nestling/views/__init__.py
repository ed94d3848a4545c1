"""Parts of a network: axes found by tracing, views of them, the one merge, and modules made
smaller."""

from nestling.views.axes import Axes
from nestling.views.merge import Contribution, merge
from nestling.views.reference import Reference
from nestling.views.shrink import resize, sub_module
from nestling.views.tracing import trace
from nestling.views.view import (
    State,
    Tensors,
    View,
    by_index,
    from_spec,
    full,
    keep_private,
    masked,
    prefix,
    rolled,
    rolling,
    to_spec,
    without,
)

__all__ = [
    "Axes",
    "Contribution",
    "Reference",
    "State",
    "Tensors",
    "View",
    "by_index",
    "from_spec",
    "full",
    "keep_private",
    "masked",
    "merge",
    "prefix",
    "resize",
    "rolled",
    "rolling",
    "sub_module",
    "to_spec",
    "trace",
    "without",
]
