"""Shards whose bytes follow from run, generation, step and rank. Written and read here without tierd's code."""

from __future__ import annotations

import hashlib
import json
import struct

TENSOR = "model.weight"


def weight(run: str, generation: int, step: int, rank: int, size_bytes: int) -> bytes:
    """The bytes of the one tensor of a shard."""
    return hashlib.shake_256(f"{run} {generation} {step} {rank}".encode()).digest(size_bytes)


def encode(content: bytes) -> bytes:
    """A safetensors file of one tensor."""
    tensor = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, TENSOR: tensor}).encode()
    return struct.pack("<Q", len(header)) + header + content


def decode(raw: bytes) -> bytes:
    """The bytes of the tensor in a safetensors file. Raises ValueError or KeyError where it is not one."""
    if len(raw) < 8:
        raise ValueError(f"a shard of {len(raw)} bytes")
    length = struct.unpack("<Q", raw[:8])[0]
    begin, end = json.loads(raw[8 : 8 + length])[TENSOR]["data_offsets"]
    if len(raw) < 8 + length + end:
        raise ValueError(f"a shard of {len(raw)} bytes, and its header says {8 + length + end}")
    return raw[8 + length + begin : 8 + length + end]
