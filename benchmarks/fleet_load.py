"""A day of load in an hour: a fleet of real processes under random faults, and what must hold.

    python benchmarks/fleet_load.py [--minutes 60] [--behind 100] [--gateways 2] [--direct 20]
                                    [--folder KEPT]

`nestling serve` with TLS and keys, gateways behind which devices hang on a real MQTT broker, and
devices that join directly, each some processes of its own. Every few seconds something happens to
somebody: a device is killed and started again, is stopped for a while, a radio device loses its
line, a gateway is killed and started again, so is the server. After so many minutes the server is
stopped, and it is looked at

- whether memory stayed flat: of the server and of each gateway, in its longest life between two
  kills, the median of the last quarter against that of the second quarter, to 5 %. Counted is what
  its lasting processes have for themselves: files that all map are no leak, and Flower's process
  for each letter is there or not as it happens;
- whether any reply was lost or counted twice: in every round that stands, those who were asked and
  are not said to be missing were accepted, each once (by the audit log, which must be whole);
- whether any round that stands took longer than its deadline and 5 s more, in the life of the
  server that ended it, though a reply was there by then: no device holds the others. Rounds of
  which the server's log says that there was none yet are counted beside;
- whether the result is that of the simulator in which the same clients missed the same rounds, bit
  for bit.

Needs mosquitto and `pip install nestling[fleet,mqtt]`, about half a gigabyte a direct device, and
half an hour to say anything of memory. Exit code 1 where anything did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from fleet_gateway import (
    Mosquitto,
    bits_of,
    devices_of,
    experiment,
    gateway_file,
    images,
    in_process,
    state_of,
    where,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nestling import Experiment, FleetConfig, Server, Tier
from nestling.fleet.care import certs, logs
from nestling.fleet.care.audit import BrokenChain, check
from nestling.runfiles import lines_of
from nestling.runs import checkpoint
from nestling.runs.assemble import assemble
from nestling.runs.federation import MOST_SHARE, MOST_STEP
from tests.fleet.processes import Client, ProcessFleet, Running, fleet

MANY = 100_000
"""Rounds that no hour is long enough for."""
FLAT, DIRECT = 0.05, "direct"
HELD = 5.0
"""Seconds beyond its deadline that a round may take."""
PAUSE, REST = (2.0, 20.0), (3.0, 12.0)
"""How long somebody is stopped, and how long it is until the next fault."""
PASSING = ("flwr-clientapp",)
"""What Flower starts for every letter, and what is gone with it."""


def told(behind: int, direct: int) -> Experiment:
    """Small devices behind gateways and larger ones of their own, all in every round, with the
    bounds that a fleet has by itself, so that the simulator has them too."""
    base = experiment(behind, MANY)
    larger = Tier(name=DIRECT, ratio=1.0, count=direct)
    tiers = (*base.fleet.tiers, *([larger] if direct else []))
    return base.with_changes(
        fleet=FleetConfig(tiers=tiers),
        evaluate=replace(base.evaluate, every=MANY),
        server=Server(most_share=MOST_SHARE, most_step=MOST_STEP),
    )


Point = tuple[float, float]
"""Seconds since the beginning, megabytes."""


@dataclass
class Load:
    """The fleet, what can happen to it, and what was seen."""

    made: ProcessFleet
    asked: Experiment
    direct: dict[str, int]  # the client that each device is which joins by itself
    seed: int
    serve: tuple[str, ...]
    server: Running | None = None
    gateways: dict[str, Client] = field(default_factory=dict)
    devices: dict[str, Client] = field(default_factory=dict)
    megabytes: dict[str, dict[int, list[Point]]] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)

    def start_server(self) -> None:
        self.server = self.made.start_server(self.asked, "run", *self.serve)

    def start_gateway(self, name: str) -> None:
        words = ["gateway", f"127.0.0.1:{self.made.port}", "--certs", str(self.made.certs)]
        words += ["--devices", str(self.made.root / name / "devices.toml"), "--name", name]
        words += ["--folder", str(self.made.root / f"device-{name}")]
        process, log = self.made._start(words, f"{name}.log")
        self.gateways[name] = Client(process, log, name, self.made.root / name)
        self.made.started.append(self.gateways[name])

    def start_device(self, name: str) -> None:
        number = str(self.direct[name])
        self.devices[name] = self.made.start_client(name, DIRECT, "--client", number)

    def play(self, seconds: float, radios: Mapping[str, Any]) -> None:
        """Lets things happen for so long."""
        draw, begun = random.Random(self.seed), time.monotonic()
        following, looked, said = begun + draw.uniform(*REST), begun, begun
        while time.monotonic() - begun < seconds:
            self.tend()
            if time.monotonic() >= following:
                self.fault(draw, radios)
                following = time.monotonic() + draw.uniform(*REST)
            if time.monotonic() >= looked:
                self.look(time.monotonic() - begun)
                looked = time.monotonic() + 2.0
            if time.monotonic() >= said:
                self.say(time.monotonic() - begun)
                said = time.monotonic() + 60.0
            time.sleep(0.2)

    def tend(self) -> None:
        """Starts again what ended by itself, which is no fault of ours to make."""
        if self.server is not None and self.server.process.poll() is not None:
            self.happened["the server ended by itself"] += 1
            self.start_server()
        for name, one in [*self.gateways.items(), *self.devices.items()]:
            if one.process.poll() is not None:
                self.happened["a device or gateway ended by itself"] += 1
                (self.start_gateway if name in self.gateways else self.start_device)(name)

    def fault(self, draw: random.Random, radios: Mapping[str, Any]) -> None:
        """Something happens to somebody."""
        kinds: list[tuple[str, int, Callable[[], None]]] = [
            ("a radio device lost its line", 60 * bool(radios), lambda: self._cut(draw, radios)),
            ("a device was killed", 40 * bool(self.direct), lambda: self._kill_device(draw)),
            ("a device was stopped a while", 30 * bool(self.direct), lambda: self._stop(draw)),
            # rarely enough that a life is long enough to see memory grow in it
            ("a gateway was killed", 3 * bool(self.gateways), lambda: self._kill_gateway(draw)),
            ("the server was killed", 2, self._kill_server),
        ]
        name, _, act = draw.choices(kinds, [weight for _, weight, _ in kinds])[0]
        self.happened[name] += 1
        act()

    def _cut(self, draw: random.Random, radios: Mapping[str, Any]) -> None:
        line = draw.choice(list(radios.values()))._client.socket()
        if line is not None:
            line.close()  # it is noticed, and connects again

    def _kill_device(self, draw: random.Random) -> None:
        name = draw.choice(list(self.direct))
        _kill(self.devices[name])
        self.start_device(name)

    def _stop(self, draw: random.Random) -> None:
        tree = _tree(self.devices[draw.choice(list(self.direct))].pid)
        _signal(tree, signal.SIGSTOP)
        time.sleep(draw.uniform(*PAUSE))
        _signal(tree, signal.SIGCONT)

    def _kill_gateway(self, draw: random.Random) -> None:
        name = draw.choice(list(self.gateways))
        _kill(self.gateways[name])
        self.start_gateway(name)

    def _kill_server(self) -> None:
        assert self.server is not None
        _kill(self.server)
        self.start_server()

    def look(self, now: float) -> None:
        """Notes what the server and the gateways hold."""
        assert self.server is not None
        for name, one in {"server": self.server, **self.gateways}.items():
            lives = self.megabytes.setdefault(name, {})
            lives.setdefault(one.pid, []).append((now, _own_memory(_tree(one.pid))))

    def say(self, now: float) -> None:
        """How far it is, for whoever waits."""
        rows = lines_of(self.made.root / "run" / "metrics.jsonl")
        heard = sum(len(row["clients"]) - len(row["missed"]) for row in rows)
        held = ", ".join(
            f"{name} {lives[max(lives, key=lambda pid: lives[pid][-1][0])][-1][1]:.0f} MB"
            for name, lives in self.megabytes.items()
        )
        faults = sum(self.happened.values())
        print(
            f"minute {now / 60:.0f}: {len(rows)} rounds, {heard} replies, {faults} faults; {held}",
            flush=True,
        )


def _tree(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text()
        except OSError:
            continue
        parents[int(path.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _kill(one: Running) -> None:
    """All of it at once, as when the power goes."""
    _signal(_tree(one.pid), signal.SIGKILL)
    one.process.wait(60)


def _own_memory(pids: list[int]) -> float:
    """Megabytes that lasting processes have for themselves: not files, which many map."""
    total = 0
    for pid in pids:
        try:
            words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if not any(Path(word).name in PASSING for word in words):
            anonymous = [line for line in text.splitlines() if line.startswith("RssAnon:")]
            total += sum(int(line.split()[1]) for line in anonymous)
    return total / 1024


# -- what must hold --------------------------------------------------------------------------------


def longest(lives: dict[int, list[Point]]) -> list[Point]:
    """What was seen in the longest life, from its beginning."""
    points = max(lives.values(), key=lambda seen: seen[-1][0] - seen[0][0])
    return [(at - points[0][0], megabytes) for at, megabytes in points]


def growth(points: list[Point]) -> float:
    """By what share the median of the last quarter of the time is above that of the second."""
    last = max(at for at, _ in points)
    quarters = [
        [m for at, m in points if a * last <= at <= b * last] for a, b in ((0.25, 0.5), (0.75, 1.0))
    ]
    if not all(quarters):
        return 0.0
    return statistics.median(quarters[1]) / statistics.median(quarters[0]) - 1


def replies(run: Path) -> tuple[int, list[str]]:
    """How many replies stand, and what is wrong with them: lost, or counted twice."""
    wrong, accepted, merged = [], dict[int, list[int]](), dict[int, list[int]]()
    try:
        lines = check(run)
    except BrokenChain as broken:
        return 0, [str(broken)]
    for line in lines:
        if line["event"] == "accepted":
            accepted.setdefault(line["round"], []).append(line["client"])
        elif line["event"] == "started":  # what was not merged is played again
            accepted.clear()
        elif line["event"] == "merged":
            merged[line["round"]] = accepted.pop(line["round"], [])
    total = 0
    for row in lines_of(run / "metrics.jsonl"):
        # One who was refused an old letter may have answered well beside it.
        wanted = sorted(set(row["clients"]) - set(row["missed"]))
        found = sorted(merged.get(row["round"], []))
        total += len(found)
        if found != wanted:
            wrong.append(f"round {row['round']}: accepted {found}, of those who answered {wanted}")
    return total, wrong


def held(run: Path, deadline: float) -> tuple[float, int, list[str]]:
    """The seconds of the longest round that had a reply at its deadline; how many had none; and
    which took longer than they may. The seconds of a round are those in the life of the server that
    ended it."""
    log = logs.read(run / logs.SERVER_LOG, last=10**6, most=2**30)
    short = {line["round"] for line in log if line["event"] == "short"}
    rows = [row for row in lines_of(run / "metrics.jsonl") if row["round"] not in short]
    wrong = [
        f"round {row['round']}: {row['seconds']:.1f} s, {len(row['clients'])} devices were asked, "
        f"{len(row['missed'])} gave no reply"
        for row in rows
        if row["seconds"] > deadline + HELD
    ]
    return max((row["seconds"] for row in rows), default=0.0), len(short), wrong


def same_as_simulated(run: Path, asked: Experiment) -> bool:
    """Whether the simulator ends the same if the same clients miss the same rounds."""
    saved = checkpoint.load(run)
    assert saved is not None, "no round was finished: give it more minutes"
    state, totals = saved
    rows = [row for row in lines_of(run / "metrics.jsonl") if row["round"] <= totals.round]
    everybody = set(range(sum(tier.count for tier in asked.fleet.tiers)))
    missed = {
        row["round"]: sorted(everybody.difference(row["clients"]) | set(row["missed"]))
        for row in rows
    }
    simulated = asked.with_changes(rounds=totals.round)
    return bits_of(state) == state_of(in_process(simulated, missed))


# -- the measurement -------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--behind", type=int, default=100, help="devices behind gateways")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--direct", type=int, default=20, help="devices that join directly")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="a new one, which stays; or else none stays")
    given = parser.parse_args()
    if not where():
        raise SystemExit("mosquitto is not installed: apt-get install mosquitto")
    torch.set_num_threads(1)
    if given.folder:
        given.folder.mkdir()
        return measured(given.folder.absolute(), given)
    root = Path(tempfile.mkdtemp(prefix="nst"))
    try:
        return measured(root, given)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measured(root: Path, given: argparse.Namespace) -> int:
    asked = told(given.behind, given.direct)
    kinds = assemble(asked)[1].world.fleet
    own = {c: kinds.tier_of(c).name == DIRECT for c in range(len(kinds))}
    behind = {f"d{c}": c for c in own if not own[c]}
    direct = {f"c{c}": c for c in own if own[c]}
    groups = [list(behind)[k :: given.gateways] for k in range(given.gateways)]
    brokers = [_broker(root / f"broker{k}", group) for k, group in enumerate(groups)]
    of = {name: brokers[k] for k, group in enumerate(groups) for name in group}
    flash = {f"d{c}": blob for c, blob in images(asked, list(behind.values())).items()}
    try:
        radio = devices_of(flash, lambda name: of[name].as_user(name))
        with radio as radios, fleet(root / "fleet") as made:
            made.root.mkdir()
            hubs = [f"gw{k}={len(group)}" for k, group in enumerate(groups)]
            certs.issue(made.certs, hosts=["127.0.0.1"], devices=list(direct), gateways=hubs)
            made.secure = True
            words = ("--min-clients", "1", "--deadline", str(given.deadline), "--health", "off")
            load = Load(made, asked, direct, given.seed, words)
            load.start_server()
            for k, group in enumerate(groups):
                (made.root / f"gw{k}").mkdir()
                clients = {name: behind[name] for name in group}
                user = brokers[k].as_user("gateway")
                gateway_file(made.root / f"gw{k}", user, clients, absence=5.0)
                load.start_gateway(f"gw{k}")
            for name in direct:
                load.start_device(name)
            _until_a_round(made.root / "run")
            load.play(60 * given.minutes, radios)
            assert load.server is not None
            load.server.stop()
            (root / "memory.json").write_text(json.dumps(load.megabytes))
            return verdict(load, made.root / "run", asked, given.deadline)
    finally:
        for broker in brokers:
            broker.stop()


def _broker(folder: Path, devices: list[str]) -> Mosquitto:
    """A gateway's own: on a broker one gateway speaks for all."""
    folder.mkdir()
    return Mosquitto(folder, devices).start()


def _until_a_round(run: Path) -> None:
    end = time.monotonic() + 900
    while not lines_of(run / "metrics.jsonl"):
        if time.monotonic() > end:
            raise SystemExit("no round in fifteen minutes")
        time.sleep(1.0)


def verdict(load: Load, run: Path, asked: Experiment, deadline: float) -> int:
    for what, times in load.happened.most_common():
        print(f"{times} times {what}")
    seen = {name: longest(lives) for name, lives in load.megabytes.items()}
    grown = {name: growth(points) for name, points in seen.items()}
    for name, points in seen.items():
        middle, minutes = statistics.median(m for _, m in points), points[-1][0] / 60
        print(
            f"memory of {name}: {middle:.0f} MB in the middle of its longest life of "
            f"{minutes:.0f} minutes, {grown[name]:+.1%} at the end"
        )
    total, wrong = replies(run)
    rounds = len(lines_of(run / "metrics.jsonl"))
    print(f"{rounds} rounds, {total} replies, {len(wrong)} rounds with lost or doubled ones")
    print("\n".join(wrong[:10]), end="\n" if wrong else "")
    most, short, late = held(run, deadline)
    print(
        f"the longest round took {most:.1f} s, {len(late)} took more than {deadline + HELD:.0f} s; "
        f"{short} others had no reply at their deadline and waited for one"
    )
    print("\n".join(late[:10]), end="\n" if late else "")
    same = same_as_simulated(run, asked)
    print(f"the result is {'the same as' if same else 'NOT that of'} the simulator's")
    flat = all(share <= FLAT for share in grown.values())
    all_of_it = flat and not wrong and not late and same
    print("all of it holds" if all_of_it else "NOT all of it holds")
    return 0 if all_of_it else 1


if __name__ == "__main__":
    sys.exit(main())
