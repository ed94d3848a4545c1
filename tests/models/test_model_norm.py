"""The normalisation kinds, and static batch normalisation's calibration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models import NORMS, build, calibrate, norm_layer, state_entries
from nestling.models.norm import groups
from nestling.seeds import torch_seeded


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(norm: str) -> nn.Module:
    with torch_seeded(0, "test"):
        return build("tinycnn", shape=(1, 8, 8), classes=3, channels=(4, 8), norm=norm)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("dims", "shape"), [(1, (6, 8, 5)), (2, (6, 8, 5, 5)), (3, (6, 8, 3, 3, 3))])
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
