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
    """Open the tier that a [[cold]] section describes. `on_request` gets (operation, outcome) of each request."""
    if config.url.startswith("file://"):
        root = Path(config.url.removeprefix("file://"))
        return Tier(config.name, DirectoryStore(root, max_write_mib_s=config.max_upload_mib_s))
    # Imported here, so that boto3 (0.3 s, 30 MB) is loaded only where a bucket is configured.
    from tierd.s3.store import S3Store

    store = S3Store(
        config.url,
        region=config.region,
        endpoint_url=config.endpoint_url,
        ca_bundle=config.ca_bundle,
        sse=config.sse,
        sse_kms_key_id=config.sse_kms_key_id,
        name=config.name,
        parts_in_flight=limits.parts_in_flight,
        request_timeout_s=limits.request_timeout_s,
        max_upload_mib_s=config.max_upload_mib_s,
        storage_class=config.storage_class,
        lasting_storage_class=config.milestone_storage_class,
        on_request=on_request,
    )
    return Tier(config.name, store, ManifestCache(cache_folder(), f"{config.url} {config.endpoint_url}"))
