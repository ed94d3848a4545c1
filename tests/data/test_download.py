from __future__ import annotations

import hashlib
import io
import socket
import tarfile
from pathlib import Path

import pytest

from nestling.data.download import extract, fetch
from nestling.errors import InputError

BODY = bytes(range(256)) * 3000
MD5 = hashlib.md5(BODY).hexdigest()
SHA256 = hashlib.sha256(BODY).hexdigest()


def failed(urls: list[str], path: Path, word: str) -> None:
    with pytest.raises(InputError, match=word) as caught:
        fetch(urls, path, md5=MD5)
    assert caught.value.field == "data.name"
    assert "NESTLING_DATA" in str(caught.value)
    assert str(path) in str(caught.value)
    assert all(url in str(caught.value) for url in urls)
    assert not path.exists()
    assert not path.parent.exists() or list(path.parent.iterdir()) == [], "no part is left behind"


@pytest.mark.parametrize("digest", [{"md5": MD5}, {"sha256": SHA256}, {"md5": MD5.upper()}])
def test_a_good_file_arrives_under_its_name_only(tmp_path, site, digest):
    path = tmp_path / "deep" / "file"
    assert fetch([site.put("good", BODY)], path, **digest) == path
    assert path.read_bytes() == BODY
    assert list(path.parent.iterdir()) == [path]


def test_a_wrong_digest_is_refused(tmp_path, site):
    failed([site.put("bad", BODY[:-1] + b"?")], tmp_path / "d" / "file", "wrong md5")


def test_a_missing_file_is_refused(tmp_path, site):
    failed([site.url + "absent"], tmp_path / "d" / "file", "404")


def test_a_truncated_answer_is_refused(tmp_path, site):
    failed([site.put("short", BODY[:1000], length=len(BODY))], tmp_path / "d" / "file", "1000")


def test_an_unreachable_host_is_refused(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/file"
        failed([url], tmp_path / "d" / "file", "refused")


def test_nonsense_addresses_are_refused(tmp_path):
    failed(["not a url"], tmp_path / "d" / "file", "not a url")


def test_the_next_address_is_tried(tmp_path, site):
    urls = [site.url + "absent", site.put("bad", b"?"), site.put("good", BODY)]
    fetch(urls, tmp_path / "file", md5=MD5)
    assert (tmp_path / "file").read_bytes() == BODY
    assert site.asked == ["/absent", "/bad", "/good"]


def test_a_failure_keeps_the_file_that_was_there(tmp_path, site):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(InputError):
        fetch([site.put("bad", b"?")], path, md5=MD5)
    assert path.read_bytes() == b"before"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, site):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="file"):
        fetch([site.put("good", BODY)], tmp_path / "file" / "below", md5=MD5)


# Archives


def archive(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, body in members:
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return path


def link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


def test_only_the_named_members_are_written(tmp_path):
    path = archive(
        tmp_path / "a.tar.gz",
        [
            (tarfile.TarInfo("set/one"), b"1"),
            (tarfile.TarInfo("set/unasked"), b"?"),
            (tarfile.TarInfo("../escaped"), b"?"),
            (tarfile.TarInfo(str(tmp_path / "absolute")), b"?"),
            (link("set/link", "/etc/passwd"), b""),
        ],
    )
    extract(path, tmp_path / "out" / "here", ["set/one"])
    written = sorted(
        str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()
    )
    assert written == ["a.tar.gz", "out/here/set/one"]


def test_a_link_in_place_of_a_file_is_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path = archive(tmp_path / "a.tar.gz", [(link("one", str(secret)), b"")])
    with pytest.raises(InputError, match="not a regular file"):
        extract(path, tmp_path / "out", ["one"])
    assert not (tmp_path / "out" / "one").exists()


def test_an_absent_member_and_a_damaged_archive_are_refused(tmp_path):
    path = archive(tmp_path / "a.tar.gz", [(tarfile.TarInfo("one"), bytes(range(256)) * 400)])
    with pytest.raises(InputError, match="two"):
        extract(path, tmp_path / "out", ["two"])
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InputError, match="delete the archive"):
        extract(path, tmp_path / "out", ["one"])
    path.write_bytes(b"<html>")
    with pytest.raises(InputError, match="unpacked"):
        extract(path, tmp_path / "out", ["one"])
    assert not list((tmp_path / "out").glob("*"))
