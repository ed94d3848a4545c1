"""MobileNetV2 (Sandler et al., 2018): inverted residuals, in the common table of (expansion,
channels, blocks, stride)."""

from __future__ import annotations

from torch import Tensor, nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import (
    Network,
    Stem,
    check_stem,
    conv2d,
    he_init,
    image,
    named,
    pooled,
    scaled,
)
from nestling.settings import Positive

_TABLE = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_FIRST, _LAST = 32, 1280


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter every channel by 3x3, narrow by 1x1; added to the input where the shapes
    agree."""

    def __init__(self, body: nn.Sequential, *, residual: bool) -> None:
        """Wraps the convolutions of `body`; `residual` says whether the input is added."""
        super().__init__()
        self.body = body
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return x + self.body(x) if self.residual else self.body(x)


def mobilenetv2(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    stem: Stem = "cifar",
    expand_first: bool = False,
) -> nn.Module:
    """Seventeen inverted residuals between a 3x3 and a 1x1 convolution, the mean over pixels, the
    head.

    stem:         imagenet starts with stride 2, cifar with stride 1 (as FlexFL does).
    expand_first: gives the first block a 1x1 convolution of its own although it does not widen,
                  which FlexFL's has.
    """
    before, _, _ = image("mobilenetv2", shape)
    entry = _unit(
        before, scaled(_FIRST, width), 3, norm, stride=1 if check_stem(stem) == "cifar" else 2
    )
    stages, full = [], _FIRST
    for expansion, after, count, first_stride in _TABLE:
        stage = []
        for place in range(count):
            stride = first_stride if place == 0 else 1
            widen = expansion > 1 or expand_first
            body = _body(full, expansion * full, after, stride, width, norm, widen=widen)
            stage.append(InvertedResidual(body, residual=stride == 1 and full == after))
            full = after
        stages.append(nn.Sequential(*stage))
    last = _unit(scaled(full, width), scaled(_LAST, width), 1, norm)
    neck = named(last=last, **dict(pooled().named_children()))
    network = Network(
        stem=entry, stages=stages, neck=neck, head=nn.Linear(scaled(_LAST, width), classes)
    )
    he_init(network)
    return network


def _body(
    before: int, middle: int, after: int, stride: int, width: float, norm: str, *, widen: bool
) -> nn.Sequential:
    first, inner, last = scaled(before, width), scaled(middle, width), scaled(after, width)
    parts = {"expand": _unit(first, inner, 1, norm)} if widen else {}
    parts["depthwise"] = _unit(inner, inner, 3, norm, stride=stride, groups=inner)
    parts["project"] = named(
        conv=conv2d(inner, last, 1, bias=norm == "none"), norm=norm_layer(norm, last)
    )
    return named(**parts)


def _unit(
    before: int, after: int, kernel: int, norm: str, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    conv = conv2d(before, after, kernel, stride=stride, groups=groups, bias=norm == "none")
    return named(conv=conv, norm=norm_layer(norm, after), relu=nn.ReLU6())
