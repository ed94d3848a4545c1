"""What travels between the server and a node, as bytes.

    server → node   Welcome  the run: its number, the experiment, the public rows clients need
    node → server   Hello    the clients behind the node, and what their devices are
    server → node   Order    the work of one round for clients behind the node
    node → server   Answer   what came of it, client by client

A frame is a mark, a version, a kind, a header in JSON, the tensors' bytes one after another and the
CRC-32 of all that: no pickle, nothing that is executed. Whatever is read is bounded and checked;
bytes that changed on the way, or do not hold what they should, are refused with an `InputError`
that says why.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestling.errors import InputError, unknown
from nestling.harmless import harmless
from nestling.message import TRANSPORTS, Message, pack_bits, unpack_bits
from nestling.runfiles import number

VERSION = 2
MAX_BYTES = 2**31
"""The largest frame that is read (2 GiB)."""

MAX_HEADER = 2**24
MAX_TENSORS = 2**16
MAX_TEXT = 2**20
MAX_NAME = 128
MAX_CLIENTS = 2**16

_MARK = b"NSTL"
_HEAD = struct.Struct("<4sBcI")
_CRC = struct.Struct("<I")
_RUN = re.compile(r"[0-9a-f]{8,64}")
_KEY = re.compile(r"[0-9a-f]{32}")
_FP16_MOST = 65504.0

_DTYPES: dict[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "f32": (torch.float32, np.dtype("<f4")),
    "f64": (torch.float64, np.dtype("<f8")),
    "f16": (torch.float16, np.dtype("<f2")),
    "bf16": (torch.bfloat16, np.dtype("<i2")),  # NumPy has no bfloat16: its bits travel
    "i8": (torch.int8, np.dtype("i1")),
    "u8": (torch.uint8, np.dtype("u1")),
    "i16": (torch.int16, np.dtype("<i2")),
    "i32": (torch.int32, np.dtype("<i4")),
    "i64": (torch.int64, np.dtype("<i8")),
    "bits": (torch.bool, np.dtype("u1")),
}
_CODES = {torch_type: code for code, (torch_type, _) in _DTYPES.items()}


@dataclass(eq=False)
class Parcel:
    """A message as it travels: `table` says what is inside, `data` are the tensors' bytes."""

    table: Mapping[str, Any]
    data: bytes | memoryview

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors as they are sent."""
        return len(self.data)

    @cached_property
    def digest(self) -> str:
        """Equal for equal content."""
        found = hashlib.blake2b(_json(self.table), digest_size=16)
        found.update(self.data)
        return found.hexdigest()

    @staticmethod
    def of(message: Message, transport: str = "float32") -> Parcel:
        """A message packed up; `transport` may round its float32 tensors."""
        if transport not in TRANSPORTS:
            raise unknown("transport", transport, TRANSPORTS, field="engine.transport")
        parts, chunks = [], []
        for kind, part in message.parts.items():
            rows = []
            for name, tensor in part.items():
                row, data = _packed(name, tensor.detach().cpu(), transport)
                rows.append(row)
                chunks.append(data)
            parts.append([kind, rows])
        return Parcel({"facts": dict(message.facts), "parts": parts}, b"".join(chunks))

    def open(self) -> Message:
        """The message inside, its size that of what travelled."""
        parts: dict[str, dict[str, Tensor]] = {}
        start = 0
        facts, table = _get(self.table, "facts", dict), _get(self.table, "parts", list)
        if sum(len(rows) for _, rows in _pairs(table)) > MAX_TENSORS:
            raise InputError(f"more than {MAX_TENSORS} tensors in a message")
        for kind, rows in _pairs(table):
            part = parts.setdefault(kind, {})
            for row in rows:
                name, tensor, start = _unpacked(row, self.data, start)
                if name in part:
                    raise InputError(f"{kind}: {_short(name)} is there twice")
                part[name] = tensor
        if start != len(self.data):
            raise InputError(f"{len(self.data) - start} bytes belong to no tensor")
        message = Message(parts, facts)
        message.__dict__["nbytes"] = len(self.data)
        return message


@dataclass(eq=False)
class JobOrder:
    """One client's share of an order: which view of which network to train, and the message. `base`
    is the last round in which a result of the client counted (0: none): it starts from what it kept
    then, and forgets what it did since. `key` stands for all of it: work with the same key is the
    same work, and its result may be given again without doing it again."""

    client: int
    name: str
    key: str
    network: str
    spec: Mapping[str, Any]
    parcel: Parcel
    base: int = 0


@dataclass(eq=False)
class Order:
    """The work of one round for the clients behind one node. `covered` is the last round of which
    the server has a checkpoint: it will never go back behind that. `transport` is how replies are
    to travel, `attempt` how often the order has been sent. `start` is how often the server has been
    started: within one start rounds only go up, so that an order of a lower one is out of date. An
    order without jobs says that the run is over, and `round` was its last."""

    run: str
    round: int
    covered: int
    jobs: list[JobOrder]
    transport: str = "float32"
    attempt: int = 1
    start: int = 1

    def to_bytes(self) -> bytes:
        """The order as a frame of kind O."""
        # one that several clients share travels once
        parcels = {id(job.parcel): job.parcel for job in self.jobs}
        place = {key: number for number, key in enumerate(parcels)}
        jobs = [
            {
                "client": j.client,
                "name": j.name,
                "key": j.key,
                "network": j.network,
                "spec": j.spec,
                "parcel": place[id(j.parcel)],
                "base": j.base,
            }
            for j in self.jobs
        ]
        told = {
            "run": self.run,
            "round": self.round,
            "covered": self.covered,
            "transport": self.transport,
        }
        return _frame(
            b"O",
            {**told, "attempt": self.attempt, "start": self.start, "jobs": jobs},
            list(parcels.values()),
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Order:
        """The order in a frame, every field checked."""
        header, parcels = _open(data, b"O")
        transport = _text(header, "transport")
        if transport not in TRANSPORTS:
            raise unknown("transport", transport, TRANSPORTS)
        jobs = [
            JobOrder(
                _whole(job, "client"),
                _text(job, "name"),
                _matching(job, "key", _KEY),
                _text(job, "network"),
                _get(job, "spec", dict),
                _parcel(job, parcels),
                _whole(job, "base"),
            )
            for job in _tables(header, "jobs", MAX_CLIENTS)
        ]
        run, round, covered = (
            _matching(header, "run", _RUN),
            _whole(header, "round"),
            _whole(header, "covered"),
        )
        return Order(
            run, round, covered, jobs, transport, _whole(header, "attempt"), _whole(header, "start")
        )


@dataclass(eq=False)
class JobDone:
    """What came of a client's work: the reply, its mean loss over `samples` samples, and the steps
    it took."""

    client: int
    key: str
    parcel: Parcel
    loss: float
    steps: int
    samples: int


@dataclass(frozen=True)
class Failed:
    """A client's work that failed, and why."""

    client: int
    key: str
    error: str


@dataclass(eq=False)
class Answer:
    """What came of an order. `free` is the memory in bytes that is free now, by the clients' names;
    `error` refuses the whole order, and `unknown` says that the node has not been welcomed to that
    run."""

    run: str
    round: int
    results: list[JobDone | Failed] = field(default_factory=list)
    free: dict[str, int] = field(default_factory=dict)
    error: str = ""
    unknown: bool = False

    def to_bytes(self) -> bytes:
        """The answer as a frame of kind A; work that failed brings its error instead of a
        parcel."""
        parcels: list[Parcel] = []
        rows: list[dict[str, Any]] = []
        for one in self.results:
            row: dict[str, Any] = {"client": one.client, "key": one.key}
            if isinstance(one, Failed):
                row["error"] = one.error
            else:
                row |= {
                    "parcel": len(parcels),
                    "loss": one.loss,
                    "steps": one.steps,
                    "samples": one.samples,
                }
                parcels.append(one.parcel)
            rows.append(row)
        told = {"run": self.run, "round": self.round, "results": rows, "free": self.free}
        return _frame(b"A", {**told, "error": self.error, "unknown": self.unknown}, parcels)

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Answer:
        """The answer in a frame, every field checked; parcels stay packed."""
        header, parcels = _open(data, b"A")
        results = [_result(row, parcels) for row in _tables(header, "results", MAX_CLIENTS)]
        free = _get(header, "free", dict)
        if len(free) > MAX_CLIENTS:
            raise InputError(f"free memory of {len(free)} clients")
        reports = {_checked_name(name): _whole(free, name, most=2**60) for name in free}
        run, round = _matching(header, "run", _RUN), _whole(header, "round")
        return Answer(
            run,
            round,
            results,
            reports,
            _said(header, "error"),
            _get(header, "unknown", bool),
        )


@dataclass(frozen=True)
class Member:
    """A client as its node reports it.

    name:    what it is called, for ever; the server remembers its number by it.
    client:  the number it would like to have, or None.
    device:  the kind of device (a name of the catalogue) or tier it is.
    ram, free: its memory, and how much of it is free now, in bytes; macs: multiply-accumulates per
               second. 0: not measured.
    rows:    its rows of data, and counts those of each class; None where they are the experiment's
             own share.
    """

    name: str
    client: int | None = None
    device: str = ""
    ram: int = 0
    free: int = 0
    macs: float = 0.0
    rows: int | None = None
    counts: tuple[int, ...] | None = None

    def table(self) -> dict[str, Any]:
        """As plain data."""
        return {**self.__dict__, "counts": list(self.counts) if self.counts is not None else None}

    @staticmethod
    def read(table: Mapping[str, Any]) -> Member:
        """The inverse of `table`, checked."""
        counts = table.get("counts")
        if counts is not None:
            counts = tuple(_whole({"counts": n}, "counts") for n in _get(table, "counts", list))
        return Member(
            _checked_name(_text(table, "name", MAX_NAME)),
            _optional(table, "client"),
            harmless(_text(table, "device", MAX_NAME), MAX_NAME),
            _whole(table, "ram", most=2**60),
            _whole(table, "free", most=2**60),
            _real(table, "macs"),
            _optional(table, "rows"),
            counts,
        )


@dataclass(frozen=True)
class Hello:
    """Who is behind a node. `token` is a secret of the node: whoever has told a name first with it
    keeps the name."""

    run: str
    token: str
    members: tuple[Member, ...]
    error: str = ""

    def to_bytes(self) -> bytes:
        """The hello as a frame of kind H, which has no tensors."""
        told = {
            "run": self.run,
            "token": self.token,
            "members": [m.table() for m in self.members],
            "error": self.error,
        }
        return _frame(b"H", told, [])

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Hello:
        """The hello in a frame, every field checked; two clients of one name are refused."""
        header, _ = _open(data, b"H")
        members = tuple(Member.read(table) for table in _tables(header, "members", MAX_CLIENTS))
        if len({m.name for m in members}) < len(members):
            raise InputError("two clients of one name")
        run, token = _matching(header, "run", _RUN), _matching(header, "token", _KEY)
        return Hello(run, token, members, _said(header, "error"))


@dataclass(eq=False)
class Welcome:
    """A run, as a node gets to know it: the experiment with all settled, and the data's form, which
    a node needs to build the networks. `rows` is how many training rows the experiment's own data
    has; `public` holds the public rows, where clients use them. `refused` is why the node was
    refused when it answered the last one. `classes` are the network's outputs, whatever the task;
    samples are `tokens` or numbers; `mean` and `scale` are those of values to be learned."""

    run: str
    experiment: str
    shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...]
    rows: int
    public: Parcel | None = None
    refused: str = ""
    tokens: bool = False
    mean: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    def to_bytes(self) -> bytes:
        """The welcome as a frame of kind W; the public rows, if any, are its only parcel."""
        told = {
            "run": self.run,
            "experiment": self.experiment,
            "shape": list(self.shape),
            "classes": self.classes,
        }
        if self.refused:
            told["refused"] = self.refused
        if self.tokens:
            told["tokens"] = True
        if self.mean:
            told |= {"mean": list(self.mean), "scale": list(self.scale)}
        parcels = [self.public] if self.public is not None else []
        return _frame(
            b"W", {**told, "class_names": list(self.class_names), "rows": self.rows}, parcels
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview) -> Welcome:
        """The welcome in a frame, every field checked; its first parcel, if any, holds the public
        rows."""
        header, parcels = _open(data, b"W")
        shape = tuple(
            _whole({"shape": n}, "shape", least=1, most=2**24) for n in _get(header, "shape", list)
        )
        names = tuple(str(name) for name in _get(header, "class_names", list))
        classes, rows = (
            _whole(header, "classes", least=1, most=2**20),
            _whole(header, "rows", least=1),
        )
        run, experiment = _matching(header, "run", _RUN), _text(header, "experiment", MAX_TEXT)
        public, refused = parcels[0] if parcels else None, header.get("refused", "")
        refused = _said({"refused": refused}, "refused")
        mean, scale = (_floats(header, name, classes) for name in ("mean", "scale"))
        if bool(mean) != bool(scale) or not all(one > 0 for one in scale):
            raise InputError("a welcome with a scale that cannot be")
        tokens = header.get("tokens", False) is True
        return Welcome(
            run, experiment, shape, classes, names, rows, public, refused, tokens, mean, scale
        )


def _floats(header: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    """So many finite numbers, or none."""
    told = header.get(name, [])
    good = isinstance(told, list) and len(told) in (0, count)
    if not good or not all(type(one) in (int, float) and math.isfinite(one) for one in told):
        raise InputError(f"a frame whose {name} is not {count} numbers")
    return tuple(float(one) for one in told)


def kind_of(data: bytes | memoryview) -> str:
    """What a frame is: "welcome", "hello", "order" or "answer"."""
    kinds = {b"W": "welcome", b"H": "hello", b"O": "order", b"A": "answer"}
    kind = _head(data)[0]
    if kind not in kinds:
        raise InputError(f"a frame of kind {kind!r}")
    return kinds[kind]


def key_of(
    run: str,
    round: int,
    client: int,
    network: str,
    spec: Mapping[str, Any],
    parcel: Parcel,
    base: int = 0,
) -> str:
    """The key of a client's work (see `JobOrder`)."""
    return hashlib.blake2b(
        _json([run, round, client, network, spec, parcel.digest, base]), digest_size=16
    ).hexdigest()


# -- tensors ---------------------------------------------------------------------------------------


def _packed(name: str, tensor: Tensor, transport: str) -> tuple[list[Any], bytes]:
    """A tensor's row in the table, and its bytes: [name, type, shape] and, where it was rounded,
    [how, scale]."""
    shape = list(tensor.shape)
    if tensor.dtype not in _CODES:
        raise InputError(f"tensors of type {tensor.dtype} do not travel")
    if tensor.dtype == torch.bool:
        return [name, "bits", shape], pack_bits(tensor).numpy().tobytes()
    if tensor.dtype == torch.float32 and transport != "float32":
        most = float(tensor.abs().max()) if tensor.numel() else 0.0
        # What is not finite, or too large for 16 bits, stays as it is.
        if transport == "int8" and tensor.dim() >= 2 and math.isfinite(most):
            scale = most / 127 or 1.0
            whole = torch.clamp(torch.round(tensor.double() / scale), -127, 127).to(torch.int8)
            return [name, "f32", shape, "i8", scale], _raw(whole, "i8")
        if most <= _FP16_MOST:
            return [name, "f32", shape, "f16"], _raw(tensor.half(), "f16")
    code = _CODES[tensor.dtype]
    return [name, code, shape], _raw(tensor, code)


def _raw(tensor: Tensor, code: str) -> bytes:
    plain = tensor.contiguous()
    return (
        (plain.view(torch.int16) if code == "bf16" else plain)
        .numpy()
        .astype(_DTYPES[code][1], copy=False)
        .tobytes()
    )


def _unpacked(row: Any, data: bytes | memoryview, start: int) -> tuple[str, Tensor, int]:
    name, code, shape, sent, scale = _row(row)
    count = math.prod(shape)
    size = math.ceil(count / 8) if sent == "bits" else count * _DTYPES[sent][1].itemsize
    if start + size > len(data):
        raise InputError(
            f"{_short(name)}: {size} bytes are announced, {len(data) - start} are there"
        )
    end = start + size
    read = np.frombuffer(data[start:end], _DTYPES[sent][1]).copy()
    if sent == "bits":
        return name, unpack_bits(torch.from_numpy(read), shape), end
    tensor = torch.from_numpy(read).reshape(shape)
    if sent == "bf16":
        tensor = tensor.view(torch.bfloat16)
    if sent != code:
        tensor = (tensor.double() * scale).float() if sent == "i8" else tensor.float()
    return name, tensor, end


def _row(row: Any) -> tuple[str, str, list[int], str, float]:
    """The row of a tensor: name, type, shape, the type it travelled as, and the scale of what was
    rounded."""
    if not isinstance(row, list) or not 3 <= len(row) <= 5:
        raise InputError("a tensor is not described by its name, type and shape")
    name, code, shape, sent, scale = [*row, *(row[1], 1.0)[len(row) - 3 :]] if len(row) < 5 else row
    if not isinstance(name, str) or len(name) > 1024:
        raise InputError("a tensor's name is not a short text")
    if (
        not isinstance(code, str)
        or code not in _DTYPES
        or not isinstance(sent, str)
        or sent not in _DTYPES
    ):
        raise InputError(f"{_short(name)}: there is no type {_short(code)}")
    if sent != code and (code, sent) not in (("f32", "f16"), ("f32", "i8")):
        raise InputError(f"{_short(name)}: {code} does not travel as {sent}")
    if (
        not isinstance(shape, list)
        or len(shape) > 8
        or any(type(n) is not int or not 0 <= n < 2**31 for n in shape)
    ):
        raise InputError(f"{_short(name)}: {_short(shape)} is no shape")
    if math.prod(shape) > MAX_BYTES:
        raise InputError(f"{_short(name)}: {math.prod(shape)} numbers are too many")
    if number(scale) is None:
        raise InputError(f"{_short(name)}: the scale is {_short(scale)}")
    return name, code, shape, sent, float(scale)


# -- frames ----------------------------------------------------------------------------------------


def _frame(kind: bytes, header: dict[str, Any], parcels: Sequence[Parcel]) -> bytes:
    told = {**header, "parcels": [{**p.table, "bytes": len(p.data)} for p in parcels]}
    text = _json(told)
    if len(text) > MAX_HEADER:
        raise InputError(f"a header of {len(text)} bytes is over the limit of {MAX_HEADER}")
    chunks = [_HEAD.pack(_MARK, VERSION, kind, len(text)), text, *(p.data for p in parcels)]
    crc = 0
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return b"".join([*chunks, _CRC.pack(crc)])


def _head(data: bytes | memoryview) -> tuple[bytes, int]:
    if len(data) > MAX_BYTES:
        raise InputError(f"{len(data)} bytes are over the limit of {MAX_BYTES}")
    if len(data) < _HEAD.size + _CRC.size:
        raise InputError(f"{len(data)} bytes are too short for anything")
    mark, version, kind, length = _HEAD.unpack_from(data)
    if mark != _MARK:
        raise InputError("these bytes are not ours")
    if version != VERSION:
        raise InputError(
            f"version {version} of the protocol; this is version {VERSION}",
            fix="install the same nestling everywhere",
        )
    if length > MAX_HEADER or length > len(data) - _HEAD.size - _CRC.size:
        raise InputError(f"a header of {length} bytes in a frame of {len(data)}")
    return kind, length


def _open(data: bytes | memoryview, kind: bytes) -> tuple[dict[str, Any], list[Parcel]]:
    found, length = _head(data)
    if found != kind:
        raise InputError(f"a frame of kind {found!r} where {kind!r} was expected")
    whole = memoryview(data)
    body, crc = whole[: -_CRC.size], whole[-_CRC.size :]
    if _CRC.unpack(crc)[0] != zlib.crc32(body):
        raise InputError("damaged on its way: its checksum is that of other bytes")
    start = _HEAD.size + length
    try:
        header = json.loads(bytes(body[_HEAD.size : start]))
    except (ValueError, RecursionError) as error:
        raise InputError(f"the header cannot be read: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise InputError("the header is no table")
    parcels = []
    for table in _tables(header, "parcels", MAX_CLIENTS):
        size = _whole(table, "bytes", most=MAX_BYTES)
        if start + size > len(body):
            raise InputError(
                f"{size} bytes of tensors are announced, {len(body) - start} are there"
            )
        parcels.append(
            Parcel(
                {"facts": table.get("facts"), "parts": table.get("parts")},
                body[start : start + size],
            )
        )
        start += size
    if start != len(body):
        raise InputError(f"{len(body) - start} bytes after the end")
    return header, parcels


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


# -- fields ----------------------------------------------------------------------------------------


def _get(table: Mapping[str, Any], name: str, kind: type) -> Any:
    value = table.get(name)
    if type(value) is not kind:
        raise InputError(f"{name} is {_short(value)}")
    return value


def _whole(table: Mapping[str, Any], name: str, *, least: int = 0, most: int = 2**40) -> int:
    value: int = _get(table, name, int)
    if not least <= value <= most:
        raise InputError(f"{name} is {_short(value)}")
    return value


def _optional(table: Mapping[str, Any], name: str) -> int | None:
    return None if table.get(name) is None else _whole(table, name)


def _real(table: Mapping[str, Any], name: str) -> float:
    value = number(table.get(name))
    if value is None:
        raise InputError(f"{name} is {_short(table.get(name))}")
    return float(value)


def _text(table: Mapping[str, Any], name: str, most: int = 1024) -> str:
    value: str = _get(table, name, str)
    if len(value) > most:
        raise InputError(f"{name} is a text of {len(value)} letters")
    return value


def _said(table: Mapping[str, Any], name: str) -> str:
    """What a node says in its own words, to be shown to people."""
    return harmless(_text(table, name, MAX_TEXT))


def _checked_name(name: str) -> str:
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise InputError(f"{_short(name)} is no name")
    return name


def _matching(table: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = _text(table, name)
    if not pattern.fullmatch(value):
        raise InputError(f"{name} is {_short(value)}")
    return value


def _tables(table: Mapping[str, Any], name: str, most: int) -> list[dict[str, Any]]:
    rows: list[Any] = _get(table, name, list)
    if len(rows) > most or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{name} is no list of at most {most} tables")
    return rows


def _pairs(table: list[Any]) -> list[tuple[str, list[Any]]]:
    if not all(
        isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) and isinstance(p[1], list)
        for p in table
    ):
        raise InputError("the parts of a message are not what they should be")
    return [(kind, rows) for kind, rows in table]


def _parcel(row: Mapping[str, Any], parcels: list[Parcel]) -> Parcel:
    number = _whole(row, "parcel")
    if number >= len(parcels):
        raise InputError(f"there is no parcel {number}")
    return parcels[number]


def _result(row: dict[str, Any], parcels: list[Parcel]) -> JobDone | Failed:
    client, key = _whole(row, "client"), _matching(row, "key", _KEY)
    if "error" in row:
        return Failed(client, key, _said(row, "error"))
    return JobDone(
        client,
        key,
        _parcel(row, parcels),
        _real(row, "loss"),
        _whole(row, "steps"),
        _whole(row, "samples"),
    )


def _short(value: Any) -> str:
    """A value for an error message, whatever it is."""
    text = (
        repr(value)[:200]
        if isinstance(value, (str, int, float, bool, type(None)))
        else type(value).__name__
    )
    return text if len(text) <= 60 else text[:57] + "..."
