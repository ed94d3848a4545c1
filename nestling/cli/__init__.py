"""The command line, one group of commands per file. Heavy imports wait until a command needs them,
so that `nestling --help` answers at once."""

from nestling.cli.main import app, main

__all__ = ["app", "main"]
