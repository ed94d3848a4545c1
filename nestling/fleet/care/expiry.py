"""Which certificates of a fleet end soon, in words, some weeks before they do."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

from nestling.fleet.care.certs import ServerFiles, certificates

SERVER_SOON, AUTHORITY_SOON = timedelta(days=30), timedelta(days=90)
"""An authority's end is told earlier: a new one must be brought to every device."""


def ending_soon(files: ServerFiles, now: datetime | None = None) -> list[str]:
    """A line for each certificate of a server that ends soon, or has ended, and what to do."""
    found = [_ending(files.certificate, "the server's certificate", SERVER_SOON, _RENEW, now)]
    if files.ca.exists():
        found.append(_ending(files.ca, "the fleet's authority", AUTHORITY_SOON, _RENEW_CA, now))
    return [line for line in found if line]


def trust_ending_soon(ca: Path, now: datetime | None = None) -> str:
    """The same of the authority that a device trusts; empty where there is time."""
    return _ending(ca, "the authority that this device trusts", AUTHORITY_SOON, _ASK, now)


_RENEW = "renew it: nestling certs DIR --host NAME --force"
_RENEW_CA = "renew it: nestling certs DIR --renew-ca"
_ASK = "get a new ca.crt from whoever runs the server"


def _ending(path: Path, what: str, soon: timedelta, fix: str, now: datetime | None) -> str:
    now = now or datetime.now(timezone.utc)
    try:
        end = certificates(path)[0].not_valid_after_utc
    except (OSError, ValueError) as error:
        return f"{what} cannot be read: {error}"
    if end - now > soon:
        return ""
    when = f"ends in {(end - now).days} days, on" if end > now else "ended on"
    return f"{what} {when} {end.date()}; {fix}"
