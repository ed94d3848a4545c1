"""The text that ships: rows of characters, every role a client, its last rows held out."""

from __future__ import annotations

import numpy as np
import pytest

from nestling import InputError
from nestling.data import DATASETS, load
from nestling.data.plays import TEXT, speeches


def test_it_is_small_and_what_its_readme_says() -> None:
    assert TEXT.stat().st_size < 200_000
    text = (TEXT.parent / "README.md").read_text()
    said = speeches()
    lines = {role: sum(len(line) > 0 for line in words.split("\n")) for role, words in said.items()}
    assert len(said) == 24 and min(lines.values()) >= 300 and "24 roles" in text
    assert len({letter for words in said.values() for letter in words}) == 65
    assert "public domain" in text and "mnist12k.npz" in text
    assert said["ROMEO"].startswith("Is the day so young?")
    assert "What's in a name? that which we call a rose\nBy any other name" in said["JULIET"]


def test_rows_of_characters_and_what_comes_next() -> None:
    data = load("shakespeare", task="next-token")
    info = DATASETS["shakespeare"]
    assert (data.shape, data.classes, info.natural) == (info.shape, 65, True)
    assert data.client is not None and int(data.client.max()) + 1 == 24 == info.classes
    names = np.array(data.class_names)
    roles = sorted(speeches())
    for role in ("ROMEO", "JULIET"):
        own = data.client == roles.index(role)
        assert 0.19 < 1 - own.sum() / (len(speeches()[role]) // 65) < 0.2
        row = int(np.flatnonzero(own)[0])
        assert "".join(names[data.x[row].numpy()]) == speeches()[role][:64]
        assert "".join(names[data.y[row].numpy()]) == speeches()[role][1:65]
    train = sum(len(said) // 65 - len(said) // 65 // 5 for said in speeches().values())
    assert len(data.y) == train and len(data.y_test) == sum(
        len(said) // 65 // 5 for said in speeches().values()
    )


def test_its_classes_are_the_roles() -> None:
    data = load("shakespeare", options={"steps": 100})
    assert data.shape == (100,) and data.class_names == tuple(sorted(speeches()))
    assert data.client is not None and (data.client == data.y.numpy()).all()
    assert load("shakespeare", client="none").client is None


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"options": {"steps": 1}}, "data.options.steps"),
        ({"options": {"steps": 10_000}}, "data.options.steps"),
        ({"task": "regression"}, "data.task"),
        ({"task": "forecast"}, "data.task"),
        ({"scale": "unit"}, "data.scale"),
    ],
)
def test_what_it_cannot_be_is_refused(how: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as caught:
        load("shakespeare", **how)
    assert caught.value.field == field
