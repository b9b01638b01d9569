"""The messages between `tierd import` and torch's process."""

from __future__ import annotations

import pytest

from tierd.format.import_messages import ImportedTensor, ImportReply


def test_reply_comes_back_as_it_was() -> None:
    tensor = ImportedTensor(name="a.\ud800", dtype="F32", shape=(2, 3), torch_dtype="complex64")
    reply = ImportReply(tree={"large": -(1 << 4000), "text": "\x00é\udfff", "number": 0.1}, tensors=[tensor])
    assert ImportReply.decode(reply.encode()) == reply


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b'{"tensors": [{"name": 5}]}', b'{"tree": []}'])
def test_what_is_no_reply_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        ImportReply.decode(raw)
