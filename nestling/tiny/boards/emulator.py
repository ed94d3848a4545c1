"""Emulated boards as processes: started, cut off and started again, with the serial link on a
socket."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path

from nestling.errors import InputError
from nestling.tiny.boards import children
from nestling.tiny.boards.table import Board, Firmware, firmware

LONGEST_START = 30.0  # seconds until the socket is there, on a busy machine


class Emulator(ABC):
    """A board that runs in a process of its own. Its link is the Unix socket `socket`; `log` holds
    what the emulator says."""

    def __init__(self, image: Firmware, blob: bytes, socket: str | Path) -> None:
        """Writes the client's data beside the socket for the emulator to load; data that do not fit
        the flash are refused."""
        if len(blob) > image.blob_bytes:
            raise InputError(
                f"{len(blob)} bytes of data do not fit the {image.blob_bytes} bytes of flash "
                f"behind the firmware of {image.board.name}",
                field="board",
                fix="give the client fewer samples or a board with more flash",
            )
        self.image, self.socket = image, Path(socket)
        self.log = self.socket.with_suffix(".log")
        self.data = self.socket.with_suffix(".blob")
        self.data.write_bytes(self.flash_data(blob))
        self.process: children.Child | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """What is started."""

    def flash_data(self, blob: bytes) -> bytes:
        """The client's data as the emulator takes them from a file."""
        return blob

    @property
    def transport(self) -> str:
        """Where the gateway finds the board."""
        return f"unix:{self.socket}"

    @property
    def pid(self) -> int:
        """The number of the emulator's process."""
        if self.process is None:
            raise RuntimeError(f"{self.image.board.name} has not been started")
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the process was started and still runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> Emulator:
        """Switches the board on; returns when its link can be connected to."""
        self.kill()
        self.socket.unlink(missing_ok=True)
        self.process = children.start(self.command(), self.log)
        until = time.monotonic() + LONGEST_START
        while not _listening(self.socket):
            if not self.alive or time.monotonic() > until:
                self.kill()
                raise InputError(
                    f"{self.image.board.name} did not start:\n{self.words()}",
                    field="board",
                    fix="see its message",
                )
            time.sleep(0.005)
        return self

    def kill(self) -> None:
        """Cuts the power."""
        if self.process is not None:
            children.kill(self.process)

    restart = start

    def words(self) -> str:
        """The last of what the emulator said."""
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""

    def __enter__(self) -> Emulator:
        """Starts the board unless it is on already."""
        return self if self.alive else self.start()

    def __exit__(self, *_: object) -> None:
        """Cuts the power."""
        self.kill()


def _listening(socket: Path) -> bool:
    """Whether somebody waits for connections there. A socket's file is there a moment before that;
    where the kernel keeps no list of sockets the file must do."""
    sockets = Path("/proc/net/unix")
    if not sockets.exists():
        return socket.exists()
    accepting = 1 << 16
    fields = (line.split() for line in sockets.read_text().splitlines()[1:])
    return any(
        len(line) == 8 and line[7] == str(socket) and int(line[3], 16) & accepting
        for line in fields
    )


def emulator(
    board: str | Board | Firmware, blob: bytes, socket: str | Path, shift: int | None = None
) -> Emulator:
    """The board with its firmware and a client's data, not yet started: in QEMU if it has a machine
    of its own there, else in Unicorn. `shift`: QEMU's clock counts instructions, see
    `QemuBoard`."""
    image = board if isinstance(board, Firmware) else firmware(board)
    if image.board.machine is None:
        from nestling.tiny.boards.unicorn import UnicornBoard

        return UnicornBoard(image, blob, socket)
    from nestling.tiny.boards.qemu import QemuBoard

    return QemuBoard(image, blob, socket, shift)
