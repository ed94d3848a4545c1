"""What tab offers, asked as a shell asks; and what ctrl-C says of code of one's own."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from nestling.cli.completing import complete_device, method_names
from nestling.cli.main import main
from nestling.cli.shared import GentleStop
from nestling.devices import catalogue
from nestling.methods import METHODS
from tests.shell import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "work").mkdir()
    return Shell(tmp_path / "work", tmp_path / "programs")


def test_the_names_are_those_of_the_tables() -> None:
    assert method_names() == list(METHODS)
    assert complete_device("") == list(catalogue())


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("nestling swe", ["sweep"]),
        ("nestling run --set method.name=fedp", ["fedper", "fedproto", "fedprox"]),
        ("nestling sweep --methods fedavg,hete", ["fedavg,heteroavg", "fedavg,heterofl"]),
        ("nestling fit tinycnn --device raspberry-pi-z", ["raspberry-pi-zero-2w"]),
        ("nestling join x --device esp32-", ["esp32-s3"]),
        ("nestling new f", ["fleet"]),
    ],
)
def test_bash_completes(typed: str, offered: list[str], shell: Shell) -> None:
    """With the script that is installed, called as bash calls it."""
    words = shlex.split(typed)
    (shell.folder / "typed.sh").write_text(
        'eval "$(_NESTLING_COMPLETE=source_bash nestling)"\n'
        f"COMP_WORDS=({typed}) COMP_CWORD={len(words) - 1}\n"
        "_nestling_completion nestling\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
        'echo "by: $(complete -p nestling)"\n'
    )
    *found, by = shell.type("bash typed.sh").stdout.splitlines()
    assert [word.removeprefix("method.name=") for word in found] == offered
    assert "-F _nestling_completion nestling" in by


def test_nothing_heavy_is_imported_to_complete(shell: Shell) -> None:
    ask = (
        "import sys; from nestling.cli import completing as c; "
        "c.complete_method('f'); c.complete_override('method.name='); c.complete_device('e'); "
        "print('torch' in sys.modules)"
    )
    assert shell.type(f"python -c {shlex.quote(ask)}").stdout == "False\n"


def test_what_goes_on_with_a_run_names_ones_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert call(["new", "method", "own_mean"], monkeypatch) == 0
    quick = ["rounds=2", "split.size=40", "train.epochs=1", "engine.name=inline"]
    sets = [word for text in quick for word in ("--set", text)]
    command = ["run", "--set", "method.name=own_mean:OwnMean", *sets, "--out", "my run"]
    with monkeypatch.context() as pressed:
        pressed.setattr(GentleStop, "__call__", lambda self: True)
        assert call(command, monkeypatch) == 130
    said = re.search(r"stopped after round 1; go on with: nestling (.*)", capsys.readouterr().err)
    assert said is not None and said[1] == "run --resume 'my run' --trust own_mean:OwnMean"
    assert call(shlex.split(said[1]), monkeypatch) == 0


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["nestling", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)
