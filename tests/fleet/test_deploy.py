"""The files for running a fleet as services: units that systemd accepts and rates as well closed,
an image that follows our rules.

No container engine builds the image in tests; the rules are checked on the text.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from nestling import cli
from nestling.fleet.care.health import PORT

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = ("nestling-serve.service", "nestling-join.service")
NEWER = {"RestartSteps", "RestartMaxDelaySec"}
"""What systemd knows since version 254 only; older ones say so and go on."""


def settings(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / unit).read_text().splitlines():
        if line and line[0] not in "#[":
            name, equals, value = line.partition("=")
            assert equals, line
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit(unit: str, tmp_path: Path) -> None:
    copied = tmp_path / unit  # where nestling is installed, the unit is as it is
    copied.write_text(
        (DEPLOY / unit).read_text().replace("/opt/nestling/bin/nestling", "/bin/true")
    )
    made = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copied],
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = [line for line in made.stderr.splitlines() if str(copied) in line or unit in line]
    unknown = {key for line in said for key in re.findall(r"Unknown key (?:name )?'(\w+)'", line)}
    assert unknown <= NEWER and len(said) == len(unknown), made.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_rates_the_unit_as_closed(unit: str) -> None:
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--threshold=20",
        "--no-pager",
        DEPLOY / unit,
    ]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "unrecognized option" in made.stderr:
        pytest.skip("this systemd-analyze cannot look at files")
    assert made.returncode == 0, made.stdout[-500:] + made.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_units_are_closed_and_come_back(unit: str) -> None:
    found = settings(unit)
    for name, value in {
        "User": "nestling",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "CapabilityBoundingSet": "",
        "UMask": "0077",
        "Restart": "always",
        "StartLimitIntervalSec": "0",
        "WantedBy": "multi-user.target",
    }.items():
        assert found[name] == [value], name
    assert int(found["RestartSec"][0]) < int(found["RestartMaxDelaySec"][0])
    assert all(len(values) == 1 for values in found.values())


def test_a_finished_run_is_not_started_again() -> None:
    assert settings("nestling-serve.service")["RestartPreventExitStatus"] == ["0 2"]
    assert "RestartPreventExitStatus" not in settings("nestling-join.service")


def options_of(command: str) -> set[str]:
    (found,) = [one for name, one in get_command(cli.app).commands.items() if name == command]  # type: ignore[attr-defined]
    return {word for parameter in found.params for word in parameter.opts}


def given(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize("unit", UNITS)
def test_units_use_options_that_exist(unit: str) -> None:
    words = settings(unit)["ExecStart"][0].split()
    assert words[0] == "/opt/nestling/bin/nestling" and words[1] == unit.removesuffix(
        ".service"
    ).removeprefix("nestling-")
    assert given(words) and given(words) <= options_of(words[1])


# -- the image -------------------------------------------------------------------------------------


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of the Dockerfile by stage, long lines joined."""
    text = "\n".join(
        line
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    )
    found: dict[str, list[tuple[str, str]]] = {}
    stage = ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        assert word in {
            *(
                "FROM",
                "RUN",
                "COPY",
                "ENV",
                "WORKDIR",
                "VOLUME",
                "USER",
                "ENTRYPOINT",
                "CMD",
                "HEALTHCHECK",
                "EXPOSE",
            ),
            "STOPSIGNAL",
        }, line
        if word == "FROM":
            match = re.fullmatch(r"(\S+) AS (\w+)", rest)
            assert match, line
            stage = match[2]
            found[stage] = []
        found[stage].append((word, rest))
    return found


def values(stage: str, word: str) -> list[str]:
    """What a stage says, with what it begins with."""
    lines = stages()[stage]
    base = lines[0][1].split(" AS ")[0]
    above = values(base, word) if base in stages() else []
    return above + [rest for name, rest in lines if name == word]


def test_base_images_are_slim_and_of_a_named_version() -> None:
    for name, lines in stages().items():
        base = lines[0][1].split(" AS ")[0]
        assert base in stages() or re.fullmatch(r"python:3\.\d+-slim", base), name


@pytest.mark.parametrize("stage", ["serve", "join"])
def test_what_runs_is_not_root_and_is_looked_after(stage: str) -> None:
    (user,) = values(stage, "USER")
    assert re.fullmatch(r"([1-9]\d{3,}):\1", user)
    lines = stages()["base"]
    place = lines.index(("USER", user))
    assert not any(word in ("RUN", "COPY") for word, _ in lines[place:] + stages()[stage])
    (check,) = values(stage, "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[:3] == ["python", "-m", "nestling.fleet.care.health"]
    entry = json.loads(values(stage, "ENTRYPOINT")[-1])
    assert entry == ["nestling", stage]  # a list: signals reach it, not a shell
    words = json.loads(values(stage, "CMD")[-1])
    assert given(words) <= options_of(stage) | {"--help"}


def test_what_the_image_asks_is_what_it_serves() -> None:
    words = json.loads(values("serve", "CMD")[-1])
    assert words[words.index("--health") + 1].endswith(f":{PORT}")
    assert (
        f"http://127.0.0.1:{PORT}" in values("serve", "HEALTHCHECK")[0]
        and str(PORT) in values("serve", "EXPOSE")[0].split()
    )
    assert list(stages())[-1] == "serve"  # what is built where no stage is named


def test_nothing_secret_and_nothing_unneeded_is_copied_in() -> None:
    copied = [rest for stage in stages() for word, rest in stages()[stage] if word == "COPY"]
    assert copied and all(
        re.match(r"(--from=build /opt/nestling|pyproject\.toml README\.md|nestling) ", rest)
        for rest in copied
    )
    everything = (DEPLOY / "Dockerfile").read_text()
    assert "ADD " not in everything and "sudo" not in everything and ":latest" not in everything
    assert not re.search(r"curl[^\n]*\|\s*(ba)?sh", everything)


def test_what_is_installed_is_bounded() -> None:
    installs = [rest for _, rest in stages()["build"] if "pip install" in rest]
    assert len(installs) == 2 and all("<" in rest for rest in installs)
    assert "PIP_NO_CACHE_DIR=1" in values("build", "ENV")[0]
