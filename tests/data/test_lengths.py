"""Sequences of unequal length: what is filled up counts for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, vmap

from nestling import Data, EngineConfig, Experiment, InputError, Named, SplitConfig, Train, run
from nestling.data import Dataset
from nestling.data.npz import read_npz
from nestling.models import build
from nestling.tasks import losses
from nestling.tasks.losses import FILLING
from nestling.training.objectives import Batch, distillation
from tests.small import TIERS, small

RNG = np.random.default_rng(5)
LENGTHS = [9, 4, 7, 12, 4, 5, 11, 6, 8, 12, 10, 5]
SEQUENCES = [3 + RNG.normal(size=(n, 2)).astype(np.float32) for n in LENGTHS]
TEXTS = [RNG.integers(0, 6, n) for n in LENGTHS]
Y = np.arange(len(LENGTHS)) % 2
TEST = np.arange(len(LENGTHS)) >= 9
ROWS = np.flatnonzero(~TEST)


def loaded(x: Any, y: Any = Y, **how: Any) -> Dataset:
    return Data.of(x, y, test=TEST, **how).load()


def line(data: Dataset) -> str:
    assert data.reading is not None
    return data.reading.line("iid")


def test_sequences_are_filled_up_at_the_front_with_what_scaled_data_call_zero() -> None:
    """Statistics are those of real steps; the last step, which an LSTM reads, is real."""
    data = loaded(SEQUENCES)
    real = np.concatenate([SEQUENCES[row] for row in ROWS]).astype(np.float64)
    assert data.shape == (2, 12)
    for row, x in zip(ROWS, data.x, strict=True):
        own = (SEQUENCES[row] - real.mean(0)) / real.std(0)
        assert np.allclose(x[:, 12 - len(own) :].T, own, atol=1e-5)
        assert not x[:, : 12 - len(own)].any()
    low, high = (f(np.concatenate(SEQUENCES)) for f in (np.min, np.max))
    assert f"values {low:.4g} to {high:.4g}, standardised per channel" in line(data)
    told = "10 of 12 sequences, which have 4 to 12 steps, filled up at the front"
    assert told in line(data)


@pytest.mark.parametrize("scale", ["unit", "none"])
def test_other_scales_do_not_count_filling_either(scale: str) -> None:
    data = loaded(SEQUENCES, scale=scale)
    real = np.concatenate([SEQUENCES[row] for row in ROWS])
    low, high = (real.min(), real.max()) if scale == "unit" else (0.0, 1.0)
    assert np.allclose(data.x[0, :, -9:].T, (SEQUENCES[0] - low) / (high - low), atol=1e-5)
    assert not data.x[0, :, :3].any()


def test_what_equals_in_length_is_read_as_before() -> None:
    even = np.stack([one[:4] for one in SEQUENCES])
    plain, listed = loaded(even, layout="lc"), loaded(list(even), layout="lc")
    assert torch.equal(plain.x, listed.x) and line(plain) == line(listed)


def filled(samples: list[np.ndarray], blank: Any) -> np.ndarray:
    x = np.full((len(samples), max(LENGTHS), *samples[0].shape[1:]), blank, samples[0].dtype)
    for row, one in zip(x, samples, strict=True):
        row[: len(one)] = one
    return x


def test_a_file_says_the_lengths_itself(tmp_path: Path) -> None:
    """Whatever stands behind the real steps, no number among it."""
    path = tmp_path / "mine.npz"
    x = filled(SEQUENCES, np.nan)
    np.savez(path, x=x, y=Y, test=TEST, length=LENGTHS)
    listed, read = loaded(SEQUENCES), read_npz(path)
    assert torch.equal(read.x, listed.x) and torch.equal(read.x_test, listed.x_test)
    np.savez(path, x=np.moveaxis(x, 1, 2), y=Y, test=TEST, length=LENGTHS)
    assert torch.equal(read_npz(path, layout="cl").x, listed.x)
    gap = x.copy()
    gap[0, 2, 1] = np.nan
    np.savez(path, x=gap, y=Y, test=TEST, length=LENGTHS)
    with pytest.raises(InputError, match=r"1 missing values"):
        read_npz(path)
    mended = read_npz(path, missing="mean").x
    real = np.concatenate([gap[row, : LENGTHS[row]] for row in ROWS])
    at_the_mean = np.nanmean(real[:, 1])
    real[np.isnan(real)] = at_the_mean
    wanted = (at_the_mean - real[:, 1].mean()) / real[:, 1].std()
    assert float(mended[0, 1, 12 - 9 + 2]) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("length", "word"),
    [
        ([0] * 12, "run from 0 to 0"),
        ([13] * 12, "run from 13 to 13"),
        ([4] * 11, "a whole number for every row"),
        ([4.0] * 12, "a whole number for every row"),
    ],
)
def test_strange_lengths_are_refused(tmp_path: Path, length: list[Any], word: str) -> None:
    np.savez(tmp_path / "mine.npz", x=filled(SEQUENCES, 0), y=Y, length=length)
    with pytest.raises(InputError) as caught:
        read_npz(tmp_path / "mine.npz")
    assert word in f"{caught.value}" and caught.value.fix


def test_features_have_no_length(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((12, 3)), y=Y, length=[3] * 12)
    with pytest.raises(InputError, match="'f' has no steps"):
        read_npz(tmp_path / "mine.npz")


def test_rows_and_test_rows_of_other_lengths() -> None:
    """Both are filled up to the longest of all."""
    data = Data.of(SEQUENCES[:3], Y[:3], test=(SEQUENCES[3:], Y[3:])).load()
    assert data.x.shape == (3, 2, 12) and data.x_test.shape == (9, 2, 12)
    even = np.stack([one[:4] for one in SEQUENCES[:3]])
    data = Data.of(even, Y[:3], test=(SEQUENCES[3:], Y[3:])).load()
    assert not data.x[:, :, :8].any() and bool(data.x[:, :, 8:].all())


def test_lengths_tell_data_from_others() -> None:
    x = [np.zeros((3, 2)), np.zeros((4, 2))]
    assert Data.of(x, [0, 1]).digest != Data.of(np.zeros((2, 4, 2)), [0, 1]).digest


def test_signals_of_unequal_length_are_sounds_with_silence_behind() -> None:
    signals = [RNG.normal(size=n) for n in (200, 120, 180, 90, 150)]
    whole = np.stack([np.pad(one, (0, 200 - len(one))) for one in signals])
    how = {"transform": "log-mel", "options": {"rate": 1000, "window": 0.05, "step": 0.02}}
    test = np.arange(5) > 2
    listed, plain = (Data.of(x, [0, 1, 0, 1, 0], test=test, **how).load() for x in (signals, whole))
    assert torch.equal(listed.x, plain.x)
    assert "4 filled with silence" in line(listed)


def test_token_ids_of_classes_are_filled_up_with_an_id_of_their_own() -> None:
    data = loaded(TEXTS)
    words = 1 + max(int(one.max()) for one in TEXTS)
    assert f"at the front with id {words}" in line(data)
    assert data.x[0].tolist() == [words] * 3 + TEXTS[0].tolist()


def test_the_next_token_needs_no_y_and_what_is_filled_has_none() -> None:
    data = loaded(TEXTS, None, task="next-token")
    assert "filled up at the end;" in line(data) and data.classes == 6
    assert data.x[0].tolist() == [*TEXTS[0].tolist(), 0, 0]
    assert data.y[0].tolist() == [*TEXTS[0][1:].tolist(), *[FILLING] * 3]
    with pytest.raises(InputError, match="1 texts have a single token"):
        loaded([TEXTS[0][:1], *TEXTS[1:]], None, task="next-token")


NETWORKS = {
    "gpt": {"dim": 8, "depth": 2, "heads": 2, "head_dim": 4, "hidden": 8},
    "lstm": {"words": 6, "every": True, "hidden": (8,), "dim": 4},
}


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_text_costs_and_scores_what_the_unfilled_one_does(name: str, data: Any) -> None:
    """And so do gradients, in a stack of networks too."""
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=2, max_size=5))
    draw = [st.lists(st.integers(0, 5), min_size=n, max_size=n) for n in lengths]
    texts = [np.array(data.draw(one)) for one in draw]
    texts[0][0] = 5  # the largest id is there
    test = np.arange(2 * len(texts)) < len(texts)
    read = Data.of([*texts, *texts], task="next-token", layout="tokens", test=test).load()
    torch.manual_seed(0)
    net = build(name, shape=read.shape, classes=read.classes, **NETWORKS[name])
    alone = [(torch.tensor(t[None, :-1]), torch.tensor(t[None, 1:])) for t in texts]
    each = torch.cat([losses(net(x), y) for x, y in alone])
    assert torch.allclose(losses(net(read.x), read.y), each, atol=1e-5)
    task = read.learned
    right = torch.cat([task.right(task.answers(net(x), y), y) for x, y in alone])
    answers = task.answers(net(read.x), read.y)
    assert torch.allclose(task.right(answers, read.y), right)
    metrics, _ = task.measured(answers, read.y)
    assert metrics["test_loss"] == pytest.approx(float(each.mean()), rel=1e-4)
    if name == "lstm":
        return  # recurrent layers have no batching rule for their gradients
    params = dict(net.named_parameters())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return losses(functional_call(net, weights, (x,)), y).mean()

    both = {key: torch.stack([p, p / 2]) for key, p in params.items()}
    stacks = vmap(grad(loss), in_dims=(0, None, None))(both, read.x, read.y)
    single = [grad(loss)(params, x, y) for x, y in alone]
    for key, found in stacks.items():
        mean = torch.stack([one[key] for one in single]).mean(0)
        assert torch.allclose(found[0], mean, atol=1e-5), key


def test_what_is_distilled_of_filling_counts_for_nothing() -> None:
    y = torch.tensor([[1, 2, FILLING], [0, FILLING, FILLING]])
    teacher, student = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    batch = Batch(y, y, torch.arange(2))
    found = distillation(teacher, student, 2.0, batch)
    parts = [
        distillation(teacher[r : r + 1, :n], student[r : r + 1, :n], 2.0, Batch(one, one, one[0]))
        for r, n in enumerate((2, 1))
        for one in [y[r : r + 1, :n]]
    ]
    assert float(found) == pytest.approx(float(sum(parts) / 2), rel=1e-5)
    values = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    told, wanted = torch.randn(2, 2), torch.randn(2, 2, requires_grad=True)
    apart = distillation(told, wanted, batch=Batch(values, values, torch.arange(2)))
    off = (told - wanted).square()
    assert float(apart) == pytest.approx(float((off[0, 0] + off[1].mean()) / 2), rel=1e-5)


def test_a_sample_is_said_again_without_its_filling() -> None:
    """The error of a filled row is that of its real values, and so is the gradient."""
    data = loaded(SEQUENCES, task="reconstruction", normal=("0",))
    outputs = torch.randn(len(data.y), 24, requires_grad=True)
    found = losses(outputs, data.y)
    told = outputs.detach().reshape(-1, 2, 12)
    for row, x, mine in zip([0, 2, 4, 6, 8], data.x, told, strict=True):
        n = LENGTHS[row]
        wanted = (x[:, 12 - n :] - mine[:, 12 - n :]).square().mean()
        assert float(found[[0, 2, 4, 6, 8].index(row)]) == pytest.approx(float(wanted), rel=1e-5)
    found.sum().backward()
    assert outputs.grad is not None and bool(outputs.grad.isfinite().all())
    assert bool((outputs.grad == 0)[data.y.isnan()].all())


def test_what_is_foretold_is_real() -> None:
    data = loaded(SEQUENCES, None, task="forecast", horizon=3)
    read = loaded(SEQUENCES)
    assert torch.equal(data.y, read.x[:, :, 9:].flatten(1))
    assert torch.equal(data.x, read.x[:, :, :9])
    with pytest.raises(InputError, match="2 of the sequences have no more than 4 steps"):
        loaded(SEQUENCES, None, task="forecast", horizon=4)


def texts_learned(engine: str, **changes: Any) -> Experiment:
    """Texts of 3 to 12 tokens that count up, of which the next token is known."""
    chance = np.random.default_rng(2)
    texts = [(np.arange(n) + chance.integers(8)) % 8 for n in chance.integers(3, 13, 240)]
    settings: dict[str, Any] = {
        "data": Data.of(texts, task="next-token"),
        "model": Named("gpt", {"dim": 16, "depth": 1, "hidden": 16, "heads": 2, "head_dim": 8}),
        "split": SplitConfig(kind="iid", public=0.0),
        "train": Train(epochs=1, batch=8, lr=0.01, optimizer="adam"),
        "participants": 0,
        "engine": EngineConfig(engine, workers=1 if engine == "cohort" else 2),
        **changes,
    }
    return small("heterofl", **settings)


def test_texts_of_unequal_length_are_learned(tmp_path: Path) -> None:
    """One in eight is chance."""
    one = run(texts_learned("inline", rounds=8), out=tmp_path / "one")
    assert one.summary["global_score"]["last"] > 0.6
    assert TIERS[0].name in set(one.summary["by_tier"])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pool", "cohort"])
def test_every_engine_leaves_filling_out(tmp_path: Path, engine: str) -> None:
    # not Adam, which makes whole steps of gradients that are rounding alone
    train = Train(epochs=1, batch=8, lr=0.1)
    plain, other = (
        run(texts_learned(name, train=train), out=tmp_path / name) for name in ("inline", engine)
    )
    close = 0.0 if engine == "pool" else 1e-4
    states = (found.federation.method.global_model().state for found in (plain, other))  # type: ignore[union-attr]
    for a, b in zip(*(state.values() for state in states), strict=True):
        assert float((a - b).abs().max()) <= close
