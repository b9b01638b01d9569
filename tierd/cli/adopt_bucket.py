"""Opens a prefix of a bucket for `tierd adopt s3://BUCKET/PREFIX --preset NAME`.

The bucket has the settings of a cold tier in the same bucket if the config has one; otherwise boto3's defaults.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tierd.config.sections import ColdConfig, Config
from tierd.errors import BadConfig
from tierd.transfer.history_source import HistorySource


def check_bucket(url: str, config: Config) -> ColdConfig:
    """The settings for the bucket. Raises BadConfig if the URL is not s3://bucket/prefix, or overlaps a tier."""
    parts = urlsplit(url)
    if not parts.netloc or parts.query or parts.fragment:
        raise BadConfig(f"adopt {url}: expected s3://bucket/prefix")
    buckets = {cold.url: cold for cold in config.cold if cold.url.startswith("s3://")}
    place = f"{parts.netloc}/{parts.path.strip('/')}/".replace("//", "/")
    for other in buckets:
        tier = f"{urlsplit(other).netloc}/{urlsplit(other).path.strip('/')}/".replace("//", "/")
        if place.startswith(tier) or tier.startswith(place):
            raise BadConfig(
                f"adopt {url}: the tier at {other} is {'around' if place.startswith(tier) else 'in'} it",
                hint="give a prefix outside of the tiers",
            )
    same = [cold for other, cold in buckets.items() if urlsplit(other).netloc == parts.netloc]
    return msgspec.structs.replace(same[0] if same else ColdConfig(), name=f"s3://{parts.netloc}", url=url)


@asynccontextmanager
async def bucket_history(cold: ColdConfig, config: Config) -> AsyncGenerator[HistorySource, Any]:
    # Imported here, so that boto3 (0.3 s, 30 MB) is loaded only where a bucket is named.
    from tierd.s3.foreign_objects import ForeignObjects
    from tierd.transfer.bucket_history import BucketHistory

    objects = ForeignObjects(cold, config.limits)
    try:
        yield BucketHistory(objects)
    finally:
        await objects.close()
