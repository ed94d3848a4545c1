"""`build`: the table, the checks on its options, and a user's own network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from nestling.errors import InputError
from nestling.models import MODELS, build

MNIST = (1, 28, 28)


def refusal(
    name: str, *, shape: tuple[int, ...] = MNIST, classes: int = 10, **options: object
) -> InputError:
    with torch.device("meta"), pytest.raises(InputError) as caught:
        build(name, shape=shape, classes=classes, **options)
    assert caught.value.fix
    return caught.value


def test_an_unknown_model_lists_the_table_and_the_way_to_ones_own() -> None:
    error = refusal("tinycn")
    assert error.field == "model.name"
    assert "did you mean 'tinycnn'" in str(error)
    assert "package.module:callable" in str(error)


def test_an_unknown_option_names_the_near_one() -> None:
    error = refusal("tinycnn", chanels=[4])
    assert error.field == "model.chanels"
    assert "did you mean 'channels'" in str(error)
    assert "shape" not in str(error.fix)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("tinycnn", "width", "half"),
        ("tinycnn", "width", True),
        ("tinycnn", "width", 0.0),
        ("tinycnn", "width", -1),
        ("tinycnn", "width", float("nan")),
        ("tinycnn", "width", float("inf")),
        ("tinycnn", "channels", 16),
        ("tinycnn", "channels", "16"),
        ("tinycnn", "channels", [16, 0]),
        ("tinycnn", "channels", [16, 2.5]),
        ("tinycnn", "channels", [True]),
        ("tinycnn", "norm", 3),
        ("tinycnn", "norm", "layer"),
        ("dscnn", "blocks", 2.0),
        ("dscnn", "blocks", 0),
        ("dscnn", "blocks", None),
        ("dscnn", "kernel", [3]),
        ("dscnn", "kernel", [3, 3, 3]),
        ("mobilenetv2", "expand_first", 1),
        ("resnet18", "stem", "mnist"),
        ("mobilenetv2", "stem", "mnist"),
        ("densenet121", "stem", "mnist"),
        ("resnet18", "blocks", [1, 1, 1, 1, 1]),
        ("resnet18", "blocks", []),
        ("resnet50", "blocks", []),
        ("resnet8", "blocks", [1, 1, 1, 1]),
        ("densenet121", "blocks", []),
        ("vgg16", "dropout", 1.5),
        ("autoencoder", "code", 0),
        ("autoencoder", "hidden", [128, 0]),
    ],
)
def test_a_bad_value_names_its_option(name: str, option: str, value: object) -> None:
    assert refusal(name, shape=(3, 32, 32), **{option: value}).field == f"model.{option}"


@pytest.mark.parametrize(
    "name", ["resnet8", "preresnet18", "resnet18", "resnet50", "exitcnn", "exitresnet"]
)
def test_no_channels_at_all_is_refused(name: str) -> None:
    refusal(name, channels=[])


def test_lists_and_whole_numbers_are_taken_as_a_file_gives_them() -> None:
    network = build("tinycnn", shape=[1, 28, 28], classes=10, width=1, channels=[4, 8])
    assert [stage.conv.out_channels for stage in network.stages] == [4, 8]


@pytest.mark.parametrize("name", [name for name, info in MODELS.items() if info.input == "image"])
def test_image_networks_refuse_sequences(name: str) -> None:
    error = refusal(name, shape=(9, 128))
    assert error.field == "model.name"
    assert "cnn1d" in str(error)


@pytest.mark.parametrize("shape", [(3, 32, 32), (12,)])
def test_sequence_networks_refuse_the_rest(shape: tuple[int, ...]) -> None:
    for name in ("cnn1d", "forecaster"):
        assert refusal(name, shape=shape).field == "model.name"


@pytest.mark.parametrize("shape", [(3, 32, 32), (9, 128)])
def test_networks_of_texts_refuse_the_rest(shape: tuple[int, ...]) -> None:
    assert refusal("gpt", shape=shape).field == "model.name"


@pytest.mark.parametrize(("name", "size"), [("vgg16", 15), ("cnn", 7), ("densenet121", 28)])
def test_too_small_an_image_is_refused(name: str, size: int) -> None:
    assert "at least" in str(refusal(name, shape=(3, size, size)))


@pytest.mark.parametrize(
    "shape", [(), (0, 28, 28), (1, -1, 4), (1.0, 2, 3), "abc", 3, (True, 2, 2)]
)
def test_a_shape_is_positive_whole_numbers(shape: object) -> None:
    assert refusal("mlp", shape=shape).field == "model.shape"


@pytest.mark.parametrize("classes", [0, -1, 2.0, True, "10"])
def test_classes_is_a_positive_whole_number(classes: object) -> None:
    assert refusal("mlp", classes=classes).field == "model.classes"


OWN = """
import torch
from nestling.errors import InputError
NUMBER = 3
def net(*, shape, classes, hidden=4):
    first, last = torch.nn.Linear(shape[0], hidden), torch.nn.Linear(hidden, classes)
    return torch.nn.Sequential(torch.nn.Flatten(), first, last)
def wrong(*, shape, classes):
    return "network"
def breaks(*, shape, classes):
    raise KeyError("lost")
def refuses(*, shape, classes):
    raise InputError("not today", field="model.own")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nestling_own_networks.py").write_text(OWN)
    (tmp_path / "nestling_own_broken.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_ones_own_network_is_built_with_its_options() -> None:
    network = build("nestling_own_networks:net", shape=(6,), classes=3, hidden=5)
    assert network(torch.zeros(2, 6)).shape == (2, 3)
    assert isinstance(network[1], nn.Linear)
    assert network[1].out_features == 5


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nestling_own_networks:missing", "does not exist"),
        ("nestling_own_networks:NUMBER", "not callable"),
        ("nestling_own_networks:wrong", "returned str"),
        ("nestling_own_networks:breaks", "raised KeyError"),
        ("nestling_own_networks:", "does not name"),
        (":net", "does not name"),
        ("nestling_own_nowhere:net", "cannot import"),
        ("nestling_own_broken:net", "a_module_that_is_not_there"),
    ],
)
def test_what_is_wrong_with_ones_own_is_said(name: str, words: str) -> None:
    error = refusal(name)
    assert error.field == "model.name"
    assert words in str(error)


@pytest.mark.usefixtures("own")
def test_an_option_that_ones_own_does_not_take_is_named() -> None:
    assert "depth" in str(refusal("nestling_own_networks:net", depth=3))


@pytest.mark.usefixtures("own")
def test_an_input_error_of_ones_own_passes_through() -> None:
    with pytest.raises(InputError, match="not today") as caught:
        build("nestling_own_networks:refuses", shape=(6,), classes=3)
    assert caught.value.field == "model.own"
