"""Certificates and keys: what is made, who may read it, what TLS and OpenSSH make of it, and that
nothing is lost by mistake."""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from nestling.errors import InputError

pytest.importorskip("cryptography", reason="comes with nestling[fleet]")

from nestling.fleet.care import certs
from nestling.fleet.care.expiry import ending_soon, trust_ending_soon


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certs.issue(tmp_path / "keys", hosts=["fleet.example", "10.0.0.7"], devices=["pi-1", "pi-2"])
    return tmp_path / "keys"


def named(folder: Path) -> set[str]:
    return {holder.name for holder in certs.public_keys(folder).values()}


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
    assert named(folder / "server/devices") == {"pi-1", "pi-2"}


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
    assert certs.public_keys(folder / "server/revoked") == {old: certs.KeyHolder("pi-1")}
    assert named(folder / "server/devices") == {"pi-2"}
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


def ends(path: Path) -> datetime:
    return certs.certificates(path)[0].not_valid_after_utc


def test_the_server_s_certificate_does_not_outlive_its_authority(folder: Path) -> None:
    (line,) = certs.issue(folder, hosts=["fleet.example"], days=3650, force=True)
    assert ends(folder / "server/server.crt") == ends(folder / "ca/ca.crt")
    assert line.endswith(f"until {ends(folder / 'ca/ca.crt').date()}")
    inner = certs.make_loopback_authority(folder / "inner", days=10)
    assert ends(inner.certificate) <= ends(inner.ca)


def test_a_renewed_authority_and_the_old_are_both_trusted(folder: Path, tmp_path: Path) -> None:
    server, device = certs.server_files(folder), folder / "devices/pi-1/ca.crt"
    (tmp_path / "before.crt").write_bytes(device.read_bytes())
    (line,) = certs.issue(folder, renew_ca=True)
    assert "bring every device" in line
    # the server still has its old certificate, which both kinds of devices trust
    for trusted in (device, tmp_path / "before.crt"):
        shake(server, trusted, "fleet.example")
    with pytest.raises(InputError, match="before every device trusts it"):
        certs.issue(folder, renew_ca=True, hosts=["fleet.example"], force=True)
    certs.issue(folder, hosts=["fleet.example"], force=True)
    shake(server, device, "fleet.example")
    with pytest.raises(ssl.SSLCertVerificationError):  # it was not brought the new one
        shake(server, tmp_path / "before.crt", "fleet.example")
    certs.issue(folder, devices=["pi-9"])
    shake(server, folder / "devices/pi-9/ca.crt", "fleet.example")
    certs.issue(folder, renew_ca=True)
    assert len(certs.certificates(device)) == 3
    shake(server, device, "fleet.example")
    for path in folder.rglob("*.crt"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    with pytest.raises(InputError, match="no authority"):
        certs.issue(tmp_path / "other", renew_ca=True)
    assert not (tmp_path / "other").exists()


def test_an_authority_that_has_ended_signs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = ends(folder / "ca/ca.crt") + timedelta(days=1)
    monkeypatch.setattr(certs, "_now", lambda: later)
    with pytest.raises(InputError, match=r"authority ended on .*--renew-ca"):
        certs.issue(folder, hosts=["fleet.example"], force=True)
    certs.issue(folder, renew_ca=True)
    assert len(certs.certificates(folder / "devices/pi-1/ca.crt")) == 1  # the old one is gone
    certs.issue(folder, hosts=["fleet.example"], force=True)


def test_an_end_is_told_weeks_before(folder: Path) -> None:
    files = certs.server_files(folder)
    end, last = ends(files.certificate), ends(files.ca)
    assert not ending_soon(files) and not ending_soon(files, end - timedelta(days=31))
    (line,) = ending_soon(files, end - timedelta(days=20, hours=1))
    assert line.startswith(f"the server's certificate ends in 20 days, on {end.date()}; renew it")
    server, authority = ending_soon(files, last - timedelta(days=80, hours=1))
    assert server.startswith(f"the server's certificate ended on {end.date()}")
    assert authority.startswith(f"the fleet's authority ends in 80 days, on {last.date()}")
    assert "--renew-ca" in authority
    assert "ca.crt" in trust_ending_soon(files.ca, last) and not trust_ending_soon(files.ca)
    files.certificate.write_text("half a")
    assert "cannot be read" in ending_soon(files)[0]


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
