"""The C runtime against torch: every operation, loss and setting; then what it refuses."""

from __future__ import annotations

import copy
import math
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.planning import descriptor as d
from nestling.planning.descriptor import DescriptorSettings
from nestling.planning.plan import MemoryPlan, plan
from nestling.tiny.runtime import data, native, toolchain
from nestling.tiny.runtime.job import Done, Job, Step
from tests.tiny.nets import NETWORKS, OPERATIONS, batches, samples, train_with_torch

NEAR = 1e-6
PLAIN = DescriptorSettings(lr=0.05)
ALL = {**OPERATIONS, **NETWORKS}


def both(
    name: str, settings: DescriptorSettings, *, rows: int = 12, shifts: bool = False, **given: Any
) -> tuple[Done, np.ndarray, float, MemoryPlan]:
    """Five steps of a network by C and by torch: what C gave, torch's weights and summed loss, and
    the plan."""
    shape, made = ALL[name]
    torch.manual_seed(1)
    net = made()
    classes = int(net(torch.zeros(2, *shape)).shape[1])
    x, y = samples(shape, classes, rows)
    steps = batches(rows)
    if shifts:
        source = np.random.default_rng(5)
        steps = [Step(s.rows, source.integers(-2, 3, (len(s.rows), 2)), s.inner) for s in steps]
    if "inner" in given:
        steps = [
            Step(s.rows, s.shifts, inner)
            for s, inner in zip(steps, given.pop("inner"), strict=True)
        ]
    freeze = given.pop("freeze", ())
    planned = plan(
        net,
        shape,
        freeze=freeze,
        momentum=settings.momentum > 0,
        anchor="anchor" in given,
        mask="mask" in given,
        present="present" in given,
        target="targets" in given,
    )
    found = native.run_job(job_of(planned, net, settings, steps, given), data.pack(x, y))
    before = planned.pack(net.state_dict())
    extra = {k: v for k, v in given.items() if v is not None}
    if "head" in extra:
        extra["head"] = net.get_submodule(extra["head"])
    loss = train_with_torch(net, x, y, steps, settings, freeze=freeze, **extra)
    after = planned.pack(net.state_dict())
    assert np.abs(after - before).max() > 1e-3  # else the comparison says nothing
    return found, after, loss, planned


def job_of(
    planned: MemoryPlan,
    net: nn.Module,
    settings: DescriptorSettings,
    steps: list[Step],
    given: dict[str, Any],
) -> Job:
    anchor, mask, present, targets = (
        given.get(k) for k in ("anchor", "mask", "present", "targets")
    )
    return Job(
        planned,
        planned.pack(net.state_dict()),
        settings,
        steps,
        anchor=None if anchor is None else planned.pack(anchor)[: planned.trained],
        mask=None if mask is None else planned.mask(mask),
        present=None if present is None else present.numpy(),
        targets=None if targets is None else targets.numpy(),
    )


def check(found: Done, weights: np.ndarray, loss: float, near: float = NEAR) -> None:
    assert np.abs(found.weights - weights).max() <= near
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.steps == 5


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_trains_as_in_torch(name: str) -> None:
    found, weights, loss, _ = both(name, PLAIN)
    check(found, weights, loss)


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks_train_as_in_torch(name: str) -> None:
    found, weights, loss, _ = both(name, DescriptorSettings(lr=0.05, momentum=0.9))
    check(found, weights, loss)


def like(name: str, seed: int) -> dict[str, Tensor]:
    """Another set of weights of a network."""
    torch.manual_seed(seed)
    return ALL[name][1]().state_dict()


def flags(name: str) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(3)
    return {
        n: (torch.rand(t.shape, generator=source) < 0.6).float()
        for n, t in like(name, 1).items()
        if t.dim() > 1
    }


TARGETS = torch.randn(12, 5, generator=torch.Generator().manual_seed(9)) * 2

SETTINGS: dict[str, tuple[str, DescriptorSettings, dict[str, Any]]] = {
    "momentum": ("max pool", DescriptorSettings(0.05, momentum=0.9), {}),
    "decay": ("max pool", DescriptorSettings(0.05, momentum=0.5, decay=0.1), {}),
    "clip": ("residual", DescriptorSettings(0.2, momentum=0.9, clip=0.5), {}),
    "clip that does not bind": ("residual", DescriptorSettings(0.05, clip=1e4), {}),
    "proximal": ("max pool", DescriptorSettings(0.05, mu=0.7), {"anchor": like("max pool", 2)}),
    "mask": ("conv 1x1", DescriptorSettings(0.1, momentum=0.9), {"mask": flags("conv 1x1")}),
    "mask, clip, decay": (
        "conv 1x1",
        DescriptorSettings(0.1, 0.9, decay=0.05, clip=0.3),
        {"mask": flags("conv 1x1")},
    ),
    "present": ("global pool", PLAIN, {"present": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])}),
    "regression": ("max pool", DescriptorSettings(0.05, ce=0.0, mse=0.8), {"targets": TARGETS}),
    "distillation": (
        "max pool",
        DescriptorSettings(0.05, ce=0.0, kd=0.6, temperature=3.0),
        {"targets": TARGETS},
    ),
    "distillation at 1": (
        "ends in a pool",
        DescriptorSettings(0.05, ce=0.5, kd=2.0),
        {"targets": TARGETS},
    ),
    "everything": (
        "depth-wise separable",
        DescriptorSettings(
            0.05,
            momentum=0.9,
            decay=0.01,
            clip=1.0,
            mu=0.1,
            ce=0.5,
            mse=0.3,
            kd=0.7,
            temperature=2.0,
        ),
        {
            "targets": TARGETS,
            "present": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
            "anchor": like("depth-wise separable", 4),
            "mask": flags("depth-wise separable"),
        },
    ),
    "inner loss": (
        "global pool",
        DescriptorSettings(0.05, ce=0.5, inner=0.5),
        {"inner": [2, 4, 0, 6, 3], "head": "4"},
    ),
    "inner loss, frozen below": (
        "max pool",
        DescriptorSettings(0.05, inner=1.5),
        {"inner": [1, 5, 9, 0, 16], "head": "5", "freeze": ("0", "3")},
    ),
    "frozen prefix": ("branches", PLAIN, {"freeze": ("0", "1")}),
    "frozen norm": ("group norm", PLAIN, {"freeze": ("1",)}),
    "frozen middle": (
        "conv 1x1",
        DescriptorSettings(0.05, momentum=0.9, decay=0.1),
        {"freeze": ("2",)},
    ),
    "only the head": ("residual", PLAIN, {"freeze": ("0", "2")}),
    "shifts": ("conv 3x3", PLAIN, {"shifts": True}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_every_setting_trains_as_in_torch(case: str) -> None:
    name, settings, given = SETTINGS[case]
    found, weights, loss, _ = both(name, settings, **given)
    check(found, weights, loss)


def test_what_is_frozen_or_masked_does_not_move() -> None:
    found, _, _, planned = both("branches", PLAIN, freeze=("0", "1"))
    start = planned.pack(like("branches", 1))
    assert np.array_equal(found.weights[planned.trained :], start[planned.trained :])
    found, _, _, planned = both(
        "conv 1x1", DescriptorSettings(0.1, momentum=0.9), mask=flags("conv 1x1")
    )
    still = ~planned.mask(flags("conv 1x1"))
    assert still.any()
    assert np.array_equal(
        found.weights[: planned.trained][still],
        planned.pack(like("conv 1x1", 1))[: planned.trained][still],
    )


def test_convolutions_are_multiplied_by_the_plans_scale() -> None:
    shape, made = OPERATIONS["conv 3x3"]
    torch.manual_seed(1)
    net = made()
    x, y = samples(shape, 5, 12)
    planned, steps = plan(net, shape, scales=[((), 0.7)]), batches(12)
    found = native.run_job(
        Job(planned, planned.pack(net.state_dict()), PLAIN, steps), data.pack(x, y)
    )
    for layer in net:
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda _, given, out: out * 0.7)
    loss = train_with_torch(net, x, y, steps, PLAIN)
    check(found, planned.pack(net.state_dict()), loss)


def test_an_affine_operation_trains() -> None:
    """No torch module is lowered to a trained one, so this plan is written by hand."""
    channels, plane = 3, 4
    scale, shift, weight, bias = 0, 3, 6, 6 + 5 * channels * plane
    params = bias + 5
    x0, a, at = 8 * params, 8 * params + 48, 8 * params + 96
    ops = [
        d.Op(
            d.AFFINE,
            d.TRAINED,
            d.RELU6,
            x0,
            out=a,
            out_grad=at + 20,
            weight=scale,
            bias=shift,
            **_sizes(3, 2, 2, 3, 2, 2),
        ),
        d.Op(
            d.DENSE,
            d.TRAINED | d.INPUT_GRADIENT,
            0,
            a,
            out=at,
            first_grad=at + 20,
            out_grad=at,
            weight=weight,
            bias=bias,
            **_sizes(12, 1, 1, 5, 1, 1),
        ),
    ]
    header = d.Header(
        2,
        params,
        params,
        at + 68,
        0,
        4 * params,
        d.NONE,
        d.NONE,
        d.NONE,
        x0,
        3,
        2,
        2,
        at,
        at,
        5,
        d.NONE,
        d.NONE,
    )
    net = nn.Sequential(Affine(channels), nn.ReLU6(), nn.Flatten(), nn.Linear(12, 5))
    x, y = samples((3, 2, 2), 5, 6)
    engine, blob = (
        native.CRuntime(d.to_bytes(header, ops), header.arena),
        native.FlashData(data.pack(x, y)),
    )
    flat = [t.detach().reshape(-1).numpy() for t in net.state_dict().values()]
    engine.write(native.WEIGHTS, np.concatenate(flat), "the weights")
    engine.begin(DescriptorSettings(0.1).to_bytes())
    for step in batches(6):
        engine.batch(blob, step.rows)
    train_with_torch(net, x, y, batches(6), DescriptorSettings(0.1))
    flat = [t.detach().reshape(-1).numpy() for t in net.state_dict().values()]
    assert np.abs(engine.block(native.WEIGHTS) - np.concatenate(flat)).max() <= NEAR


class Affine(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, channels))
        self.bias = nn.Parameter(torch.linspace(-0.2, 0.3, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def _sizes(*sizes: int) -> dict[str, int]:
    names = ("in_channels", "in_height", "in_width", "out_channels", "out_height", "out_width")
    return dict(zip(names, sizes, strict=True))


def test_forward_gives_the_logits() -> None:
    shape, made = NETWORKS["resnet8"]
    torch.manual_seed(0)
    net = made()
    x, y = samples(shape, 10, 3)
    planned = plan(net, shape)
    engine, blob = (
        native.CRuntime(planned.descriptor, planned.arena),
        native.FlashData(data.pack(x, y)),
    )
    engine.write(native.WEIGHTS, planned.pack(net.state_dict()), "the weights")
    with torch.no_grad():
        wanted = net.eval()(x).numpy()
    for row in range(3):
        assert np.abs(engine.forward(blob, row) - wanted[row]).max() < 1e-5


# --- exactness ------------------------------------------------------------------------------------


def test_the_same_job_twice_gives_the_same_bits() -> None:
    one, _, _, _ = both("group norm", DescriptorSettings(0.05, 0.9))
    two, _, _, _ = both("group norm", DescriptorSettings(0.05, 0.9))
    assert one.weights.tobytes() == two.weights.tobytes() and one.loss == two.loss


def builds() -> dict[str, tuple[list[str] | None, tuple[str, ...]]]:
    """Compilers and how they are to optimise: as different as this machine allows."""
    found: dict[str, tuple[list[str] | None, tuple[str, ...]]] = {
        "O0": (None, ("-O0",)),
        "Os": (None, ("-Os",)),
    }
    if platform.machine() in ("x86_64", "aarch64"):
        found["native"] = (None, ("-O3", "-march=native"))
    if toolchain.zig():
        found["zig"] = (toolchain.zig(), ("-O2",))
    return found


@pytest.mark.parametrize("how", ["O0", "Os", "native", "zig"])
def test_every_build_gives_the_same_bits(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how not in builds():
        pytest.skip(
            "ziglang is not installed: pip install ziglang"
            if how == "zig"
            else "no such option on this machine"
        )
    compiler, flags = builds()[how]
    sources = [toolchain.RUNTIME / name for name in native.SOURCES]
    path = toolchain.build(
        "nestling-other.so", sources, (*toolchain.FLAGS, *flags, "-fPIC"), ("-shared",), compiler
    )
    jobs = [case_job(case) for case in ("everything", "inner loss")] + [
        network_job(name) for name in NETWORKS
    ]
    usual = [native.run_job(*job) for job in jobs]
    other = native.load(path)
    monkeypatch.setattr(native, "library", lambda: other)
    for job, one in zip(jobs, usual, strict=True):
        two = native.run_job(*job)
        assert two.weights.tobytes() == one.weights.tobytes() and two.loss == one.loss


def case_job(case: str) -> tuple[Job, bytes]:
    """The job of one of the settings above."""
    name, settings, given = SETTINGS[case]
    shape, made = ALL[name]
    torch.manual_seed(1)
    net = made()
    x, y = samples(shape, 5, 12)
    steps = [
        Step(s.rows, None, inner)
        for s, inner in zip(batches(12), given.get("inner", [0] * 5), strict=True)
    ]
    blocks = {"anchor": "anchor", "mask": "mask", "present": "present", "target": "targets"}
    planned = plan(
        net,
        shape,
        momentum=settings.momentum > 0,
        **{block: key in given for block, key in blocks.items()},
    )
    return job_of(planned, net, settings, steps, given), data.pack(x, y)


def network_job(name: str) -> tuple[Job, bytes]:
    shape, made = NETWORKS[name]
    torch.manual_seed(1)
    net = made()
    x, y = samples(shape, 10, 6)
    planned = plan(net, shape, momentum=True)
    steps = [Step(np.array([0, 3])), Step(np.array([5, 1, 2]))]
    return Job(
        planned, planned.pack(net.state_dict()), DescriptorSettings(0.05, 0.9, clip=1.0), steps
    ), data.pack(x, y)


def test_a_training_that_breaks_down_leaves_one_kind_of_nan() -> None:
    shape, made = OPERATIONS["group norm"]
    net = made()
    x, y = samples(shape, 5, 12)
    planned = plan(net, shape, momentum=True)
    job = Job(
        planned,
        planned.pack(net.state_dict()),
        DescriptorSettings(lr=1e38, momentum=0.9),
        batches(12),
    )
    bits = native.run_job(job, data.pack(x, y)).weights.view(np.uint32)
    broken = bits[np.isnan(bits.view(np.float32))]
    assert len(broken) and set(broken) == {0x7FC00000}


def test_exp_log_and_sqrt() -> None:
    library = native.library()
    points = np.concatenate([np.linspace(-90, 90, 4001), np.linspace(-1, 1, 2001)]).astype(
        np.float32
    )
    for x in points:
        exact = math.exp(float(x))
        close = abs(library.nst_exp(x) - exact) <= 2e-7 * exact
        assert (
            close
            or (exact < 1.2e-38 and library.nst_exp(x) == 0)
            or (exact > 3.4e38 and library.nst_exp(x) == math.inf)
        )
    positive = np.concatenate(
        [np.exp(np.linspace(-103, 88, 4001)), np.linspace(0.5, 2, 2001)]
    ).astype(np.float32)
    for x in positive[positive > 0]:
        exact = math.log(float(x))
        assert abs(library.nst_log(x) - exact) <= 2e-7 * max(abs(exact), 0.5)
    roots = np.array([library.nst_sqrt(x) for x in positive], np.float32)
    assert np.array_equal(roots, np.sqrt(positive))  # correctly rounded
    assert library.nst_exp(0.0) == 1.0 and library.nst_log(1.0) == 0.0
    assert (
        math.isnan(library.nst_exp(math.nan))
        and math.isnan(library.nst_log(-1.0))
        and math.isnan(library.nst_sqrt(-1.0))
    )
    assert (
        library.nst_log(0.0) == -math.inf
        and library.nst_exp(math.inf) == math.inf
        and library.nst_exp(-math.inf) == 0.0
    )


# --- data -----------------------------------------------------------------------------------------


def test_data_takes_a_byte_an_entry_where_that_is_exact() -> None:
    grey = torch.arange(256).repeat(2).reshape(2, 1, 16, 16).float()
    y = torch.tensor([3, 1])
    assert len(data.pack(grey, y)) == 40 + 4 + 512
    assert len(data.pack(grey * 0.5 - 3, y)) == 40 + 4 + 512
    assert len(data.pack(torch.full((2, 1, 16, 16), 0.3), y)) == 40 + 4 + 512
    assert len(data.pack(torch.randn(2, 1, 16, 16), y)) == 40 + 4 + 2048
    assert len(data.pack(grey.sqrt(), y)) == 40 + 4 + 2048
    assert len(data.pack(torch.where(grey == 7, torch.nan, grey), y)) == 40 + 4 + 2048


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 7), (5,)])
def test_what_the_board_reads_is_what_was_packed(shape: tuple[int, ...], coded: bool) -> None:
    """Through a network that hands its input on: the logits are the input."""
    x = torch.randint(0, 9, (4, *shape)).float() * 0.25 - 1 if coded else torch.randn(4, *shape)
    size = math.prod(shape)
    net = nn.Sequential(nn.Flatten(), nn.Linear(size, size, bias=False))
    net[1].weight.data = torch.eye(size)
    planned = plan(net, shape)
    engine, blob = (
        native.CRuntime(planned.descriptor, planned.arena),
        native.FlashData(data.pack(x, torch.arange(4))),
    )
    assert blob.view.kind == coded
    engine.write(native.WEIGHTS, planned.pack(net.state_dict()), "the weights")
    for row in range(4):
        assert np.array_equal(engine.forward(blob, row), x[row].reshape(-1).numpy())


def test_data_that_is_damaged_is_refused() -> None:
    x, y = samples((1, 4, 4), 3, 5)
    blob = data.pack(x, y)
    native.FlashData(blob)
    for place in range(len(blob)):
        broken = bytearray(blob)
        broken[place] ^= 0x40
        if not 24 <= place < 32:  # scale and offset of floats are not used
            with pytest.raises(native.RuntimeRefused):
                native.FlashData(bytes(broken))
    for length in (0, 10, 39, 40, len(blob) - 1):
        with pytest.raises(native.RuntimeRefused):
            native.FlashData(blob[:length])


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(2, 1, 2, 2), torch.zeros(3)),
        (torch.zeros(0, 1, 2, 2), torch.zeros(0)),
        (torch.zeros(2, 1, 2, 2), torch.tensor([0, -1])),
        (torch.zeros(2, 1, 2, 2), torch.tensor([0, 70000])),
        (torch.zeros(2, 1, 2, 2, 2), torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2)),
    ],
)
def test_data_that_cannot_be_packed(x: Tensor, y: Tensor) -> None:
    with pytest.raises(InputError):
        data.pack(x, y)


# --- refusals -------------------------------------------------------------------------------------


def small_job(**changes: Any) -> tuple[Job, bytes]:
    shape, made = OPERATIONS["max pool"]
    torch.manual_seed(0)
    net = made()
    x, y = samples(shape, 5, 12)
    blocks = changes.pop("blocks", {})
    planned = plan(net, shape, **blocks)
    return replace(
        Job(planned, planned.pack(net.state_dict()), PLAIN, batches(12)), **changes
    ), data.pack(x, y)


SETTINGS_CODE, NUMBER_CODE, STATE_CODE, ROW_CODE, LABEL_CODE, SHIFT_CODE, INNER_CODE, DATA_CODE = (
    13,
    12,
    14,
    15,
    16,
    17,
    18,
    19,
)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"settings": DescriptorSettings(0.1, momentum=0.9)}, SETTINGS_CODE),
        ({"settings": DescriptorSettings(0.1, mu=0.1)}, SETTINGS_CODE),
        ({"settings": DescriptorSettings(0.1, kd=0.1)}, SETTINGS_CODE),
        ({"settings": DescriptorSettings(0.1, mse=0.1)}, SETTINGS_CODE),
        ({"settings": DescriptorSettings(math.nan)}, NUMBER_CODE),
        ({"settings": DescriptorSettings(-0.1)}, NUMBER_CODE),
        ({"settings": DescriptorSettings(0.1, clip=math.inf)}, NUMBER_CODE),
        ({"settings": DescriptorSettings(0.1, temperature=0.0)}, NUMBER_CODE),
        ({"steps": [Step(np.array([0, 12]))]}, ROW_CODE),
        ({"steps": [Step(np.array([], np.int64))]}, STATE_CODE),
        ({"steps": [Step(np.array([0]), np.array([[3, 0]]))]}, SHIFT_CODE),
        ({"steps": [Step(np.array([0]), np.array([[0, -3]]))]}, SHIFT_CODE),
        ({"steps": [Step(np.array([0]), inner=10_000)]}, INNER_CODE),
    ],
)
def test_a_job_that_the_runtime_cannot_do_is_refused(changes: dict[str, Any], code: int) -> None:
    job, blob = small_job(**changes)
    with pytest.raises(native.RuntimeRefused) as error:
        native.run_job(job, blob)
    assert error.value.code == code
    assert native.REASONS[code] in str(error.value)


def test_other_data_than_the_networks_is_refused() -> None:
    job, _ = small_job()
    for x, y, code in [
        (torch.zeros(12, 1, 8, 9), torch.zeros(12), DATA_CODE),
        (torch.zeros(12, 1, 8, 8), torch.full((12,), 5), LABEL_CODE),
    ]:
        with pytest.raises(native.RuntimeRefused) as error:
            native.run_job(job, data.pack(x, y))
        assert error.value.code == code


def test_labels_do_not_matter_without_a_loss_that_reads_them() -> None:
    job, _ = small_job(
        settings=DescriptorSettings(0.1, ce=0.0, mse=1.0),
        blocks={"target": True},
        targets=TARGETS.numpy(),
    )
    assert (
        native.run_job(job, data.pack(torch.zeros(12, 1, 8, 8), torch.full((12,), 500))).steps == 5
    )


def test_arrays_of_the_wrong_size_are_refused() -> None:
    for changes in [
        {"weights": np.zeros(3, np.float32)},
        {"anchor": np.zeros(3, np.float32)},
        {"mask": np.ones(4, bool)},
        {"present": np.ones(5, np.float32)},
        {"targets": np.zeros((3, 5), np.float32)},
        {"steps": [Step(np.array([0, 1]), np.zeros((1, 2)))]},
        {"steps": [Step(np.array([-1]))]},
    ]:
        job, blob = small_job(**changes)
        with pytest.raises(InputError):
            native.run_job(job, blob)


def test_an_inner_loss_needs_a_trained_dense_layer_at_the_end() -> None:
    for name, freeze in [("ends in a pool", ()), ("ends in ReLU", ()), ("residual", ("4",))]:
        shape, made = OPERATIONS[name]
        net = made()
        x, y = samples(shape, 5, 4)
        planned = plan(net, shape, freeze=freeze)
        job = Job(
            planned,
            planned.pack(net.state_dict()),
            DescriptorSettings(0.1, inner=1.0),
            [Step(np.array([0]), inner=1)],
        )
        with pytest.raises(native.RuntimeRefused) as error:
            native.run_job(job, data.pack(x, y))
        assert error.value.code == INNER_CODE


def test_an_arena_a_word_too_small_is_refused() -> None:
    job, _ = small_job()
    native.CRuntime(job.plan.descriptor, job.plan.arena)
    with pytest.raises(native.RuntimeRefused, match="larger arena"):
        native.CRuntime(job.plan.descriptor, job.plan.arena - 4)


def planned_and(**header: int) -> bytes:
    """The descriptor of a small job with some fields of the header changed."""
    job, _ = small_job(
        blocks={"momentum": True, "anchor": True, "mask": True, "target": True, "present": True}
    )
    return d.to_bytes(replace(job.plan.header, **header), list(job.plan.ops))


def op_changed(number: int, **changes: Any) -> bytes:
    job, _ = small_job()
    ops = list(job.plan.ops)
    ops[number] = replace(ops[number], **changes)
    return d.to_bytes(job.plan.header, ops)


ARENA = small_job(
    blocks={"momentum": True, "anchor": True, "mask": True, "target": True, "present": True}
)[0].plan.arena
OPS = small_job()[0].plan.ops


PLACES = (
    "weights",
    "grads",
    "momentum",
    "anchor",
    "mask",
    "target",
    "present",
    "input",
    "output",
    "output_grad",
)


@pytest.mark.parametrize("field", PLACES)
@pytest.mark.parametrize("value", [2, ARENA, ARENA - 4, 0xFFFFFFFC, 0x80000000, 4])
def test_every_place_of_the_header_is_checked(field: str, value: int) -> None:
    """Unaligned, behind the arena, partly behind it, where the sum overflows, and upon the weights
    (or they upon the gradients)."""
    with pytest.raises(native.RuntimeRefused):
        native.CRuntime(planned_and(**{field: value}), 1 << 22)


@pytest.mark.parametrize(
    "changes",
    [
        {"ops": 5},
        {"ops": 0},
        {"ops": 300},
        {"params": 0},
        {"params": 1 << 30},
        {"trained": 1 << 20},
        {"trained": 7},
        {"classes": 0},
        {"classes": 4},
        {"classes": 1 << 31},
        {"in_channels": 0},
        {"in_height": 9},
        {"in_width": 1 << 16},
        {"weights": d.NONE},
        {"grads": d.NONE},
        {"output_grad": d.NONE},
        {"arena": 100},
    ],
)
def test_every_number_of_the_header_is_checked(changes: dict[str, int]) -> None:
    with pytest.raises(native.RuntimeRefused):
        native.CRuntime(planned_and(**changes), 1 << 22)


@pytest.mark.parametrize("number", range(len(OPS)))
@pytest.mark.parametrize(
    "changes",
    [
        {"kind": 0},
        {"kind": 9},
        {"flags": 16},
        {"flags": 4},
        {"activation": 3},
        {"first": d.NONE},
        {"first": 2},
        {"first": 0},
        {"first": 1 << 31},
        {"out": d.NONE},
        {"out": 0xFFFFFFF8},
        {"out": 0},
        {"out_grad": d.NONE},
        {"out_grad": 0},
        {"second": 0},
        {"second_grad": 0},
        {"in_channels": 0},
        {"in_channels": 65535},
        {"out_channels": 65535},
        {"in_height": 65535},
        {"out_height": 65535},
        {"out_width": 65535},
        {"scale": math.nan},
        {"scale": math.inf},
        {"eps": math.nan},
        {"eps": -1.0},
        {"weight": 1 << 31},
        {"bias": 0xFFFFFFFE},
    ],
)
def test_every_field_of_an_operation_is_checked(number: int, changes: dict[str, Any]) -> None:
    with pytest.raises(native.RuntimeRefused) as error:
        native.CRuntime(op_changed(number, **changes), 1 << 22)
    assert error.value.op in (number, d.NONE)


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (0, {"kernel_height": 0}),
        (0, {"stride_width": 0}),
        (0, {"kernel_width": 255}),
        (0, {"kernel_width": 1}),
        (0, {"stride_height": 2}),
        (0, {"pad_left": 3}),
        (0, {"groups": 0}),
        (0, {"groups": 2}),
        (0, {"weight": d.NONE}),
        (0, {"aux": 0}),
        (1, {"aux": d.NONE}),
        (1, {"aux": 4}),
        (1, {"pad_top": 2}),
        (1, {"kernel_height": 255, "kernel_width": 255}),
        (1, {"weight": 0}),
        (1, {"first_grad": d.NONE}),
        (1, {"out": OPS[1].first}),
        (1, {"first_grad": OPS[1].out_grad}),
        (2, {"first_grad": OPS[2].first}),
        (2, {"first_grad": OPS[2].out_grad + 4}),
        (3, {"out_height": 5, "out_channels": 1}),
    ],
)
def test_what_an_operation_needs_is_checked(number: int, changes: dict[str, Any]) -> None:
    with pytest.raises(native.RuntimeRefused) as error:
        native.CRuntime(op_changed(number, **changes), 1 << 22)
    assert error.value.op == number


def test_damaged_descriptors_are_refused() -> None:
    job, _ = small_job()
    whole = job.plan.descriptor
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1
        with pytest.raises(native.RuntimeRefused):
            native.CRuntime(bytes(broken), 1 << 22)
    for length in (0, 4, 87, 88, len(whole) - 4, len(whole) - 1):
        with pytest.raises(native.RuntimeRefused):
            native.CRuntime(whole[:length], 1 << 22)


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "host_compiler", lambda: None)
    monkeypatch.setattr(toolchain, "cache_dir", lambda: toolchain.Path("/nonexistent"))
    native.library.cache_clear()
    try:
        with pytest.raises(InputError, match="apt-get install gcc, or pip install"):
            native.library()
    finally:
        native.library.cache_clear()


def test_engines_run_in_threads() -> None:
    job, blob = small_job()
    alone = native.run_job(job, blob)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: native.run_job(copy.copy(job), blob), range(16)))
    assert all(
        f.weights.tobytes() == alone.weights.tobytes() and f.loss == alone.loss for f in found
    )
