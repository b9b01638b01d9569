"""Counts NaN and Inf in one checkpoint. A separate program, so that numpy and its memory are not in the daemon.

health/examiner.py starts it with the shards as open descriptors; it prints a `Diagnosis` as JSON, or a string that says
why they cannot be examined. Inf counts only in trained tensors and in the optimizer, because a buffer may be a mask of
infinities.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from tierd.descriptors import read_all
from tierd.errors import Corrupt, TierdError
from tierd.format import checksum
from tierd.format.health import TENSORS_LISTED_MAX, Diagnosis, NotFinite, is_examined
from tierd.format.shard import TensorEntry, read_header
from tierd.tiers.direct_io import page_aligned

BLOCK_BYTES = 4 << 20  # fits the CPU cache, for the checksum and the count

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """`arguments`: DESCRIPTOR:SIZE of each shard, the size in bytes."""
    os.nice(19)  # lowers the disk priority too
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # slots must not stay open after the daemon has died
    shards = [argument.split(":") for argument in arguments]
    try:
        answer: Diagnosis | str = examine([(int(descriptor), int(size_bytes)) for descriptor, size_bytes in shards])
    except (TierdError, OSError) as error:
        answer = str(error)
    with suppress(BrokenPipeError):  # the daemon has died
        sys.stdout.buffer.write(msgspec.json.encode(answer))
        sys.stdout.buffer.flush()


def examine(files: list[tuple[int, int]]) -> Diagnosis:
    """`files`: (descriptor, size in bytes) of all shards of one checkpoint. Raises Corrupt for an invalid shard."""
    shards = [read_header(partial(os.pread, fd), size_bytes, where="a shard") for fd, size_bytes in files]
    trained, must_change = _trained(shards[0].tierd)
    counts: dict[str, Counter[str]] = {}
    digests: dict[str, int] = {}
    buffer = page_aligned(BLOCK_BYTES)
    for (descriptor, _), shard in zip(files, shards, strict=True):
        for entry in shard.tensors.values():
            if not is_examined(entry.name, entry.shape):
                continue
            count, digest = _count(descriptor, entry, buffer, is_digested=entry.name in trained)
            if entry.name not in trained and not entry.name.startswith("optimizer."):
                count["inf"] = 0
            if count.total():
                counts.setdefault(entry.name, Counter()).update(count)
            if entry.name in trained:
                digests[f"{entry.name}{list(entry.saved_offsets)}"] = digest
    first = sorted(counts.items())[:TENSORS_LISTED_MAX]
    is_comparable = must_change and not counts  # weights that are all NaN do not count as unchanged
    return Diagnosis(
        healthy=not counts,
        tensors=len(counts),
        not_finite=[NotFinite(tensor=name[:256], nan=count["nan"], inf=count["inf"]) for name, count in first],
        digest=checksum.encode(checksum.crc64nvme(repr(sorted(digests.items())).encode())) if is_comparable else "",
    )


def _trained(tierd: dict[str, Any]) -> tuple[set[str], bool]:
    """(the names of the trained tensors, whether they must change between steps: a learning rate is not 0)."""
    names: set[str] = set()
    rates: list[Any] = []
    for section in (tierd.get("state") or {}).values():
        if section.get("kind") != "optimizers":
            continue
        has_several = len(section["value"]) > 1
        for index, optimizer in enumerate(section["value"]):
            prefix = f"optimizer.{index}." if has_several else "optimizer."
            foreign = set(optimizer["foreign"])  # parameters that are not in the model
            for group in optimizer["groups"]:
                names |= {(prefix if name in foreign else "model.") + name for name in group["params"]}
                rates.append(group["options"].get("lr"))
    return names, any(rate != 0 for rate in rates)


def _count(descriptor: int, entry: TensorEntry, buffer: memoryview, *, is_digested: bool) -> tuple[Counter[str], int]:
    """(number of "nan" and "inf" in the tensor, its checksum, or 0 unless `is_digested`)."""
    count_block = COUNTS.get(entry.dtype)
    count: Counter[str] = Counter()
    digest = 0
    if count_block is None and not is_digested:
        return count, digest
    for offset in range(entry.offset, entry.offset + entry.size_bytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, entry.offset + entry.size_bytes - offset)]
        if missing := read_all(descriptor, offset, block):
            raise Corrupt(f"read a shard: it ends at byte {offset + len(block) - missing}")
        if is_digested:
            digest = checksum.crc64nvme(block, digest)
        if count_block is not None:
            nan, inf = count_block(block)
            count.update(nan=nan, inf=inf)
    return count, digest


def _count_floats(dtype: str, block: memoryview) -> tuple[int, int]:
    """For a dtype of numpy."""
    numbers = np.frombuffer(block, dtype)
    if np.isfinite(numbers).all():
        return 0, 0
    return int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())


def _count_bits(dtype: str, not_finite_bits: int, nan_bits: int, block: memoryview) -> tuple[int, int]:
    """For a dtype that numpy lacks. NaN and Inf have all `not_finite_bits` set; Inf has none of `nan_bits`."""
    numbers = np.frombuffer(block, dtype)
    not_finite = numbers[(numbers & not_finite_bits) == not_finite_bits]
    nan = int(((not_finite & nan_bits) != 0).sum())
    return nan, len(not_finite) - nan


def _count_fnuz(block: memoryview) -> tuple[int, int]:
    """The fnuz float8s have one NaN, at the bits of a negative zero, and no Inf. https://arxiv.org/abs/2206.02915"""
    return int((np.frombuffer(block, "u1") == 0x80).sum()), 0


COUNTS: dict[str, Callable[[memoryview], tuple[int, int]]] = {
    "F64": partial(_count_floats, "<f8"),
    "F32": partial(_count_floats, "<f4"),
    "F16": partial(_count_floats, "<f2"),
    "C64": partial(_count_floats, "<f4"),  # real and imaginary part
    "BF16": partial(_count_bits, "<u2", 0x7F80, 0x007F),  # the bits of the exponent and of the mantissa
    "F8_E5M2": partial(_count_bits, "u1", 0x7C, 0x03),
    # float8_e4m3fn has one bit pattern for NaN (and a sign) and no Inf. https://arxiv.org/abs/2209.05433
    "F8_E4M3": partial(_count_bits, "u1", 0x7F, 0x7F),
    "F8_E4M3FNUZ": _count_fnuz,
    "F8_E5M2FNUZ": _count_fnuz,
}
"""A function for each safetensors dtype that returns the (NaN, Inf) counts of a block of whole elements."""


if __name__ == "__main__":
    main(sys.argv[1:])
