"""Certificates and keys of a fleet: a test authority of its own, the server's certificate, a key
pair for every device.

    DIR/ca/             ca.key, ca.crt                      stays with whoever issues
    DIR/server/         ca.crt, server.crt, server.key,     goes to the server
                        devices/NAME.pub, revoked/NAME.pub
    DIR/devices/NAME/   ca.crt, device.key, name            goes to that device, and nowhere else

Devices prove who they are with an elliptic-curve key (P-384, OpenSSH format: what a Flower
SuperNode takes); the server proves it with a certificate. What a key stands for (one device, of a
tier or any, or a gateway for so many) the operator says when it is issued, and its public half
carries it. Folders are 0700, files 0600. Nothing is overwritten unless it is asked for.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nestling.errors import InputError
from nestling.files import write_atomic, writing
from nestling.keys import check_closed, need_cryptography

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TIER, _GATEWAY = re.compile(r" tier=(\S+)"), re.compile(r" gateway=(\d{1,6})\b")
DAYS, AUTHORITY_DAYS = 365, 1825
CLOCKS_DIFFER = datetime.timedelta(minutes=10)
"""Certificates begin this long ago: a device without a battery-backed clock may lag."""


@dataclass(frozen=True)
class ServerFiles:
    """What the server holds."""

    root: Path

    @property
    def ca(self) -> Path:
        """The authority's certificate; missing where a public authority signed the server's."""
        return self.root / "ca.crt"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.root / "server.crt"

    @property
    def key(self) -> Path:
        """The server's key."""
        return self.root / "server.key"

    @property
    def devices(self) -> Path:
        """The folder of the public keys of devices that may join, NAME.pub each."""
        return self.root / "devices"

    @property
    def revoked(self) -> Path:
        """The folder of those that may not any more."""
        return self.root / "revoked"


@dataclass(frozen=True)
class DeviceFiles:
    """What a device holds."""

    root: Path
    name: str

    @property
    def ca(self) -> Path | None:
        """The authority to trust; None: the system's."""
        path = self.root / "ca.crt"
        return path if path.exists() else None

    @property
    def key(self) -> Path:
        """The device's private key."""
        return self.root / "device.key"


@dataclass(frozen=True)
class KeyHolder:
    """Whom a key stands for: the device `name`, which may join as `tier` only ("": as any), or a
    gateway of that name, which may speak for at most `devices` others (0: it is no gateway)."""

    name: str
    tier: str = ""
    devices: int = 0

    @staticmethod
    def parse(text: str) -> KeyHolder:
        """A device as the command line names it: NAME, or NAME=TIER."""
        name, equals, tier = text.partition("=")
        check_name(name)
        if equals and not re.fullmatch(r"\S+", tier):
            raise InputError(
                f"{text!r} names no tier", field="--device", fix="write NAME, or NAME=TIER"
            )
        return KeyHolder(name, tier)

    @staticmethod
    def parse_gateway(text: str) -> KeyHolder:
        """A gateway as the command line names it: NAME=MOST."""
        name, _, most = text.partition("=")
        check_name(name, "--gateway")
        if not re.fullmatch(r"[1-9][0-9]{0,5}", most):
            raise InputError(
                f"{text!r} does not say how many devices it may speak for",
                field="--gateway",
                fix=f"write {name}=30 for at most 30",
            )
        return KeyHolder(name, devices=int(most))

    @property
    def comment(self) -> str:
        """As it stands behind the key in its public half."""
        tier = f" tier={self.tier}" if self.tier else ""
        return self.name + tier + (f" gateway={self.devices}" if self.devices else "")

    @staticmethod
    def of_comment(name: str, comment: str) -> KeyHolder:
        """What stands behind a key; whatever else stands there says nothing."""
        tier, most = _TIER.search(comment), _GATEWAY.search(comment)
        return KeyHolder(name, tier[1] if tier else "", int(most[1]) if most else 0)


def issue(
    folder: Path,
    *,
    hosts: Sequence[str] = (),
    devices: Sequence[str] = (),
    gateways: Sequence[str] = (),
    revoke: Sequence[str] = (),
    renew_ca: bool = False,
    force: bool = False,
    days: int = DAYS,
) -> list[str]:
    """Makes what is missing and what was asked for; returns a line for each thing done. `devices`
    are NAME or NAME=TIER, `gateways` NAME=MOST. With `force` a named host or device gets new files.
    `renew_ca` makes a new authority beside the old, which stays trusted until its end; the server's
    certificate, which the old one signed, stays until every device has heard of the new."""
    need_cryptography()
    holders = [KeyHolder.parse(text) for text in devices]
    holders += [KeyHolder.parse_gateway(text) for text in gateways]
    for name in revoke:
        check_name(name)
    if not 1 <= days <= 3650:
        raise InputError(f"{days} days", field="--days", fix="1 to 3650")
    if renew_ca and hosts:
        raise InputError(
            "a renewed authority signs nothing before every device trusts it",
            field="--renew-ca",
            fix="leave --host out, bring every device its ca.crt, then renew the server's",
        )
    server = ServerFiles(folder / "server")
    done = []
    with writing(folder, "DIR"):
        fresh = not (folder / "ca" / "ca.key").exists()
        named = [holder.name for holder in holders]
        if fresh and renew_ca:
            raise InputError(
                f"there is no authority in {folder}",
                field="--renew-ca",
                fix="name the folder that issued the keys",
            )
        _check_room(folder, server, hosts, named, revoke, force, fresh)
        for part in (
            folder,
            folder / "ca",
            server.root,
            server.devices,
            server.revoked,
            folder / "devices",
        ):
            private_folder(part)
    if fresh:
        _make_authority(folder / "ca", max(days, AUTHORITY_DAYS))
        done.append(f"authority: {folder / 'ca'} (keep ca.key where nobody else reads)")
    if renew_ca:
        done.append(_renew_authority(folder, server, max(days, AUTHORITY_DAYS)))
    if hosts or not server.certificate.exists():
        names = list(hosts) or default_hosts()
        end = _make_server(folder / "ca", server, names, days)
        done.append(f"server: {server.root} for {', '.join(names)}, until {end}")
    done += [_make_device(folder, server, holder) for holder in holders]
    done += [_revoke(server, name) for name in revoke]
    return done


def default_hosts() -> list[str]:
    """This machine, by its name and over loopback."""
    return list(dict.fromkeys([socket.gethostname(), "localhost", "127.0.0.1", "::1"]))


def check_name(name: str, field: str = "--device") -> str:
    """Refuses a name that cannot be a file's."""
    if not NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is not a name",
            field=field,
            fix="letters, digits, dots, hyphens and underscores, at most 63",
        )
    return name


def server_files(folder: Path) -> ServerFiles:
    """The server's files in DIR/server, or in the folder itself where only that was copied;
    complete, or an `InputError`."""
    files = ServerFiles(folder / "server" if (folder / "server").is_dir() else folder)
    for path in (files.certificate, files.key, files.devices):
        _there(path, "--certs")
    check_closed(files.key, "--certs")
    return files


def device_files(folder: Path, name: str | None = None) -> DeviceFiles:
    """A device's files in DIR/devices/NAME, or in the folder itself where only that was copied."""
    if (folder / "devices").is_dir():
        names = sorted(
            p.name for p in (folder / "devices").iterdir() if (p / "device.key").exists()
        )
        if name is None and len(names) != 1:
            raise InputError(
                f"{folder} holds keys of {len(names)} devices",
                field="--name",
                fix="say which this device is",
            )
        folder = folder / "devices" / (name or names[0])
    key = _there(folder / "device.key", "--certs")
    check_closed(key, "--certs")
    written = folder / "name"
    files = DeviceFiles(
        folder,
        check_name(
            written.read_text().strip() if written.exists() else name or folder.name, "--certs"
        ),
    )
    if name is not None and name != files.name:
        raise InputError(
            f"the key in {folder} was made for {files.name!r}",
            field="--name",
            fix="use that name, or that device's key",
        )
    return files


def public_keys(folder: Path) -> dict[str, KeyHolder]:
    """What a node sends as its public key (base64 of PEM) → whom it stands for, for every NAME.pub
    in the folder that holds a key."""
    found = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            key = path.read_bytes()
            comment = " ".join(key.decode(errors="replace").split()[2:])
            found[wire_key(key)] = KeyHolder.of_comment(path.stem, f" {comment}")
        except (OSError, ValueError):  # noqa: PERF203 (a file without a key is passed over)
            continue
    return found


def wire_key(openssh: bytes) -> str:
    """A public key in OpenSSH format the way Flower's nodes send it in a header."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_ssh_public_key(openssh)
    pem = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return base64.b64encode(pem).decode()


def signed_by(wire: str, text: str | None, signature: str | None) -> bool:
    """Whether a text was signed by the owner of a key, as Flower's nodes sign the time."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = serialization.load_pem_public_key(base64.b64decode(wire))
    assert isinstance(key, ec.EllipticCurvePublicKey)  # noqa: S101 (devices have no others)
    try:
        raw = base64.b64decode(signature or "", validate=True)
        key.verify(raw, (text or "").encode(), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint(wire: str) -> str:
    """A short name for a key that no log needs to hide."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(wire.encode()).digest()).decode()[:16]


def certificates(path: Path) -> list[x509.Certificate]:
    """The certificates in a file: of an authority that was renewed, the newest first."""
    from cryptography import x509

    return x509.load_pem_x509_certificates(path.read_bytes())


def private_folder(path: Path) -> Path:
    """Makes a folder that only its owner reads."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(path, 0o700)
    return path


def write_private(path: Path, data: bytes, force: bool = True) -> None:
    """A whole file that was never readable by others, not even while it was being written."""
    write_atomic(path, data, mode=0o600, replace=force)


def make_loopback_authority(folder: Path, days: int = DAYS) -> ServerFiles:
    """An authority and a certificate for 127.0.0.1, for what two processes of one machine say to
    each other."""
    private_folder(folder)
    server = ServerFiles(folder)
    _make_authority(folder, days)
    _make_server(folder, server, ["127.0.0.1", "localhost"], days)
    return server


def _check_room(
    folder: Path,
    server: ServerFiles,
    hosts: Sequence[str],
    devices: Sequence[str],
    revoke: Sequence[str],
    force: bool,
    fresh: bool,
) -> None:
    """All refusals come before the first file is written."""
    if fresh and revoke:
        raise InputError(
            f"there is no authority in {folder}",
            field="--revoke",
            fix="name the folder that issued the key",
        )
    if fresh and (folder / "ca" / "ca.crt").exists():
        raise InputError(
            f"{folder / 'ca'} holds a certificate but not its key",
            field="DIR",
            fix="issue where the key is",
        )
    if hosts and server.certificate.exists() and not force:
        raise InputError(
            f"{server.certificate} exists",
            field="--host",
            fix="--force replaces it; devices need nothing new",
        )
    if (hosts or not server.certificate.exists()) and not fresh:
        ended = certificates(folder / "ca" / "ca.crt")[0].not_valid_after_utc
        if ended <= _now():
            raise InputError(
                f"the authority ended on {ended.date()}",
                field="--host",
                fix="--renew-ca, and bring every device its ca.crt",
            )
    for name in devices:
        gone = (server.revoked / f"{name}.pub").exists()
        if not force and (
            gone
            or (server.devices / f"{name}.pub").exists()
            or (folder / "devices" / name).exists()
        ):
            state = "is revoked" if gone else "has a key"
            raise InputError(
                f"{name} {state} already",
                field="--device",
                fix="--force gives it a new one and ends the old",
            )
    for name in revoke:
        if not (server.devices / f"{name}.pub").exists():
            known = ", ".join(sorted(p.stem for p in server.devices.glob("*.pub"))) or "none"
            raise InputError(
                f"there is no device {name!r}", field="--revoke", fix=f"devices: {known}"
            )


def _renew_authority(folder: Path, server: ServerFiles, days: int) -> str:
    """The new authority stands first in ca.crt, and those before it that have not ended follow:
    whoever holds the file trusts them all."""
    from cryptography.hazmat.primitives import serialization

    place = folder / "ca"
    old = [one for one in certificates(place / "ca.crt") if one.not_valid_after_utc > _now()]
    _make_authority(place, days, force=True)
    kept = b"".join(one.public_bytes(serialization.Encoding.PEM) for one in old)
    both = (place / "ca.crt").read_bytes() + kept
    for path in (place / "ca.crt", server.ca, *folder.glob("devices/*/ca.crt")):
        write_private(path, both)
    return (
        f"authority: renewed in {place}; bring every device its {folder / 'devices'}/NAME/ca.crt, "
        "and only then renew the server's certificate (--host NAME --force)"
    )


def _make_authority(folder: Path, days: int, force: bool = False) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    name, end = _named("nestling fleet authority"), _now() + datetime.timedelta(days=days)
    builder = _certificate(name, name, key.public_key(), key.public_key(), end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    write_private(folder / "ca.key", _pem(key), force)
    write_private(folder / "ca.crt", _signed(builder, key))


def _make_server(
    authority: Path, files: ServerFiles, hosts: Sequence[str], days: int
) -> datetime.date:
    """The server's certificate, and the day on which it ends: the authority's last at most."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    ca_key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)  # noqa: S101 (the authority is our own)
    ca = certificates(authority / "ca.crt")[0]
    key = ec.generate_private_key(ec.SECP384R1())
    end = min(_now() + datetime.timedelta(days=days), ca.not_valid_after_utc)
    builder = _certificate(_named(hosts[0]), ca.subject, key.public_key(), ca_key.public_key(), end)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    builder = builder.add_extension(
        x509.SubjectAlternativeName(_alternatives(hosts)), critical=False
    )
    write_private(files.key, _pem(key))
    write_private(files.certificate, _signed(builder, ca_key))
    if authority != files.root:
        write_private(files.ca, (authority / "ca.crt").read_bytes())
    return end.date()


def _make_device(folder: Path, server: ServerFiles, holder: KeyHolder) -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP384R1()), holder.name
    home = private_folder(folder / "devices" / name)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _retire(server, name)
    write_private(home / "device.key", private)
    write_private(home / "name", f"{name}\n".encode())
    write_private(home / "ca.crt", (folder / "ca" / "ca.crt").read_bytes())
    write_private(server.devices / f"{name}.pub", public + f" {holder.comment}\n".encode())
    kind = f"gateway {name}, for {holder.devices} devices" if holder.devices else f"device {name}"
    return f"{kind}: {home} (copy it there); its public key: {server.devices / f'{name}.pub'}"


def _retire(server: ServerFiles, name: str) -> None:
    """A device's old key becomes a revoked one, under a name of its own."""
    old = server.devices / f"{name}.pub"
    if not old.exists():
        return
    numbers = (n for n in range(1, 1_000_000) if not (server.revoked / f"{name}.{n}.pub").exists())
    os.replace(old, server.revoked / f"{name}.{next(numbers)}.pub")


def _revoke(server: ServerFiles, name: str) -> str:
    os.replace(server.devices / f"{name}.pub", server.revoked / f"{name}.pub")
    return (
        f"device {name}: revoked; copy {server.root} to the server, which refuses it from then on"
    )


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - CLOCKS_DIFFER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False
        )
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    off = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **off,
    )


def _named(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternatives(hosts: Iterable[str]) -> list[x509.GeneralName]:
    from cryptography import x509

    found: list[x509.GeneralName] = []
    for host in hosts:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:  # noqa: PERF203 (each may be a name or an address)
            if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})", host):
                raise InputError(
                    f"{host!r} is neither a host's name nor an address", field="--host"
                ) from None
            found.append(x509.DNSName(host))
    return found


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _there(path: Path, field: str) -> Path:
    if not path.exists():
        raise InputError(
            f"there is no {path}", field=field, fix="make it with `nestling certs`, or copy it here"
        )
    return path
