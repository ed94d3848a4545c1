"""The normalisation kinds, and static batch normalisation's calibration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models import NORMS, build, calibrate, norm_layer, state_entries
from nestling.models.norm import WIDTHS, WidthNorm, groups
from nestling.seeds import torch_seeded
from nestling.training.phase import Phase
from nestling.training.trainer import batches
from nestling.views import Reference, prefix
from nestling.views.nested import forward


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(norm: str) -> nn.Module:
    with torch_seeded(0, "test"):
        return build("tinycnn", shape=(1, 8, 8), classes=3, channels=(4, 8), norm=norm)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("dims", "shape"), [(1, (6, 8, 5)), (2, (6, 8, 5, 5)), (3, (6, 8, 3, 3, 3))]
)
def test_every_kind_keeps_the_shape(kind: str, dims: int, shape: tuple[int, ...]) -> None:
    assert norm_layer(kind, 8, dims)(numbers(*shape)).shape == shape


@pytest.mark.parametrize(("channels", "expected"), [(64, 16), (4, 1), (6, 3), (5, 5), (1, 1)])
def test_the_group_size_is_four_or_the_largest_divisor_of_it(channels: int, expected: int) -> None:
    assert groups(channels) == expected
    assert norm_layer("group", channels).num_groups == expected


@pytest.mark.parametrize("kept", [4, 8, 12])
def test_a_prefix_of_channels_normalises_as_in_the_wide_network(kept: int) -> None:
    x = numbers(3, 16, 5, 5)
    wide, narrow = norm_layer("group", 16), norm_layer("group", kept)
    with torch.no_grad():
        wide.weight.copy_(numbers(16, seed=1))
        narrow.weight.copy_(wide.weight[:kept])
    torch.testing.assert_close(narrow(x[:, :kept]), wide(x)[:, :kept], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["batch", "sbn"])
def test_batch_kinds_have_no_buffers_and_use_the_batch_in_evaluation(kind: str) -> None:
    layer = norm_layer(kind, 8).eval()
    assert not list(layer.buffers())
    out = layer(3 + 2 * numbers(32, 8, 4, 4))
    torch.testing.assert_close(out.mean(dim=(0, 2, 3)), torch.zeros(8), rtol=0, atol=1e-5)


def test_tracked_uses_running_statistics_in_evaluation() -> None:
    layer = norm_layer("tracked", 8).eval()
    x = numbers(32, 8, 4, 4)
    torch.testing.assert_close(layer(x), x, rtol=1e-4, atol=1e-4)


def test_none_is_nothing() -> None:
    assert isinstance(norm_layer("none", 8), nn.Identity)


def test_an_unknown_kind_names_the_near_one() -> None:
    with pytest.raises(InputError, match="did you mean 'batch'") as caught:
        norm_layer("bacth", 8)
    assert caught.value.field == "model.norm"


def test_an_unknown_number_of_dimensions_is_refused() -> None:
    with pytest.raises(InputError, match="4 spatial"):
        norm_layer("batch", 8, 4)


def test_calibrated_statistics_are_the_plain_mean_over_batches() -> None:
    batches = [numbers(16, 1, 8, 8, seed=1), 5 + numbers(4, 1, 8, 8, seed=2)]
    source = network("sbn")
    layer = calibrate(source, batches).stages[0].norm
    with torch.no_grad():
        before = [source.stages[0].conv(batch) for batch in batches]
    means = torch.stack([maps.mean(dim=(0, 2, 3)) for maps in before]).mean(dim=0)
    variances = torch.stack([maps.var(dim=(0, 2, 3)) for maps in before]).mean(dim=0)
    torch.testing.assert_close(layer.running_mean, means)
    torch.testing.assert_close(layer.running_var, variances)
    assert int(layer.num_batches_tracked) == 2


def test_after_calibration_a_sample_does_not_depend_on_its_batch() -> None:
    x = numbers(8, 1, 8, 8)
    source = network("sbn").eval()
    fixed = calibrate(source, [numbers(16, 1, 8, 8, seed=seed) for seed in range(3)])
    assert not fixed.training
    torch.testing.assert_close(fixed(x[:1]), fixed(x)[:1])
    assert not torch.allclose(source(x[:1]), source(x)[:1], atol=1e-3)


def test_calibration_leaves_the_original_alone() -> None:
    source = network("sbn")
    before = {name: value.clone() for name, value in source.state_dict().items()}
    fixed = calibrate(source, [numbers(8, 1, 8, 8)])
    assert source.training
    assert source.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in source.state_dict().items())
    assert state_entries(fixed) == state_entries(source) + 2 * (4 + 8) + 2


def test_calibration_touches_sbn_layers_only() -> None:
    fixed = calibrate(network("tracked"), [5 + numbers(8, 1, 8, 8)])
    assert torch.equal(fixed.stages[0].norm.running_mean, torch.zeros(4))
    assert not list(calibrate(network("batch"), [numbers(8, 1, 8, 8)]).buffers())


def test_calibration_measures_without_dropout() -> None:
    source = nn.Sequential(nn.Dropout(0.9), norm_layer("sbn", 3))
    x = numbers(16, 3, 2, 2)
    torch.testing.assert_close(calibrate(source, [x])[1].running_mean, x.mean(dim=(0, 2, 3)))


def test_calibration_without_batches_is_refused() -> None:
    with pytest.raises(InputError, match="no batches"):
        calibrate(network("sbn"), [])


def width_network(norm: str = "per-width") -> Reference:
    with torch_seeded(0, "test"):
        return Reference("main", build("resnet8", shape=(1, 8, 8), classes=3, norm=norm), (1, 8, 8))


def test_a_width_norm_keeps_one_affine_and_statistics_of_every_width() -> None:
    layer = norm_layer("per-width", 10)
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == {
        "weight": (10,),
        "bias": (10,),
        "means": (5, 10),
        "variances": (5, 10),
    }
    assert tuple(norm_layer("per-width:0.25,0.5,1", 10).means.shape) == (3, 10)


def test_a_width_norm_at_full_width_is_the_tracked_one() -> None:
    plain, layer, x = (
        norm_layer("tracked", 8),
        norm_layer("per-width", 8),
        3 + 2 * numbers(32, 8, 4, 4),
    )
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer.means[-1], plain.running_mean)
    torch.testing.assert_close(layer.variances[-1], plain.running_var)
    assert bool((layer.means[:-1] == 0).all()) and bool((layer.variances[:-1] == 1).all())
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("channels", [5, 8, 10, 13, 64])
def test_the_number_of_channels_says_which_statistics(channels: int) -> None:
    for row, width in enumerate(WIDTHS):
        layer = norm_layer("per-width", channels)
        kept = math.ceil(width * channels - 1e-9)
        layer.weight = nn.Parameter(layer.weight[:kept].detach())
        assert layer.row == row
    layer.weight = nn.Parameter(layer.weight[:1].detach())
    assert layer.row == 0


@pytest.mark.parametrize("widths", ["", "1,0.5", "0.5,0.5,1", "0,1", "0.5,1.5", "narrow"])
def test_widths_that_are_none_are_refused(widths: str) -> None:
    with pytest.raises(InputError) as caught:
        norm_layer(f"per-width:{widths}", 8)
    assert caught.value.field == "model.norm"


def test_only_the_width_norm_takes_widths() -> None:
    with pytest.raises(InputError):
        norm_layer("batch:0.5,1", 8)


def test_tracing_ties_the_statistics_of_all_widths_to_their_channels() -> None:
    plain, axes = width_network("tracked").axes, width_network().axes
    assert (axes.names, axes.sizes, axes.grains) == (plain.names, plain.sizes, plain.grains)
    for name, dims in axes.dims.items():
        if name.endswith(("means", "variances")):
            layer = name.rpartition(".")[0]
            assert dims[0] is None and (dims[1] == axes.dims[f"{layer}.weight"][0]).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_cut_network_uses_the_statistics_of_its_width(width: float) -> None:
    """Every row of the statistics holds its own number; what the small network computes shows which
    one it read."""
    reference = width_network()
    view = prefix(reference.axes, width)
    state = view.extract(reference.initial)
    for name in reference.by_width:
        state[name] = torch.arange(1.0, 6.0)[:, None].expand(view.shape(name)).clone()
    network = reference.network(view, state).eval()
    x = numbers(4, 1, 8, 8)
    row = WIDTHS.index(width) + 1.0
    with torch.no_grad():
        into = network.stem.conv(x)
        weight, bias = (
            network.stem.norm.weight[:, None, None],
            network.stem.norm.bias[:, None, None],
        )
        torch.testing.assert_close(
            network.stem.norm(into), (into - row) / math.sqrt(row + 1e-5) * weight + bias
        )
    network.train()(x)
    moved = [bool((network.stem.norm.means[k] != k + 1).any()) for k in range(5)]
    assert moved == [level == width for level in WIDTHS]
    assert all(
        layer.num_features == len(layer.weight)
        for layer in network.modules()
        if isinstance(layer, WidthNorm)
    )


def test_a_network_inside_another_moves_the_statistics_of_its_own_width() -> None:
    reference = width_network()
    outer, inner = prefix(reference.axes, 0.8), prefix(reference.axes, 0.4)
    state = {name: t.clone() for name, t in outer.extract(reference.initial).items()}
    x = numbers(6, 1, 8, 8)
    forward(reference, inner, state, x, inside=outer)
    alone = reference.network(inner, inner.extract(reference.initial)).train()
    alone(x)
    for name in reference.by_width:
        wide = inner.shape(name)[1]
        torch.testing.assert_close(state[name][1, :wide], alone.state_dict()[name][1])
        assert torch.equal(
            state[name][:, wide:], outer.cut(name, reference.initial[name])[:, wide:]
        )
        assert torch.equal(
            state[name][[0, 2, 3, 4]], outer.cut(name, reference.initial[name])[[0, 2, 3, 4]]
        )


def test_a_network_that_is_only_asked_moves_no_statistics() -> None:
    reference = width_network()
    state = {name: t.clone() for name, t in reference.initial.items()}
    forward(reference, prefix(reference.axes, 0.4), state, numbers(6, 1, 8, 8), training=False)
    assert all(torch.equal(t, reference.initial[name]) for name, t in state.items())


def test_a_lone_sample_is_left_out_where_batch_statistics_need_two() -> None:
    train_phase = Phase(batch=4)
    for norm, steps in (("per-width", 2), ("group", 3)):
        net = build("tinycnn", shape=(1, 8, 8), classes=3, channels=(4, 8), norm=norm)
        assert len(list(batches(9, train_phase, net, 0))) == steps
