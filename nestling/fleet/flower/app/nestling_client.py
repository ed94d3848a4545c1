"""What a device runs for every message: a new process, which therefore only hands it to the worker
that is there all the time."""

from nestling.fleet.flower.relay import app

__all__ = ["app"]
