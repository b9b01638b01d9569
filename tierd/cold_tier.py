"""Opens the cold tier that a [[cold]] section of the config describes: a directory or a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tierd.config import ColdConfig, LimitsConfig
from tierd.config_file import cache_folder
from tierd.tiers.cache import ManifestCache
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier


def open_cold_tier(
    config: ColdConfig, limits: LimitsConfig, on_request: Callable[[str, str], None] | None = None
) -> Tier:
    """`on_request` gets (operation, outcome) of each attempt of a request to a bucket."""
    if config.url.startswith("file://"):
        root = Path(config.url.removeprefix("file://"))
        timeout_s = 2 * limits.request_timeout_s
        store = DirectoryStore(root, max_write_mib_s=config.max_upload_mib_s, timeout_s=timeout_s)
        return Tier(config.name, store, limits=limits)
    # Imported here, so that boto3 (0.3 s, 30 MB) is loaded only where a bucket is configured.
    from tierd.s3.store import S3Store

    folder = cache_folder()
    cache = ManifestCache(folder, f"{config.url} {config.endpoint_url}") if folder else None
    return Tier(config.name, S3Store(config, limits, on_request=on_request), cache, limits=limits)
