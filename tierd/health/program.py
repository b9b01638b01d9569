"""The program that checks the numbers of one checkpoint for NaN, Inf and weights that do not change.

A process of its own, so that numpy, its memory and its time are not the daemon's. workers/examiner.py starts it with
the shards as open descriptors, and it prints what it found.

What is looked at: everything but what a user keeps besides (KEPT), and outside of model, optimizer and EMA no number
that is by itself: a best loss so far may well be infinite, a score NaN. NaN counts wherever it is looked for, Inf only
in what is trained and in the optimizer: a buffer may be a mask of infinities.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from tierd.errors import Corrupt, TierdError
from tierd.format import checksum
from tierd.format.health import TENSORS_LISTED_MAX, Examined, NotFinite
from tierd.format.shard import Shard, TensorEntry, header_length, parse_header
from tierd.tiers.direct_io import page_aligned

BLOCK_BYTES = 4 << 20  # stays in the cache between the checksum and the look at it
EXAMINED = ("model.", "optimizer.", "ema.")
KEPT = ("scheduler.", "scaler.", "dataloader.", "extra.", "rng.")  # by sections of a TrainingState

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Arguments: DESCRIPTOR:SIZE of each shard, the size in bytes."""
    os.nice(19)  # with it goes the lowest of the usual priorities for the disk
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a dead daemon's slots must not live on through us
    shards = [tuple(map(int, one.split(":"))) for one in arguments]
    try:
        found = examine([(descriptor, size_bytes) for descriptor, size_bytes in shards])
    except (TierdError, OSError) as error:
        found = Examined(trouble=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found))


def examine(files: list[tuple[int, int]]) -> Examined:
    """All shards of one checkpoint, as (descriptor, size in bytes). Raises Corrupt when one is no shard."""
    shards = [_read_shard(descriptor, size_bytes) for descriptor, size_bytes in files]
    trained, is_moving = _trained(shards[0].tierd)
    counts: dict[str, Counter[str]] = {}
    digests: dict[str, int] = {}
    buffer = page_aligned(BLOCK_BYTES)
    for (descriptor, _), shard in zip(files, shards, strict=True):
        for entry in shard.tensors.values():
            if not _is_examined(entry):
                continue
            found, digest = _look(descriptor, entry, buffer, is_digested=entry.name in trained)
            if entry.name not in trained and not entry.name.startswith("optimizer."):
                found["inf"] = 0
            if found.total():
                counts.setdefault(entry.name, Counter()).update(found)
            if entry.name in trained:
                digests[f"{entry.name}{list(entry.saved_offsets)}"] = digest
    first = sorted(counts.items())[:TENSORS_LISTED_MAX]
    return Examined(
        tensors=len(counts),
        not_finite=[NotFinite(tensor=name[:256], nan=one["nan"], inf=one["inf"]) for name, one in first],
        digest=checksum.encode(checksum.crc64nvme(repr(sorted(digests.items())).encode())) if is_moving else "",
    )


def _read_shard(descriptor: int, size_bytes: int) -> Shard:
    length = header_length(os.pread(descriptor, 8, 0), size_bytes, where="a shard")
    header = bytearray(length)
    _read(descriptor, 0, memoryview(header))
    return parse_header(memoryview(header), size_bytes, where="a shard")


def _is_examined(entry: TensorEntry) -> bool:
    """A DictState, or what DCP saves, has names of its own: tensors under them count like a model's."""
    return entry.name.startswith(EXAMINED) or (not entry.name.startswith(KEPT) and len(entry.shape) > 0)


def _trained(tierd: dict[str, Any]) -> tuple[set[str], bool]:
    """(the stored names of what optimizers train, whether it is meant to change: some learning rate is not 0)."""
    names: set[str] = set()
    rates: list[Any] = []
    for section in (tierd.get("state") or {}).values():
        if section.get("kind") != "optimizers":
            continue
        several = len(section["value"]) > 1
        for index, optimizer in enumerate(section["value"]):
            prefix = f"optimizer.{index}." if several else "optimizer."
            for group in optimizer["groups"]:
                foreign = set(optimizer["foreign"])
                names |= {(prefix if one in foreign else "model.") + one for one in group["params"]}
                rates.append(group["options"].get("lr"))
    return names, any(rate != 0 for rate in rates)


def _look(descriptor: int, entry: TensorEntry, buffer: memoryview, *, is_digested: bool) -> tuple[Counter[str], int]:
    count = COUNTS.get(entry.dtype)
    found: Counter[str] = Counter()
    digest = 0
    if count is None and not is_digested:
        return found, digest
    for offset in range(entry.offset, entry.offset + entry.size_bytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, entry.offset + entry.size_bytes - offset)]
        _read(descriptor, offset, block)
        if is_digested:
            digest = checksum.crc64nvme(block, digest)
        if count is not None:
            nan, inf = count(block)
            found.update(nan=nan, inf=inf)
    return found, digest


def _read(descriptor: int, offset: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            raise Corrupt(f"read a shard: it ends at byte {offset + done}")
        done += count


def _floats(dtype: str) -> Callable[[memoryview], tuple[int, int]]:
    """Numbers that numpy knows."""

    def count(block: memoryview) -> tuple[int, int]:
        numbers = np.frombuffer(block, dtype)
        if np.isfinite(numbers).all():
            return 0, 0
        return int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())

    return count


def _bits(dtype: str, exponent: int, mantissa: int) -> Callable[[memoryview], tuple[int, int]]:
    """Numbers that numpy does not know, by their bits: all of the exponent set, and NaN when the mantissa is not 0."""

    def count(block: memoryview) -> tuple[int, int]:
        bits = np.frombuffer(block, dtype)
        odd = bits[(bits & exponent) == exponent]
        nan = int(((odd & mantissa) != 0).sum())
        return nan, len(odd) - nan

    return count


def _e4m3(block: memoryview) -> tuple[int, int]:
    """float8_e4m3fn: one pattern is NaN, and there is no infinity. https://arxiv.org/abs/2209.05433"""
    return int(((np.frombuffer(block, "u1") & 0x7F) == 0x7F).sum()), 0


COUNTS: dict[str, Callable[[memoryview], tuple[int, int]]] = {
    "F64": _floats("<f8"),
    "F32": _floats("<f4"),
    "F16": _floats("<f2"),
    "C64": _floats("<f4"),  # two of them
    "BF16": _bits("<u2", 0x7F80, 0x007F),
    "F8_E5M2": _bits("u1", 0x7C, 0x03),
    "F8_E4M3": _e4m3,
}
"""By safetensors dtype: (how many NaN, how many Inf) in a block of whole elements."""


if __name__ == "__main__":
    main(sys.argv[1:])
