"""What clients keep between rounds: in memory while it fits, else on disk.

Every version on disk carries its round. After a crash the run goes on from its last checkpoint, and the store gives each client
what it had then: later versions are forgotten, and an older one is only removed once a checkpoint covers a newer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

from nestling.errors import InputError
from nestling.files import write_atomic
from nestling.message import Message, payload
from nestling.views import State

_FILE = re.compile(r"(\d+)\.(\d+)\.safetensors")


class ClientStore:
    """Client number → named tensors. Without a folder everything stays in memory."""

    def __init__(self, folder: Path | None = None, limit_bytes: int = 256 * 2**20) -> None:
        self.folder, self.limit = folder, limit_bytes
        self._recent: OrderedDict[int, State] = OrderedDict()
        self._bytes = 0
        self._versions: dict[int, list[int]] = {}  # rounds on disk, oldest first
        self._covered = 0  # the round of the last checkpoint

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
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path(client, round), Message({"memory": state}).to_bytes())
            self._versions[client] = [*self._prune(client, round), round]
        self._remember(client, state)

    def clients(self) -> list[int]:
        """Who has kept anything."""
        return sorted({*self._versions, *self._recent})

    def covered(self, round: int) -> None:
        """A checkpoint of `round` is on disk: what only older checkpoints needed may go."""
        self._covered = round

    def resume(self, round: int) -> None:
        """Goes back to what clients had after `round`."""
        self._recent.clear()
        self._bytes, self._covered = 0, round
        self._versions = {}
        for path in sorted(self.folder.glob("*.safetensors")) if self.folder is not None else []:
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

    def _prune(self, client: int, round: int) -> list[int]:
        """Removes what no checkpoint can ask for any more; gives what stays."""
        old = [v for v in self._versions.get(client, []) if v != round]
        covered = [v for v in old if v <= self._covered]
        for version in covered[:-1]:
            self._path(client, version).unlink(missing_ok=True)
        return [*covered[-1:], *(v for v in old if v > self._covered)]

    def _path(self, client: int, round: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client}.{round}.safetensors"

    def _read(self, client: int, round: int) -> State:
        path = self._path(client, round)
        try:
            return dict(Message.from_bytes(path.read_bytes())["memory"])
        except (OSError, KeyError, InputError) as error:
            raise InputError(f"client {client}'s state cannot be read from {path}: {error}", fix="start the run again") from error

    def _remember(self, client: int, state: State) -> None:
        self._bytes += _size(state) - _size(self._recent.pop(client, {}))
        self._recent[client] = state
        while self.folder is not None and self._bytes > self.limit and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            self._bytes -= _size(oldest)


def _size(state: State) -> int:
    return sum(payload(t) for t in state.values())
