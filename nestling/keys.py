"""Keys that sign what is exported (Ed25519, in the PEM form that OpenSSL reads), and what is asked
of every private key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestling.errors import InputError
from nestling.files import write_atomic, writing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )


def need_cryptography() -> None:
    """Refuses to go on without the library that makes and reads keys."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise InputError(
            "keys need the package cryptography",
            field="nestling",
            fix="pip install 'nestling[fleet]'",
        ) from None


def check_closed(key: Path, field: str) -> None:
    """Refuses a key that others may read."""
    if key.stat().st_mode & 0o077:
        raise InputError(f"{key} can be read by others", field=field, fix=f"chmod 600 {key}")


def make_keys(path: Path) -> Path:
    """Writes a new private key to a file that only its owner reads, and the public one beside it,
    whose path it gives; overwrites neither."""
    need_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, public = Ed25519PrivateKey.generate(), path.with_name(path.name + ".pub")
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    with writing(path, "FILE"):
        write_atomic(path, secret, mode=0o600, replace=False)
    with writing(public, "FILE"):
        write_atomic(public, shown, replace=False)
    return public


def private_key(path: Path, field: str = "--sign") -> Ed25519PrivateKey:
    """The private key in a file that nobody else may read."""
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    found = _read(path, field, lambda data: load_pem_private_key(data, None), Ed25519PrivateKey)
    check_closed(path, field)
    return found


def public_key(path: Path, field: str = "--key") -> Ed25519PublicKey:
    """The public key in a file."""
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    return _read(path, field, load_pem_public_key, Ed25519PublicKey)


def _read(path: Path, field: str, load: Callable[[bytes], Any], kind: type) -> Any:
    try:
        found = load(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}", field=field, fix="`nestling keygen` makes keys"
        ) from None
    except (ValueError, TypeError):  # the latter: it has a passphrase
        found = None
    if not isinstance(found, kind):
        raise InputError(
            f"{path} is no {kind.__name__} in PEM without a passphrase",
            field=field,
            fix="`nestling keygen FILE` makes FILE to sign with, and FILE.pub to verify with",
        )
    return found
