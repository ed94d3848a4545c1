"""A gateway: each small device behind it is one client, and the result is that of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "paho.mqtt.client", reason="paho-mqtt is not installed: pip install nestling[mqtt]"
)
pytest.importorskip(
    "cryptography", reason="cryptography is not installed: pip install nestling[fleet]"
)

from fleet_gateway import (
    NAME,
    Mosquitto,
    bits_of,
    devices_of,
    experiment,
    gateway_file,
    images,
    in_process,
    measure,
    state_of,
    wait_for,
    where,
)

from nestling import Experiment, Named
from nestling.errors import InputError
from nestling.fleet.care import certs
from nestling.fleet.node.gateway import Devices, FleetGateway, SmallDevice, read_devices
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.links import Facts, board_shape
from nestling.fleet.protocol.wire import (
    Answer,
    Failed,
    Hello,
    JobDone,
    JobOrder,
    Order,
    Parcel,
    key_of,
)
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import Live, enliven
from nestling.message import Message
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play
from nestling.runs.run import Watcher
from nestling.tiny.link.line import Lost
from nestling.tiny.link.orders import Orders
from nestling.tiny.runtime import native, toolchain
from nestling.tiny.runtime.job import Done as TinyDone
from tests.tiny.hostboard import HostBoard, folder

pytestmark = pytest.mark.skipif(
    toolchain.host_compiler() is None, reason="there is no C compiler: apt-get install gcc"
)
needs_mosquitto = pytest.mark.skipif(
    not where(), reason="mosquitto is not installed: apt-get install mosquitto"
)
ROOM = 200_000


@contextmanager
def gateway_of(home: Path, devices: Devices, links: Any = None) -> Iterator[FleetGateway]:
    made = FleetGateway(home, NAME, devices, links or devices.links(home))
    made.open()
    try:
        yield made
    finally:
        made.close()


def served(
    told: Experiment, gateway: Any, clients: int = 0
) -> tuple[Federation, list[dict[str, Any]], Live]:
    """A run all of whose clients are behind one gateway."""
    settled, federation = assemble(told)
    live = enliven(
        settled, federation, LoopCourier({5: gateway.handle}), patience=Patience(poll=0.0)
    )
    live.greeter.again = 0.0
    live.engine.open(settled.make_method(), site_of(federation))
    live.gather(clients or len(federation.world.fleet), 60.0)
    return federation, list(play(federation)), live


def by_class(told: Experiment, client: int) -> tuple[int, ...]:
    return tuple(int(n) for n in site_of(assemble(told)[1]).split.counts(client))


# -- boards and network devices --------------------------------------------------------------------


@pytest.mark.parametrize("method", ["shared-average", "heterofl", Named("fedprox", {"mu": 0.1})])
def test_boards_on_lines_are_clients(method: Any, tmp_path: Path) -> None:
    told = experiment(3, 2, method)
    flash = images(told, range(3))
    with folder() as home, ExitStack() as boards:
        lines = [
            boards.enter_context(HostBoard(home, ROOM, flash[c], str(c))).transport
            for c in range(3)
        ]
        devices = Devices(
            tuple(
                SmallDevice(f"board{c}", lines[c], client=c, counts=by_class(told, c))
                for c in range(3)
            )
        )
        with gateway_of(tmp_path, devices) as gateway:
            federation, _, live = served(told, gateway)
    assert [entry.member.name for entry in live.roster.entries] == [
        f"{NAME}/board{c}" for c in range(3)
    ]
    assert [entry.member.rows for entry in live.roster.entries] == [20] * 3
    assert state_of(federation) == state_of(in_process(told, {}))


def test_a_board_that_dies_costs_its_own_reply_and_goes_on_when_it_returns(tmp_path: Path) -> None:
    told = experiment(3, 3)
    flash = images(told, range(3))
    with folder() as home, ExitStack() as stack:
        boards = [stack.enter_context(HostBoard(home, ROOM, flash[c], str(c))) for c in range(3)]
        listed = [SmallDevice(f"board{c}", boards[c].transport, client=c) for c in range(3)]
        listed[1] = replace(listed[1], deadline=2.0)
        with gateway_of(tmp_path, Devices(tuple(listed))) as gateway:
            settled, federation = assemble(told)
            live = enliven(
                settled, federation, LoopCourier({5: gateway.handle}), patience=Patience(poll=0.0)
            )
            live.engine.open(settled.make_method(), site_of(federation))
            live.gather(3, 60.0)
            rows = play(federation)
            next(rows)
            boards[1].kill()
            assert next(rows)["missed"] == [1]
            boards[1].start()
            gateway.devices[f"{NAME}/board1"] = replace(listed[1], deadline=120.0)
            assert next(rows)["missed"] == []
    # who notices first, the gateway or the line to the board
    reasons = ("gave no answer within 2 s", "did not come back in 2 s")
    assert [
        client
        for client, failed in gateway._failed.items()
        if any(reason in failed.error for reason in reasons)
    ] == [1]
    assert state_of(federation) == state_of(in_process(told, {2: [1]}))


@needs_mosquitto
def test_thirty_devices_of_which_two_die_in_the_middle_of_a_round(tmp_path: Path) -> None:
    """Two replies a round are missed from then on, and nothing else changes."""
    told, names = experiment(30, 5), {f"d{c}": c for c in range(30)}
    broker = Mosquitto(tmp_path, list(names)).start()
    try:
        flash = {f"d{c}": blob for c, blob in images(told, range(30)).items()}
        path = gateway_file(tmp_path, broker.as_user("gateway"), names, absence=1.0, deadline=120)
        with (
            devices_of(flash, broker.as_user, {"d3": 3, "d20": 4}) as devices,
            gateway_of(tmp_path / "gw", read_devices(path)) as gateway,
        ):
            federation, rows, live = served(told, gateway)
            link = gateway.links["d0"]
            assert [device.jobs for device in devices.values()] == [
                {"d3": 3, "d20": 4}.get(name, 5) for name in devices
            ]
    finally:
        broker.stop()
    assert [row["missed"] for row in rows] == [[], [], [3], [3, 20], [3, 20]]
    assert live.engine.counts["resent"] == 0 and link.counts["refused"] == 0  # type: ignore[attr-defined]
    assert state_of(federation) == state_of(in_process(told, {3: [3], 4: [3, 20], 5: [3, 20]}))


@needs_mosquitto
@pytest.mark.minutes
def test_two_hundred_devices_for_fifty_rounds(tmp_path: Path) -> None:
    with folder() as home:
        found = measure(home, 200, 50, lambda text: None)
    assert found["replies"] == found["expected"] and found["same"]
    assert found["growth"] < 0.01 and found["step"] < 0.1


@needs_mosquitto
def test_boards_and_network_devices_side_by_side(tmp_path: Path) -> None:
    told = experiment(4, 2)
    flash = images(told, range(4))
    broker = Mosquitto(tmp_path, ["radio0", "radio1"]).start()
    try:
        with folder() as home, ExitStack() as boards:
            listed = [SmallDevice(f"radio{c}", client=c) for c in range(2)]
            for c in (2, 3):
                line = boards.enter_context(HostBoard(home, ROOM, flash[c], str(c))).transport
                listed.append(SmallDevice(f"board{c}", line, client=c))
            both = Devices(tuple(listed), mqtt=broker.as_user("gateway"))
            blobs = {f"radio{c}": flash[c] for c in range(2)}
            with devices_of(blobs, broker.as_user), gateway_of(tmp_path / "gw", both) as gateway:
                federation, _, _ = served(told, gateway)
    finally:
        broker.stop()
    assert state_of(federation) == state_of(in_process(told, {}))


@needs_mosquitto
@pytest.mark.minutes
def test_a_gateway_joins_a_server_over_flower(tmp_path: Path) -> None:
    """All of it as processes, TLS and keys on every line: the server, the gateway, the broker; and
    three devices."""
    pytest.importorskip("flwr", reason="flwr is not installed: pip install nestling[fleet]")
    from nestling.runs.checkpoint import load
    from tests.fleet.processes import Client, fleet

    told, names = experiment(3, 2), {f"d{c}": c for c in range(3)}
    broker = Mosquitto(tmp_path, list(names)).start()
    try:
        flash = {f"d{c}": blob for c, blob in images(told, range(3)).items()}
        with devices_of(flash, broker.as_user), fleet(tmp_path / "fleet") as f:
            f.root.mkdir()
            certs.issue(f.certs, hosts=["127.0.0.1"], gateways=[f"{NAME}=3"])
            f.secure = True
            server = f.start_server(told, "run")
            path = gateway_file(f.root, broker.as_user("gateway"), names)
            words = [
                "gateway",
                f"127.0.0.1:{f.port}",
                "--devices",
                str(path),
                "--certs",
                str(f.certs),
                "--name",
                NAME,
            ]
            process, log = f._start([*words, "--folder", str(f.root / "gw")], "gateway.log")
            f.started.append(Client(process, log, NAME, f.root / "gw"))
            server.wait_done()
            assert "the gateway is ready" in log.read_text()
            kept = load(server.out)
    finally:
        broker.stop()
    assert kept is not None and bits_of(kept[0]) == state_of(in_process(told, {}))


# -- what a gateway does with letters --------------------------------------------------------------


class Bench:
    """A link whose devices answer when the test says so."""

    def __init__(self, facts: Mapping[str, Facts], flash: Mapping[str, bytes]) -> None:
        self.known, self.flash = dict(facts), flash
        self.asked: list[tuple[str, Orders, Future[TinyDone]]] = []

    def open(self) -> None: ...

    def close(self) -> None: ...

    def facts(self, device: str) -> Facts | None:
        return self.known.get(device)

    def run(self, device: str, orders: Orders) -> Future[TinyDone]:
        from nestling.fleet.node.mqtt_device import job_of

        future: Future[TinyDone] = Future()
        self.asked.append((device, orders, future))
        if device != "slow":
            future.set_result(native.run_job(job_of(orders, lambda: True), self.flash[device]))
        return future


class Talk:
    """A gateway of two devices, one of which is slow, and the letters to it."""

    def __init__(self, home: Path, deadline: float = 60.0) -> None:
        self.told = experiment(3, 2)
        settled, self.federation = assemble(self.told)
        flash = dict(zip(("quick", "slow"), images(self.told, range(2)).values(), strict=True))
        facts = {name: Facts(20, (1, 8, 8), None, 1) for name in flash}
        self.link = Bench(facts, flash)
        listed = Devices((SmallDevice("quick", client=0), SmallDevice("slow", client=1)), deadline)
        self.gateway = FleetGateway(home, NAME, listed, dict.fromkeys(flash, self.link))
        live = enliven(settled, self.federation, LoopCourier({}))
        self.run, self.welcome = live.roster.run, live.greeter.welcome

    def hello(self) -> Hello:
        return Hello.from_bytes(self.gateway.handle(self.welcome))

    def order(self, round: int = 1) -> Order:
        world, jobs = self.federation.world, []
        for client, name in enumerate(("quick", "slow")):
            device = world.device(client)
            piece = self.federation.method.piece(device, round)
            message: Message = self.federation.method.send(device, piece, round)
            parcel, network, spec = Parcel.of(message), piece.reference.name, piece.spec()
            key = key_of(self.run, round, client, network, spec, parcel)
            jobs.append(JobOrder(client, f"{NAME}/{name}", key, network, spec, parcel))
        return Order(self.run, round, round - 1, jobs)

    def ask(self, order: Order) -> Answer:
        return Answer.from_bytes(self.gateway.handle(order.to_bytes()))

    def finish(self) -> None:
        """The slow device ends the job it was given last."""
        from nestling.fleet.node.mqtt_device import job_of

        _, orders, future = [one for one in self.link.asked if one[0] == "slow"][-1]
        future.set_result(native.run_job(job_of(orders, lambda: True), self.link.flash["slow"]))


def test_a_new_round_does_not_wait_for_those_who_are_late(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.hello()
    answers: list[Answer] = []
    first = threading.Thread(target=lambda: answers.append(talk.ask(talk.order(1))))
    first.start()
    wait_for(lambda: len(talk.link.asked) == 2)
    second = threading.Thread(target=lambda: answers.append(talk.ask(talk.order(2))))
    second.start()
    first.join(60)
    assert [type(one) for one in answers[0].results] == [JobDone] and answers[0].results[
        0
    ].client == 0
    wait_for(lambda: len(talk.link.asked) == 4)
    assert talk.link.asked[1][2].cancelled()  # of round 1, nobody wants it
    talk.finish()
    second.join(60)
    assert answers[1].round == 2 and [one.client for one in answers[1].results] == [0, 1]


def test_the_end_of_a_run_is_told_and_nobody_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talk = Talk(tmp_path)
    talk.hello()
    late = threading.Thread(target=lambda: talk.ask(talk.order(2)))
    late.start()
    wait_for(lambda: len(talk.link.asked) == 2)
    with caplog.at_level("INFO", "nestling.fleet"):
        assert not talk.ask(Order(talk.run, 2, 2, [])).results
    late.join(30)
    assert not late.is_alive() and "the run is over: round 2 was its last" in caplog.text


def test_whoever_asks_again_gets_the_result_of_work_under_way(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.hello()
    answers: list[Answer] = []
    first = threading.Thread(target=lambda: answers.append(talk.ask(talk.order())))
    first.start()
    wait_for(lambda: len(talk.link.asked) == 2)
    talk.hello()  # the server has started anew, and welcomes everybody
    first.join(60)
    assert [one.client for one in answers[0].results] == [0]
    talk.finish()
    again = talk.ask(talk.order())
    assert [type(one) for one in again.results] == [JobDone, JobDone]
    assert len(talk.link.asked) == 2  # nothing was done twice
    assert talk.ask(talk.order()).to_bytes() == again.to_bytes() and len(talk.link.asked) == 2


def test_a_device_has_its_time_and_is_not_waited_for_again(tmp_path: Path) -> None:
    talk = Talk(tmp_path, deadline=0.2)
    talk.hello()
    found = talk.ask(talk.order()).results
    assert isinstance(found[0], JobDone) and isinstance(found[1], Failed)
    assert found[1].error == "TimeoutError: slow gave no answer within 0 s"
    assert talk.link.asked[1][2].cancelled()
    assert talk.ask(talk.order()).results[1] == found[1] and len(talk.link.asked) == 2


def test_a_device_that_is_lost_says_why(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.hello()
    thread_answers: list[Answer] = []
    asked = threading.Thread(target=lambda: thread_answers.append(talk.ask(talk.order())))
    asked.start()
    wait_for(lambda: len(talk.link.asked) == 2)
    talk.link.asked[1][2].set_exception(Lost("slow is gone"))
    asked.join(60)
    assert [getattr(one, "error", "") for one in thread_answers[0].results] == [
        "",
        "Lost: slow is gone",
    ]


def test_devices_that_come_later_are_told_of(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    kept = talk.link.known.pop("slow")
    assert [member.name for member in talk.hello().members] == [f"{NAME}/quick"]
    talk.link.known["slow"] = kept
    assert talk.ask(talk.order()).unknown and not talk.link.asked
    assert [(member.name, member.rows) for member in talk.hello().members] == [
        (f"{NAME}/quick", 20),
        (f"{NAME}/slow", 20),
    ]
    talk.link.known["slow"] = replace(kept, rows=19)  # and one that has other data now
    assert talk.ask(talk.order()).unknown
    assert talk.hello().members[1].rows == 19


def test_a_server_that_waits_hears_of_devices_that_come_to_a_gateway(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    kept = talk.link.known.pop("slow")
    settled, federation = assemble(talk.told)
    notes: list[str] = []
    live = enliven(
        settled,
        federation,
        LoopCourier({5: talk.gateway.handle}),
        watcher=Watcher(note=notes.append),
    )
    live.greeter.again = 0.0
    assert live.greeter.wait(2, 0.0) == 1
    threading.Timer(0.3, lambda: talk.link.known.update(slow=kept)).start()
    assert live.greeter.wait(2, 60.0, poll=0.01) == 2
    assert sum("is there" in note for note in notes) == 2  # each is told of once


def test_data_of_another_form_are_refused(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.link.known["slow"] = Facts(20, (3, 8, 8), None, 1)
    assert f"{NAME}/slow has samples of (3, 8, 8)" in talk.hello().error


def test_a_method_that_looks_at_rows_is_refused_by_name(tmp_path: Path) -> None:
    told = experiment(1, 1, "fedproto")
    link = Bench({"a": Facts(20, (1, 8, 8), None, 1)}, {"a": images(told, [0])[0]})
    gateway = FleetGateway(tmp_path, NAME, Devices((SmallDevice("a"),)), {"a": link})
    _, rows, _ = served(told, gateway)
    assert (
        rows[0]["missed"] == [0]
        and "those of a small device never leave it" in gateway._failed[0].error
    )


def test_rows_by_class_are_never_invented(tmp_path: Path) -> None:
    told = experiment(1, 1, "heterofl")
    flash = images(told, [0])[0]
    link = Bench({"a": Facts(20, (1, 8, 8), None, 1)}, {"a": flash})
    gateway = FleetGateway(tmp_path / "1", NAME, Devices((SmallDevice("a"),)), {"a": link})
    assert (
        served(told, gateway)[1][0]["missed"] == [0]
        and "devices.counts" in gateway._failed[0].error
    )
    link.known["a"] = replace(link.known["a"], counts=by_class(told, 0))
    federation, rows, _ = served(
        told, FleetGateway(tmp_path / "2", NAME, Devices((SmallDevice("a"),)), {"a": link})
    )
    assert rows[0]["missed"] == [] and state_of(federation) == state_of(in_process(told, {}))


# -- its file --------------------------------------------------------------------------------------


def test_a_file_of_devices_is_read(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(
        'deadline = 30\n[mqtt]\nhost = "broker.example"\npassword_file = "secret"\nca = "ca.crt"\n'
        '[[devices]]\nname = "kitchen"\ndevice = "esp32"\nclient = 4\n'
        '[[devices]]\nname = "cellar"\nlink = "serial:/dev/ttyUSB0:115200"\ncounts = [1, 2]\n'
    )
    found = read_devices(path)
    assert found.deadline == 30.0 and found.mqtt is not None
    assert (found.mqtt.user, found.mqtt.port, found.mqtt.tls) == ("gateway", 8883, True)
    assert (found.mqtt.password_file, found.mqtt.ca) == (tmp_path / "secret", tmp_path / "ca.crt")
    assert found.devices == (
        SmallDevice("kitchen", "mqtt", "esp32", 4),
        SmallDevice("cellar", "serial:/dev/ttyUSB0:115200", counts=(1, 2)),
    )
    assert type(found.links(tmp_path)["cellar"]) is not type(found.links(tmp_path)["kitchen"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no devices"),
        ("[[devices]]\n", "is not a name"),
        ('[[devices]]\nname = "a/b"\n', "is not a name"),
        ('[[devices]]\nname = "a"\n[[devices]]\nname = "a"\n', "two devices of one name"),
        ('[[devices]]\nname = "a"\nlink = "carrier pigeon"\n', "no link to a device"),
        ('[[devices]]\nname = "a"\nlnk = "mqtt"\n', "devices\\[0\\].lnk"),
        ('[[devices]]\nname = "a"\nclient = "4"\n', "devices\\[0\\].client"),
        ('[[devices]]\nname = "a"\ncounts = [-1]\n', "rows by class"),
        ('deadline = 0\n[[devices]]\nname = "a"\n', "deadline"),
        ('[[devices]]\nname = "a"\n[mqtt]\nhost = "h"\n', "password_file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=reason):
        read_devices(path)


def test_network_devices_need_a_broker(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no broker"):
        Devices((SmallDevice("a"),)).links(tmp_path)


def test_the_form_of_samples() -> None:
    assert [board_shape(shape) for shape in ((9,), (3, 50), (1, 8, 8))] == [
        (9, 1, 1),
        (3, 1, 50),
        (1, 8, 8),
    ]
    with pytest.raises(InputError):
        board_shape((1, 2, 3, 4))
