"""A recurrent network for sequences and for texts: layers of LSTM, read at their last step or at
every one."""

from __future__ import annotations

from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.attention import StepNorm, step_norm
from nestling.models.parts import Network, named, scaled, sequence
from nestling.settings import Count, Positive


class Recurrent(nn.Module):
    """One layer of LSTM, from steps to steps."""

    def __init__(self, before: int, after: int) -> None:
        """So many channels in, so many out."""
        super().__init__()
        self.lstm = nn.LSTM(before, after, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, steps, before) to (rows, steps, after)."""
        return self.lstm(x)[0]


class ByStep(nn.Module):
    """A sequence with its steps before its channels."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, channels, steps) to (rows, steps, channels)."""
        return x.transpose(1, 2)


class Last(nn.Module):
    """The last step, normalised."""

    def __init__(self, size: int, norm: str) -> None:
        """For steps of so many channels."""
        super().__init__()
        self.norm = step_norm(norm, size)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, steps, size) to (rows, size)."""
        return self.norm(x[:, -1])


def lstm(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: StepNorm = "none",
    hidden: tuple[Count, ...] = (64,),
    words: int = 0,
    dim: Count = 32,
    every: bool = False,
) -> nn.Module:
    """One layer after the other, read at the last step or at every one.

    norm:   what normalises a step before it is read: layer or none.
    hidden: the units of every layer.
    words:  of texts, how many different token ids there are; left out where there is no text.
    dim:    channels of the vector that stands for a token id.
    every:  answers at every step, (rows, steps, classes), such as the next token; otherwise at the
            last one alone.
    """
    stem: nn.Module = ByStep()
    if words:
        if len(shape) != 1:
            raise InputError(
                f"a text is a row of token ids; the data has shape {tuple(shape)}",
                field="model.words",
                fix="leave it out",
            )
        before = scaled(dim, width)
        stem = nn.Embedding(words, before)
    else:
        before, _ = sequence("lstm", shape)
    stages = []
    for full in hidden:
        after = scaled(full, width)
        stages.append(Recurrent(before, after))
        before = after
    neck = named(norm=step_norm(norm, before)) if every else Last(before, norm)
    return Network(stem=stem, stages=stages, neck=neck, head=nn.Linear(before, classes))
