"""The objects of another program below a prefix of a bucket: listed and read, never written.

Their keys are whatever the program called them, so this is no store of a tier. An object that was replaced since it was
listed is not read: its ETag differs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.errors import Corrupt, NotFound, TierUnreachable, Transient
from tierd.s3.client import Answer
from tierd.s3.requests import S3Requests


class ForeignObject(NamedTuple):
    """`path`: its key below the prefix. `modified_s`: Unix time, in whole seconds on most servers."""

    path: str
    size_bytes: int
    etag: str
    modified_s: float


class ForeignObjects:
    """Of the bucket and the prefix in the URL. Methods raise TierUnreachable, as those of S3Store."""

    def __init__(self, cold: ColdConfig, limits: LimitsConfig) -> None:
        self.url = cold.url.rstrip("/")
        self._requests = S3Requests(cold, limits)

    async def list(self, below: str = "") -> list[ForeignObject]:
        """All of them whose path begins with `below`; without the empty objects that stand for folders."""
        action, prefix = f"list {self.url}", self._requests.prefix
        objects: list[ForeignObject] = []
        after: dict[str, Any] = {}
        while True:
            page = await self._requests.request("list_objects_v2", action, Prefix=prefix + below, **after)
            for listed in page.get("Contents", ()):
                path = listed["Key"].removeprefix(prefix)
                modified_s = listed["LastModified"].timestamp() if "LastModified" in listed else math.inf
                if path and not path.endswith("/"):
                    objects.append(ForeignObject(path, listed["Size"], listed.get("ETag", ""), modified_s))
            if not page.get("IsTruncated"):
                return objects
            after = {"ContinuationToken": page["NextContinuationToken"]}

    async def read(self, source: ForeignObject, offset: int, buffer: memoryview) -> None:
        """Fills the buffer. Raises Transient when the object was replaced or deleted since it was listed."""
        if not buffer:
            return
        action = f"read {self.url}/{source.path}"

        def fetch(answer: Answer) -> None:
            if source.etag and answer.get("ETag", source.etag) != source.etag:
                raise _changed(action)
            if answer["ContentLength"] != len(buffer) or not _begins_at(answer, offset):
                raise TierUnreachable(f"{action}: the server ignored the range", hint="tierd needs ranged GETs")
            done = 0
            while done < len(buffer):
                count = answer["Body"].readinto(buffer[done:])
                if count == 0:
                    raise TierUnreachable(f"{action}: the connection ended after {done} bytes")
                done += count

        span = f"bytes={offset}-{offset + len(buffer) - 1}"
        key = self._requests.prefix + source.path
        try:
            await self._requests.request("get_object", action, use=fetch, size_bytes=len(buffer), Key=key, Range=span)
        except (NotFound, Corrupt) as error:
            raise _changed(action) from error

    async def close(self) -> None:
        await self._requests.close()


def _changed(action: str) -> Transient:
    return Transient(f"{action}: it was replaced or deleted meanwhile", hint="adopt it when it is complete")


def _begins_at(answer: Answer, offset: int) -> bool:
    return not offset or answer.get("ContentRange", "").startswith(f"bytes {offset}-")
