"""Certificates and keys: what is made, who may read it, what TLS and OpenSSH make of it, and that
nothing is lost by mistake."""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.errors import InputError

pytest.importorskip("cryptography", reason="comes with nestling[fleet]")

from nestling.fleet.care import certs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certs.issue(tmp_path / "keys", hosts=["fleet.example", "10.0.0.7"], devices=["pi-1", "pi-2"])
    return tmp_path / "keys"


def test_nobody_else_can_read_anything(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_each_party_gets_what_it_needs_and_no_more(folder: Path) -> None:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "ca/ca.key",
        "ca/ca.crt",
        "server/ca.crt",
        "server/server.crt",
        "server/server.key",
        "server/devices/pi-1.pub",
        "server/devices/pi-2.pub",
        *(
            f"devices/{name}/{file}"
            for name in ("pi-1", "pi-2")
            for file in ("ca.crt", "device.key", "name")
        ),
    }


def shake(server: certs.ServerFiles, ca: Path, host: str) -> None:
    """A TLS handshake in memory."""
    there = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    there.load_cert_chain(server.certificate, server.key)
    here = ssl.create_default_context(cafile=str(ca))
    here.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, other = (
        here.wrap_bio(down, up, server_hostname=host),
        there.wrap_bio(up, down, server_side=True),
    )
    waiting = {client, other}
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.discard(side)
            except ssl.SSLWantReadError:
                pass
    assert not waiting


@pytest.mark.parametrize("host", ["fleet.example", "10.0.0.7"])
def test_tls_accepts_the_server_under_its_names(folder: Path, host: str) -> None:
    shake(certs.server_files(folder), folder / "devices" / "pi-1" / "ca.crt", host)


def test_tls_refuses_another_name_and_another_authority(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(certs.server_files(folder), folder / "ca" / "ca.crt", "elsewhere.example")
    certs.issue(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(certs.server_files(folder), tmp_path / "other" / "ca" / "ca.crt", "fleet.example")


def test_the_device_key_is_an_openssh_key_that_fits_its_public_half(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    files = certs.device_files(folder, "pi-1")
    key = serialization.load_ssh_private_key(files.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    assert (folder / "server/devices/pi-1.pub").read_bytes().split()[:2] == public.split()
    assert set(certs.public_keys(folder / "server/devices").values()) == {"pi-1", "pi-2"}


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for wrong in (
        {"devices": ["pi-1"]},
        {"devices": ["new", "pi-2"]},
        {"hosts": ["other.example"]},
    ):
        with pytest.raises(InputError, match=r"already|exists"):
            certs.issue(folder, **wrong)  # type: ignore[arg-type]
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_more_devices_can_come_later(folder: Path) -> None:
    before = (folder / "server/server.crt").read_bytes()
    certs.issue(folder, devices=["pi-3"])
    assert certs.device_files(folder / "devices" / "pi-3").name == "pi-3"
    assert (folder / "server/server.crt").read_bytes() == before


def test_a_revoked_key_leaves_the_list_and_a_new_one_ends_the_old(folder: Path) -> None:
    old = certs.wire_key((folder / "server/devices/pi-1.pub").read_bytes())
    certs.issue(folder, revoke=["pi-1"])
    assert certs.public_keys(folder / "server/revoked") == {old: "pi-1"}
    assert set(certs.public_keys(folder / "server/devices").values()) == {"pi-2"}
    with pytest.raises(InputError, match="no device 'pi-1'"):
        certs.issue(folder, revoke=["pi-1"])
    with pytest.raises(InputError, match="revoked"):
        certs.issue(folder, devices=["pi-1"])
    second = certs.wire_key((folder / "server/devices/pi-2.pub").read_bytes())
    certs.issue(folder, devices=["pi-1", "pi-2"], force=True)
    assert set(certs.public_keys(folder / "server/revoked")) == {old, second}
    assert not set(certs.public_keys(folder / "server/devices")) & {old, second}


def test_the_part_that_was_copied_is_enough(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "on-the-device"
    os.rename(folder / "devices" / "pi-2", there)
    assert certs.device_files(there).name == "pi-2"
    with pytest.raises(InputError, match="was made for 'pi-2'"):
        certs.device_files(there, "pi-1")
    with pytest.raises(InputError, match="read by others"):
        there.joinpath("device.key").chmod(0o644)
        certs.device_files(there)


@pytest.mark.parametrize("name", ["../up", "", "a b", "x" * 64, ".hidden", "a/b"])
def test_a_name_is_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is not a name"):
        certs.issue(tmp_path / "keys", devices=[name])
    assert not (tmp_path / "keys").exists()


def test_the_command(tmp_path: Path) -> None:
    def nestling(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nestling.cli", "certs", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    made = nestling("keys", "--host", "localhost", "--device", "pi-1", "--device", "pi-2")
    assert made.returncode == 0, made.stderr
    assert "BEGIN" not in made.stdout and "pi-2" in made.stdout
    again = nestling("keys", "--device", "pi-1")
    assert again.returncode == 2 and "--force" in again.stderr
    assert nestling("keys", "--revoke", "pi-1").returncode == 0
    assert (tmp_path / "keys/server/revoked/pi-1.pub").exists()
