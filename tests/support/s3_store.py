"""Opens an S3Store as a test needs it: by URL, with settings of a [[cold]] section or of [limits] by name."""

from __future__ import annotations

from typing import Any

import msgspec

from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.s3.store import S3Store

_LIMITS = frozenset(LimitsConfig.__struct_fields__)
_OWN = frozenset({"on_request", "part_bytes_min", "retry_min_s"})  # retry_min_s: of requests, not of workers


def s3_store(url: str, **settings: Any) -> S3Store:
    own = {name: value for name, value in settings.items() if name in _OWN}
    limits = {name: value for name, value in settings.items() if name in _LIMITS - _OWN}
    cold = {name: value for name, value in settings.items() if name not in _OWN | _LIMITS}
    return S3Store(
        msgspec.convert({"url": url, **cold}, ColdConfig), msgspec.structs.replace(LimitsConfig(), **limits), **own
    )
