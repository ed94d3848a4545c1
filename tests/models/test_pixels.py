"""Images with the channels of a pixel side by side: the same network, the same weights, only the
order in memory differs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.models import build
from nestling.models.pixels import LARGEST, by_pixel, takes_pixels


class Viewing(nn.Module):
    """Its code takes for granted how maps lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


def images(channels: int = 1, count: int = 5) -> Tensor:
    return torch.randn(count, channels, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("model", ["tinycnn", "resnet8", "dscnn"])
def test_a_network_computes_the_same(model: str, channels: int) -> None:
    module, x = build(model, shape=(channels, 8, 8), classes=3), images(channels)
    turned = by_pixel(module, x)
    assert turned.stride()[1] == 1 and torch.equal(turned, x)
    losses = [F.cross_entropy(module(given), torch.arange(5) % 3) for given in (x, turned)]
    for one, other in zip(
        *(torch.autograd.grad(loss, list(module.parameters())) for loss in losses), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert all(p.is_contiguous() for p in module.parameters())


def test_its_maps_lie_so_too() -> None:
    module, seen = build("tinycnn", shape=(1, 8, 8), classes=3), []
    layer = next(m for m in module.modules() if isinstance(m, nn.Conv2d))
    layer.register_forward_hook(lambda _, inputs, out: seen.append(out))
    module(by_pixel(module, images()))
    assert seen[-1].stride()[1] == 1


def test_what_would_not_run_or_not_pay_gets_images_as_they_are() -> None:
    dense, rows = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), torch.randn(5, 6)
    large = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, LARGEST // 72))
    for module in (Viewing(), dense, large):
        x = images()
        assert by_pixel(module, x) is x and not takes_pixels(module, x)
    assert by_pixel(build("tinycnn", shape=(1, 8, 8), classes=3), rows) is rows


def test_trying_leaves_the_network_alone() -> None:
    module = build("tinycnn", shape=(1, 8, 8), classes=3, norm="tracked").train()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    assert takes_pixels(module, images())
    assert module.training and all(
        torch.equal(t, before[name]) for name, t in module.state_dict().items()
    )
