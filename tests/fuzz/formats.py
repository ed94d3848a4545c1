"""What Nestling reads from others or from a disk, with good samples, a reader and what
refuses: the one table that the fuzzing tests and `benchmarks/fuzz.py` go through."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import struct
import tempfile
import wave
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import h11
import numpy as np
import tomli_w
import torch
from PIL import Image
from torch import nn

from nestling.data import cifar, idx, load, npz
from nestling.devices import read_fleet
from nestling.errors import InputError
from nestling.experiment import Experiment
from nestling.export import manifest
from nestling.files import SUM, parse_toml, sealed, summed
from nestling.fleet.care.audit import (
    ACCEPTED,
    CLIPPED,
    MERGED,
    RETURNED,
    STARTED,
    Audit,
    BrokenChain,
    audit,
)
from nestling.fleet.node import mqtt, mqtt_device, own_data
from nestling.fleet.protocol import packets, wire
from nestling.fleet.server import http1
from nestling.fleet.server.roster import Roster
from nestling.message import Message
from nestling.named_code import only
from nestling.report.compare import compare
from nestling.report.folder import read_run
from nestling.report.page import write_report
from nestling.runfiles import AUDIT
from nestling.runs import checkpoint
from nestling.runs.coverage import Coverage
from nestling.runs.federation import Totals
from nestling.runs.folder import RunFolder
from nestling.runs.sweep import Sweep, _write_head, read_sweep
from nestling.store import ClientStore
from nestling.tiny.link import bundle, frames, gateway
from nestling.tiny.link.journal import JournalEntry
from nestling.tiny.link.orders import orders_from, orders_of
from nestling.tiny.link.session import State
from nestling.tiny.runtime.job import Done
from nestling.views import Reference, prefix
from nestling.world import Piece
from tests.data.conftest import cifar_bytes, idx_bytes
from tests.fleet import test_roster, test_wire
from tests.fuzz.mutate import MOST, bent, bent_tree, text_of
from tests.report.made_up_run import write_run
from tests.small import small
from tests.test_message import sample as message
from tests.tiny.test_link_fuzz import rich_job

Remake = Callable[[Random, bytes], bytes]


@dataclass(frozen=True, eq=False)
class Format:
    """One kind of input. `read` takes the bytes and uses what it was given; whatever it raises that
    is not in `refuses` is a fault. `remake` changes what is inside and leaves lengths and checksums
    right, so that the change gets past them."""

    samples: tuple[bytes, ...]
    read: Callable[[bytes], object]
    remake: Remake | None = None
    refuses: tuple[type[Exception], ...] = (InputError,)

    def made(self, draw: Random) -> bytes:
        """A good sample made wrong."""
        data = draw.choice(self.samples)
        if self.remake is None or draw.random() < 0.4:
            return bent(draw, data, draw.choice(self.samples))
        try:
            return self.remake(draw, data)
        except UnicodeEncodeError:  # a half character, where the form has no way to say it
            return bent(draw, data, draw.choice(self.samples))


# -- what travels ----------------------------------------------------------------------------------


def _message() -> Message:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return message()


def _read_message(data: bytes) -> None:
    found = Message.from_bytes(data)
    assert isinstance(found.facts, dict)
    Message.from_bytes(found.to_bytes())  # a message can be sent on


def _sample(found: Message) -> bytes:
    """A message's bytes, with its header in one order: the format's own writer has none."""
    head, body = _opened_message(found.to_bytes())
    return _closed_message(json.dumps(head, sort_keys=True).encode(), body)


def _opened_message(data: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _closed_message(text: bytes, body: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + body


def _remade_message(draw: Random, data: bytes) -> bytes:
    head, body = _opened_message(data)
    if draw.random() < 0.6:  # the metadata are texts in JSON of their own
        name = draw.choice(list(head["__metadata__"]))
        tree = bent_tree(draw, json.loads(head["__metadata__"][name]))
        head["__metadata__"][name] = text_of(tree).decode()
    else:
        head = bent_tree(draw, head)
    return _closed_message(text_of(head), body)


def _read_wire(data: bytes) -> None:
    kinds = {
        "welcome": wire.Welcome,
        "hello": wire.Hello,
        "order": wire.Order,
        "answer": wire.Answer,
    }
    found = kinds[wire.kind_of(data)].from_bytes(data)
    found.to_bytes()
    if isinstance(found, wire.Welcome) and found.public is not None:
        found.public.open()
    for job in found.jobs if isinstance(found, wire.Order) else ():
        wire.key_of(found.run, found.round, job.client, job.network, job.spec, job.parcel)
        job.parcel.open()
    for result in found.results if isinstance(found, wire.Answer) else ():
        if isinstance(result, wire.JobDone):
            result.parcel.open()


def _remade_wire(draw: Random, data: bytes) -> bytes:
    head, body = opened_letter(data)
    return closed_letter(data, text_of(bent_tree(draw, head)), body)


def opened_letter(data: bytes) -> tuple[Any, bytes]:
    """The header of a letter, and the bytes of its tensors."""
    end = 10 + int.from_bytes(data[6:10], "little")
    return json.loads(data[10:end]), data[end:-4]


def closed_letter(data: bytes, text: bytes, body: bytes) -> bytes:
    """A letter with another header and other tensors, whose checksum is right."""
    letter = data[:6] + struct.pack("<I", len(text)) + text + body
    return letter + struct.pack("<I", zlib.crc32(letter))


def _wire_samples() -> tuple[bytes, ...]:
    public = wire.Parcel.of(Message({"public": {"x": torch.ones(2, 1, 4, 4)}}))
    names = ("one", "two", "three")
    welcome = wire.Welcome(test_wire.RUN, small().to_toml(), (1, 4, 4), 3, names, 60, public)
    members = (wire.Member("kitchen", 1, "esp32", 1, 1, 0.5, 3, (1, 2)), wire.Member("cellar"))
    hello = wire.Hello(test_wire.RUN, test_wire.KEY, members)
    letters = [test_wire.order("int8"), test_wire.order("fp16"), test_wire.answer(), hello, welcome]
    return tuple(letter.to_bytes() for letter in letters)


def _read_packet(data: bytes) -> None:
    packet = packets.Packet.from_bytes(data)
    sender = packets.Sender(packets.JOB, packet.job, b"x" * 3000)
    if packet.kind == packets.ACK:
        sender.acknowledge(packet, 1.0)
        sender.due(2.0)
    else:
        receiver = packets.Receiver(packet.job, packet.count, MOST)
        receiver.take(packet)
        receiver.data()


def _remade_packet(draw: Random, data: bytes) -> bytes:
    head, payload = bytearray(data[:12]), data[16:][: draw.choice((0, 1, 5, 1024))]
    for _ in range(draw.randrange(3)):
        head[draw.choice((0, 1, 2, 3, 4, 5, 8))] = draw.choice((0, 1, 2, 3, 255))
    head[6:8] = struct.pack("<H", len(payload))
    return bytes(head) + struct.pack("<I", zlib.crc32(head + payload)) + payload


def _read_frame(data: bytes) -> None:
    frames.decode(data.strip(b"\0"))
    reader = frames.Reader()
    for place in range(0, len(data), 100):
        reader.feed(data[place : place + 100])
        assert len(reader._rest) < 1000


def _remade_bundle(draw: Random, data: bytes) -> bytes:
    """Facts, types or shapes changed, or the bytes of an array; the checksum is right."""
    length = int.from_bytes(data[:4], "little")
    head, body = data[4 : 4 + length], data[4 + length : -4]
    if draw.random() < 0.7:
        head = text_of(bent_tree(draw, json.loads(head)))
    else:
        body = bent(draw, body, body)
    raw = struct.pack("<I", len(head)) + head + body
    return raw + struct.pack("<I", zlib.crc32(raw))


def _remade_orders(draw: Random, data: bytes) -> bytes:
    if draw.random() < 0.5:
        return _remade_bundle(draw, data)
    facts, arrays = bundle.unpack(data)
    plan = bytearray(arrays["descriptor"].tobytes())
    for _ in range(draw.randrange(1, 4)):
        plan[draw.randrange(16, len(plan))] = draw.choice((0, 1, 2, 64, 255))
    plan[12:16] = struct.pack("<I", zlib.crc32(plan[16:]))
    return bundle.pack(facts, {**arrays, "descriptor": np.frombuffer(plan, np.uint8)})


def _read_orders(data: bytes) -> None:
    orders = orders_from(bundle.unpack(data)[1])
    assert len(orders.starts) == len(orders.sizes) + 1 and orders.number
    assert len(orders.blocks) == 3
    list(mqtt_device.job_of(orders, lambda: True).steps)


@cache
def _orders() -> Any:
    return orders_of(rich_job())


def _result() -> bytes:
    orders = _orders()
    told = {"job": orders.digest, "loss": 0.5}
    told |= {"steps": len(orders.sizes), "samples": len(orders.rows)}
    return bundle.pack(told, {"weights": np.zeros(orders.header.params, np.float32)})


def _state() -> bytes:
    told = {"rows": 5, "shape": [1, 8, 8], "counts": [2, 3], "crc": 7, "ram": 0, "boot": "a"}
    return bundle.pack(told, {})


HEADS = (
    b"POST /api HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nX-Key: a b\r\n\r\nhello",
    b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
)


def _read_head(data: bytes) -> None:
    asyncio.run(_spoken(data, h11.CLIENT if data.startswith(b"HTTP") else h11.SERVER))


async def _spoken(data: bytes, role: Any) -> None:
    reader = asyncio.StreamReader(limit=http1.HEAD_LIMIT)
    reader.feed_data(data)
    reader.feed_eof()
    line = http1.HttpLine(reader, None, role)  # type: ignore[arg-type]
    if role is h11.CLIENT:
        line.http.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
        line.http.send(h11.EndOfMessage())
    head = await line.head(5.0)
    if head is not None:
        http1.headers_of(head)
        async for _ in line.body():
            pass


# -- what lies on a disk ---------------------------------------------------------------------------


@cache
def home() -> Path:
    """A folder in memory where the machine has one: what is tried need not survive."""
    memory = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="fuzz-")
    _KEEP.append(made)
    return Path(made.name)


_KEEP: list[Any] = []


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """Reads bytes as the file of that name."""

    def reads(data: bytes) -> None:
        path = home() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        read(path)

    return reads


def _made(write: Callable[[Path], object], name: str) -> bytes:
    """The bytes of the file that `write` makes in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return (Path(folder) / name).read_bytes()


def _checkpoint() -> bytes:
    state = {"method": {"a": torch.ones(3, 2)}, "kept": {"b": torch.ones(2)}}
    totals = Totals(3, 10, 20, coverage=_counted().told())
    return sealed(_sample(Message(state, {"totals": asdict(totals)})))


def _remade_sealed(draw: Random, data: bytes) -> bytes:
    return sealed(_remade_message(draw, data[32:]))


def _read_checkpoint(path: Path) -> None:
    found = checkpoint.load(path.parent)
    assert found is not None
    assert all(type(getattr(found[1], n)) is type(v) for n, v in Totals().__dict__.items())
    counted = Coverage()
    counted.restore(found[1].coverage, {"main": _reference()})
    counted.add([Piece(_reference(), _reference().full)])
    json.dumps([counted.told(), counted.page(3)])


def _read_store(path: Path) -> None:
    store = ClientStore(path.parent)
    store.resume(2)
    store.get(3)


def _remade_json(draw: Random, data: bytes) -> bytes:
    return text_of(bent_tree(draw, json.loads(data)))


def _remade_summed(draw: Random, data: bytes) -> bytes:
    """The table changed; its sum is right."""
    table = bent_tree(draw, {k: v for k, v in json.loads(data).items() if k != SUM})
    return summed(table).encode() if isinstance(table, dict) else text_of(table)


def _remade_lines(draw: Random, data: bytes) -> bytes:
    lines = data.splitlines()
    lines[place] = _remade_json(draw, lines[place := draw.randrange(len(lines))])
    return b"\n".join(lines) + draw.choice((b"", b"\n"))


def _read_log(path: Path) -> None:
    folder = RunFolder(path.parent)
    folder.start(2)
    folder.metrics()
    folder.close()


def _journal(folder: Path, digest: str = "ab" * 32) -> JournalEntry:
    return JournalEntry(folder, "b", digest, 5)


def _write_journal(folder: Path, finished: bool) -> None:
    entry, weights = _journal(folder), np.ones(4, np.float32)
    entry.begin(State(2, weights, weights, 0.5))
    entry.step(3, 0.25)
    if finished:
        entry.finish(Done(weights, 0.5, 3, 12))


def _read_journal(path: Path) -> None:
    found = _journal(path.parent).find()
    if found.done is not None:
        assert type(found.done.steps) is int and type(found.done.samples) is int
        assert type(found.done.loss) is float and found.done.weights.dtype == np.float32
    if found.state is not None:
        assert type(found.state.step) is int and found.state.weights.dtype == np.float32


def _write_roster(folder: Path) -> None:
    roster = Roster(test_roster.fleet(), folder / "roster.json", "ab" * 8)
    roster.admit(7, test_roster.OURS, wire.Member("kitchen", device="esp32", rows=3, counts=(1, 2)))
    roster.count(0, 3)
    for entry in roster.entries:
        entry.seen = 1e9
    roster.save()


def _audit() -> bytes:
    """A log of one round, as a server writes it."""

    def write(folder: Path) -> None:
        log = Audit(folder / AUDIT)
        log.add(STARTED, round=0, state="ab", experiment="cd", cut=0)
        log.add("joined", client=0, name="kitchen")
        log.add(ACCEPTED, round=1, client=0, name="kitchen", rows=40, counts_as=20, reply="ef")
        log.add("refused", round=1, client=1, name="attic", reason="too large")
        log.add(CLIPPED, round=1, client=0, name="kitchen", reason="far")
        log.add(MERGED, round=1, state="01", accepted=1, refused=1)
        log.add(RETURNED, round=1, state="ab")

    return _made(write, AUDIT)


def _remade_audit(draw: Random, data: bytes) -> bytes:
    """The lines changed; every hash is right."""
    found, last = [], "0" * 64
    for line in data.splitlines():
        table = {k: v for k, v in json.loads(line).items() if k != "hash"}
        body = text_of(bent_tree(draw, table) if draw.random() < 0.3 else table)
        last = hashlib.sha256(last.encode() + body).hexdigest()
        found.append(body[:-1] + b',"hash":"%s"}\n' % last.encode())
    return b"".join(found)


def _read_manifest(path: Path) -> None:
    (path.parent / "model.c").write_bytes(b"int model;")
    manifest.verify(path.parent)


def _read_roster(path: Path) -> None:
    roster = Roster(test_roster.fleet(), path)
    roster.go_back(2)
    roster.present({1})
    assert roster.here() == [] and roster.counted(0) <= 2


def _read_report(path: Path) -> None:
    read_run(path.parent)
    write_report(path.parent)
    compare(path.parent, target=0.5).to_json()


def _zipped(pack: Callable[..., None], **arrays: np.ndarray) -> bytes:
    found = io.BytesIO()
    pack(found, **arrays)
    return found.getvalue()


def _npz_samples() -> tuple[bytes, ...]:
    y = np.arange(12) % 3
    vectors = {"x": np.arange(24.0).reshape(12, 2), "y": y, "test": np.arange(12) > 8}
    pictures = {"x": np.arange(192, dtype=np.uint8).reshape(12, 4, 4), "y": y.astype("U3")}
    return (
        _zipped(np.savez, **vectors, client=y),
        _zipped(np.savez_compressed, **pictures),
        _zipped(np.savez, x=pictures["x"], y=y.astype("S2")),
    )


def _remade_npz(draw: Random, data: bytes) -> bytes:
    """One array's own bytes changed, in an archive that is right; or a whole array of another
    kind."""
    with np.load(io.BytesIO(data)) as file:
        arrays = dict(file)
    name = draw.choice(list(arrays))
    if draw.random() < 0.5:
        kinds = ("S3", "U2", "f8", ">f4", "c8", "?", "u8", "i1", "M8[s]", "V4", "f2")
        shape = draw.choice(((12,), (12, 2), (12, 4, 4), (), (0,), (12, 0), (3,), (12, 2, 2, 3)))
        kind = np.dtype(draw.choice(kinds))
        count = int(np.prod(shape)) * kind.itemsize
        arrays[name] = np.frombuffer(draw.randbytes(count), kind).reshape(shape)
        return _zipped(np.savez, **arrays)
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        for each, array in arrays.items():
            plain = io.BytesIO()
            np.save(plain, array)
            kept = plain.getvalue()
            archive.writestr(
                zipfile.ZipInfo(f"{each}.npy"), bent(draw, kept, kept) if each == name else kept
            )
    return found.getvalue()


def _read_rows(path: Path) -> None:
    own_data.read_rows(path, wire.Welcome("a" * 8, "", (1, 4, 4), 3, ("0", "1", "2"), 60))


def _read_images(path: Path) -> None:
    labels = path.with_name("labels")
    labels.write_bytes(idx_bytes(np.zeros(2)))
    idx.read_images(path, labels)


def _csv() -> bytes:
    rows = [
        f"{k}.5,{k * k},{('cat', 'dog')[k % 2]},{k % 3},{('train', 'test')[k > 8]}"
        for k in range(12)
    ]
    return "\n".join(["a,b,label,client,test", *rows, ""]).encode()


def _remade_csv(draw: Random, data: bytes) -> bytes:
    """One cell with something else in it."""
    rows = [line.split(",") for line in data.decode().splitlines()]
    odd = (
        "",
        "nan",
        "inf",
        "-1",
        "1e999",
        "9" * 400,
        "0x10",
        "1_0",
        "\u0661",
        "\0",
        "true",
        "test",
    )
    rows[draw.randrange(len(rows))][draw.randrange(5)] = draw.choice(odd)
    return "\n".join(",".join(row) for row in rows).encode()


def _sound(width: int = 2, channels: int = 1) -> bytes:
    found = io.BytesIO()
    with wave.open(found, "wb") as sound:
        sound.setparams((channels, width, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(range(240)))
    return found.getvalue()


def _remade_sound(draw: Random, data: bytes) -> bytes:
    """One field of the header with another number; the rest is right."""
    at, size = draw.choice(
        [(4, 4), (16, 4), (20, 2), (22, 2), (24, 4), (28, 4), (32, 2), (34, 2), (40, 4)]
    )
    value = draw.choice([0, 1, 3, 8, 255, 2**15, 2**31, 2**32 - 1, draw.getrandbits(32)])
    return data[:at] + (value % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]


def _pictures() -> tuple[bytes, ...]:
    grey = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8))
    kinds = {"PNG": grey, "BMP": grey.convert("RGB"), "GIF": grey, "JPEG": grey, "TIFF": grey}
    return tuple(_zipped(lambda to, k=k, p=p: p.save(to, k)) for k, p in kinds.items())


def _remade_picture(draw: Random, data: bytes) -> bytes:
    """A .png of another size than its rows, whose checksums are right."""
    if not data.startswith(b"\x89PNG"):
        return bent(draw, data, data)
    sides = [draw.choice([0, 1, 8, 2**10, 2**14, 2**20, 2**31 - 1]) for _ in "wh"]
    head = (
        b"IHDR"
        + struct.pack(">II", *sides)
        + bytes([draw.choice([1, 2, 8, 16]), draw.randrange(7), 0, 0, 0])
    )
    return data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]


def _by_class(name: str, ending: str, good: bytes) -> Callable[[bytes], None]:
    """Reads a folder of good files with this one among them."""

    def read(path: Path) -> None:
        for place in ("a/1", "a/2", "a/3", "a/4", "b/2", "b/3", "b/4"):
            (path.parents[1] / place).parent.mkdir(exist_ok=True)
            (path.parents[1] / f"{place}{ending}").write_bytes(good)
        load(name, path=str(path.parents[1]))

    return _file(f"{name}/b/1{ending}", read)


def _sweep_folder() -> Format:
    """The head of a sweep's folder, and its table made again."""
    out = home() / "sweep"
    write_run(out / "runs" / "a", rounds=3)
    write_run(out / "runs" / "b", rounds=3)
    head = {"studied": ["method"], "target": 0.5, "cells": ["a", "b"]}

    def read(path: Path) -> None:
        _write_head(Sweep(), [], path.parent)
        compare(path.parent).to_json()

    reads = _file("sweep/sweep.json", read)

    return Format((json.dumps(head).encode(),), reads, _remade_json)


def _sweep_file() -> bytes:
    asked = {
        "methods": ["fedavg", "heterofl"],
        "seeds": 2,
        "target": 0.5,
        "vary": {"train.lr": [0.1, 0.2]},
    }
    table = parse_toml(small().to_toml(), "sample")
    return tomli_w.dumps({**table, "sweep": asked}).encode()


def _read_sweep(path: Path) -> None:
    with only([]):
        read_sweep(path).cells()


def _experiment(text: bytes) -> None:
    with only([]):
        Experiment.from_table(parse_toml(text.decode(errors="replace"), "fuzz"))


def _remade_toml(draw: Random, data: bytes) -> bytes:
    tree = bent_tree(draw, parse_toml(data.decode(), "sample"))
    text = tomli_w.dumps(_without_none(tree) if isinstance(tree, dict) else {"a": [[]]})
    text = text.replace('"@deep@"', "[" * 5000 + "]" * 5000)
    return text.replace('"@digits@"', "9" * 5000).encode()


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return [_without_none(v) for v in tree if v is not None] if isinstance(tree, list) else tree


def _coverage() -> bytes:
    """What a run counted in two rounds, for its page."""
    return json.dumps(_counted().page(2)).encode()


def _counted() -> Coverage:
    counted = Coverage()
    for _ in range(2):
        counted.add([Piece(_reference(), prefix(_reference().axes, 0.5))])
    return counted


@cache
def _reference() -> Reference:
    return Reference("main", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (4,))


def _boards() -> bytes:
    timing = {"answer": 0.05, "patience": 10.0}
    return json.dumps({"a": {"transport": "unix:/x", "every": 5, "timing": timing}}).encode()


@cache
def messages() -> dict[str, Format]:
    """What travels."""
    orders, result, state = _orders().to_bytes(), _result(), _state()
    frame = frames.encode(frames.Frame(3, 7, 9, b"\0abc" * 40))
    parts = [packets.Packet(k, 5, 1, 3, b"x" * 1024) for k in (packets.JOB, packets.RESULT)]
    parts += [packets.Packet(packets.ACK, 5, 1, 3)]
    return {
        "message": Format((_sample(_message()),), _read_message, _remade_message),
        "wire": Format(_wire_samples(), _read_wire, _remade_wire),
        "packet": Format(tuple(p.to_bytes() for p in parts), _read_packet, _remade_packet),
        "frame": Format((frame,), _read_frame),
        "orders": Format((orders,), _read_orders, _remade_orders),
        "result": Format((result,), lambda d: mqtt._result(d, _orders()), _remade_bundle),
        "state": Format((state,), lambda d: mqtt._facts(bundle.unpack(d)[0]), _remade_bundle),
        "head": Format(HEADS, _read_head, None, (http1.BadHead, ConnectionError)),
    }


@cache
def files() -> dict[str, Format]:
    """What lies on a disk: of a run, of a gateway, of the user."""
    log = (write_run(home() / "made", rounds=3) / "metrics.jsonl").read_bytes()
    store = sealed(_sample(Message({"memory": {"a": torch.ones(3)}})))
    journal = tuple(_made(lambda f, d=d: _write_journal(f, d), "b.job") for d in (True, False))
    losses = _made(lambda f: _write_journal(f, False), "b.losses")
    _write_journal(home() / "losses", False)
    roster = _made(_write_roster, "roster.json")
    batch = cifar_bytes(np.zeros((2, 3072), np.uint8), [1, 2])
    pictures = idx_bytes(np.arange(24).reshape(2, 3, 4))
    tiers = {"tiers": [{"device": "esp32", "count": 2}, {"name": "a", "ratio": 0.5, "count": 1}]}
    return {
        "checkpoint": Format(
            (_checkpoint(),), _file("run/checkpoint.bin", _read_checkpoint), _remade_sealed
        ),
        "store": Format((store,), _file("store/3.1.bin", _read_store), _remade_sealed),
        "log": Format((log,), _file("log/metrics.jsonl", _read_log), _remade_lines),
        "journal": Format(journal, _file("journal/b.job", _read_journal), _remade_bundle),
        "losses": Format((losses,), _file("losses/b.losses", _read_journal)),
        "roster": Format((roster,), _file("roster.json", _read_roster), _remade_summed),
        "audit": Format(
            (_audit(),),
            _file(f"audited/{AUDIT}", lambda p: audit(p.parent)),
            _remade_audit,
            (InputError, BrokenChain),
        ),
        "manifest": Format(
            (manifest.manifest_of({"model.c": b"int model;"}),),
            _file(f"exported/{manifest.MANIFEST}", _read_manifest),
            _remade_json,
            (InputError, manifest.NotAsExported),
        ),
        "boards": Format((_boards(),), _file("boards.json", gateway.read_config), _remade_json),
        "npz": Format(_npz_samples(), _file("a.npz", npz.read_npz), _remade_npz),
        "rows": Format(_npz_samples()[1:], _file("b.npz", _read_rows), _remade_npz),
        "blob": Format(_npz_samples()[:1], _file("c.npz", mqtt_device.read_blob), _remade_npz),
        "idx": Format((pictures, gzip.compress(pictures, mtime=0)), _file("idx", _read_images)),
        "cifar": Format((batch,), _file("batch", cifar.read_batch)),
        "csv": Format((_csv(),), _file("a.csv", lambda p: load("csv", path=str(p))), _remade_csv),
        "wav": Format(
            (_sound(), _sound(1, 2), _sound(3)), _by_class("wavs", ".wav", _sound()), _remade_sound
        ),
        "picture": Format(
            _pictures(), _by_class("images", ".png", _pictures()[0]), _remade_picture
        ),
        "sweep": _sweep_folder(),
        "sweep file": Format((_sweep_file(),), _file("sweep.toml", _read_sweep), _remade_toml),
        "experiment": Format((small().to_toml().encode(),), _experiment, _remade_toml),
        "fleet": Format(
            (tomli_w.dumps(tiers).encode(),), _file("fleet.toml", read_fleet), _remade_toml
        ),
    }


@cache
def reports() -> dict[str, Format]:
    """The files of a run folder, as whoever writes its report reads them."""
    folder = write_run(home() / "report", rounds=3)
    (folder / "coverage.json").write_bytes(_coverage())
    remakes = {
        "coverage.json": _remade_json,
        "summary.json": _remade_json,
        "federation.json": _remade_json,
        "metrics.jsonl": _remade_lines,
        "experiment.toml": _remade_toml,
    }
    return {f"report of {n}": _in_report(folder, n, remake) for n, remake in remakes.items()}


def _in_report(folder: Path, name: str, remake: Remake) -> Format:
    """A file of a run folder whose report is written; the other files stay good."""
    good = (folder / name).read_bytes()

    def reads(data: bytes) -> None:
        (folder / name).write_bytes(data)
        try:
            _read_report(folder / name)
        finally:
            (folder / name).write_bytes(good)

    return Format((good,), reads, remake)
