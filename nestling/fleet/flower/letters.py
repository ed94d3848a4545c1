"""Letters as Flower's records: one array of bytes whatever is inside, since Flower makes one
request per tensor and hop."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from nestling.errors import InputError

ACTION = "nestling"
"""The action of our messages, so that they live beside the user's own in one ClientApp."""

ORDER, WELCOME = f"train.{ACTION}", f"query.{ACTION}"
"""Flower's types of our messages."""

_ARRAYS, _ABOUT, _BYTES = "letter", "about", "bytes"


def pack(letter: bytes) -> RecordDict:
    """A letter as the content of a message."""
    data = np.frombuffer(letter, np.uint8)
    return RecordDict(
        {_ARRAYS: ArrayRecord({_BYTES: Array(data)}), _ABOUT: ConfigRecord({"size": len(letter)})}
    )


def unpack(content: RecordDict) -> bytes:
    """The letter in a message; an `InputError` where there is none."""
    record, about = content.get(_ARRAYS), content.get(_ABOUT)
    if (
        not isinstance(record, ArrayRecord)
        or _BYTES not in record
        or not isinstance(about, ConfigRecord)
    ):
        raise InputError("a message without a letter in it")
    array = record[_BYTES]
    if array.dtype != "uint8" or len(array.shape) != 1 or array.shape[0] != about.get("size"):
        raise InputError(f"a letter of {array.dtype}, {array.shape}")
    try:
        found = array.numpy()
    except Exception as error:  # the bytes are a node's, and what reads them is not ours
        raise InputError(f"a letter that cannot be read: {type(error).__name__}") from None
    if found.dtype != np.uint8 or found.shape != array.shape:
        raise InputError("a letter that is not what it says")
    return found.tobytes()
