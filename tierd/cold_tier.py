"""Opens the cold tier that a [[cold]] section of the config describes: a directory or a bucket.

Also finds the settings for a bucket that is named on the command line, and names the directories of tiers that other
users can reach, for `tierd doctor` and the log at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import msgspec

from tierd.access import PRIVATE, Access
from tierd.config.file import cache_folder
from tierd.config.sections import ColdConfig, Config, LimitsConfig
from tierd.format.signature import Keyring
from tierd.tiers.cache import ManifestCache
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.probe import Advice, probe_exposure
from tierd.tiers.tier import Tier


def exposed(config: Config) -> Iterator[Advice]:
    """The directories of tiers that other users can reach."""
    for name, path in config.directories.items():
        yield from probe_exposure(name, path, config.access)


def cold_of_bucket(url: str, config: Config) -> ColdConfig:
    """The settings for a place in a bucket that is named on the command line: those of the cold tier with this URL,
    else of the first in the same bucket; where the config has none, boto3's defaults."""
    bucket = f"s3://{urlsplit(url).netloc}"
    colds = [cold for cold in config.cold if f"{cold.url}/".startswith(f"{bucket}/")]
    same = [cold for cold in colds if cold.url.rstrip("/") == url.rstrip("/")]
    return msgspec.structs.replace([*same, *colds, ColdConfig()][0], name=bucket, url=url)


def open_cold_tier(
    config: ColdConfig,
    limits: LimitsConfig,
    on_request: Callable[[str, str], None] | None = None,
    *,
    access: Access = PRIVATE,
    keyring: Keyring | None = None,
) -> Tier:
    """`on_request` gets (operation, outcome) of each attempt of a request to a bucket. `access`: of what is written
    into a directory. `keyring`: as of `Tier`."""
    if (root := config.directory) is not None:
        timeout_s = limits.directory_timeout_s
        store = DirectoryStore(root, max_write_mib_s=config.max_upload_mib_s, timeout_s=timeout_s, access=access)
        return Tier(config.name, store, limits=limits, keyring=keyring, deletes=config.deletes)
    # Imported here, so that boto3 (0.3 s, 30 MB) is loaded only where a bucket is configured.
    from tierd.s3.store import S3Store

    folder = cache_folder()
    cache = ManifestCache(folder, f"{config.url} {config.endpoint_url}") if folder else None
    store = S3Store(config, limits, on_request=on_request)
    return Tier(config.name, store, cache, limits=limits, keyring=keyring, deletes=config.deletes)
