"""A file is written past the page cache where its filesystem allows, and buffered where it does not."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tierd.tiers.direct_io import ALIGN_BYTES, page_aligned, reserve, round_up, set_direct


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, ALIGN_BYTES), (ALIGN_BYTES, ALIGN_BYTES), (4097, 8192)])
def test_lengths_are_rounded_up_to_what_the_disk_takes(length: int, expected: int) -> None:
    assert round_up(length) == expected


def test_memory_begins_with_a_page() -> None:
    buffer = page_aligned(3 * ALIGN_BYTES)
    assert len(buffer) == 3 * ALIGN_BYTES
    assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % ALIGN_BYTES == 0


def test_room_is_reserved_in_whole_blocks(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        reserve(fd, ALIGN_BYTES + 1)
        assert os.fstat(fd).st_size in (2 * ALIGN_BYTES, 0), "0: this filesystem reserves nothing"
    finally:
        os.close(fd)


def test_direct_writes_are_switched_on_and_off_and_what_was_written_is_there(tmp_path: Path) -> None:
    content = os.urandom(ALIGN_BYTES)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        if set_direct(fd):
            buffer = page_aligned(ALIGN_BYTES)
            buffer[:] = content
            assert os.pwrite(fd, buffer, 0) == ALIGN_BYTES
        assert not set_direct(fd, wanted=False)
        assert os.pwrite(fd, content[:7], ALIGN_BYTES) == 7, "of any length, from anywhere"
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes()[-7:] == content[:7]
