"""What a round costs beside the work: `nestling serve` with four devices against plain Flower with
the same bytes.

    python benchmarks/fleet.py [--rounds 6] [--secure] [--sizes 0 1 10]

Both are real processes on this machine. Plain Flower is a SuperLink with four SuperNodes whose
ClientApp echoes one array (it loads no torch), under Flower's own FedAvg. Ours is the whole
product: the proxy, the resident workers, and rounds that really train, evaluate nothing and write a
checkpoint. A network of as many bytes travels to each device and back, and has one step on one row
to do.

Prints a Markdown table of medians over the rounds after the first (the last of ours is left out: it
is tested), with where the time goes: until Flower has started the process for a message (its nodes'
polling, and the transfer), until the work is done (the process's imports, the relay, the work), and
until the server goes on (the transfer, the server's polling, the merge). Last comes the ratio of
ours to plain Flower's at the size nearest to 1 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from nestling.fleet.care import certs
from nestling.fleet.care.processes import Keeper, Program, flower_command, flower_env, free_port

NODES = 4
SECONDS = 1200.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Round:
    """The moments of a round, in seconds since 1970: it begins, the last process is started, the
    last work is done, it ends."""

    begin: float
    started: float
    done: float
    end: float

    @property
    def parts(self) -> tuple[float, float, float, float]:
        return (
            self.end - self.begin,
            self.started - self.begin,
            self.done - self.started,
            self.end - self.done,
        )


@dataclass
class Births:
    """When Flower started its processes for messages: looked up ten times a second, known to a
    hundredth."""

    found: dict[tuple[int, int], float] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Births:
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        threading.Thread(target=self._look, args=(boot,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()

    def last(self, begin: float, end: float) -> float:
        """The last one between two moments."""
        return max((at for at in self.found.values() if begin <= at <= end), default=begin)

    def _look(self, boot: float) -> None:
        settled: set[str] = set()  # processes that are what they will be
        while not self.stop.wait(0.1):
            for pid in {name for name in os.listdir("/proc") if name.isdigit()} - settled:
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                    ticks = int(
                        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
                    )
                except (OSError, IndexError):
                    continue
                born = boot + ticks / TICKS
                if b"flwr-clientapp" in words:
                    self.found[int(pid), ticks] = born
                if time.time() - born > 3.0:
                    settled.add(pid)


# -- plain Flower ----------------------------------------------------------------------------------


@contextmanager
def plain_fleet(root: Path) -> Iterator[Callable[[int, int], list[dict[str, Any]]]]:
    """A SuperLink and its nodes as Flower's documentation starts them; gives a function that plays
    rounds of a size."""
    port, env = free_port(), flower_env(root / "flower")
    (root / "flower").mkdir(parents=True)
    (root / "flower/config.toml").write_text(
        '[superlink]\ndefault = "here"\n[superlink.here]\naddress = '
        f'"127.0.0.1:{port}"\ninsecure = true\n'
    )
    with Keeper() as keeper:
        link = [
            flower_command("flower-superlink"),
            "--insecure",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        keeper.add(Program("superlink", link, root / "superlink.log", env))
        for number in range(NODES):
            node = [
                flower_command("flower-supernode"),
                "--insecure",
                "--superlink",
                f"127.0.0.1:{port}",
            ]
            keeper.add(
                Program(
                    f"node {number}",
                    [*node, "--port", str(free_port())],
                    root / f"node{number}.log",
                    env,
                )
            )

        def rounds(size: int, count: int) -> list[dict[str, Any]]:
            out = root / f"{size}.json"
            config = f'rounds={count} bytes={size} nodes={NODES} out="{out}"'
            app = Path(__file__).parent / "flower_echo"
            command = [flower_command("flwr"), "run", str(app), "here", "--run-config", config]
            _wait(
                lambda: (
                    subprocess.run(
                        command, env=env, capture_output=True, timeout=SECONDS
                    ).returncode
                    == 0
                ),
                keeper,
                5.0,
            )
            _wait(
                lambda: out.exists() and len(json.loads(out.read_text() or "[]")) == count, keeper
            )
            found: list[dict[str, Any]] = json.loads(out.read_text())
            return found

        yield rounds


def plain_rounds(rows: list[dict[str, Any]], births: Births) -> list[Round]:
    """What Flower's rounds were made of, without the first."""
    return [
        Round(r["begin"], births.last(r["begin"], max(r["done"])), max(r["done"]), r["end"])
        for r in rows[1:]
    ]


# -- ours ------------------------------------------------------------------------------------------


@contextmanager
def our_fleet(root: Path, secure: bool) -> Iterator[Callable[[int, int, Births], list[Round]]]:
    """Four devices that stay, and a function that serves an experiment of a size to them."""
    root.mkdir(parents=True)
    port, trust = free_port(), ["--insecure"]
    if secure:
        certs.issue(
            root / "keys", hosts=["127.0.0.1"], devices=[f"d{number}" for number in range(NODES)]
        )
        trust = ["--certs", str(root / "keys")]
    env, python = {**os.environ, "OMP_NUM_THREADS": "1"}, [sys.executable, "-m", "nestling.cli"]
    with Keeper() as keeper:
        for number in range(NODES):
            words = [
                "join",
                f"127.0.0.1:{port}",
                "--name",
                f"d{number}",
                "--device",
                "any",
                "--data",
                "experiment",
            ]
            words += ["--client", str(number), "--folder", str(root / f"device{number}"), *trust]
            keeper.add(
                Program(f"device {number}", [*python, *words], root / f"device{number}.log", env)
            )

        def rounds(size: int, count: int, births: Births) -> list[Round]:
            out, file = root / f"run{size}", root / f"{size}.toml"
            file.write_text(experiment(size, count).to_toml())
            words = [
                "serve",
                str(file),
                "--out",
                str(out),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--health",
                "off",
            ]
            words += ["--min-clients", str(NODES), *trust]
            watched = Watched(root, out)
            with open(root / f"serve{size}.log", "wb") as log:
                process = subprocess.Popen([*python, *words], env=env, stdout=log, stderr=log)
                try:
                    _wait(lambda: watched.look() or process.poll() is not None, keeper, 0.05)
                finally:
                    process.terminate()
                    process.wait(SECONDS)
            if process.returncode:
                raise SystemExit((root / f"serve{size}.log").read_text()[-3000:])
            # The first round builds networks, the last is tested.
            return watched.rounds(births)[1:-1]

        yield rounds


class Watched:
    """Sees from outside when rounds of ours end and when devices write their results."""

    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.out = root, out
        self.ends: list[tuple[float, float]] = []  # when, and the seconds that the round took
        self.results: set[float] = set()  # when a device wrote one

    def look(self) -> None:
        """Looks what is new."""
        path = self.out / "metrics.jsonl"
        if path.exists():
            for line in path.read_text().splitlines()[len(self.ends) :]:
                self.ends.append((path.stat().st_mtime, float(json.loads(line)["seconds"])))
        for result in self.root.glob("device*/worker/runs/*/*/result"):
            self.results.add(result.stat().st_mtime)

    def rounds(self, births: Births) -> list[Round]:
        """What the rounds were made of."""
        found = []
        for end, seconds in self.ends:
            begin = end - seconds
            done = max((at for at in self.results if begin <= at <= end), default=end)
            found.append(Round(begin, births.last(begin, done), done, end))
        return found


def experiment(size: int, rounds: int) -> Experiment:
    """A network of about so many bytes, of which every device trains the whole on one row."""
    width = max(1, round(size / 4 / 795))
    return Experiment(
        method=Named("shared-average"),
        rounds=rounds,
        participants=0,
        model=Named("mlp", {"hidden": [width]}),
        fleet=FleetConfig(tiers=(Tier(name="any", ratio=1.0, count=NODES),)),
        split=SplitConfig(kind="iid", size=1),
        train=Train(epochs=1, batch=1),
        engine=EngineConfig("inline"),
        evaluate=Evaluation(every=rounds, clients=1),
    )


def _wait(true: Callable[[], Any], keeper: Keeper, step: float = 0.2) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        keeper.tick()
        if time.monotonic() > end:
            raise SystemExit(f"nothing has happened for {SECONDS:.0f} s")
        time.sleep(step)


# -- the table -------------------------------------------------------------------------------------


def main(sizes: list[float], count: int, secure: bool) -> None:
    print(
        "| payload | who | a round | until the process starts | until the work is done | until "
        "the server goes on |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        medians: dict[tuple[str, float], float] = {}
        with Births() as births, plain_fleet(Path(folder) / "plain") as rounds:
            for size in sizes:
                medians["plain Flower", size] = _row(
                    size, "plain Flower", plain_rounds(rounds(int(size * 1e6), count), births)
                )
        with Births() as births, our_fleet(Path(folder) / "ours", secure) as ours:
            for size in sizes:
                medians["ours", size] = _row(size, "ours", ours(int(size * 1e6), count + 1, births))
        ratios = {size: medians["ours", size] / medians["plain Flower", size] for size in sizes}
    for size, ratio in ratios.items():
        print(f"{size:g} MB: {ratio:.2f} times plain Flower's")
    nearest = min(sizes, key=lambda size: abs(size - 1))
    print(f"ratio at {nearest:g} MB: {ratios[nearest]:.2f}")


def _row(size: float, who: str, rounds: list[Round]) -> float:
    columns = [
        statistics.median(values) for values in zip(*(one.parts for one in rounds), strict=True)
    ]
    print(
        f"| {size:g} MB | {who} | " + " | ".join(f"{value:.1f} s" for value in columns) + " |",
        flush=True,
    )
    return columns[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--sizes",
        type=float,
        nargs="+",
        default=[0.0, 1.0, 10.0],
        help="megabytes to each device and back",
    )
    parser.add_argument("--secure", action="store_true", help="ours with TLS and keys")
    given = parser.parse_args()
    main(given.sizes, given.rounds, given.secure)
