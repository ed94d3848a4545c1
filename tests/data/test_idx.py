from __future__ import annotations

import contextlib
import gzip
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestling.data.idx import read_idx, read_images
from nestling.errors import InputError

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_reads_back_what_was_written(tmp_path, write_idx, name):
    assert np.array_equal(read_idx(write_idx(tmp_path / name, IMAGES)), IMAGES)


def test_gzip_is_recognised_by_content(tmp_path, write_idx):
    zipped = write_idx(tmp_path / "a.gz", IMAGES)
    assert np.array_equal(read_idx(zipped.rename(tmp_path / "a")), IMAGES)


@pytest.mark.parametrize("zipped", [False, True])
def test_every_truncation_is_refused(tmp_path, write_idx, zipped):
    path = write_idx(tmp_path / ("a.gz" if zipped else "a"), IMAGES)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError) as caught:
            read_idx(path)
        assert str(path) in str(caught.value)
        assert "NESTLING_DATA" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "nothing"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x00", "not an IDX file"),
        (b"<html>404</html>", "not an IDX file"),
        (b"\x00\x00\x08\x00", "not an IDX file"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x01ab", "promises 1 values, it holds more"),
        (b"\x00\x00\x08\x03" + struct.pack(">III", 2**32 - 1, 2**32 - 1, 2**32 - 1), "holds fewer"),
        (
            gzip.compress(b"\x00\x00\x08\x03" + struct.pack(">III", 2**31, 2**31, 1), mtime=0),
            "holds fewer",
        ),
    ],
)
def test_bad_content_is_refused(tmp_path, raw, word):
    path = tmp_path / "bad"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=word) as caught:
        read_idx(path)
    assert caught.value.field == "data.name"
    assert str(path) in str(caught.value)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(raw=st.binary(max_size=64), zipped=st.booleans())
def test_any_bytes_give_an_array_or_an_input_error(tmp_path, raw, zipped):
    path = tmp_path / "fuzz"
    path.write_bytes(gzip.compress(raw, mtime=0) if zipped else raw)
    with contextlib.suppress(InputError):
        assert read_idx(path).dtype == np.uint8


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_idx(tmp_path / "absent")


def test_images_and_labels_must_agree(tmp_path, write_idx):
    images, labels = (
        write_idx(tmp_path / "x", IMAGES),
        write_idx(tmp_path / "y", np.array([1, 2, 3])),
    )
    with pytest.raises(InputError, match=r"y holds 3 labels but .*x holds 2 images"):
        read_images(images, labels)
    with pytest.raises(InputError, match="images need 3"):
        read_images(labels, labels)
    with pytest.raises(InputError, match="labels need 1"):
        read_images(images, images)
