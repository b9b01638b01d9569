"""Lists and reads the objects of another program below a prefix of a bucket. Never writes there.

It is not a store, because the program may use keys that no tier accepts. An object that was replaced since it was
listed is not read: its ETag differs.
"""

from __future__ import annotations

from tierd.config.sections import ColdConfig, LimitsConfig
from tierd.errors import Corrupt, NotFound, Transient
from tierd.s3.client import Answer
from tierd.s3.requests import S3Requests
from tierd.tiers.store import StoredObject


class ForeignObjects:
    """The objects below the URL of `cold`. Methods raise TierUnreachable, as those of S3Store."""

    def __init__(self, cold: ColdConfig, limits: LimitsConfig) -> None:
        self.url = cold.url.rstrip("/")
        self._requests = S3Requests(cold, limits)

    async def list(self, below: str = "") -> list[StoredObject]:
        """The objects whose keys begin with `below`, without the empty objects that stand for folders."""
        objects: list[StoredObject] = []
        async for page in self._requests.list_pages(f"list {self.url}", below):
            objects += [listed for listed in page if listed.key and not listed.key.endswith("/")]
        return objects

    async def read(self, source: StoredObject, offset: int, buffer: memoryview) -> None:
        """Fill the buffer. Raises Transient when the object was replaced or deleted since it was listed."""
        if not buffer:
            return
        action = f"read {self.url}/{source.key}"

        def check(answer: Answer) -> None:
            if source.etag and answer.get("ETag", source.etag) != source.etag:
                raise _changed(action)

        try:
            await self._requests.read_range(self._requests.prefix + source.key, action, offset, buffer, check)
        except (NotFound, Corrupt) as error:
            raise _changed(action) from error

    async def close(self) -> None:
        await self._requests.close()


def _changed(action: str) -> Transient:
    return Transient(f"{action}: it was replaced or deleted meanwhile", hint="adopt it when it is complete")
