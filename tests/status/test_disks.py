"""What the stores of the tiers say about their disks."""

from __future__ import annotations

from pathlib import Path

from tests.support.small_disk import small_disk
from tierd.status.disks import free_bytes, on_disk_of
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier


async def test_a_cold_directory_on_the_file_system_of_hot_is_named_also_before_it_exists(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_mib=1) as disk:
        places = {"hot": tmp_path / "hot", "beside": tmp_path / "not" / "made", "apart": disk / "cold"}
        hot, *colds = (Tier(name, DirectoryStore(path)) for name, path in places.items())
        try:
            assert await on_disk_of(hot, colds) == {"beside"}
            assert await free_bytes(colds[1]) == 1 << 20
        finally:
            for tier in (hot, *colds):
                await tier.store.close()
