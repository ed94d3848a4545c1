"""Whether a fleet is well: the verdict on real runs over a courier, and what the small server tells
of them."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nestling import Experiment, FleetConfig, Tier
from nestling.errors import InputError
from nestling.fleet.care import health, metrics, status
from nestling.fleet.care.health import HealthServer, judge, run_status
from nestling.fleet.care.status import StatusFile
from nestling.fleet.protocol import local
from nestling.fleet.protocol.courier import Failure, LoopCourier
from nestling.fleet.protocol.wire import kind_of
from nestling.fleet.server.engine import NoQuorum, Patience
from nestling.fleet.server.serving import play
from nestling.runs.run import Watcher
from tests.fleet.loop import six, workers_of

THREE = FleetConfig(
    tiers=(Tier(name="board", ratio=0.25, count=2), Tier(name="phone", ratio=0.5, count=1))
)


def three(rounds: int = 1) -> Experiment:
    return six(fleet=THREE, rounds=rounds)


class Looking(LoopCourier):
    """Nodes in this process, some of which keep silent; whenever answers are looked for, somebody
    looks at the run folder. Once it was seen often enough that the round waits for the silent ones,
    the run is ended."""

    def __init__(self, home: Path, run: Path, silent: Collection[int] = ()) -> None:
        self.members = workers_of(home, clients=3)
        super().__init__({100 - c: worker.handle for c, worker in self.members.items()})
        self.run, self.silent, self.seen = run, {100 - c for c in silent}, list[dict[str, Any]]()

    def push(self, letters: Mapping[int, bytes]) -> dict[int, str]:
        kept = {
            node: letter
            for node, letter in letters.items()
            if node not in self.silent or kind_of(letter) == "welcome"
        }
        lost = {node: f"lost {node}" for node in letters if node not in kept}
        return {**super().push(kept), **lost}

    def nodes(self) -> Collection[int]:
        self._look()
        return super().nodes()

    def pull(self, tickets: Collection[str]) -> list[tuple[str, bytes | Failure]]:
        self._look()
        return super().pull(tickets)

    def _look(self) -> None:
        if (self.run / status.STATUS).exists():
            self.seen.append(run_status(self.run))
        if (
            sum(
                table["phase"] == status.ROUND and len(table["doing"]["missing"]) == 1
                for table in self.seen
            )
            > 5
        ):
            raise NoQuorum("that is enough")


@pytest.fixture(scope="module", autouse=True)
def at_once() -> Iterator[None]:
    """How a run stands is written every time, not once a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatusFile.__init__, "__defaults__", (0.0, time.time))
        yield


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run in which client 2 never answers, though all three are needed, and what was seen of it
    from outside."""
    root = tmp_path_factory.mktemp("stalled")
    courier = Looking(root / "devices", root / "run", silent=[2])
    patience = Patience(poll=0.02, resend=0.2)
    with pytest.raises(NoQuorum):
        play(
            courier,
            three(),
            root / "run",
            min_clients=3,
            deadline=0.05,
            quorum=3,
            wait=60,
            patience=patience,
        )
    return root / "run", courier.seen


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("done")
    courier = Looking(root / "devices", root / "run")
    play(courier, three(2), root / "run", min_clients=3, patience=Patience(poll=0.01))
    return root / "run"


def test_a_round_that_waits_for_somebody_says_for_whom_and_since_when(
    stalled: tuple[Path, list[dict[str, Any]]],
) -> None:
    seen = stalled[1]
    waits = [
        table
        for table in seen
        if table["phase"] == status.ROUND and len(table["doing"]["missing"]) == 1
    ]
    assert waits
    first, last = waits[0], waits[-1]
    assert [c["state"] for c in last["clients"]] == ["answered", "answered", "working"]
    (missing,) = last["health"]["missing"]
    assert (
        missing["client"] == 2
        and missing["name"] == "device 2"
        and missing["node"] == 98
        and missing["attempts"] >= 1
    )
    # the same moment, however long it takes
    assert abs(missing["since"] - first["health"]["missing"][0]["since"]) < 1
    found = last["health"]
    assert found["state"] == "stalled" and found["round"] == 1
    assert (
        "2 of 3 replies after" in found["reason"]
        and "3 are needed; no reply from device 2" in found["reason"]
    )


def test_a_run_that_gave_up_says_so(stalled: tuple[Path, list[dict[str, Any]]]) -> None:
    table = run_status(stalled[0])
    assert table["phase"] == status.STOPPED and table["health"]["state"] == "stalled"
    assert table["health"]["reason"] == "that is enough"


def test_a_finished_run_is_well(done: Path) -> None:
    table = run_status(done)
    assert (
        table["health"]["state"] == "ok"
        and table["health"]["reason"] == "done: 2 rounds"
        and table["phase"] == status.DONE
    )
    assert table["totals"]["replies"] == 6 and table["round"] == table["rounds"] == 2
    assert table["tiers"]["board"] == {"expected": 2, "here": 2, "away": 0}


def test_waiting_for_clients_is_no_fault(tmp_path: Path) -> None:
    courier = Looking(tmp_path / "devices", tmp_path / "run")
    courier.workers = {100: courier.workers[100]}
    with pytest.raises(NoQuorum):
        play(
            courier,
            three(),
            tmp_path / "run",
            min_clients=3,
            wait=0.5,
            patience=Patience(poll=0.02),
        )
    found = [table["health"] for table in courier.seen if table["phase"] == status.GATHERING]
    assert (
        found
        and found[-1]["state"] == "waiting"
        and found[-1]["reason"] == "1 of 3 clients are there"
    )


def test_refusals_are_seen_while_the_run_goes_on(tmp_path: Path) -> None:
    """A node that claims another's name."""
    courier = Looking(tmp_path / "devices", tmp_path / "run")
    thief = workers_of(tmp_path / "thief", clients=1)[0]
    courier.workers[700] = thief.handle
    heard: list[str] = []
    play(
        courier,
        three(),
        tmp_path / "run",
        min_clients=3,
        patience=Patience(poll=0.01),
        watcher=Watcher(note=heard.append),
    )
    (row,) = run_status(tmp_path / "run")["refusals"]
    assert row["node"] == 700 and "belongs to another device" in row["reason"]
    assert any(note.facts["event"] == "refused" for note in heard if hasattr(note, "facts"))


def table_of(**changes: Any) -> dict[str, Any]:
    """A round of ten minutes' deadline, half a minute old, two of three replies there."""
    doing = {
        "round": 3,
        "chosen": [0, 1, 2],
        "answered": 2,
        "needed": 1,
        "seconds": 30.0,
        "silent": 20.0,
        "deadline": 600.0,
    }
    doing["missing"] = [{"client": 2, "name": "c", "node": None, "attempts": 2}]
    table = {
        "time": 1000.0,
        "phase": status.ROUND,
        "since": 970.0,
        "written": 999.0,
        "doing": doing,
        "round": 2,
        "rounds": 9,
    }
    table |= {"totals": {"typical_seconds": 10.0}, "summary": False}
    return {**table, **changes, "doing": {**doing, **changes.get("doing", {})}}


@pytest.mark.parametrize(
    ("changes", "parts", "state", "words"),
    [
        ({}, {}, "ok", "round 3 of 9: 2 of 3 replies"),
        (
            {"doing": {"silent": 70.0}},
            {},
            "stalled",
            "nobody answered for 71 s; no reply from c (away)",
        ),
        # rounds here take long
        ({"doing": {"silent": 70.0}, "totals": {"typical_seconds": 30.0}}, {}, "ok", "2 of 3"),
        # nobody knows yet
        ({"doing": {"silent": 70.0}, "totals": {"typical_seconds": None}}, {}, "ok", "2 of 3"),
        # past the deadline
        (
            {"doing": {"silent": 700.0}, "totals": {"typical_seconds": 1e4}},
            {},
            "stalled",
            "nobody answered",
        ),
        (
            {"doing": {"seconds": 700.0, "needed": 3}},
            {},
            "stalled",
            "2 of 3 replies after 701 s, 3 are needed",
        ),
        ({"written": 900.0}, {}, "stalled", "written nothing for 100 s"),
        # it computes
        ({"written": 900.0, "phase": status.MERGING}, {}, "ok", "after round 2 of 9"),
        ({"written": 10.0, "phase": status.MERGING}, {}, "stalled", "written nothing for 990 s"),
        ({}, {"trouble": "the run's process died"}, "stalled", "the run's process died"),
        ({"phase": status.DONE}, {"trouble": "the run's process died"}, "ok", "done"),
        ({"phase": None, "written": None}, {}, "waiting", "has not begun"),
        ({"phase": None, "summary": True}, {}, "ok", "done"),
    ],
)
def test_verdicts(changes: dict[str, Any], parts: dict[str, Any], state: str, words: str) -> None:
    found = judge(table_of(**changes), parts)
    assert found.state == state and words in found.reason, found


def test_many_missing_clients_are_not_all_named() -> None:
    missing = [{"client": c, "name": f"c{c}", "node": 1, "attempts": 1} for c in range(200)]
    reason = judge(table_of(doing={"silent": 99.0, "missing": missing})).reason
    assert "c9 and 190 more" in reason and len(reason) < 300


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture
def serving(done: Path) -> Iterator[HealthServer]:
    with health.telling(
        done, "127.0.0.1:0", lambda: {"trouble": "", "programs": {"proxy": {"running": False}}}
    ) as server:
        assert server is not None
        yield server


def get(
    server: HealthServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, str(answer.headers["content-type"]), body


def test_what_the_server_tells(serving: HealthServer, done: Path) -> None:
    code, kind, body = get(serving, "/health")
    assert code == 200 and kind.startswith("application/json") and json.loads(body)["state"] == "ok"
    assert json.loads(get(serving, "/status")[2])["clients"] == run_status(done)["clients"]
    assert (
        get(serving, "/")[0]
        == get(serving, "/experiment.toml")[0]
        == get(serving, "/../roster.json")[0]
        == 404
    )
    assert get(serving, "/health", "HEAD")[2] == "" and get(serving, "/health", "POST")[0] == 501
    assert serving.server_address[0] == "127.0.0.1"


def test_no_token_is_told(serving: HealthServer, done: Path) -> None:
    tokens = [row["token"] for row in json.loads((done / "roster.json").read_text())["clients"]]
    said = "".join(get(serving, path)[2] for path in ("/health", "/status", "/metrics"))
    assert len(tokens) == 3 and not any(token in said for token in tokens)


def test_a_page_that_pretends_to_be_this_machine_reads_nothing(serving: HealthServer) -> None:
    assert get(serving, "/status", Host="evil.example:8444")[0] == 403
    assert (
        get(serving, "/status", Host="localhost:8444")[0]
        == get(serving, "/status", Host="[::1]:1")[0]
        == 200
    )


def test_a_stalled_run_is_503_and_the_command_says_so(
    stalled: tuple[Path, list[dict[str, Any]]],
) -> None:
    with health.telling(stalled[0], "127.0.0.1:0") as server:
        assert server is not None
        assert get(server, "/health")[0] == 503 and get(server, "/status")[0] == 200
        made = subprocess.run(
            [sys.executable, "-m", "nestling.fleet.care.health", server.url],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert made.returncode == 1 and "that is enough" in made.stdout
    assert health.check(server.url)[0] is False  # nobody there any more


def test_before_the_run_begins_there_is_an_answer(tmp_path: Path) -> None:
    with health.telling(tmp_path / "run", "0") as server:
        assert server is not None
        code, _, body = get(server, "/health")
        assert code == 200 and json.loads(body)["state"] == "waiting"
        assert "nestling_rounds_total 0" in get(server, "/metrics")[2]
        assert health.check(server.url) == (True, "waiting: the run has not begun")


def test_damaged_files_are_an_answer_too(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("rounds = [")
    with health.telling(tmp_path, "0") as server:
        assert server is not None
        assert get(server, "/health")[0] == 500
        (tmp_path / "experiment.toml").write_text("rounds = 3")
        (tmp_path / "fleet.json").write_text("{")
        (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"rou')
        assert get(server, "/health")[0] == 200


def test_who_holds_connections_open_does_not_keep_others_out_for_long(
    serving: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health._Handler, "timeout", 0.5)
    idle = [
        socket.create_connection(("127.0.0.1", serving.server_port))
        for _ in range(health.ASKERS + 4)
    ]
    try:
        for _ in range(40):
            try:
                assert get(serving, "/health")[0] == 200
                break
            except OSError:
                threading.Event().wait(0.25)
        else:
            raise AssertionError("nobody was let in")
    finally:
        for one in idle:
            one.close()


class Tricklers:
    """Connections, as many from each of some addresses, over each of which a byte of a head comes
    now and then; one that is closed is opened again."""

    def __init__(self, port: int, count: int, addresses: int = 1) -> None:
        self.port, self.over = port, threading.Event()
        self.hosts = [f"127.0.0.{3 + k % addresses}" for k in range(count)]
        self.lines = [self.connect(host) for host in self.hosts]
        self.thread = threading.Thread(target=self.trickle, daemon=True)
        self.thread.start()

    def connect(self, host: str) -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.port), 30, (host, 0))
        line.sendall(b"GET /health HTTP/1.1\r\nX: ")
        return line

    def trickle(self) -> None:
        while not self.over.wait(0.2):
            for k, line in enumerate(self.lines):
                try:
                    line.sendall(b"x")
                except OSError:
                    line.close()
                    self.lines[k] = self.connect(self.hosts[k])

    def stop(self) -> None:
        self.over.set()
        self.thread.join(60)
        for line in self.lines:
            line.close()


@pytest.mark.parametrize("addresses", [1, 2, 3, 16])
def test_who_trickles_keeps_nobody_out(serving: HealthServer, addresses: int) -> None:
    tricklers = Tricklers(serving.server_port, 64, addresses)
    try:
        for number in range(20):
            connection = http.client.HTTPConnection(
                "127.0.0.1", serving.server_port, timeout=30, source_address=("127.0.0.2", 0)
            )
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200, number
            connection.close()
            threading.Event().wait(0.1)
    finally:
        tricklers.stop()


def test_a_request_that_does_not_end_is_ended(
    serving: HealthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PATIENCE", 0.5)
    with socket.create_connection(("127.0.0.1", serving.server_port), 60) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nX: ")
        line.settimeout(0.1)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                line.sendall(b"x")
                if line.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    raise AssertionError("it went on and on")


@pytest.mark.parametrize(
    "text", ["127.0.0.1:port", "a/b:1", "1:70000", "host", "http://127.0.0.1:1"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InputError, match="--health"):
        health.parse_health(text)


def test_addresses_and_taken_ports(tmp_path: Path) -> None:
    assert health.parse_health("9000") == ("127.0.0.1", 9000) and health.parse_health(
        "[::1]:9000"
    ) == ("::1", 9000)
    with health.telling(tmp_path, "off") as nobody:
        assert nobody is None
    with health.telling(tmp_path, "0") as first:
        assert first is not None
        with (
            pytest.raises(InputError, match="--health"),
            health.telling(tmp_path, str(first.server_port)),
        ):
            pass


def test_the_usual_port_may_be_taken_by_another_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with health.telling(tmp_path, "0") as first:
        assert first is not None
        monkeypatch.setattr(health, "PORT", first.server_port)
        with health.telling(tmp_path, str(first.server_port)) as second:
            assert second is not None and second.server_port != first.server_port
            assert get(second, "/health")[0] == 200


def test_a_device_s_worker_can_be_asked_for(tmp_path: Path) -> None:
    assert health.check_worker(tmp_path)[0] is False
    with local.serving(tmp_path / "socket", lambda letter: letter) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        assert health.check_worker(tmp_path)[0] is True
        assert local.ask(tmp_path / "socket", b"still there") == b"still there"
        server.shutdown()


# -- the text for Prometheus -----------------------------------------------------------------------

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (-?[0-9.e+-]+)')


def parsed(text: str) -> dict[str, float]:
    """The samples of a text in Prometheus' format, whose rules it must follow: families whole, each
    with its help and type first."""
    assert text.endswith("\n")
    found: dict[str, float] = {}
    family, kinds = "", dict[str, str]()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in kinds
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2] == family
            kinds[family] = line.split(" ")[3]
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            ending = ("_sum", "_count") if kinds[family] == "summary" else ("",)
            assert match[1] in [family + end for end in ending] and match[1].startswith("nestling_")
            assert kinds[family] != "counter" or family.endswith("_total")
            name = f"{match[1]}{{{match[2]}}}" if match[2] else match[1]
            assert name not in found
            found[name] = float(match[3])
    return found


def test_counts_for_prometheus(serving: HealthServer, done: Path) -> None:
    code, kind, body = get(serving, "/metrics")
    assert code == 200 and kind == "text/plain; version=0.0.4; charset=utf-8"
    found = parsed(body)
    rows = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    assert (
        found["nestling_rounds_total"]
        == found["nestling_rounds_planned"]
        == found["nestling_round_seconds_count"]
        == 2
    )
    assert found["nestling_replies_total"] == 6 and found["nestling_dropped_total"] == 0
    assert found['nestling_bytes_total{direction="up"}'] == sum(row["bytes_up"] for row in rows) > 0
    assert found['nestling_bytes_total{direction="down"}'] == rows[-1]["bytes_down_total"]
    assert found["nestling_round_seconds_sum"] == pytest.approx(sum(row["seconds"] for row in rows))
    assert (
        found['nestling_clients{tier="phone",state="here"}'] == 1
        and found['nestling_clients{tier="phone",state="away"}'] == 0
    )
    assert found['nestling_letters_total{kind="answers"}'] == 6
    assert found['nestling_score{kind="global"}'] == rows[-1]["global_score"]
    assert (
        found['nestling_health{state="ok"}'] == 1 and found['nestling_health{state="stalled"}'] == 0
    )
    assert found['nestling_program_up{program="proxy"}'] == 0


def test_names_of_tiers_cannot_break_the_text(done: Path) -> None:
    table = run_status(done)
    table["tiers"] = {'a"b\\c\nd': {"here": 1, "away": 0, "expected": 1}}
    table["scores"]["global_score"]["last"] = float("nan")
    found = parsed(metrics.exposition(table))
    assert found['nestling_clients{tier="a\\"b\\\\c\\nd",state="here"}'] == 1
    assert 'nestling_score{kind="global"}' not in found
