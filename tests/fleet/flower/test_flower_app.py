"""The example app: in this process, and with Flower's own `flwr run`, simulated and deployed.
Always the same result."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

import nestling
from nestling import Experiment, SplitConfig
from nestling.fleet.care.processes import free_port
from nestling.fleet.flower import InProcessGrid

APP = Path(__file__).parents[3] / "examples" / "flower_app"
SECONDS = 600.0
ROUNDS = 2


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """The same experiment in the simulator."""
    devices = _module("server_app").DEVICES
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "participants": 0,
        "fleet": devices,
        "split": SplitConfig(size=100),
    }
    model = nestling.run(Experiment(method="heterofl", **settings)).federation.method.global_model()
    assert model is not None
    return dict(model.state)


def _module(name: str) -> Any:
    sys.path.insert(0, str(APP))
    try:
        return importlib.import_module(f"unequal.{name}")
    finally:
        sys.path.remove(str(APP))


def check(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "global.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def config(tmp_path: Path) -> dict[str, Any]:
    return {
        "method": "heterofl",
        "rounds": ROUNDS,
        "out": str(tmp_path / "run"),
        "devices": str(tmp_path / "devices"),
    }


def test_in_this_process(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    InProcessGrid(_module("client_app").app, 2, config(tmp_path)).play(_module("server_app").app)
    check(tmp_path / "run", expected)


class Flower:
    """Flower's commands in a home of their own; what they start ends with the test, by number."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "home"),
            # where Flower finds its own commands
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            # On a busy machine Ray's own processes take their time.
            "RAY_agent_register_timeout_ms": "300000",
            "RAY_raylet_start_wait_time_s": "300",
        }
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = '
            f'"127.0.0.1:{self.port}"\ninsecure = true\n'
        )

    def start(self, command: str, *words: str) -> None:
        """Starts a command in a group of its own."""
        with open(self.folder / f"{command}-{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen(
                [_tool(command), *words],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)

    def run(self, tmp_path: Path, *words: str) -> None:
        """`flwr run`, to its end; tried again until the SuperLink answers."""
        told = " ".join(
            f"{name}={value!r}".replace("'", '"') for name, value in config(tmp_path).items()
        )
        app = tmp_path / "app"
        shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
        end = time.monotonic() + SECONDS
        while True:
            command = [
                _tool("flwr"),
                "run",
                str(app),
                "here",
                "--stream",
                "--run-config",
                told,
                *words,
            ]
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            if done.returncode == 0 or "nnection" not in done.stdout + done.stderr:
                break
            gone = [process.args for process in self.processes if process.poll() is not None]
            assert not gone and time.monotonic() < end, self.said(done.stdout + done.stderr)
        assert done.returncode == 0 and (tmp_path / "run" / "summary.json").exists(), self.said(
            done.stdout + done.stderr
        )

    def said(self, text: str) -> str:
        logs = "\n".join(
            f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}"
            for p in sorted(self.folder.glob("*.log"))
        )
        return f"{text[-4000:]}\n{logs}"

    def end(self) -> None:
        for process in reversed(self.processes):
            _kill_group(process.pid)
            process.wait(60)


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, 9)
    except ProcessLookupError:
        return


@contextmanager
def flower(tmp_path: Path) -> Iterator[Flower]:
    folder = tmp_path / "flower"
    folder.mkdir()
    found = Flower(folder)
    try:
        yield found
    finally:
        found.end()


@pytest.mark.minutes
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed (flwr[simulation])"
)
def test_with_flwr_run_in_the_simulation(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    with flower(tmp_path) as here:
        here.start(
            "flower-superlink",
            "--insecure",
            "--simulation",
            "--host",
            "127.0.0.1",
            "--port",
            str(here.port),
        )
        here.run(tmp_path, "--federation-config", "num-supernodes=2 client-resources-num-cpus=1")
    check(tmp_path / "run", expected)


@pytest.mark.minutes
def test_with_flwr_run_on_real_nodes(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    with flower(tmp_path) as here:
        here.start(
            "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(here.port)
        )
        link = f"127.0.0.1:{here.port}"
        for client in range(2):
            words = (
                "--insecure",
                "--superlink",
                link,
                "--port",
                str(free_port()),
                "--node-config",
                f"client={client}",
            )
            here.start("flower-supernode", *words)
        here.run(tmp_path)
    check(tmp_path / "run", expected)
