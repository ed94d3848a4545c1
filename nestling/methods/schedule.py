"""Lengths in a method's settings, which mean the same in short and in long runs."""

from __future__ import annotations


def in_rounds(length: float, rounds: int) -> int:
    """A number of rounds: as it is from 1 on, and below 1 that share of a run of so many rounds, at least one."""
    return round(length) if length >= 1 else max(1, round(length * rounds))
