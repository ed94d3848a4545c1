"""Boards with any map of RAM and flash, emulated by Unicorn (a package of its own, under GPL-2.0,
that is used and never bundled).

A board is a process, `python -m nestling.tiny.boards.unicorn`: it maps exactly the memory that the
board has, and whatever touches anything else ends it with a message.
"""

from __future__ import annotations

import argparse
import select
import socket
import sys
from pathlib import Path
from typing import Any

from nestling.tiny.boards.emulator import Emulator
from nestling.tiny.boards.table import Firmware
from nestling.tiny.runtime import elf, toolchain

SYSTEM, AIRCR = 0xE000E000, 0xD0C  # interrupts, clock and reset of every Cortex-M
WINDOW = 0x1000
DATA, STATE = 0x00, 0x04  # of the CMSDK UART
FULL_IN = 2
MOST_UNSENT = 4096


class UnicornBoard(Emulator):
    """A board in Unicorn. It has no clock: its ticks stay at 0."""

    def __init__(self, image: Firmware, blob: bytes, socket: str | Path) -> None:
        """Needs the package `unicorn`, and says how to get it where it is missing."""
        toolchain.need("unicorn")
        super().__init__(image, blob, socket)

    def command(self) -> list[str]:
        """This module as a process, told the board's memory map, core and UART."""
        board = self.image.board
        maps = [
            "--ram",
            f"{board.ram}:{board.ram_bytes}",
            "--flash",
            f"{board.flash}:{board.flash_bytes}",
        ]
        data = ["--data", str(self.data), "--data-at", str(self.image.blob)]
        place = [
            "--core",
            board.core,
            "--uart",
            str(board.uart.address),
            "--socket",
            str(self.socket),
        ]
        return [
            sys.executable,
            "-m",
            "nestling.tiny.boards.unicorn",
            "--elf",
            str(self.image.path),
            *maps,
            *data,
            *place,
        ]


class Fault(Exception):
    """The program did what the board cannot do."""


class Machine:
    """The core, its memory and its UART."""

    def __init__(self, core: str, uart: int, ram: tuple[int, int], flash: tuple[int, int]) -> None:
        """Maps exactly this RAM and flash, and the windows of the UART and of the system
        registers."""
        import unicorn
        from unicorn import arm_const

        self._registers = arm_const
        self._error = unicorn.UcError  # type: ignore[attr-defined]
        self.received, self.unsent = bytearray(), bytearray()
        self.fault = ""
        mode = unicorn.UC_MODE_THUMB | unicorn.UC_MODE_MCLASS
        self.core = uc = unicorn.Uc(unicorn.UC_ARCH_ARM, mode)  # type: ignore[attr-defined]
        uc.ctl_set_cpu_model(getattr(arm_const, f"UC_CPU_ARM_{core.upper().replace('-', '_')}"))
        uc.mem_map(*flash, unicorn.UC_PROT_READ | unicorn.UC_PROT_EXEC)
        uc.mem_map(*ram, unicorn.UC_PROT_READ | unicorn.UC_PROT_WRITE)
        uc.mmio_map(uart, WINDOW, self._uart_read, None, self._uart_write, None)
        uc.mmio_map(SYSTEM, WINDOW, lambda *_: 0, None, self._system_write, None)
        uc.hook_add(unicorn.UC_HOOK_MEM_INVALID, self._invalid)
        self._vectors = flash[0]

    def load(self, address: int, data: bytes) -> None:
        """Puts `data` into the flash."""
        try:
            self.core.mem_write(address, data)
        except self._error:
            raise Fault(f"{len(data)} bytes at {address:#010x} do not lie in the flash") from None

    def reset(self) -> None:
        """Sets stack and program counter to what the vector table says."""
        stack, start = (
            int.from_bytes(self.core.mem_read(self._vectors + at, 4), "little") for at in (0, 4)
        )
        self.core.reg_write(self._registers.UC_ARM_REG_SP, stack)
        self.core.reg_write(self._registers.UC_ARM_REG_PC, start)
        self._at = start

    def run(self) -> None:
        """Goes on until the program waits for the link, or has much to send."""
        try:
            self.core.emu_start(self._at | 1, 0xFFFFFFFF)
        except self._error as error:
            raise Fault(
                f"{self.fault or error} at "
                f"{self.core.reg_read(self._registers.UC_ARM_REG_PC):#010x}"
            ) from None
        if self.fault:
            raise Fault(self.fault)
        self._at = self.core.reg_read(self._registers.UC_ARM_REG_PC)

    def _uart_read(self, _uc: Any, offset: int, _size: int, _: object) -> int:
        if offset == STATE:
            return FULL_IN if self.received else 0
        return self.received.pop(0) if offset == DATA and self.received else 0

    def _uart_write(self, uc: Any, offset: int, _size: int, value: int, _: object) -> None:
        if offset == DATA:
            self.unsent.append(value & 0xFF)
            if len(self.unsent) >= MOST_UNSENT:
                uc.emu_stop()

    def _system_write(self, uc: Any, offset: int, _size: int, _value: int, _: object) -> None:
        if offset == AIRCR:
            self.fault = "the board reset itself"
            uc.emu_stop()

    def _invalid(
        self, _uc: Any, _access: int, address: int, _size: int, _value: int, _: object
    ) -> bool:
        self.fault = f"there is no such memory: {address:#010x}"
        return False


def serve(machine: Machine, path: str) -> None:
    """Runs the board with its link on the Unix socket `path`, one peer at a time, until it
    faults."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        peer: socket.socket | None = None
        while True:
            machine.run()
            peer = _send(peer, machine.unsent)
            while not machine.received:
                if peer is None:
                    peer = server.accept()[0]
                select.select([peer], [], [])
                peer = _receive(peer, machine.received)


def _send(peer: socket.socket | None, unsent: bytearray) -> socket.socket | None:
    """As on a line: what nobody listens to is lost."""
    try:
        if peer is not None:
            peer.sendall(unsent)
    except OSError:
        peer = None
    unsent.clear()
    return peer


def _receive(peer: socket.socket, received: bytearray) -> socket.socket | None:
    try:
        data = peer.recv(MOST_UNSENT)
    except OSError:
        data = b""
    received += data
    return peer if data else None


def main(arguments: list[str] | None = None) -> int:
    """One board."""
    parser = argparse.ArgumentParser(
        description="A Cortex-M board in Unicorn, its serial link on a Unix socket."
    )
    for name in ("--elf", "--ram", "--flash", "--core", "--socket"):
        parser.add_argument(name, required=True)
    parser.add_argument("--uart", type=int, required=True)
    parser.add_argument("--data")
    parser.add_argument("--data-at", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        machine = Machine(options.core, options.uart, _range(options.ram), _range(options.flash))
        for segment in elf.read(options.elf).segments:
            machine.load(segment.address, segment.data)
        if options.data:
            machine.load(options.data_at, Path(options.data).read_bytes())
        machine.reset()
        serve(machine, options.socket)
    except Fault as fault:
        print(f"fault: {fault}", file=sys.stderr)
    return 1


def _range(text: str) -> tuple[int, int]:
    start, size = text.split(":")
    return int(start), int(size)


if __name__ == "__main__":
    sys.exit(main())
