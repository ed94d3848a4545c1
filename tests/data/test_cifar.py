from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest

from nestling.data.cifar import read_batch, read_folder
from nestling.errors import InputError

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_reads_an_original_batch(tmp_path, cifar_pickle, module):
    path = tmp_path / "data_batch_1"
    path.write_bytes(cifar_pickle(IMAGES, [3, 0, 9, 1], module=module))
    x, y = read_batch(path)
    assert np.array_equal(x, IMAGES.reshape(4, 3, 32, 32))
    assert y.tolist() == [3, 0, 9, 1]


def test_the_test_pickle_is_one_that_pickle_itself_can_read(cifar_pickle):
    batch = pickle.loads(
        cifar_pickle(IMAGES, [3, 0, 9, 1], module=b"numpy._core.multiarray"), encoding="bytes"
    )
    assert np.array_equal(batch[b"data"], IMAGES)
    assert batch[b"labels"] == [3, 0, 9, 1]


def test_a_hostile_pickle_is_refused_and_does_not_run(tmp_path, hostile_pickle):
    path, marker = tmp_path / "data_batch_1", tmp_path / "ran"
    path.write_bytes(hostile_pickle(marker))
    with pytest.raises(InputError, match=r"system") as caught:
        read_batch(path)
    assert str(path) in str(caught.value)
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists(), "the payload is harmless in itself, so the test above proves nothing"


@pytest.mark.parametrize(
    "call",
    [
        b"cbuiltins\neval\n",
        b"cnumpy\nload\n",
        b"cnumpy.testing._private.utils\nruncstring\n",
        b"c_codecs\nencode\n",
    ],
)
def test_every_other_name_is_refused(tmp_path, call):
    path = tmp_path / "b"
    path.write_bytes(b"\x80\x02" + call + b"U\x011\x85R.")
    with pytest.raises(InputError, match="which CIFAR-10 files never do"):
        read_batch(path)


def test_the_name_is_refused_in_the_newer_opcode_too(tmp_path):
    path = tmp_path / "b"
    path.write_bytes(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.")
    with pytest.raises(InputError, match=r"os\.system"):
        read_batch(path)


def test_a_huge_memo_index_is_refused_before_memory_is_spent(tmp_path):
    path = tmp_path / "b"
    path.write_bytes(b"\x80\x02}r" + struct.pack("<I", 2**28) + b".")
    with pytest.raises(InputError, match="memo index is out of range"):
        read_batch(path)


def test_truncated_batches_are_refused(tmp_path, cifar_pickle):
    path = tmp_path / "b"
    whole = cifar_pickle(IMAGES[:1], [3])
    for length in [*range(260), len(whole) - 1, len(whole) - 100]:
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            read_batch(path)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ([1, 2], "no 'data' and 'labels'"),
        ({b"labels": [1]}, "no 'data' and 'labels'"),
        ({b"data": [[1] * 3072], b"labels": [1]}, "'data' is not an array"),
    ],
)
def test_wrong_structure_is_refused(tmp_path, value, word):
    path = tmp_path / "b"
    path.write_bytes(pickle.dumps(value, protocol=3))
    with pytest.raises(InputError, match=word):
        read_batch(path)


@pytest.mark.parametrize(
    ("images", "labels", "options", "word"),
    [
        (IMAGES, [1, 2, 3], {}, "4 images but 3 labels"),
        (IMAGES, [1, 2, 3, 10], {}, "'labels'"),
        (IMAGES, [1, 2, 3, -1], {}, "'labels'"),
        (IMAGES, [], {}, "'labels'"),
        (IMAGES[:, :-1], [1, 2, 3, 4], {}, "'data'"),
        (IMAGES, [1, 2, 3, 4], {"dtype": b"O"}, "'data'"),
    ],
)
def test_wrong_content_is_refused(tmp_path, cifar_pickle, images, labels, options, word):
    path = tmp_path / "b"
    path.write_bytes(cifar_pickle(images, labels, **options))
    with pytest.raises(InputError, match=word):
        read_batch(path)


def test_a_folder_is_five_batches_and_a_test(tmp_path, cifar_pickle):
    for i in range(1, 6):
        (tmp_path / f"data_batch_{i}").write_bytes(cifar_pickle(IMAGES, [i] * 4))
    (tmp_path / "test_batch").write_bytes(cifar_pickle(IMAGES[:2], [7, 8]))
    x, y, x_test, y_test = read_folder(tmp_path)
    assert x.shape == (20, 3, 32, 32)
    assert y.tolist() == [i for i in range(1, 6) for _ in range(4)]
    assert x_test.shape == (2, 3, 32, 32)
    assert y_test.tolist() == [7, 8]
    (tmp_path / "data_batch_4").unlink()
    with pytest.raises(InputError, match="data_batch_4"):
        read_folder(tmp_path)
