"""What every firmware takes before any plan. Numbers, so that a forecast needs no compiler; a test
compares them with linked images."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FirmwareSizes:
    """The part of a board's memory that no plan changes, in bytes."""

    stack: int  # reserved; the boards measure how much of it was used
    data: int  # .data and .bss: the node with its frame
    flash: int  # at most, over all boards and compilers

    @property
    def statics(self) -> int:
        """RAM that is taken before any plan."""
        return self.stack + self.data


FIRMWARE = FirmwareSizes(stack=1024, data=512, flash=32 * 1024)
