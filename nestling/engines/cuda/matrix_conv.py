"""Convolutions as matrix products.

A stack of convolutions with weights of their own is a grouped convolution, and for some shapes the
library computes its forward pass group by group, without tensor cores. As shifted copies of the
input and one batch of matrix products it is a few large calls; the same holds for its gradient,
which follows from the plain operations here and which a compiler can fuse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _MatrixConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.padding, tuple)
        (high, wide), (down, right), (top, left) = self.kernel_size, self.stride, self.padding
        padded = F.pad(x, (left, left, top, top)).transpose(0, 1)
        rows, columns = (padded.shape[2] - high) // down + 1, (padded.shape[3] - wide) // right + 1
        shifted = [
            padded[
                :,
                :,
                i : i + (rows - 1) * down + 1 : down,
                j : j + (columns - 1) * right + 1 : right,
            ]
            for i in range(high)
            for j in range(wide)
        ]
        table = torch.stack(shifted, 1).reshape(self.in_channels * high * wide, -1)
        out = self.weight.reshape(self.out_channels, -1) @ table
        if self.bias is not None:
            out = out + self.bias[:, None]
        return out.reshape(self.out_channels, len(x), rows, columns).transpose(0, 1)


def use_matrices(module: nn.Module) -> None:
    """Makes the plain 2-d convolutions of a network compute this way; its state and its results
    stay what they are."""
    for layer in module.modules():
        plain = (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.dilation == (1, 1)
            and layer.padding_mode == "zeros"
        )
        if plain and isinstance(layer.padding, tuple):
            layer.__class__ = _MatrixConv2d
