"""The pre-activation ResNet18 for small images of HeteroFL's CIFAR experiments (Diao et al.,
2021)."""

from __future__ import annotations

from torch import Tensor, nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, conv2d, image, named, pooled, scaled
from nestling.models.resnet import plan
from nestling.settings import Count, Positive


class PreBlock(nn.Module):
    """Normalisation and activation come before each convolution; a projected shortcut starts after
    the first of them."""

    def __init__(self, before: int, after: int, *, stride: int, norm: str, project: bool) -> None:
        """Two 3x3 convolutions, the first with `stride`; `project` gives the shortcut a 1x1
        convolution."""
        super().__init__()
        self.norm1 = norm_layer(norm, before)
        self.relu1 = nn.ReLU()
        self.conv1 = conv2d(before, after, stride=stride, bias=norm == "none")
        self.norm2 = norm_layer(norm, after)
        self.relu2 = nn.ReLU()
        self.conv2 = conv2d(after, after, bias=norm == "none")
        self.shortcut = conv2d(before, after, 1, stride=stride) if project else None

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        active = self.relu1(self.norm1(x))
        side = x if self.shortcut is None else self.shortcut(active)
        return self.conv2(self.relu2(self.norm2(self.conv1(active)))) + side


def preresnet18(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    blocks: tuple[Count, ...] = (2, 2, 2, 2),
    channels: tuple[Count, ...] = (64, 128, 256, 512),
) -> nn.Module:
    """A 3x3 stem, one stage for every entry of `blocks`, a last normalisation, the mean over
    pixels, the head.

    blocks:   the blocks of every stage.
    channels: of every stage; the stem has those of the first.
    """
    before, _, _ = image("preresnet18", shape)
    planned = plan(blocks, (*channels[:1], *channels))
    stages = [nn.Sequential(*(_block(*place, width, norm) for place in stage)) for stage in planned]
    stem = conv2d(before, scaled(channels[0], width))
    size = scaled(channels[len(blocks) - 1], width)
    neck = named(norm=norm_layer(norm, size), relu=nn.ReLU(), **dict(pooled().named_children()))
    return Network(stem=stem, stages=stages, neck=neck, head=nn.Linear(size, classes))


def _block(before: int, after: int, stride: int, width: float, norm: str) -> PreBlock:
    project = stride != 1 or before != after
    return PreBlock(
        scaled(before, width), scaled(after, width), stride=stride, norm=norm, project=project
    )
