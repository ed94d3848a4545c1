"""Where networks are looked into: found by watching a pass, whatever the network."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models import build
from nestling.models.embedding import Pooled, with_features
from nestling.models.taps import find_taps, watching
from nestling.views import Reference

PICTURE = (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "depth", "first", "last", "features"),
    [
        ("tinycnn", 3, "stages.0.norm", "stages.2.norm", None),
        ("resnet18", 17, "stem.norm", "stages.3.1.norm2", 512),
        ("resnet50", 49, "stem.norm", "stages.3.2.norm3", 2048),
        ("densenet121", 120, "stem.norm", "neck.norm", 1024),
        ("mobilenetv2", 52, "stem.norm", "neck.last.norm", 1280),
        ("vgg16", 13, "stages.0.norm", "stages.12.norm", 4096),
        ("preresnet18", 17, "stem", "stages.3.1.conv2", 512),
    ],
)
def test_taps_of_the_families(
    name: str, depth: int, first: str, last: str, features: int | None
) -> None:
    """Layers minus the classifier, without shortcuts; the norm that directly follows, and
    DenseNet's behind the last joining."""
    taps = find_taps(build(name, shape=PICTURE, classes=10), PICTURE)
    assert (taps.depth, taps.first, taps.last, taps.head) == (depth, first, last, "head")
    assert features in (None, taps.features)


class Odd(nn.Module):
    """A network of nobody's family: a shortcut of one convolution beside two, and in-place
    activation."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Conv2d(3, 8, 1)
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.calm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.top = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        main = self.two(self.act(self.calm(self.one(x))))
        return self.top((main + self.short(x)).mean((2, 3)))


def test_a_shortcut_is_no_place_of_its_own() -> None:
    taps = find_taps(Odd(), (3, 8, 8))
    assert taps.convs == ("calm", "two") and (taps.head, taps.features) == ("top", 8)


def test_a_network_without_convolutions_says_so_when_asked() -> None:
    taps = find_taps(build("mlp", shape=(12,), classes=4), (12,))
    assert taps.depth == 0 and taps.head == "head"
    with pytest.raises(InputError, match="no convolution"):
        _ = taps.first


def test_a_network_may_name_its_taps() -> None:
    module = Odd()
    module.taps = {"convs": ["short", "one"], "head": "top"}  # type: ignore[assignment]
    assert Reference("own", module, (3, 8, 8)).taps.convs == ("short", "one")
    module.taps = {"convs": ["nowhere"]}  # type: ignore[assignment]
    with pytest.raises(InputError, match="no layer 'nowhere'"):
        _ = Reference("own", module, (3, 8, 8)).taps


def test_watching_sees_what_layers_put_out_and_leaves_nothing_behind() -> None:
    module = Odd().eval()
    x = torch.randn(4, 3, 8, 8)
    with watching(module, ["short"], "top") as seen:
        out = module(x)
    assert torch.equal(seen["short"], module.short(x))
    assert torch.equal(module.top(seen["features"]), out)
    assert not module.short._forward_hooks and not module.top._forward_pre_hooks


def test_features_of_the_right_number_are_left_as_they_are() -> None:
    module = Odd()
    taps = find_taps(module, (3, 8, 8))
    assert with_features(module, taps, taps.features) is module


def test_pooling_is_that_of_the_library_and_has_nothing_to_learn() -> None:
    for before, after in ((12, 4), (10, 4), (7, 7), (5, 8)):
        pool, x = Pooled(before, after), torch.randn(3, before)
        assert torch.allclose(pool(x), F.adaptive_avg_pool1d(x, after), atol=1e-6)
        assert not pool.state_dict() and not list(pool.parameters())


def test_unlike_networks_get_features_of_one_size() -> None:
    for module, shape in (
        (Odd(), (3, 8, 8)),
        (build("mlp", shape=(3, 8, 8), classes=5), (3, 8, 8)),
    ):
        before = {name: t.clone() for name, t in module.state_dict().items()}
        made = with_features(module, find_taps(module, shape), 6, "sigmoid")
        taps = find_taps(made, shape)
        assert taps.features == 6 and taps.head.endswith(".out")
        with watching(made, (), taps.head) as seen:
            assert made(torch.randn(2, *shape)).shape == (2, 5)
        assert (
            float(seen["features"].detach().min()) >= 0
            and float(seen["features"].detach().max()) <= 1
        )
        assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
