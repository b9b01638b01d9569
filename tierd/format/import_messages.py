"""What `tierd import` and the process in which torch reads a file say to each other, over its stdin and stdout.

The process gets one `ImportRequest`, and sends one `ImportReply`: the length as u64, then JSON. Then, for each request,
the bytes of a tensor:

    request: u64 index of the tensor | u64 offset | u64 length        little-endian
    answer:  `length` bytes
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

import msgspec

LENGTH = struct.Struct("<Q")
REQUEST = struct.Struct("<QQQ")
REPLY_BYTES_MAX = 200_000_000  # a shard's header, which has the tree and the names, has at most half of it


class ImportedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """As a shard stores it: `dtype` and `shape` are those of the stored form if `torch_dtype` is not empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    torch_dtype: str = ""


class LikeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group of an optimizer's parameters: their names, and the names of the options."""

    params: list[str]
    options: list[str]


class Like(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint of --like gives: the groups of its optimizer, with the names of the options that this kind of
    optimizer always has, and the kinds of the sections by name."""

    groups: list[LikeGroup]
    defaults: list[str]
    sections: dict[str, str]


class ImportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`model`: the key of the model's state dict in the file."""

    model: str | None = None
    like: Like | None = None

    def encode(self) -> bytes:
        raw = msgspec.json.encode(self)
        return LENGTH.pack(len(raw)) + raw

    @classmethod
    def read(cls, stream: BinaryIO) -> ImportRequest:
        (length,) = LENGTH.unpack(stream.read(LENGTH.size))
        return msgspec.json.decode(stream.read(length), type=cls)


class ImportReply(msgspec.Struct, frozen=True, kw_only=True):
    """`tree`: the state tree. `error_kind`: what TierdError has, where the file was refused; else empty.

    Encoded as the header of a shard is: msgspec has no integers of more than 64 bits."""

    tree: dict[str, Any] = {}
    tensors: list[ImportedTensor] = []
    error_kind: str = ""
    message: str = ""
    hint: str = ""

    def encode(self) -> bytes:
        return json.dumps(msgspec.to_builtins(self), allow_nan=False).encode("ascii")

    @classmethod
    def decode(cls, raw: bytes | bytearray) -> ImportReply:
        """Raises ValueError for anything else."""
        return msgspec.convert(json.loads(raw), cls)
