"""Devices behind a real broker, with TLS, a password each, and topics of their own."""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "paho.mqtt.client", reason="paho-mqtt is not installed: pip install nestling[mqtt]"
)
pytest.importorskip(
    "cryptography", reason="cryptography is not installed: pip install nestling[fleet]"
)

from fleet_gateway import Mortal, Mosquitto, devices_of, wait_for, where

from nestling.errors import InputError
from nestling.fleet.care import certs
from nestling.fleet.node.broker import Broker, hashed, topic, write_broker
from nestling.fleet.node.mqtt import MqttDevices
from nestling.fleet.protocol.packets import PART, RESULT, WINDOW, Packet
from nestling.tiny.link import bundle
from nestling.tiny.link.line import Lost
from nestling.tiny.link.orders import Orders, orders_of
from nestling.tiny.runtime import native, toolchain
from nestling.tiny.runtime.job import Job
from tests.tiny.hostboard import assert_same, client_data, job

pytestmark = [
    pytest.mark.skipif(not where(), reason="mosquitto is not installed: apt-get install mosquitto"),
    pytest.mark.skipif(
        toolchain.host_compiler() is None, reason="there is no C compiler: apt-get install gcc"
    ),
]
SECONDS = 120.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    made = Mosquitto(tmp_path_factory.mktemp("broker"), ["a", "b", "c"]).start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def gateway(broker: Mosquitto) -> Iterator[MqttDevices]:
    made = MqttDevices(broker.as_user("gateway"), ["a", "b", "c"], absence=1.0)
    made.open()
    try:
        yield made
    finally:
        made.close()


def large() -> Job:
    """A job that does not go into one window of packets, either way."""
    found = job(width=60, shifts=True, mask=lambda p, r: np.ones(p.trained, bool))
    assert found.weights.nbytes > WINDOW * PART
    return found


def by_hand(broker: Broker, heard: list[tuple[str, bytes]], *topics: str) -> Any:
    """A client that is nobody's device; what it hears goes into a list."""
    client, ready = broker.client(), threading.Event()
    granted: list[Any] = []
    client.on_connect = lambda c, d, f, reason, p: (
        c.subscribe([(t, 1) for t in topics]) if topics else ready.set()
    )
    client.on_subscribe = lambda c, d, m, codes, p: (granted.extend(codes), ready.set())
    client.on_message = lambda c, d, message: heard.append((message.topic, message.payload))
    client.loop_start()
    assert ready.wait(SECONDS)
    return client


# -- jobs ------------------------------------------------------------------------------------------


def test_a_device_does_jobs_to_the_bit(broker: Mosquitto, gateway: MqttDevices) -> None:
    blobs = {name: client_data(seed) for seed, name in enumerate("ab")}
    with devices_of(blobs, broker.as_user):
        wait_for(lambda: gateway.facts("a") and gateway.facts("b"))
        jobs = [
            job(seed=1),
            job(seed=2, present=lambda p, r: np.array([1, 0, 1, 1, 0], np.float32)),
            large(),
        ]
        for told in jobs:
            futures = {name: gateway.run(name, orders_of(told)) for name in blobs}
            for name, blob in blobs.items():
                assert_same(futures[name].result(SECONDS), native.run_job(told, blob))
        facts = gateway.facts("a")
    assert (
        facts is not None
        and facts.rows == 40
        and facts.shape == (1, 8, 8)
        and sum(facts.counts or ()) == 40
    )
    assert gateway.counts["refused"] == 0


def test_a_new_job_takes_the_place_of_an_old_one(broker: Mosquitto, gateway: MqttDevices) -> None:
    blob, old, new = client_data(), orders_of(large()), job(seed=3)
    with devices_of({"a": blob}, broker.as_user):
        wait_for(lambda: gateway.facts("a"))
        first = gateway.run("a", old)
        second = gateway.run("a", orders_of(new))
        assert_same(second.result(SECONDS), native.run_job(new, blob))
        assert first.cancelled()


def test_a_job_that_comes_twice_is_done_once(broker: Mosquitto) -> None:
    blob, told = client_data(), orders_of(job())
    with devices_of({"a": blob}, broker.as_user) as devices:
        for _ in range(2):  # the second gateway knows nothing of the first
            gateway = MqttDevices(broker.as_user("gateway"), ["a"])
            gateway.open()
            try:
                wait_for(lambda: gateway.facts("a"))  # noqa: B023
                assert_same(gateway.run("a", told).result(SECONDS), native.run_job(job(), blob))
            finally:
                gateway.close()
        assert devices["a"].jobs == 1


def test_a_job_outlives_a_restart_of_the_broker(broker: Mosquitto, gateway: MqttDevices) -> None:
    blob, told = client_data(), large()
    goes_on = threading.Event()

    class Slow(Mortal):
        def compute(self, orders: Orders, wanted: Any) -> Any:
            goes_on.wait(SECONDS)
            return super().compute(orders, wanted)

    device = Slow("a", blob, broker.as_user("a"))
    device.start()
    try:
        wait_for(lambda: gateway.facts("a"))
        gateway.absence = SECONDS
        future = gateway.run("a", orders_of(told))
        wait_for(lambda: device.jobs)
        broker.stop()
        goes_on.set()
        broker.start()
        ended = threading.Event()
        threading.Thread(
            target=lambda: [device.tick() for _ in iter(lambda: ended.wait(0.2), True)], daemon=True
        ).start()
        try:
            assert_same(future.result(SECONDS), native.run_job(told, blob))
        finally:
            ended.set()
    finally:
        device.die()


def test_a_device_says_why_it_cannot(broker: Mosquitto, gateway: MqttDevices) -> None:
    told = orders_of(job())
    with devices_of({"a": client_data()}, broker.as_user) as devices:
        devices["a"].ram = len(told.descriptor) + told.header.arena - 1
        wait_for(lambda: gateway.facts("a"))
        with pytest.raises(InputError, match=r"a: the job needs \d+ bytes of RAM"):
            gateway.run("a", told).result(SECONDS)


def test_a_device_that_dies_is_noticed_and_costs_its_own_job_only(
    broker: Mosquitto, gateway: MqttDevices
) -> None:
    blobs, told = {"a": client_data(1), "b": client_data(2)}, job()
    with devices_of(blobs, broker.as_user, {"a": 1}):
        wait_for(lambda: gateway.facts("a") and gateway.facts("b"))
        lost, kept = gateway.run("a", orders_of(told)), gateway.run("b", orders_of(told))
        with pytest.raises(Lost, match="a is gone"):
            lost.result(SECONDS)
        assert_same(kept.result(SECONDS), native.run_job(told, blobs["b"]))


def test_hostile_packets_are_refused_and_others_served(
    broker: Mosquitto, gateway: MqttDevices
) -> None:
    blob, told = client_data(), job()
    orders = orders_of(told)
    bad = by_hand(broker.as_user("b"), [])
    try:
        bad.publish(
            topic("b", "state"), bundle.pack({"rows": 3, "shape": [1, 8, 8], "crc": 0}, {}), qos=1
        )
        wait_for(lambda: gateway.facts("b"))
        future = gateway.run("b", orders)
        wrong = bundle.pack({"job": "0" * 64, "loss": 1.0, "steps": 1, "samples": 1}, {})
        for payload in (
            b"",
            b"garbage",
            bytes(100_000)[:60_000],
            # more than the job can give
            Packet(RESULT, orders.number, 0, 60000, bytes(PART)).to_bytes(),
            Packet(RESULT, orders.number + 1, 0, 1, b"x").to_bytes(),  # of another job
            Packet(RESULT, orders.number, 0, 1, wrong).to_bytes(),
        ):
            bad.publish(topic("b", "up"), payload, qos=1)
        with pytest.raises(InputError, match="a result of another job"):
            future.result(SECONDS)
        assert gateway.counts["refused"] == 5 and gateway.counts["late"] == 1
        for state in (
            b"{}",
            bundle.pack({"rows": 3, "shape": [1, 8, 8], "crc": 0, "counts": [1, 1]}, {}),
            bytes(66_000),
        ):
            bad.publish(topic("b", "state"), state, qos=1)
        wait_for(lambda: gateway.counts["refused"] == 8)
        with devices_of({"a": blob}, broker.as_user):
            wait_for(lambda: gateway.facts("a"))
            assert_same(gateway.run("a", orders).result(SECONDS), native.run_job(told, blob))
    finally:
        bad.publish(topic("b", "state"), b"", qos=1, retain=True).wait_for_publish(SECONDS)
        bad.disconnect()
        bad.loop_stop()


@pytest.mark.parametrize(
    ("facts", "weights", "reason"),
    [
        ({"steps": 11}, None, "11 steps"),
        ({"loss": float("nan")}, None, "a loss of nan"),
        ({"loss": "low"}, None, "without loss"),
        ({}, np.zeros(3, np.float32), "weights of shape"),
        ({}, "doubles", "float64"),
        ({"error": "no room"}, None, "no room"),
    ],
)
def test_a_result_that_cannot_be_is_refused(
    facts: dict[str, Any], weights: Any, reason: str
) -> None:
    from nestling.fleet.node.mqtt import _result

    orders = orders_of(job())
    right = np.zeros(orders.header.params, np.float32)
    sent = (
        right
        if weights is None
        else right.astype(np.float64)
        if isinstance(weights, str)
        else weights
    )
    told = {
        "job": orders.digest,
        "loss": 1.0,
        "steps": len(orders.sizes),
        "samples": len(orders.rows),
    }
    assert _result(bundle.pack(told, {"weights": right}), orders).steps == len(orders.sizes)
    with pytest.raises(InputError, match=reason):
        _result(bundle.pack({**told, **facts}, {"weights": sent}), orders)


# -- who may do what -------------------------------------------------------------------------------


def test_a_device_reaches_its_own_topics_only(broker: Mosquitto) -> None:
    for_all: list[tuple[str, bytes]] = []
    for_a: list[tuple[str, bytes]] = []
    mine = [topic("a", "down")]
    others = [
        topic("b", "down"),
        "nestling/+/down",
        "nestling/#",
        "#",
        topic("b", "up"),
        topic("a", "up"),
    ]
    overseer = by_hand(broker.as_user("gateway"), for_all, "nestling/+/up", "nestling/+/state")
    spy = by_hand(broker.as_user("a"), for_a, *mine, *others)
    try:
        for device in "ab":
            overseer.publish(
                topic(device, "down"), f"for {device}".encode(), qos=1
            ).wait_for_publish(SECONDS)
        for name in (
            topic("b", "up"),
            topic("b", "state"),
            topic("b", "down"),
            topic("a", "down"),
            "elsewhere",
            topic("a", "up"),
        ):
            # the broker takes it, and drops what is not allowed
            spy.publish(name, b"from a", qos=1).wait_for_publish(SECONDS)
        wait_for(lambda: for_all)
        overseer.publish(topic("a", "down"), b"last", qos=1).wait_for_publish(SECONDS)
        wait_for(lambda: (topic("a", "down"), b"last") in for_a)
        assert for_all == [(topic("a", "up"), b"from a")]
        # It may have subscribed to several patterns that hold its own topic, and hears it for each.
        assert set(for_a) == {(topic("a", "down"), b"for a"), (topic("a", "down"), b"last")}
    finally:
        for client in (overseer, spy):
            client.disconnect()
            client.loop_stop()


@pytest.mark.parametrize("bound", [True, False], ids=["our broker", "ids are free for all"])
def test_nobody_throws_the_gateway_or_a_device_off_by_its_id(bound: bool, tmp_path: Path) -> None:
    """A device with a good password of its own takes others' ids, and a stranger their names."""
    broker = Mosquitto(tmp_path, ["a", "b"])
    if not bound:
        lines = broker.config.read_text().splitlines(keepends=True)
        broker.config.write_text("".join(line for line in lines if "clientid" not in line))
    broker.start()
    wrong = tmp_path / "guess"
    wrong.write_text("guess")
    wrong.chmod(0o600)
    gateway, thrown_off = MqttDevices(broker.as_user("gateway"), ["a"]), list[Any]()
    gateway.open()
    try:
        with devices_of({"a": client_data()}, broker.as_user) as devices:
            wait_for(lambda: gateway.facts("a"))
            for client in (gateway._client, devices["a"]._client) if bound else (gateway._client,):
                client.on_disconnect = lambda c, *_: thrown_off.append(c)
            for id in ("gateway", "a") if bound else ("gateway",):
                taker = broker.as_user("b").client(id=id)
                answers: list[Any] = []
                taker.on_connect = lambda c, d, f, reason, p, to=answers: to.append(reason)
                taker.loop_start()
                wait_for(lambda to=answers: to)
                assert not answers[0].is_failure
                taker.disconnect()
                taker.loop_stop()
                stranger = replace(broker.as_user(id), password_file=wrong).client()
                stranger.on_connect = lambda c, d, f, reason, p, to=answers: to.append(reason)
                stranger.loop_start()
                wait_for(lambda to=answers: len(to) > 1)
                assert answers[1].is_failure
                stranger.loop_stop()
            assert_same(
                gateway.run("a", orders_of(job())).result(SECONDS),
                native.run_job(job(), client_data()),
            )
            assert not thrown_off
            gateway._client.on_disconnect = devices["a"]._client.on_disconnect = None
    finally:
        gateway.close()
        broker.stop()


def test_a_wrong_password_is_refused(broker: Mosquitto, tmp_path: Path) -> None:
    wrong = tmp_path / "secret"
    wrong.write_text("guess")
    wrong.chmod(0o600)
    with pytest.raises(InputError, match="refuses 'gateway'"):
        MqttDevices(replace(broker.as_user("gateway"), password_file=wrong), ["a"]).open()
    (tmp_path / "blob").write_bytes(client_data())
    words = [
        "--broker",
        f"127.0.0.1:{broker.port}",
        "--name",
        "a",
        "--ca",
        str(broker.ca),
        "--data",
        str(tmp_path / "blob"),
    ]
    command = [
        sys.executable,
        "-m",
        "nestling.fleet.node.mqtt_device",
        *words,
        "--password-file",
        str(wrong),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 2 and "the broker refuses it" in ended.stderr
    assert "guess" not in ended.stderr + broker.log()


def test_a_device_as_a_process(broker: Mosquitto, gateway: MqttDevices, tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    np.savez(
        tmp_path / "rows.npz",
        x=source.standard_normal((40, 1, 8, 8)).astype(np.float32),
        y=source.integers(0, 5, 40),
    )
    words = [
        "--broker",
        f"127.0.0.1:{broker.port}",
        "--name",
        "c",
        "--ca",
        str(broker.ca),
        "--data",
        str(tmp_path / "rows.npz"),
    ]
    secret = str(broker.as_user("c").password_file)
    device = subprocess.Popen(
        [sys.executable, "-m", "nestling.fleet.node.mqtt_device", *words, "--password-file", secret]
    )
    try:
        wait_for(lambda: gateway.facts("c"))
        assert_same(
            gateway.run("c", orders_of(job())).result(SECONDS), native.run_job(job(), client_data())
        )
    finally:
        device.terminate()
        assert device.wait(SECONDS) == 0
    wait_for(lambda: gateway._desks["c"].away)  # it has taken leave


def test_without_tls_or_another_authority_nothing_is_said(
    broker: Mosquitto, tmp_path: Path
) -> None:
    certs.issue(tmp_path / "other", hosts=["127.0.0.1"])
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger = replace(
            broker.as_user("a"), ca=tmp_path / "other" / "server" / "ca.crt"
        ).client()
        stranger.reconnect()
    plain = replace(broker.as_user("a"), tls=False).client()
    answers: list[Any] = []
    plain.on_connect = lambda c, d, f, reason, p: answers.append(reason)
    plain.reconnect()
    for _ in range(5):
        plain.loop(0.2)
    assert not answers
    with pytest.raises(InputError, match="without TLS"):
        replace(broker.as_user("a"), tls=False, host="192.0.2.1").client()


def test_the_brokers_files_are_private_and_hold_no_password(broker: Mosquitto) -> None:
    files = [path for path in (broker.folder / "broker").rglob("*") if path.is_file()]
    assert len(files) == 3 + 4 and all(path.stat().st_mode & 0o077 == 0 for path in files)
    for name in ("a", "gateway"):
        secret = broker.as_user(name).password_file.read_text()
        assert all(secret not in p.read_text() for p in files if p.parent.name != "secrets")
    before = broker.as_user("a").password_file.read_text()
    write_broker(
        broker.folder / "broker",
        ["a", "b", "c"],
        certs.server_files(broker.folder / "keys"),
        port=broker.port,
    )
    assert broker.as_user("a").password_file.read_text() == before
    assert hashed("x") != hashed("x")
    with pytest.raises(InputError, match="is not a name"):
        write_broker(broker.folder / "other", ["a/b"], certs.server_files(broker.folder / "keys"))
    with pytest.raises(InputError, match="gateway"):
        write_broker(
            broker.folder / "other", ["gateway"], certs.server_files(broker.folder / "keys")
        )


def test_a_password_that_others_can_read_is_refused(broker: Mosquitto, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0o644)
    with pytest.raises(InputError, match="can be read by others"):
        replace(broker.as_user("a"), password_file=path).client()
