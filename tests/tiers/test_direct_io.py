"""O_DIRECT is used where the filesystem allows it; elsewhere writes are buffered."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tierd.format.shard import ALIGN_BYTES, round_up
from tierd.tiers.direct_io import page_aligned, reserve, set_direct


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, ALIGN_BYTES), (ALIGN_BYTES, ALIGN_BYTES), (4097, 8192)])
def test_lengths_are_rounded_up_to_whole_blocks(length: int, expected: int) -> None:
    assert round_up(length) == expected


def test_buffer_begins_at_a_page() -> None:
    buffer = page_aligned(3 * ALIGN_BYTES)
    assert len(buffer) == 3 * ALIGN_BYTES
    assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % ALIGN_BYTES == 0


def test_disk_space_is_reserved_in_whole_blocks(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        reserve(fd, ALIGN_BYTES + 1)
        assert os.fstat(fd).st_size in (2 * ALIGN_BYTES, 0), "0: this filesystem reserves nothing"
    finally:
        os.close(fd)


def test_direct_io_can_be_turned_on_and_off_between_writes(tmp_path: Path) -> None:
    content = os.urandom(ALIGN_BYTES)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        if set_direct(fd):
            buffer = page_aligned(ALIGN_BYTES)
            buffer[:] = content
            assert os.pwrite(fd, buffer, 0) == ALIGN_BYTES
        assert not set_direct(fd, wanted=False)
        assert os.pwrite(fd, content[:7], ALIGN_BYTES) == 7, "buffered writes need no alignment"
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes()[-7:] == content[:7]
