"""Where a server is: written by people, checked here."""

from __future__ import annotations

import ipaddress

from nestling.errors import InputError

PORT = 8443


def is_loopback(host: str) -> bool:
    """Whether a name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_server(text: str, field: str = "SERVER") -> tuple[str, int]:
    """Host and port from "host", "host:port", "https://host:port", "[::1]:port"."""
    rest = text.removeprefix("https://").removeprefix("http://").rstrip("/")
    host, colon, port = (
        rest.rpartition(":")
        if not rest.endswith("]") and (rest.startswith("[") or rest.count(":") == 1)
        else (rest, "", "")
    )
    try:
        number = int(port) if colon else PORT
    except ValueError:
        number = 0
    if not host.strip("[]") or not 1 <= number <= 65535 or "/" in host or " " in host:
        raise InputError(
            f"{text!r} is not a server's address", field=field, fix="write host or host:port"
        )
    return host.strip("[]"), number


def join_address(host: str, port: int) -> str:
    """As commands want it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
