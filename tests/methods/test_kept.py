"""Kept state is written and read back by its fields' types; what a method is, its docstring and
settings say."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import nestling
from nestling.methods import METHODS, Info, method_class
from nestling.methods.info import with_title
from nestling.methods.kept import kept, made, put_back, state_of
from nestling.views import State
from nestling.views.flat import Packed, pack
from tests.small import small


@dataclass
class Table:
    """A dataclass of what can be kept."""

    rows: State
    known: Tensor


@dataclass
class Keeper:
    """Fields of every kind."""

    weights: State = kept()
    groups: dict[str, State] = kept()
    own: list[State] = kept()
    seen: Tensor = kept()
    steps: int = kept()
    rate: float = kept()
    started: bool = kept()
    table: Table = kept()
    derived: State = made()

    def start(self, value: float) -> Keeper:
        tensor = torch.full((2, 3), value)
        self.weights, self.groups = pack({"a": tensor}), {"": {"b": tensor}, "x y": {"c": tensor}}
        self.own, self.seen = [{}, {"d": tensor}], tensor > 0
        self.steps, self.rate, self.started = int(value), value / 3, value > 1
        self.table, self.derived = Table({"r": tensor}, tensor > 1), {"e": tensor}
        return self


def test_what_is_kept_comes_back() -> None:
    before, after = Keeper().start(2.0), Keeper().start(0.0)
    put_back(after, {name: dict(part) for name, part in state_of(before).items()})
    assert isinstance(after.weights, Packed)
    assert (after.steps, after.rate, after.started) == (2, 2.0 / 3, True)
    assert torch.equal(after.table.known, before.table.known) and list(after.groups) == ["", "x y"]
    assert [list(own) for own in after.own] == [[], ["d"]]
    for name, part in state_of(before).items():
        assert all(torch.equal(tensor, state_of(after)[name][key]) for key, tensor in part.items())
    assert after.derived["e"].sum() == 0  # no part of it


def test_what_was_empty_is_empty_again() -> None:
    empty, full = Keeper().start(1.0), Keeper().start(1.0)
    empty.groups, empty.weights = {}, {}
    put_back(full, state_of(empty))
    assert full.groups == {} and not full.weights


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_its_own_state_back(name: str) -> None:
    method = nestling.run(small(name, rounds=1)).federation.method
    before = {part: dict(state) for part, state in method.state().items()}
    method.restore({part: dict(state) for part, state in before.items()})
    after = method.state()
    assert before.keys() == after.keys()
    for part, state in before.items():
        assert state.keys() == after[part].keys()
        assert all(
            torch.equal(tensor, after[part][key]) and tensor.dtype == after[part][key].dtype
            for key, tensor in state.items()
        )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_title_and_a_paper(name: str) -> None:
    info = method_class(name).info
    assert info.title and info.paper and info.family and info.evidence


@pytest.mark.parametrize(
    ("docstring", "title", "paper"),
    [
        (
            'FedProto (Tan et al., "FedProto: Federated Prototype Learning", AAAI 2022).',
            "FedProto",
            "Tan et al., AAAI 2022",
        ),
        (
            'FedMD (Li, Wang, "FedMD: Heterogenous", NeurIPS 2019 workshop).',
            "FedMD",
            "Li & Wang, NeurIPS 2019 workshop",
        ),
        ('DepthFL (Kim, Yu, Kim, Moon, "DepthFL", ICLR 2023).', "DepthFL", "Kim et al., ICLR 2023"),
        (
            'FD, federated distillation (Jeong et al., "Communication", 2018).',
            "FD",
            "Jeong et al., 2018",
        ),
        ("A method of one's own.", "", ""),
    ],
)
def test_a_docstring_names_its_paper(docstring: str, title: str, paper: str) -> None:
    found = with_title(Info("width", "width", "ours"), docstring)
    assert (found.title, found.paper) == (title, paper)
