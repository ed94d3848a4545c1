"""What `nestling config` says of settings: it is complete, it is told in words, and it is what the
code holds to."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import torch

from nestling.cli import main
from nestling.devices import FleetConfig, Tier
from nestling.devices.tiers import check_fleet
from nestling.errors import InputError
from nestling.experiment import Experiment
from nestling.models import MODELS, build
from nestling.models.options import option_defaults, option_hints, option_names
from nestling.runs.sweep import read_sweep
from nestling.sections import SWEEP, TOP, network_families, section_of, sections
from nestling.settings import Bounds, OneOf, bounds_of

EVERY = [row for section in sections().values() for row in section.rows]
ROWS = [row for row in EVERY if not row.key.startswith(f"{SWEEP}.")]  # of an experiment itself


def config(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit code of `nestling config`."""
    monkeypatch.setattr(sys, "argv", ["nestling", "config", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


def _keys(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in table.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, dict) and key not in ("options", "model_options"):
            yield from _keys(value, here)
        else:
            yield here


def test_it_has_every_key_that_a_file_may_have_and_no_other() -> None:
    written = set(_keys(Experiment().to_table()))
    tier = {f"fleet.tiers.{field.name}" for field in dataclasses.fields(Tier)}
    assert {row.key for row in ROWS} == written | tier | {"method.*", "model.*"}


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.key)
def test_every_setting_has_a_type_and_a_meaning(row: Any) -> None:
    assert row.type and len(row.meaning) > 5
    assert row.default or row.key.endswith(".*")


def test_defaults_are_those_of_an_experiment() -> None:
    table = Experiment().to_table()
    for row in ROWS:
        if row.default and not row.key.startswith("fleet.tiers."):
            value: Any = table
            for part in row.key.split("."):
                value = value[part]
            assert json.loads(row.default) == value, row.key


def _refuses(key: str, value: float) -> bool:
    """Whether a setting is refused by its name."""
    try:
        if key.startswith("fleet.tiers."):
            name = key.rpartition(".")[2]
            value = (value,) if name == "memory_std" else value  # type: ignore[assignment]
            tier = dataclasses.replace(Tier(device="nrf52840"), **{name: value})
            check_fleet(FleetConfig(tiers=(tier,)))
        else:
            text = f"[{value}, {value}]" if key == "server.betas" else str(value)
            found = Experiment.from_parts({}, [f"{key}={text}"])
            found.split.check()
            check_fleet(found.fleet)
    except InputError as error:
        where = str(error.field).replace("tiers[0]", "tiers")
        return where == key and "without a gate" not in str(error)
    return False


def _bounded() -> Iterator[tuple[str, bool, Bounds]]:
    experiment = Experiment()
    classes = {"": Experiment, "fleet.tiers": Tier} | {
        field.name: type(getattr(experiment, field.name))
        for field in dataclasses.fields(Experiment)
        if dataclasses.is_dataclass(getattr(experiment, field.name))
    }
    for path, cls in classes.items():
        for name, (whole, bounds) in bounds_of(cls).items():
            yield (f"{path}.{name}" if path else name), whole, bounds


@pytest.mark.parametrize(("key", "whole", "bounds"), list(_bounded()), ids=lambda v: str(v))
def test_what_its_type_says_is_what_is_refused(key: str, whole: bool, bounds: Bounds) -> None:
    """Beyond both ends, at an end that is open, and not at one that belongs to it."""
    kind = int if whole else float
    for end, is_open, beyond in (
        (bounds.low, bounds.open_low, -1),
        (bounds.high, bounds.open_high, 1),
    ):
        if end is not None:
            allowed_zero = bool(bounds.zero) and end + beyond == 0
            assert allowed_zero or _refuses(key, kind(end + beyond)), end + beyond
            assert _refuses(key, kind(end)) == is_open, end
    assert not (bounds.zero and _refuses(key, kind(0)))


def test_some_bounds_are_read_of_every_checked_section() -> None:
    found = {key.rpartition(".")[0] for key, _, _ in _bounded()}
    named = {
        "data",
        "split",
        "fleet",
        "fleet.tiers",
        "train",
        "server",
        "attack",
        "engine",
        "evaluate",
    }
    assert found == {"", *named}


def test_sections_are_found_by_name() -> None:
    assert section_of("tiers") == section_of("fleet.tiers")
    assert next(row.key for row in section_of(TOP).rows) == "rounds"
    assert "method.mu" in [row.key for row in section_of("method.fedprox").rows]
    with pytest.raises(InputError, match=r"method.name: unknown method"):
        section_of("method.fedporx")


def test_the_command_prints_all_or_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config("--json", monkeypatch=monkeypatch) == 0
    assert [row["key"] for row in json.loads(capsys.readouterr().out)] == [r.key for r in EVERY]
    assert config("attack", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "attack.share" in said and "[attack]" in said and "split.alpha" not in said


def test_an_unknown_section_names_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config("trian", monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert "unknown section 'trian' (did you mean 'train'?" in said
    assert all(name in said for name in sections())


@pytest.mark.parametrize("name", list(MODELS))
def test_every_option_of_a_network_is_told(name: str) -> None:
    section, builder = section_of(f"model.{name}"), MODELS[name].build
    assert [row.key for row in section.rows] == [f"model.{one}" for one in option_names(builder)]
    assert section.text
    for row, default in zip(section.rows, option_defaults(builder).values(), strict=True):
        assert row.type != "any" and len(row.meaning) > 5, row.key
        assert row.default == json.dumps(default), row.key


def _network_rules() -> Iterator[tuple[str, str, Any]]:
    """Every rule of every option: once for each family, whose networks share a function."""
    for name, *_ in network_families():
        for option, hint in option_hints(MODELS[name].build).items():
            listed = get_origin(hint) is tuple
            for rule in get_args(get_args(hint)[0] if listed else hint)[1:]:
                yield name, option, rule


@pytest.mark.parametrize(("name", "option", "rule"), list(_network_rules()), ids=str)
def test_what_an_option_of_a_network_allows_is_what_is_not_refused(
    name: str, option: str, rule: Bounds | OneOf
) -> None:
    info = MODELS[name]
    default = option_defaults(info.build)[option]

    def refused(value: object) -> bool:
        shape = {"sequence": (1, 64), "text": (64,)}.get(info.input, (1, 64, 64))
        given: object = [value] * len(default) if listed else value
        if option == "exits":  # of which the last one must stand behind the last block
            given = [value, sum(option_defaults(info.build)["blocks"])]
        try:
            with torch.device("meta"):
                build(name, shape=shape, classes=3, **{"width": 0.1, option: given})
        except InputError as error:
            return error.field == f"model.{option}"
        return False

    listed = isinstance(default, tuple)
    if isinstance(rule, OneOf):
        assert refused("nothing") and not any(map(refused, rule.names))
        return
    kind = int if listed or isinstance(default, int) else float
    assert rule.low is not None
    assert refused(kind(rule.low - 1)) and refused(kind(rule.low)) == rule.open_low
    if rule.high is not None:
        assert refused(kind(rule.high)) == rule.open_high and refused(kind(rule.high + 1))


def test_networks_of_a_family_differ_in_defaults_alone() -> None:
    families = network_families()
    assert ("resnet50", "resnet101", "resnet152") in families and ("mlp",) in families
    assert sorted(name for family in families for name in family) == sorted(MODELS)
    for first, *others in families:
        told = [dataclasses.replace(row, default="") for row in section_of(f"model.{first}").rows]
        for other in others:
            own = section_of(f"model.{other}").rows
            assert [dataclasses.replace(row, default="") for row in own] == told


def test_the_command_lists_the_options_of_a_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config("model.vgg16", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "model.dropout" in said and "[4096, 4096]" in said and "in [0, 1)" in said
    assert config("--help", monkeypatch=monkeypatch) == 0
    assert "model.NAME" in capsys.readouterr().out
    assert config("model.vg16", monkeypatch=monkeypatch) == 2
    assert "did you mean 'vgg16'" in capsys.readouterr().err
    assert config("model.mine:Net", monkeypatch=monkeypatch) == 2
    assert "arguments of the callable" in capsys.readouterr().err


def test_the_table_of_a_sweep_is_listed_with_its_defaults(tmp_path: Path) -> None:
    rows = {row.key: row.default for row in section_of(SWEEP).rows}
    asked = {"methods": "[]", "seeds": "3", "target": "0.0"}
    assert rows == {**{f"{SWEEP}.{name}": text for name, text in asked.items()}, "sweep.vary": "{}"}
    file = tmp_path / "a.toml"
    file.write_text("[sweep]\n" + "".join(f"{name} = {text}\n" for name, text in asked.items()))
    assert dataclasses.replace(read_sweep(file), beside=None) == read_sweep(None)
    for wrong in ("1.5", "-1", "true", '"high"'):
        file.write_text(f"[sweep]\ntarget = {wrong}\n")
        with pytest.raises(InputError, match=r"sweep.target: .*\[0, 1\] is wanted"):
            read_sweep(file)
