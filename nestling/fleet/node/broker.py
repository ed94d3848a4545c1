"""The MQTT broker between a gateway and its devices: how it is reached, and the files that a
Mosquitto broker needs to keep devices apart. Topics are nestling/DEVICE/down (jobs), /up (results)
and /state (who is there; retained).

    python -m nestling.fleet.node.broker DIR --certs KEYS --device kitchen --device cellar
        [--host ADDRESS] [--port PORT]
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import pwd
import re
import secrets
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nestling.errors import InputError
from nestling.fleet.care.certs import ServerFiles, private_folder, server_files, write_private
from nestling.fleet.protocol.addresses import is_loopback

if TYPE_CHECKING:
    from paho.mqtt.client import Client

TOPICS = "nestling"
KEEPALIVE = 30
"""Seconds; a device that was cut off is missed after one and a half times as long."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
GATEWAY = "gateway"
# of Mosquitto's own tool: passwords here are random and long, so that more of them protect nothing
_ROUNDS = 101


@dataclass(frozen=True)
class Broker:
    """How a broker is reached. `ca`: the authority that signed its certificate (None: one that the
    system trusts)."""

    host: str
    user: str
    password_file: Path
    port: int = 8883
    ca: Path | None = None
    tls: bool = True

    def client(self, id: str = "") -> Client:
        """A client that connects, and connects again, as soon as its loop is started. `id`: what
        the broker knows the connection by, which throws an older one of the same id off (default:
        the user's name, as our own broker has it in any case)."""
        mqtt = _paho()
        made: Client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2, client_id=id or self.user, protocol=mqtt.MQTTv311
        )
        if self.tls:
            made.tls_set_context(
                ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
            )
        elif not is_loopback(self.host):
            raise InputError(
                f"without TLS only a broker on this machine can be reached, not {self.host}",
                field="mqtt.tls",
                fix="leave tls on, and name the authority with ca",
            )
        made.username_pw_set(self.user, read_secret(self.password_file))
        made.max_inflight_messages_set(500)
        made.reconnect_delay_set(1, 30)
        made.connect_async(self.host, self.port, KEEPALIVE)
        return made


def topic(device: str, end: str) -> str:
    """A device's topic: its "down", "up" or "state"."""
    return f"{TOPICS}/{device}/{end}"


def check_device(name: str, field: str) -> str:
    """Refuses a name that cannot be part of a topic and of a file's name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is not a name",
            field=field,
            fix="letters, digits, dots, hyphens and underscores, at most 63",
        )
    return name


def read_secret(path: Path) -> str:
    """The password in a file that nobody else may read."""
    try:
        if path.stat().st_mode & 0o077:
            raise InputError(
                f"{path} can be read by others", field="password_file", fix=f"chmod 600 {path}"
            )
        return path.read_text().strip()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}", field="password_file"
        ) from None


def write_broker(
    folder: Path,
    devices: Sequence[str],
    certificate: ServerFiles,
    host: str = "127.0.0.1",
    port: int = 8883,
    user: str = "",
) -> Path:
    """The files of a Mosquitto broker for a gateway and its devices; gives its configuration's
    path.

    A password is made for each of them that has none yet, in secrets/NAME, to be copied to that
    device. Nobody without one gets in, and a device reaches its own topics only. `user`: who the
    broker is to run as where root starts it (default: who owns the files).
    """
    names = [check_device(name, "devices") for name in devices]
    if GATEWAY in names or len(set(names)) < len(names):
        raise InputError(
            f"two devices of one name, or one called {GATEWAY!r}",
            field="devices",
            fix="give each its own name",
        )
    private_folder(folder)
    place = private_folder(folder / "secrets")
    lines = []
    for name in (GATEWAY, *names):
        if not (place / name).exists():
            write_private(place / name, secrets.token_urlsafe(24).encode())
        lines.append(f"{name}:{hashed(read_secret(place / name))}\n")
    write_private(folder / "passwords", "".join(lines).encode())
    write_private(folder / "acl", _acl().encode())
    runs_as = user or pwd.getpwuid(os.getuid()).pw_name
    settings = {
        "listener": f"{port} {host}",
        "certfile": certificate.certificate,
        "keyfile": certificate.key,
        "tls_version": "tlsv1.2",
        "allow_anonymous": "false",
        # who has a password can throw nobody off by taking another's id
        "use_username_as_clientid": "true",
        "password_file": folder / "passwords",
        "acl_file": folder / "acl",
        "persistence": "false",
        "max_queued_messages": 10000,
        "message_size_limit": 70000,
        "user": runs_as,
    }
    path = folder / "mosquitto.conf"
    write_private(path, "".join(f"{name} {value}\n" for name, value in settings.items()).encode())
    return path


def _acl() -> str:
    """Who may do what; %u is the name that a device has proved with its password."""
    return (
        f"user {GATEWAY}\ntopic read {TOPICS}/+/up\ntopic read {TOPICS}/+/state\ntopic write "
        f"{TOPICS}/+/down\n"
        f"\npattern read {TOPICS}/%u/down\npattern write {TOPICS}/%u/up\npattern write "
        f"{TOPICS}/%u/state\n"
    )


def hashed(password: str) -> str:
    """As Mosquitto keeps passwords (PBKDF2 with SHA-512)."""
    salt = secrets.token_bytes(12)
    found = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ROUNDS, 64)
    return f"$7${_ROUNDS}${base64.b64encode(salt).decode()}${base64.b64encode(found).decode()}"


def _paho():  # type: ignore[no-untyped-def]
    try:
        from paho.mqtt import client
    except ImportError:
        raise InputError(
            "paho-mqtt is not installed", field="mqtt", fix="pip install 'nestling[mqtt]'"
        ) from None
    return client


def main(words: Sequence[str] | None = None) -> int:
    """The command: writes the broker's files and says how to start it; exit code 2 where an input
    is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m nestling.fleet.node.broker",
        description="Makes the files of a Mosquitto broker.",
    )
    parser.add_argument("folder", type=Path, help="where; made where it is missing")
    parser.add_argument(
        "--certs", type=Path, required=True, help="certificates (see `nestling certs`)"
    )
    parser.add_argument(
        "--device", action="append", default=[], help="a device; repeatable. All of them, each time"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=8883, help="the port to listen on")
    parser.add_argument(
        "--user", default="", help="who the broker runs as where root starts it (default: you)"
    )
    told = parser.parse_args(words)
    try:
        files = server_files(told.certs.absolute())
        path = write_broker(
            told.folder.absolute(), told.device, files, told.host, told.port, told.user
        )
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"start it with: mosquitto -c {path}")
    print(f"passwords: {told.folder / 'secrets'} (copy each to its device)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
