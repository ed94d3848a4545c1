"""A run in a notebook shows how it stands, in a line; elsewhere nothing is shown. IPython's part is
played by a small stand-in that keeps what it is to display; where IPython is, by a real kernel."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import nestling
from nestling.report import pace
from nestling.report.pace import Pace
from tests.shell import ROOT
from tests.small import small


class Displayed:
    """What `IPython.display.display` gives: a line that can be written anew."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.texts.append(data["text/plain"])


@pytest.fixture
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook shows, text after text; a terminal's IPython where the parameter says so."""
    texts: list[str] = []

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Displayed:
        assert display_id
        made = Displayed(texts)
        made.update(data, raw=raw)
        return made

    shell = types.SimpleNamespace() if getattr(request, "param", "") == "terminal" else None
    ipython, inner = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell or types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    ipython.version_info = (9, 0, 0)  # type: ignore[attr-defined] # which matplotlib asks
    inner.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    return texts


def test_a_run_writes_its_line_anew_with_every_round(shown: list[str], tmp_path: Path) -> None:
    result = nestling.run(small(rounds=3), out=tmp_path / "run")
    assert shown[:2] == ["setting up", "round 0/3"]
    rounds = list(dict.fromkeys(text.partition(" · ")[0] for text in shown[1:]))
    assert rounds == [f"round {number}/3" for number in range(4)]
    last = result.metrics[-1]
    said = f"global {last['global_score']:.1%} personal {last['personal_score']:.1%}"
    assert shown[-1].startswith(f"round 3/3 · {said} · ") and " left" not in shown[-1]
    middle = [text for text in shown if text.startswith("round 2/3")]
    assert middle and all("about " in text and text.endswith(" left") for text in middle)
    shown.clear()
    nestling.resume(tmp_path / "run", overrides=("rounds=4",))
    assert "round 3/4" in shown and shown[-1].startswith("round 4/4 · ")


def test_a_run_that_is_stopped_does_not_go_on_counting(shown: list[str]) -> None:

    def interrupt(*_: object) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nestling.run(small(rounds=3, evaluate=nestling.Evaluation(metrics=[interrupt])))
    assert shown[-1].startswith("round 0/3") and " left" not in shown[-1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_writes_its_line_anew(shown: list[str], tmp_path: Path, jobs: int) -> None:
    given: dict[str, Any] = {"methods": ["fedavg", "heterofl"], "seeds": 1, "jobs": jobs}
    nestling.sweep(small(), out=tmp_path / "s", **given)
    assert shown[:2] == ["setting up", "0 of 2 runs done · round 0/4"]
    assert any(text.startswith("1 of 2 runs done · ") for text in shown)
    assert any(text.endswith(" left") for text in shown)
    assert shown[-1].startswith("2 of 2 runs done · round 4/4 · ") and " left" not in shown[-1]
    assert "-seed0 global " in shown[-1]
    shown.clear()
    nestling.sweep(small(), out=tmp_path / "s", **{**given, "seeds": 2})
    assert shown[1] == "2 of 4 runs done · round 4/8"
    assert shown[-1].startswith("4 of 4 runs done · round 8/8 · ")


def test_the_line_of_a_sweep_counts_runs_that_fail(shown: list[str], tmp_path: Path) -> None:
    def fails(*_: object) -> float:
        raise ValueError("no")

    broken = small(evaluate=nestling.Evaluation(metrics=[fails]))
    with pytest.raises(nestling.InputError, match="no run came to its first round"):
        nestling.sweep(broken, out=tmp_path / "s", seeds=2, jobs=1)
    assert shown[-1].startswith("0 of 2 runs done · 2 failed · round 0/4 · ")


def test_a_watcher_takes_the_place_of_the_line(shown: list[str], tmp_path: Path) -> None:
    nestling.run(small(rounds=1), watcher=nestling.Watcher())
    nestling.sweep(
        small(rounds=1), out=tmp_path / "s", seeds=1, jobs=1, watcher=nestling.SweepWatcher()
    )
    assert shown == []


@pytest.mark.parametrize("shown", ["terminal"], indirect=True)
def test_on_a_terminal_nothing_is_shown(
    shown: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nestling.run(small(rounds=1))
    assert shown == []
    monkeypatch.delitem(sys.modules, "IPython")
    nestling.run(small(rounds=1))
    assert "IPython" not in sys.modules  # to find out, nothing is imported
    assert capfd.readouterr().out == ""


def test_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    one = Pace({"a": 3, "b": 2, "done": 0})
    now = 110.0
    assert one.time_left() == "" and one.more == 5
    one.round("a")
    assert one.time_left() == "about 40 s left"
    one.over("b")
    assert one.time_left() == "about 20 s left" and one.took() == "10 s"
    one.over("a")
    assert one.time_left() == ""


def test_in_a_real_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    manager = pytest.importorskip("jupyter_client.manager")
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    kernel, client = manager.start_new_kernel(startup_timeout=300)
    told: list[tuple[str, dict[str, Any]]] = []
    try:
        reply = client.execute_interactive(
            "import nestling\nfrom tests.small import small\n_ = nestling.run(small(rounds=2))",
            output_hook=lambda message: told.append((message["msg_type"], message["content"])),
            timeout=300,
        )
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", told
    lines = [(kind, content) for kind, content in told if "display_data" in kind]
    assert [kind for kind, _ in lines] == [
        "display_data",
        *["update_display_data"] * (len(lines) - 1),
    ]
    assert len({content["transient"]["display_id"] for _, content in lines}) == 1  # one line
    assert lines[0][1]["data"] == {"text/plain": "setting up"}
    assert lines[-1][1]["data"]["text/plain"].startswith("round 2/2 · global ")
    assert not [content for kind, content in told if kind == "stream"]
