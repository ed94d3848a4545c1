"""Lengths in a method's settings, which mean the same in short and in long runs."""

from __future__ import annotations


def in_rounds(length: float, rounds: int) -> int:
    """A number of rounds: a length of 1 or more as it is, a smaller one as a share of the run's `rounds`, at least one."""
    return round(length) if length >= 1 else max(1, round(length * rounds))
