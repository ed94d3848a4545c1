"""One torch thread per test process, as in every engine: sums then run in the same order
everywhere. Chance is seeded by a test's name. And which slow tests run."""

import random
import zlib

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("seeded", derandomize=True)
hypothesis.settings.load_profile("seeded")

PART = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    told = (
        f"slow tests: every {PART}th of them, all, or nothing but every second one (the even "
        "or the odd ones)"
    )
    parser.addoption(
        "--slow", choices=("none", "part", "all", "even", "odd"), default="part", help=told
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the slow tests (three seeds of a small federation, emulated boards) only a part runs,
    unless all are asked for."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(
                    pytest.mark.skip(
                        reason="there is no CUDA device here: make gpu is for machines with one"
                    )
                )
    chosen = config.getoption("--slow")
    # A test that is named on the command line is wanted.
    if chosen == "all" or any("::" in str(argument) for argument in config.args):
        return
    if chosen in ("even", "odd"):
        long = [
            item
            for item in items
            if item.get_closest_marker("slow") or item.get_closest_marker("minutes")
        ]
        wanted = set(long[chosen == "odd" :: 2])
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = [item for item in items if item in wanted]
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    left_out = set(slow) if chosen == "none" else set(slow) - set(slow[::PART])
    left_out |= {item for item in items if item.get_closest_marker("minutes")}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """The same draws in every run, alone or among others."""
    seed = zlib.crc32(request.node.name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture
def images_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images in one order of memory everywhere. Stacks never turn them over, and where two pixels
    of a pool are equal, rounding may decide which of them gets the gradient: tests that compare
    stacks closely need both sides to round alike."""
    monkeypatch.setattr("nestling.models.pixels._pays", lambda module: False)
