"""What a gateway takes to speak for many devices: memory and seconds a round, with a real broker,
TLS and a password for each device.

    python benchmarks/fleet_gateway.py [DEVICES] [ROUNDS]        default: 200 50

The gateway, the broker and the devices (all of them in one process, as threads) are processes of
their own on this machine; two devices die in the middle of a round. Needs mosquitto (apt-get
install mosquitto) and `pip install nestling[mqtt]`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nestling import (
    EngineConfig,
    Evaluation,
    Experiment,
    FleetConfig,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.engines.engine import Engine
from nestling.fleet.care import certs
from nestling.fleet.care.processes import free_port
from nestling.fleet.node.broker import Broker, write_broker
from nestling.fleet.node.mqtt_device import MqttDevice, Unwanted
from nestling.fleet.protocol import local
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import enliven
from nestling.methods.server import KEPT
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play
from nestling.tiny.link.orders import Orders
from nestling.tiny.runtime.data import pack
from nestling.tiny.runtime.job import Done
from nestling.training.client import Errand, Outcome

NAME = "gw"
WARM = 10
"""Rounds after which the gateway's memory is to stay as it is."""


# -- the experiment --------------------------------------------------------------------------------


def experiment(devices: int, rounds: int, method: str = "shared-average") -> Experiment:
    """Small devices of three sizes, everybody in every round, little to train."""
    counts = (devices - 2 * (devices // 3), devices // 3, devices // 3)
    tiers = [
        Tier(name=f"size {r}", ratio=r, count=n, board="host")
        for r, n in zip((0.25, 0.5, 1.0), counts, strict=True)
        if n
    ]
    return Experiment(
        method=method,
        rounds=rounds,
        participants=0,
        data="mnist12k-8x8",
        model=Named("tinycnn", {"channels": [8, 8], "norm": "none"}),
        fleet=FleetConfig(tiers=tuple(tiers)),
        split=SplitConfig(kind="dirichlet", alpha=1.0, size=20, public=0.0),
        train=Train(epochs=1, batch=10, lr=0.05, augment="none"),
        engine=EngineConfig("inline"),
        evaluate=Evaluation(every=rounds, clients=1),
    )


def images(told: Experiment, clients: Sequence[int]) -> dict[int, bytes]:
    """The clients' shares of the data as their devices have them in flash."""
    site = site_of(assemble(told)[1])
    rows = {client: torch.from_numpy(site.rows_of(client)) for client in clients}
    return {client: pack(site.x[rows[client]], site.y[rows[client]]) for client in clients}


def in_process(told: Experiment, missed: Mapping[int, Sequence[int]]) -> Federation:
    """The same run in this process, where some clients' replies are missed: round → those."""
    settled, federation = assemble(told)
    federation.engine.open(settled.make_method(), site_of(federation))
    federation.engine = _Without(federation.engine, missed)
    list(play(federation))
    return federation


class _Without:
    """An engine some of whose outcomes never arrive."""

    def __init__(self, base: Engine, missed: Mapping[int, Sequence[int]]) -> None:
        self.base, self.missed = base, missed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        return self.base.run(
            [errand for errand in errands if errand.client not in self.missed.get(errand.round, ())]
        )


def state_of(federation: Federation) -> dict[str, bytes]:
    """The server's state, bit by bit."""
    return bits_of(federation.method.state())


def bits_of(state: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, bytes]:
    """A method's state, without the server's own notes, which only fleets have."""
    parts = [(kind, part) for kind, part in state.items() if not kind.startswith(KEPT)]
    return {
        f"{kind}/{name}": t.detach().cpu().numpy().tobytes()
        for kind, part in parts
        for name, t in part.items()
    }


# -- the broker and the devices --------------------------------------------------------------------


class Mosquitto:
    """A real broker on this machine's loop, with TLS, passwords and access lists."""

    def __init__(self, folder: Path, devices: Sequence[str]) -> None:
        self.folder, self.port = folder, free_port()
        certs.issue(folder / "keys", hosts=["127.0.0.1"])
        self.config = write_broker(
            folder / "broker", devices, certs.server_files(folder / "keys"), port=self.port
        )
        self.ca = folder / "keys" / "server" / "ca.crt"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Mosquitto:
        with open(self.folder / "mosquitto.log", "ab") as log:
            self.process = subprocess.Popen(
                [where(), "-c", str(self.config)], stdout=log, stderr=log
            )
        wait_for(
            lambda: (
                "running" in self.log() or self.process is None or self.process.poll() is not None
            )
        )
        assert self.process.poll() is None, self.log()
        return self

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        return (self.folder / "mosquitto.log").read_text(errors="replace")

    def as_user(self, name: str) -> Broker:
        """How one of its users reaches it."""
        return Broker(
            "127.0.0.1", name, self.folder / "broker" / "secrets" / name, self.port, self.ca
        )


def where() -> str:
    """The broker's program; Debian keeps it where only root looks."""
    return (
        shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
        or ""
    )


def wait_for(true: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("waited in vain")
        time.sleep(0.05)


class Mortal(MqttDevice):
    """A device that dies while it is at work on its job number `last`."""

    last = 0

    def compute(self, orders: Orders, wanted: Callable[[], bool]) -> Done:
        if self.jobs == self.last:
            self.die()
            raise Unwanted
        return super().compute(orders, wanted)

    def die(self) -> None:
        """As when the power goes: nobody takes leave."""
        line = self._client.socket()
        self._client.loop_stop()
        if line is not None:
            line.close()


@contextmanager
def devices_of(
    flash: Mapping[str, bytes],
    broker: Callable[[str], Broker],
    deaths: Mapping[str, int] | None = None,
) -> Iterator[dict[str, Mortal]]:
    """Devices by name, all in this process; `deaths` says in which job some die."""
    crew, closing = ThreadPoolExecutor(4), threading.Event()
    made = {name: Mortal(name, blob, broker(name), crew=crew) for name, blob in flash.items()}
    for name, last in (deaths or {}).items():
        made[name].last = last
    for device in made.values():
        device.start()

    def tick() -> None:
        while not closing.wait(0.5):
            for device in made.values():
                device.tick()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield made
    finally:
        closing.set()
        ticker.join()
        for device in made.values():
            device.die()
        crew.shutdown()


def gateway_file(folder: Path, broker: Broker, clients: Mapping[str, int], **more: Any) -> Path:
    """The file that names the devices of a gateway."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in more.items()]
    lines += ["[mqtt]", f'host = "{broker.host}"', f"port = {broker.port}", f'ca = "{broker.ca}"']
    lines += [f'password_file = "{broker.password_file}"']
    for name, client in clients.items():
        lines += ["[[devices]]", f'name = "{name}"', f"client = {client}"]
    path = folder / "devices.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


# -- the measurement -------------------------------------------------------------------------------


def measure(
    folder: Path, devices: int, rounds: int, tell: Callable[[str], None] = print
) -> dict[str, Any]:
    """Runs it; gives the gateway's memory after every round (MB), the seconds, the replies, and
    whether the result is the same as in one process with the same replies missed."""
    told, names = experiment(devices, rounds), {f"d{client}": client for client in range(devices)}
    dying = {f"d{devices // 3}": rounds // 2, f"d{devices - 1}": rounds // 2 + 1}
    mosquitto = Mosquitto(folder, list(names)).start()
    processes = []
    try:
        (folder / "flash").mkdir()
        for client, blob in images(told, range(devices)).items():
            (folder / "flash" / f"d{client}").write_bytes(blob)
        path = gateway_file(folder, mosquitto.as_user("gateway"), names, absence=2.0)
        processes.append(_start("--play", folder, mosquitto.port, json.dumps(dying)))
        socket = folder / "socket"
        words = ["-m", "nestling.fleet.node.gateway", "--socket", socket, "--folder", folder / NAME]
        gateway = _start(*words, "--name", NAME, "--devices", path)
        processes.append(gateway)
        courier = LoopCourier({1: lambda letter: local.ask(socket, letter, start=120.0)})
        found = _play(told, courier, gateway.pid, tell)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        mosquitto.stop()
    missed = {r: [names[n] for n, last in dying.items() if r >= last] for r in range(1, rounds + 1)}
    found["same"] = found.pop("state") == state_of(in_process(told, missed))
    found["expected"] = sum(devices - len(missed[r]) for r in range(1, rounds + 1))
    # Once devices have died there is a step; what must not be is growth from round to round.
    found["step"] = _growth(found["megabytes"][min(WARM, rounds - 1) :])
    found["growth"] = _growth(found["megabytes"][3 * rounds // 4 :])
    return found


def _play(
    told: Experiment, courier: LoopCourier, gateway: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    settled, federation = assemble(told)
    live = enliven(settled, federation, courier, patience=Patience(poll=0.0))
    live.engine.open(settled.make_method(), site_of(federation))
    live.greeter.again = 0.0
    live.gather(len(federation.world.fleet), 120.0)
    memory, seconds, replies, begun = [], [], 0, time.monotonic()
    for row in play(federation):
        seconds.append(time.monotonic() - begun)
        memory.append(_resident(gateway))
        missing = row["dropped"] + row["refused"]
        replies += len(row["clients"]) - missing
        tell(
            f"round {row['round']}: {memory[-1]:.1f} MB, {seconds[-1]:.2f} s, {missing} replies "
            "missing"
        )
        begun = time.monotonic()
    return {
        "megabytes": memory,
        "seconds": seconds,
        "replies": replies,
        "state": state_of(federation),
    }


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _start(*words: Any) -> subprocess.Popen[bytes]:
    script = [] if words[0] == "-m" else [__file__]
    return subprocess.Popen(
        [sys.executable, *script, *map(str, words)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def _devices(folder: Path, port: int, dying: Mapping[str, int]) -> None:
    flash = {path.name: path.read_bytes() for path in (folder / "flash").iterdir()}
    ca = folder / "keys" / "server" / "ca.crt"
    with devices_of(
        flash, lambda n: Broker("127.0.0.1", n, folder / "broker" / "secrets" / n, port, ca), dying
    ):
        threading.Event().wait()


def _growth(megabytes: list[float]) -> float:
    """By what share of the first the largest is larger."""
    return max(megabytes) / megabytes[0] - 1


def main(devices: int = 200, rounds: int = 50) -> None:
    if not where():
        raise SystemExit("mosquitto is not installed: apt-get install mosquitto")
    folder = Path(tempfile.mkdtemp(prefix="nst"))
    try:
        found = measure(folder, devices, rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    middle = sorted(found["seconds"])[rounds // 2]
    print(
        f"{devices} devices, {rounds} rounds: median {middle:.2f} s a round, {found['replies']} "
        f"of {found['expected']} replies"
    )
    step, growth = (f"{100 * found[name]:.1f} %" for name in ("step", "growth"))
    print(
        f"the gateway's memory grew by {step} after {WARM} rounds, by {growth} in the last "
        "quarter of them"
    )
    print(f"the result is {'the same as' if found['same'] else 'NOT that of'} in one process")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--play"]:
        _devices(Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        main(*(int(word) for word in sys.argv[1:]))
