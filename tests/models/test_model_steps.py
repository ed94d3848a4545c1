"""Networks over steps (vit, kwt, lstm): they run at all widths, can be cut all over and in depth,
and train alike alone, in a stack and in a federation of unlike devices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import nestling
from nestling import EngineConfig, FleetConfig, Tier
from nestling.errors import InputError
from nestling.models import build, parameters
from nestling.seeds import torch_seeded
from nestling.views import Reference, prefix
from tests.small import small

CLASSES = 5
SHAPES = {
    "vit": [(1, 28, 28), (3, 32, 30)],
    "kwt": [(1, 32, 20), (6, 40)],
    "lstm": [(6, 12)],
}
ALL = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]
HALVES = FleetConfig(tiers=(Tier(name="half", ratio=0.5, count=2), Tier(ratio=1.0, count=2)))


def make(name: str, shape: tuple[int, ...], **options: object) -> nn.Module:
    with torch_seeded(0, "test", name):
        return build(name, shape=shape, classes=CLASSES, **options)


def rows(count: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("norm", ["layer", "none"])
@pytest.mark.parametrize("width", [1.0, 0.5, 0.1])
@pytest.mark.parametrize(("name", "shape"), ALL)
def test_it_runs_at_every_width_and_all_of_it_learns(
    name: str, shape: tuple[int, ...], width: float, norm: str
) -> None:
    network = make(name, shape, width=width, norm=norm)
    out = network(rows(3, shape))
    assert out.shape == (3, CLASSES)
    assert network.features(rows(3, shape)).shape == (3, network.head.in_features)
    nn.functional.cross_entropy(out, torch.tensor([0, 1, 2])).backward()
    assert [n for n, p in network.named_parameters() if p.grad is None] == []
    if width < 1:
        assert parameters(network) < parameters(make(name, shape))


@pytest.mark.parametrize(("name", "shape"), ALL)
def test_a_narrow_one_is_a_corner_of_the_wide_one(name: str, shape: tuple[int, ...]) -> None:
    wide, narrow = make(name, shape).state_dict(), make(name, shape, width=0.3).state_dict()
    assert wide.keys() == narrow.keys()
    for key in wide:
        pairs = zip(narrow[key].shape, wide[key].shape, strict=True)
        assert all(small <= large for small, large in pairs), key
    assert narrow["head.weight"].shape[0] == CLASSES


@pytest.mark.parametrize(("name", "shape"), ALL)
def test_nearly_all_of_it_can_be_cut(name: str, shape: tuple[int, ...]) -> None:
    reference = Reference("main", make(name, shape), shape)
    assert reference.axes.share(reference.parameters) > 0.99
    assert reference.axes.notes == ()
    half = reference.network(prefix(reference.axes, 0.5))
    assert parameters(half) < 0.4 * parameters(reference.module)
    assert half(rows(2, shape)).shape == (2, CLASSES)


@pytest.mark.parametrize(("name", "shape"), [(n, s[0]) for n, s in SHAPES.items()])
def test_gradients_of_a_stack_equal_those_of_one(name: str, shape: tuple[int, ...]) -> None:
    network = make(name, shape, width=0.25).double()
    weights = {key: value.detach() for key, value in network.named_parameters()}
    x = torch.stack([rows(4, shape), rows(4, shape).flip(0) * 2]).double()

    def loss(state: dict[str, Tensor], data: Tensor) -> Tensor:
        return functional_call(network, state, (data,)).square().mean()

    stacked = {key: value.expand(2, *value.shape) for key, value in weights.items()}
    together = vmap(grad(loss))(stacked, x)
    alone = grad(loss)(weights, x[1])
    for key in weights:
        torch.testing.assert_close(together[key][1], alone[key], rtol=1e-6, atol=1e-8)


def test_a_text_is_read_by_its_token_ids() -> None:
    network = make("lstm", (7,), words=11)
    assert network(torch.randint(11, (3, 7))).shape == (3, CLASSES)
    reference = Reference("main", network, (7,))
    assert dict(zip(reference.axes.names, reference.axes.sizes, strict=True)) == {
        "stem": 32,
        "stages.0.lstm": 64,
    }


def test_an_earlier_step_is_seen_later() -> None:
    for name, shape in ALL:
        network, x = make(name, shape), rows(1, shape)
        changed = x.clone()
        changed[..., 0] += 1
        assert not torch.allclose(network(x), network(changed)), name


@pytest.mark.parametrize(
    ("name", "shape", "options", "field"),
    [
        ("vit", (6, 40), {}, "model.name"),
        ("vit", (1, 8, 8), {"patch": 9}, "model.patch"),
        ("vit", (1, 8, 8), {"norm": "group"}, "model.norm"),
        ("kwt", (3, 32, 32), {}, "model.name"),
        ("lstm", (1, 8, 8), {}, "model.name"),
        ("lstm", (6, 40), {"words": 9}, "model.words"),
    ],
)
def test_what_does_not_fit_names_its_field(
    name: str, shape: tuple[int, ...], options: dict[str, object], field: str
) -> None:
    with pytest.raises(InputError) as refused:
        make(name, shape, **options)
    assert refused.value.field == field


@pytest.mark.parametrize("name", ["vit", "kwt"])
def test_unlike_devices_train_it_alike_on_two_engines(name: str) -> None:
    states = []
    for engine in ("inline", "cohort"):
        experiment = small(
            "heterofl",
            model=nestling.Named(name, {"dim": 16, "depth": 1, "heads": 2, "head_dim": 8}),
            fleet=HALVES,
            participants=4,
            rounds=1,
            engine=EngineConfig(engine),
        )
        result = nestling.run(experiment)
        assert result.model is not None
        states.append(result.model.state_dict())
    for key, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][key], atol=1e-5), key
