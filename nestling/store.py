"""What clients keep between rounds: in memory while it fits, else on disk.

In a run folder every state is written at once, under its client and round. After a crash the run
goes on from its last checkpoint, and the store gives each client what it had then: later versions
are forgotten, and an older one is only removed once a checkpoint covers a newer. A version counts
only once a checkpoint covers it, so it is written plainly and flushed with the others of its round.
Without a run folder only what no longer fits is written, to a temporary folder that goes with the
store.

What is put in a round can be undone until the round is settled. Nothing is copied for it: what a
put replaces is held on to, or lies on disk as an older version.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nestling.errors import InputError
from nestling.files import read_sealed, sealed
from nestling.message import Message, payload
from nestling.views import State

_FILE = re.compile(r"(\d+)\.(\d+)\.bin")
_FLUSHERS = 16  # disks join flushes that wait at the same time
# what the server writes down of a client is stored under the client's number plus this
_SERVER = 2**40


class ClientStore:
    """Client number → named tensors. `limit_bytes` of them are held in memory, those used last."""

    def __init__(self, folder: Path | None = None, limit_bytes: int = 256 * 2**20) -> None:
        """Writes states to `folder`; without one, to a temporary folder and only what memory has no
        room for."""
        self.folder, self.limit = folder, limit_bytes
        self._recent: OrderedDict[int, State] = OrderedDict()
        self._bytes = 0
        self._versions: dict[int, list[int]] = {}  # rounds on disk, oldest first
        self._covered = 0  # the round of the last checkpoint
        self._unflushed: set[Path] = set()
        # without a run folder: those whose state is in memory only
        self._unwritten: set[int] = set()
        self._temporary: Path | None = None
        # round that is not settled → client → what a put of that round replaced
        self._replaced: dict[int, dict[int, State]] = {}

    def get(self, client: int) -> State:
        """What the client kept; nothing at first."""
        if client not in self._recent:
            if not self._versions.get(client):
                return {}
            self._remember(client, self._read(client, self._versions[client][-1]))
        self._recent.move_to_end(client)
        return self._recent[client]

    def put(self, client: int, state: State, round: int) -> None:
        """Keeps the client's state as of a round."""
        if not state:
            return
        self._hold(client, round)
        if self.folder is not None:
            self._unflushed.add(self._write(client, state, round))
            self._versions[client] = [*self._prune(client, round), round]
        else:
            self._unwritten.add(client)
        self._remember(client, state)

    def begin(self, round: int) -> None:
        """From now on what is put as of a round can be undone, until the round is settled."""
        self._replaced[round] = {}

    def confirm(self, round: int) -> None:
        """A round stands."""
        self._replaced.pop(round, None)

    def undo(self, round: int) -> None:
        """Takes back what was put as of a round and of those begun after it."""
        for number in sorted((begun for begun in self._replaced if begun >= round), reverse=True):
            for client, state in self._replaced.pop(number).items():
                self._take_back(client, number, state)

    def clients(self) -> list[int]:
        """Who has kept anything."""
        return sorted(client for client in {*self._versions, *self._recent} if client < _SERVER)

    def sync(self) -> None:
        """Flushes what was put to the disk, so that a checkpoint may rely on it."""
        if not self._unflushed:
            return
        paths = [*self._unflushed, self._home()]
        with ThreadPoolExecutor(min(_FLUSHERS, len(paths))) as flushers:
            list(flushers.map(_flush, paths))
        self._unflushed.clear()

    def covered(self, round: int) -> None:
        """A checkpoint of `round` is on disk: what only older checkpoints needed may go."""
        self.sync()
        self._covered = round

    def resume(self, round: int) -> None:
        """Goes back to what clients had after `round`."""
        self._recent.clear()
        self._bytes, self._covered = 0, round
        self._versions, self._unflushed, self._unwritten, self._replaced = {}, set(), set(), {}
        self._refuse_old()
        for path in self.folder.glob("*.bin") if self.folder is not None else []:
            match = _FILE.fullmatch(path.name)
            if match is None:
                continue
            client, version = int(match[1]), int(match[2])
            if version > round:
                path.unlink()
            else:
                self._versions.setdefault(client, []).append(version)
        for versions in self._versions.values():
            versions.sort()

    def _refuse_old(self) -> None:
        """Refuses what an earlier version wrote: nothing tells whether it is as it was written."""
        if self.folder is not None and any(self.folder.glob("*.safetensors")):
            raise InputError(
                f"{self.folder} was written by an earlier version, without checksums",
                fix="go on with that version, or start the run again",
            )

    def _hold(self, client: int, round: int) -> None:
        """Holds on to what the first put of a round replaces. A run folder has it on disk: no put
        removes the version before it."""
        replaced = self._replaced.get(round)
        if replaced is not None and client not in replaced:
            replaced[client] = self.get(client) if self.folder is None else {}

    def _take_back(self, client: int, round: int, state: State) -> None:
        """Gives a client what it had before a round: without a run folder that is `state`, else the
        version before."""
        self._bytes -= _size(self._recent.pop(client, {}))
        versions = self._versions.pop(client, [])
        if self.folder is not None:
            path = self._path(client, round)
            self._unflushed.discard(path)
            path.unlink(missing_ok=True)
            if versions[:-1]:
                self._versions[client] = versions[:-1]
        elif state:
            self._unwritten.add(client)
            self._remember(client, state)
        else:
            self._unwritten.discard(client)

    def _prune(self, client: int, round: int) -> list[int]:
        """Removes what no checkpoint can ask for any more; gives what stays."""
        old = [v for v in self._versions.get(client, []) if v != round]
        covered = [v for v in old if v <= self._covered]
        for version in covered[:-1]:
            self._path(client, version).unlink(missing_ok=True)
        return [*covered[-1:], *(v for v in old if v > self._covered)]

    def _home(self) -> Path:
        """Where states are written; made when the first one is."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            return self.folder
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="nestling-"))
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        return self._temporary

    def _path(self, client: int, round: int) -> Path:
        return self._home() / f"{client}.{round}.bin"

    def _write(self, client: int, state: State, round: int) -> Path:
        path = self._path(client, round)
        path.write_bytes(sealed(Message({"memory": state}).to_bytes()))
        return path

    def _read(self, client: int, round: int) -> State:
        return _state_in(self._path(client, round), client)

    def _remember(self, client: int, state: State) -> None:
        self._bytes += _size(state) - _size(self._recent.pop(client, {}))
        self._recent[client] = state
        while self._bytes > self.limit and len(self._recent) > 1:
            oldest, let_go = self._recent.popitem(last=False)
            self._bytes -= _size(let_go)
            if oldest in self._unwritten:
                self._spill_over(oldest, let_go)

    def _spill_over(self, client: int, state: State) -> None:
        """Writes what only memory held. Nobody resumes from it, so that one version, of no round,
        is enough."""
        self._write(client, state, 0)
        self._versions[client] = [0]
        self._unwritten.discard(client)


class Records:
    """What the server writes down of clients, in their store but never sent to them: it costs
    memory for the clients seen only, spills over to disk, and a resumed run finds it as it was."""

    def __init__(self, store: ClientStore) -> None:
        """Keeps its entries in the clients' own store."""
        self._store = store

    def get(self, client: int) -> State:
        """What is known of a client; nothing at first."""
        return self._store.get(_SERVER + client)

    def put(self, client: int, state: State, round: int) -> None:
        """Writes down what is known of a client as of a round."""
        self._store.put(_SERVER + client, state, round)


def memory_at(folder: Path, client: int, round: int) -> State:
    """What a client had kept after `round`, nothing where it had not; from a store's folder that is
    another's, in which nothing is changed."""
    return _version_at(folder, client, round)


def record_at(folder: Path, client: int, round: int) -> State:
    """What the server had written down of a client after `round`, likewise."""
    return _version_at(folder, _SERVER + client, round)


def _version_at(folder: Path, client: int, round: int) -> State:
    names = [found for path in folder.glob("*.bin") if (found := _FILE.fullmatch(path.name))]
    versions = [int(n[2]) for n in names if int(n[1]) == client and int(n[2]) <= round]
    return _state_in(folder / f"{client}.{max(versions)}.bin", client) if versions else {}


def _state_in(path: Path, client: int) -> State:
    try:
        return dict(Message.from_bytes(read_sealed(path))["memory"])
    except (OSError, KeyError, InputError) as error:
        raise InputError(
            f"client {client}'s state cannot be read from {path}: {error}",
            fix="start the run again",
        ) from error


def _size(state: State) -> int:
    return sum(payload(t) for t in state.values())


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
