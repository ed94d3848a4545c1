"""Experiments: TOML in and out, overrides, and errors that name the field."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from nestling import Data, Experiment, FleetConfig, InputError, Named, SplitConfig, Tier, Train
from nestling.methods.submodel.heterofl import HeteroFL


def test_the_default_reads_back_equal() -> None:
    assert Experiment.from_table(Experiment().to_table()) == Experiment()


def test_a_rich_experiment_survives_a_file(tmp_path: Path) -> None:
    experiment = Experiment(
        method=Named("heterofl", {"dynamic": True}),
        model=Named("tinycnn", {"channels": [8, 8, 8], "norm": "none"}),
        fleet=FleetConfig(
            tiers=(
                Tier(ratio=0.5, count=3, memory_std=(5.0, 8.0)),
                Tier(model="mlp", model_options={"hidden": [9]}, count=1),
            )
        ),
        split=SplitConfig(kind="classes", classes=3),
        train=Train(milestones=(5, 9)),
        data=Data("mnist"),
    )
    (tmp_path / "e.toml").write_text(experiment.to_toml())
    assert Experiment.read(tmp_path / "e.toml") == experiment


def test_overrides_reach_every_depth(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text('method = "heterofl"\n[split]\nkind = "iid"\n')
    changes = [
        "method.dynamic=true",
        "split.alpha=0.25",
        "rounds=7",
        "data.name=mnist",
        "train.milestones=[3, 4]",
    ]
    experiment = Experiment.read(tmp_path / "e.toml", changes)
    assert experiment.method == Named(
        "heterofl", {"dynamic": True}
    ) and experiment.make_method() == HeteroFL(dynamic=True)
    assert (
        experiment.split.kind,
        experiment.split.alpha,
        experiment.rounds,
        experiment.data.name,
    ) == ("iid", 0.25, 7, "mnist")
    assert experiment.train.milestones == (3, 4)


def test_shorthands_of_the_api() -> None:
    module = nn.Linear(3, 2)
    experiment = Experiment(
        method=HeteroFL(scaler=False), model=module, data="mnist", fleet=(Tier(ratio=1.0),)
    )
    assert experiment.make_method() == HeteroFL(scaler=False) and experiment.own_model is module
    assert experiment.data == Data("mnist") and experiment.fleet.tiers == (Tier(ratio=1.0),)
    assert experiment.with_changes(rounds=3).own_model is module


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "method.name=heteroffl",
            "method.name: unknown method 'heteroffl' (did you mean 'heterofl'?",
        ),
        ("method.nme=x", "method.nme: unknown field 'nme'"),
        ("roundss=3", "roundss: unknown field 'roundss' (did you mean 'rounds'?"),
        ("split.alpa=3", "split.alpa: unknown field 'alpa' (did you mean 'alpha'?"),
        ("rounds=3.5", "rounds: expected a whole number, got 3.5"),
        ("rounds=true", "rounds: expected a whole number, got True"),
        ("seed=-1", "seed: must be at least 0, not -1"),
        ("participants=-1", "participants: must be at least 0 (0: every client), not -1"),
        ("train.lr=fast", "train.lr: expected a number, got 'fast'"),
        ("train.lr=nan", "train.lr: expected a finite number"),
        ("train.milestones=3", "train.milestones: expected a list of whole numbers, got 3"),
        ("fleet.tiers=3", "fleet.tiers: expected a list of tables, got 3"),
        ("data.normal=3", "data.normal: expected a list of texts, got 3"),
        ("train.schedule=step", "train.schedule: unknown schedule 'step'"),
        ("train.augment=crop", "train.augment: unknown augmentation 'crop'"),
        (
            "train.optimizer=adamx",
            "train.optimizer: unknown optimiser 'adamx' (allowed: sgd, adam, adamw)",
        ),
        ("train.warmup=-1", "train.warmup: must not be negative"),
        ("engine.name=gpu", "engine.name: unknown engine 'gpu'"),
        (
            "fleet.tiers=[{ratoi=1}]",
            "fleet.tiers[0].ratoi: unknown field 'ratoi' (did you mean 'ratio'?",
        ),
        ("data=3", "data: expected a table of Data fields, got 3"),
        ("rounds", "--set: cannot read the override 'rounds'"),
        ("rounds.deep=3", "rounds.deep"),
    ],
)
def test_bad_fields_are_named(override: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("rounds = 2\n")
    with pytest.raises(InputError) as error:
        Experiment.read(tmp_path / "e.toml", [override])
    assert said in str(error.value)


def test_a_cosine_refuses_what_it_cannot_follow() -> None:
    with pytest.raises(InputError, match=r"train.warmup: all 5 rounds"):
        Experiment(rounds=5, train=Train(schedule="cosine", warmup=5))
    with pytest.raises(InputError, match=r"train.milestones: a cosine has none"):
        Train(schedule="cosine", milestones=(3,))
    assert Experiment(rounds=5, train=Train(warmup=9)).train.warmup == 9


def test_a_file_that_is_not_toml_is_told(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("rounds = = 3")
    with pytest.raises(InputError, match="not valid TOML"):
        Experiment.read(tmp_path / "e.toml")
    with pytest.raises(InputError, match="there is no file"):
        Experiment.read(tmp_path / "none.toml")


def test_paths_are_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("[[tiers]]\nratio = 1.0\n")
    (tmp_path / "e.toml").write_text('[fleet]\npath = "fleet.toml"\n')
    assert Experiment.read(tmp_path / "e.toml").fleet.path == str(tmp_path / "fleet.toml")
