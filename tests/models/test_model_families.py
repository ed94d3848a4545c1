"""Every family: builds, runs, learns at all widths, scales by the rule, and can be traced and
batched over clients."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch_pruning
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from nestling.models import MODELS, NORMS, build, parameters
from nestling.models.parts import scaled
from nestling.seeds import torch_seeded

SMALL = (
    "mlp",
    "autoencoder",
    "cnn",
    "tinycnn",
    "cnn1d",
    "forecaster",
    "dscnn",
    "resnet8",
    "exitcnn",
    "tinyexits",
    "tinyresnet",
)
BIG = ("resnet18", "resnet50", "preresnet18", "vgg16", "mobilenetv2", "densenet121", "exitresnet")
FAMILIES = (*SMALL, *BIG)
STEPS = ("gpt", "kwt", "lstm", "vit")
"""Have tests of their own, in test_model_steps and test_model_tokens."""
SHAPES = {"sequence": (9, 32), "text": (12,)}
CLASSES = 5


def shape_for(name: str) -> tuple[int, ...]:
    return SHAPES.get(MODELS[name].input, (3, 32, 32))


def make(name: str, **options: object) -> nn.Module:
    with torch_seeded(0, "test", name):
        return build(name, shape=shape_for(name), classes=CLASSES, **options)


def on_meta(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return build(name, shape=shape_for(name), classes=CLASSES, **options)


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def run_and_check(network: nn.Module, x: Tensor) -> None:
    out = network(x)
    assert out.shape == (len(x), CLASSES)
    nn.functional.cross_entropy(
        out, torch.zeros(len(x), dtype=torch.long, device=x.device)
    ).backward()
    # The exits before the last do not take part in the plain forward pass.
    missing = [
        name
        for name, value in network.named_parameters()
        if value.grad is None and not name.startswith("heads.")
    ]
    assert missing == []


@pytest.mark.parametrize("width", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("name", SMALL)
def test_a_small_network_runs_forward_and_backward(name: str, width: float) -> None:
    network = make(name, width=width)
    run_and_check(network, batch(4, *shape_for(name)))
    assert all(
        torch.isfinite(value.grad).all() for value in network.parameters() if value.grad is not None
    )


@pytest.mark.parametrize("width", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("name", BIG)
def test_a_big_network_runs_forward_and_backward(name: str, width: float) -> None:
    run_and_check(on_meta(name, width=width), torch.empty(4, *shape_for(name), device="meta"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_network_takes_every_norm(name: str, norm: str) -> None:
    network = on_meta(name, norm=norm, width=0.25)
    run_and_check(network, torch.empty(4, *shape_for(name), device="meta"))
    kinds = {"group": nn.GroupNorm, "none": ()}.get(norm, nn.modules.batchnorm._BatchNorm)
    layers = [
        part
        for part in network.modules()
        if isinstance(part, (nn.GroupNorm, nn.modules.batchnorm._BatchNorm))
    ]
    assert bool(layers) == (norm != "none")
    assert all(isinstance(layer, kinds) for layer in layers)


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_linear_and_sees_the_features(name: str) -> None:
    network = on_meta(name, width=0.25).eval()
    assert isinstance(network.head, nn.Linear)
    assert network.head.out_features == CLASSES
    text = MODELS[name].input == "text"
    kind = torch.int64 if text else torch.float32
    x = torch.empty(2, *shape_for(name), dtype=kind, device="meta")
    steps = shape_for(name) if text else ()  # at every one of which something is told
    assert network.features(x).shape == (2, *steps, network.head.in_features)


@pytest.mark.parametrize("width", [0.5, 0.3, 0.01])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_narrow_network_is_a_corner_of_the_wide_one(name: str, width: float) -> None:
    wide, narrow = on_meta(name).state_dict(), on_meta(name, width=width).state_dict()
    assert wide.keys() == narrow.keys()
    for key in wide:
        assert all(
            small <= large for small, large in zip(narrow[key].shape, wide[key].shape, strict=True)
        ), key
    first = next(iter(wide))
    heads = [key for key in wide if key.startswith(("head.", "heads."))]
    assert narrow[first].shape[1] == wide[first].shape[1]
    assert heads
    assert all(narrow[key].shape[0] == CLASSES for key in heads)


@pytest.mark.parametrize("name", ["resnet34", "exitresnet"])
def test_a_projection_stays_where_both_its_ends_round_to_the_same_size(name: str) -> None:
    channels = (64, 96, 128, 256, 512)
    wide, narrow = on_meta(name, channels=channels), on_meta(name, channels=channels, width=0.01)
    assert wide.state_dict().keys() == narrow.state_dict().keys()


# Sizes behind a flattened map or a concatenation are sums of scaled parts.
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in FAMILIES
        if name not in ("tinycnn", "tinyexits", "tinyresnet", "densenet121")
    ],
)
def test_hidden_axes_follow_the_ceiling_rule(name: str) -> None:
    width = 0.3
    wide, narrow = on_meta(name).state_dict(), on_meta(name, width=width).state_dict()
    for key in wide:
        for small, large in zip(narrow[key].shape, wide[key].shape, strict=True):
            assert small in (large, max(1, math.ceil(width * large))), key


@pytest.mark.parametrize(
    ("full", "width", "expected"),
    [(100, 0.07, 7), (64, 1 / 16, 4), (3, 0.01, 1), (5, 0.5, 3), (8, 2, 16)],
)
def test_the_scaling_rule(full: int, width: float, expected: int) -> None:
    assert scaled(full, width) == expected


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 7, 11)])
@pytest.mark.parametrize(
    "name", ["tinycnn", "dscnn", "resnet8", "exitcnn", "tinyexits", "tinyresnet", "mlp"]
)
def test_microcontroller_networks_take_any_image(name: str, shape: tuple[int, ...]) -> None:
    with torch_seeded(0, "test"):
        network = build(name, shape=shape, classes=CLASSES)
    assert network(batch(2, *shape)).shape == (2, CLASSES)


@pytest.mark.parametrize(
    ("name", "size"),
    [("vgg16", 28), ("vgg16", 16), ("cnn", 8), ("densenet121", 29), ("mobilenetv2", 28)],
)
def test_the_smallest_images_that_are_accepted_do_run(name: str, size: int) -> None:
    with torch.device("meta"):
        network = build(name, shape=(1, size, size), classes=CLASSES)
    assert network(torch.empty(2, 1, size, size, device="meta")).shape == (2, CLASSES)


def test_depth_follows_the_options() -> None:
    assert len(make("mlp", hidden=(8, 8, 8)).stages) == 3
    assert len(make("mlp", hidden=()).stages) == 0
    assert len(make("tinycnn", channels=(4, 4)).stages) == 2
    assert len(make("dscnn", blocks=2).stages) == 2
    assert [len(stage) for stage in on_meta("resnet18", blocks=(1, 3)).stages] == [1, 3]
    assert on_meta("resnet18", blocks=(1, 3)).head.in_features == 128
    assert on_meta("preresnet18", blocks=(1, 1, 1)).head.in_features == 256
    assert [len(stage) for stage in on_meta("resnet8", blocks=(3, 3, 3)).stages] == [3, 3, 3]


def test_a_shallow_resnet_is_named_as_the_front_of_a_deep_one() -> None:
    deep, shallow = on_meta("resnet26").state_dict(), on_meta("resnet10").state_dict()
    assert all(deep[key].shape == shallow[key].shape for key in shallow)


def test_stems() -> None:
    x = torch.empty(2, 3, 32, 32, device="meta")
    assert on_meta("resnet18", stem="imagenet").stem(x).shape == (2, 64, 8, 8)
    assert on_meta("resnet18", stem="cifar").stem(x).shape == (2, 64, 32, 32)
    assert on_meta("mobilenetv2", stem="imagenet").stem(x).shape == (2, 32, 16, 16)
    assert on_meta("mobilenetv2").stem(x).shape == (2, 32, 32, 32)


def test_vgg_without_dropout_has_no_random_layer() -> None:
    assert not any(isinstance(part, nn.Dropout) for part in on_meta("vgg16", dropout=0.0).modules())
    assert sum(isinstance(part, nn.Dropout) for part in on_meta("vgg16").modules()) == 2


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = make("resnet8").state_dict(), make("resnet8").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["resnet8", "dscnn", "tinycnn"])
def test_signal_survives_without_normalisation(name: str) -> None:
    network = make(name, norm="none")
    assert 0.1 < network.features(batch(8, 3, 32, 32)).std() < 20


@pytest.mark.parametrize("norm", ["group", "sbn"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_network_can_be_traced_symbolically(name: str, norm: str) -> None:
    graph = torch.fx.symbolic_trace(on_meta(name, width=0.25, norm=norm))
    layers = [
        module
        for module in graph.modules()
        if isinstance(module, (nn.GroupNorm, nn.modules.batchnorm._BatchNorm))
    ]
    assert layers


@pytest.mark.parametrize("name", [*SMALL, "preresnet18", "mobilenetv2", "densenet121"])
def test_channel_ties_can_be_traced(name: str) -> None:
    network = make(name, width=0.5, norm="batch")
    graph = torch_pruning.DependencyGraph().build_dependency(network, batch(2, *shape_for(name)))
    first = next(
        part for part in network.modules() if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Linear))
    )
    linear = isinstance(first, nn.Linear)
    cut = (
        torch_pruning.prune_linear_out_channels if linear else torch_pruning.prune_conv_out_channels
    )
    before = parameters(network)
    graph.get_pruning_group(first, cut, idxs=[0]).prune()
    assert network(batch(2, *shape_for(name))).shape == (2, CLASSES)
    assert parameters(network) < before


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("name", [*SMALL, "mobilenetv2", "preresnet18"])
def test_gradients_batched_over_clients_equal_those_of_one(name: str, norm: str) -> None:
    network = make(name, width=0.25, norm=norm).double()
    weights = {key: value.detach() for key, value in network.named_parameters()}
    x = batch(2, 4, *shape_for(name)).double()

    def loss(state: dict[str, Tensor], data: Tensor) -> Tensor:
        return functional_call(network, state, (data,)).square().mean()

    together = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    alone = grad(loss)(weights, x[1])
    for key in weights:
        torch.testing.assert_close(together[key][1], alone[key], rtol=1e-6, atol=1e-8)


def test_every_builder_of_the_table_is_a_family_tested_here() -> None:
    builders = {name: getattr(info.build, "func", info.build) for name, info in MODELS.items()}
    assert {builders[name] for name in (*FAMILIES, *STEPS)} == set(builders.values())


def test_the_table_agrees_with_the_builders() -> None:
    for name, info in MODELS.items():
        options = inspect.signature(info.build).parameters
        assert info.norm == options["norm"].default, name
        assert info.input in ("image", "sequence", "text", "any"), name
        assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options.values()), (
            name
        )
        assert {"shape", "classes", "width", "norm"} <= options.keys(), name
        assert info.title, name
        assert info.note, name
