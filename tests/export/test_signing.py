"""Exported folders tell what was changed in them since, and who signed them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestling import cli
from nestling.errors import InputError
from nestling.export.manifest import MANIFEST, SIGNATURE, NotAsExported, verify
from nestling.keys import make_keys
from nestling.runs import run as running
from nestling.runs.export import export
from nestling.runs.run import Result
from tests.small import small

pytest.importorskip("cryptography", reason="pip install 'nestling[fleet]'")


@pytest.fixture(scope="module")
def run() -> Result:
    return running.run(small(rounds=1))


@pytest.fixture(scope="module")
def home(run: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed folder `out`, the key that signed it, and another's."""
    home = tmp_path_factory.mktemp("signed")
    for name in ("key", "other"):
        make_keys(home / name)
    tier = next(iter(run.federation.world.plans))
    export(run, device=tier, out=home / "out", formats=("c",), calibration=50, sign=home / "key")
    return home


@pytest.fixture
def out(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home / "out", tmp_path / "out"))


def test_a_folder_as_exported_is_verified(home: Path) -> None:
    assert {p.name for p in (home / "out").iterdir()} == {
        "model.c", "model.h", "export.json", MANIFEST, SIGNATURE,
    }  # fmt: skip
    assert verify(home / "out", home / "key.pub") == verify(home / "out") == 3


def test_a_changed_byte_of_any_file_is_found(home: Path, out: Path) -> None:
    for path in sorted(out.iterdir()):
        good = path.read_bytes()
        for place in (0, len(good) // 2, len(good) - 1):
            changed = bytearray(good)
            changed[place] ^= 1
            path.write_bytes(changed)
            with pytest.raises(NotAsExported, match=path.name):
                verify(out, home / "key.pub")
        path.write_bytes(good)
    assert verify(out, home / "key.pub")


def test_a_missing_and_a_further_file_are_found(home: Path, out: Path) -> None:
    for path in sorted(out.iterdir()):
        good = path.read_bytes()
        path.unlink()
        with pytest.raises(NotAsExported, match=f"{path.name} is missing"):
            verify(out, home / "key.pub")
        path.write_bytes(good)
    (out / "more").mkdir()
    (out / "more" / "model.h").write_text("// another")
    with pytest.raises(NotAsExported, match=r"more/model\.h is not in"):
        verify(out, home / "key.pub")


@pytest.mark.parametrize("kind", ["a pipe", "a link", "a link to a folder"])
def test_what_is_no_plain_file_is_refused_and_not_read(
    kind: str, out: Path, tmp_path: Path
) -> None:
    """A pipe that nobody writes to would be read for ever."""
    good = shutil.move(out / "model.h", tmp_path / "model.h")
    if kind == "a pipe":
        os.mkfifo(out / "model.h")
    else:
        (out / "model.h").symlink_to(good if kind == "a link" else tmp_path)
    command = [sys.executable, "-m", "nestling.cli", "verify", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr == f"nestling: {out / 'model.h'} is no plain file\n"


def test_another_key_did_not_sign_it(home: Path, out: Path) -> None:
    with pytest.raises(NotAsExported, match="not what the holder of"):
        verify(out, home / "other.pub")


def test_an_unsigned_export_has_sums_and_no_old_signature(
    run: Result, home: Path, out: Path
) -> None:
    tier = next(iter(run.federation.world.plans))
    export(run, device=tier, out=out, formats=("c",), calibration=50)
    assert verify(out) == 3
    with pytest.raises(NotAsExported, match="unsigned"):
        verify(out, home / "key.pub")


def test_keys_are_ones_own_and_never_replaced(home: Path, tmp_path: Path, run: Result) -> None:
    assert stat.S_IMODE((home / "key").stat().st_mode) == 0o600
    with pytest.raises(InputError, match="exists"):
        make_keys(home / "key")
    tier = next(iter(run.federation.world.plans))
    open_to_all = Path(shutil.copy(home / "key", tmp_path / "key"))
    os.chmod(open_to_all, 0o644)
    for wrong, words in (
        (open_to_all, "can be read by others"),
        (home / "key.pub", "is no Ed25519PrivateKey"),
        (home / "nothing", "cannot read"),
    ):
        with pytest.raises(InputError, match=words):
            export(run, device=tier, out=tmp_path / "out", formats=("c",), sign=wrong)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="is no Ed25519PublicKey"):
        verify(home / "out", home / "key")


def test_the_commands(home: Path, out: Path, tmp_path: Path) -> None:
    def asked(*words: object) -> tuple[int, str]:
        made = CliRunner().invoke(cli.app, [str(word) for word in words])
        return made.exit_code, made.output

    assert asked("keygen", tmp_path / "mine")[0] == 0 and (tmp_path / "mine.pub").exists()
    code, said = asked("verify", out, "--key", home / "key.pub")
    assert code == 0 and "3 files are as exported; signed by" in said
    assert "give --key" in asked("verify", out)[1]
    (out / "model.c").write_text("int model;")
    code, said = asked("verify", out, "--key", home / "key.pub")
    assert code == 1 and "model.c differs" in said


def test_without_the_library_it_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(InputError, match=r"pip install 'nestling\[fleet\]'"):
        verify(home / "out", home / "key.pub")
