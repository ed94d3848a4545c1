"""A network of their own for processes that listen on 127.0.0.1 and ask nobody who they are.

Every user of a machine reaches its loop. Flower's control and runtime interfaces have no other door
(its SuperLink takes an address and a port, no socket in a folder), so the loop itself is made
another one: a network namespace of Linux, with nothing in it but a 127.0.0.1 of its own. It is held
open by the file descriptors here, which children inherit, and is gone with the last process in it.
To enter it takes the same user, or root.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ENTER = """
import ctypes, os, sys
for word in filter(None, sys.argv[1].split(",")):
    if ctypes.CDLL(None, use_errno=True).setns(int(word), 0):
        sys.exit("cannot enter a network: " + os.strerror(ctypes.get_errno()))
    os.close(int(word))
del sys.argv[1]
"""
"""Enters what the first argument names, as descriptors, and takes it off. With nothing else loaded:
a process with threads may not."""

_RUN = ENTER + "os.execvp(sys.argv[1], sys.argv[1:])\n"

# Whoever is root may have a network alone; others need to be somebody in a namespace of users first
# (as themselves: nothing else is theirs there). The loop of a new network is down: 0x8914 and 0x49
# are SIOCSIFFLAGS, and IFF_UP with IFF_LOOPBACK and IFF_RUNNING.
_MAKE = """
import ctypes, fcntl, os, socket, struct, sys
libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
alone = libc.unshare(0x40000000) == 0
if not alone:
    if libc.unshare(0x50000000): sys.exit(os.strerror(ctypes.get_errno()))
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file: file.write(text)
with socket.socket() as any: fcntl.ioctl(any, 0x8914, struct.pack("16sH14x", b"lo", 0x49))
print("net" if alone else "user,net", flush=True)
sys.stdin.read()
"""

_SECONDS = 30.0


@dataclass(frozen=True)
class Enclosure:
    """A network that only its own processes see, as the descriptors that hold it."""

    descriptors: tuple[int, ...]

    @property
    def words(self) -> str:
        """For `ENTER`."""
        return ",".join(map(str, self.descriptors))

    def run(self, command: Sequence[str], **more: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command inside it, as `subprocess.run` does."""
        inside = [sys.executable, "-I", "-S", "-c", _RUN, self.words, *command]
        return subprocess.run(inside, pass_fds=self.descriptors, text=True, **more)  # noqa: S603 (a list of our own words, no shell)

    def enter(self) -> None:
        """Has this process inside from now on; sockets that it has stay where they are. It must
        not have threads yet."""
        for descriptor in self.descriptors:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), "the network of Flower's own cannot be entered")

    def __enter__(self) -> Enclosure:
        """As a context it is let go of at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of it."""
        self.close()

    def close(self) -> None:
        """Lets go of it; it stays for as long as a process is in it."""
        for descriptor in self.descriptors:
            os.close(descriptor)


NOWHERE = Enclosure(())
"""None at all: what is run in it runs where we are."""


def enclosure() -> Enclosure:
    """A new one. `OSError` with the reason where the system does not let us: another system than
    Linux, a container, a service manager that forbids namespaces."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"{sys.platform} has no network namespaces")
    command = [sys.executable, "-I", "-S", "-c", _MAKE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as maker:  # noqa: S603
        assert maker.stdout is not None  # noqa: S101 (a pipe was asked for)
        kinds = maker.stdout.readline().strip()
        made = [
            os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY)
            for kind in kinds.split(",")
            if kind
        ]
        said = maker.communicate(timeout=_SECONDS)[1].strip()
    if not made:
        raise OSError(said.splitlines()[-1] if said else "no namespace could be made")
    return Enclosure(tuple(made))
