"""Boards that QEMU emulates."""

from __future__ import annotations

from pathlib import Path

from nestling.tiny.boards.emulator import Emulator
from nestling.tiny.boards.table import Firmware
from nestling.tiny.runtime import elf, toolchain

QEMU = "qemu-system-arm"


class QemuBoard(Emulator):
    """A board in QEMU. `shift`: an instruction is 2^shift nanoseconds of its clock, whatever the
    host does, so that the board's ticks count instructions; None: the clock is the host's."""

    def __init__(
        self, image: Firmware, blob: bytes, socket: str | Path, shift: int | None = None
    ) -> None:
        """Needs QEMU installed, and says how to get it where it is not."""
        toolchain.need(QEMU)
        super().__init__(image, blob, socket)
        self.shift = shift

    def flash_data(self, blob: bytes) -> bytes:
        """The data as an ELF file at their place in flash."""
        # Raw data are refused beyond the size of the machine's main memory, which STM32 machines do
        # not have in newer versions.
        return elf.wrap(blob, self.image.blob) if blob else b""

    def command(self) -> list[str]:
        """QEMU with the firmware, the data and the serial port on the socket."""
        machine = self.image.board.machine
        assert machine is not None
        clock = [] if self.shift is None else ["-icount", f"shift={self.shift},sleep=off"]
        data = ["-device", f"loader,file={self.data}"] if self.data.stat().st_size else []
        serial = ["-serial", f"unix:{self.socket},server=on,wait=off"]
        # A board that faults resets itself; that ends the process, for the supervisor to see.
        quiet = ["-display", "none", "-monitor", "none", "-no-reboot"]
        return [
            QEMU,
            "-M",
            machine,
            "-kernel",
            str(self.image.path),
            *data,
            *serial,
            *clock,
            *quiet,
        ]
