"""The lock of a run: one adoption at a time commits, and a holder that does not end delays the others for a while."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tierd.errors import LockHeld, NotFound
from tierd.tiers.pool import ThreadPool
from tierd.tiers.run_lock import run_lock


async def test_one_after_the_other_holds_it_and_one_that_waits_too_long_is_told(tmp_path: Path) -> None:
    pool = ThreadPool(2, "lock", timeout_s=30)
    inside: list[int] = []

    async def hold(number: int) -> None:
        async with run_lock(pool, tmp_path):
            inside.append(number)
            await asyncio.sleep(0)
            assert inside.pop() == number

    async with run_lock(pool, tmp_path):
        with pytest.raises(LockHeld, match="another process has held it"):
            async with run_lock(pool, tmp_path, wait_s=0.0):
                pass
        waiting = [asyncio.ensure_future(hold(number)) for number in range(5)]
    await asyncio.gather(*waiting)
    with pytest.raises(NotFound):
        async with run_lock(pool, tmp_path / "none"):
            pass
    pool.close()
