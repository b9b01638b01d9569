"""A simulated S3 server, and the boto3-like client through which the real S3Store talks to one bucket of it.

Modelled: PUT with and without If-None-Match, HEAD, GET with ranges, paged listings, single and batch deletes. A request
takes effect at one instant. The seed injects faults: an error before the effect, an answer lost after it, a server that
ignores conditions, times without any connection for all nodes or for one, and listings that show the keys of a while
ago. A listing of several pages is not atomic.

Not modelled: multipart uploads (the simulated shards fit into one part), versioning, requests that never end.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache, partial
from typing import Any

from awscrt.checksums import crc64nvme
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError

from tierd.config.sections import ColdConfig
from tierd.s3.client import S3Client

OnChange = Callable[[str, bytes | None, bytes | None], None]
"""Called with (key, content before, content now); None: absent."""

OnListed = Callable[[str, str, list[str]], None]
"""Called with (node, prefix, keys) when a listing was answered completely."""


@dataclass
class SimulatedBucket:
    """`error_rate`, `lost_rate`: the shares of requests that fail before and after their effect. `faults` counts the
    injected ones. `cut_off`: the nodes without a connection. `now`: gives each object the time when it was written;
    None: listings have no times. `stale_s`: how old a listing is."""

    random: random.Random
    page_keys: int = 1000
    ignores_conditions: bool = False
    error_rate: float = 0.0
    lost_rate: float = 0.0
    is_down: bool = False
    faults: int = 0
    cut_off: set[str] = field(default_factory=set[str])
    now: Callable[[], datetime] | None = None
    stale_s: float = 0.0
    written_at: dict[str, datetime] = field(default_factory=dict[str, datetime])
    changes: list[tuple[datetime, str, bytes | None]] = field(default_factory=list[Any])  # when, key, content before
    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    keys: list[str] = field(default_factory=list[str])  # of them, sorted
    on_change: OnChange = lambda key, before, now: None
    on_listed: OnListed = lambda node, prefix, keys: None

    def write(self, key: str, content: bytes | None) -> None:
        before = self.objects.get(key)
        at = bisect_left(self.keys, key)
        if content is None:
            self.objects.pop(key, None)
            del self.keys[at : at + (before is not None)]
        else:
            self.objects[key] = content
            self.keys[at : at + (before is not None)] = [key]
        if self.now is not None:
            self.written_at[key] = self.now()
            self.changes.append((self.now(), key, before))
        self.on_change(key, before, content)

    def lose(self, key: str) -> None:
        """As a server that loses an object: nobody is told."""
        if self.objects.pop(key, None) is not None:
            del self.keys[bisect_left(self.keys, key)]

    def listed(self) -> dict[str, bytes]:
        """The objects that a listing shows."""
        if self.now is None or not self.stale_s:
            return self.objects
        objects, shown_at = dict(self.objects), self.now() - timedelta(seconds=self.stale_s)
        for changed_at, key, before in reversed(self.changes):
            if changed_at <= shown_at:
                break
            objects.pop(key, None)
            if before is not None:
                objects[key] = before
        return objects

    def about_time(self, key: str) -> dict[str, datetime]:
        return {"LastModified": self.written_at[key]} if key in self.written_at else {}


class BucketClient(S3Client):
    """The S3Client of one node. All code above boto3's own methods is real."""

    def __init__(self, cold: ColdConfig, bucket: SimulatedBucket, node: str) -> None:
        super().__init__(cold, "simulated", connections=1, timeout_s=60.0)
        self._requests = _Requests(bucket, node)

    def _connect(self, *, signs_payload: bool) -> Any:
        return self._requests


class _Requests:
    """The methods of boto3's client that S3Store calls."""

    def __init__(self, bucket: SimulatedBucket, node: str) -> None:
        self._bucket = bucket
        self._node = node
        self._listed: dict[str, list[str]] = {}

    def __getattr__(self, operation: str) -> Callable[..., dict[str, Any]]:
        return partial(self._request, operation)

    def _request(self, operation: str, **arguments: Any) -> dict[str, Any]:
        bucket = self._bucket
        if bucket.is_down or self._node in bucket.cut_off:
            bucket.faults += 1
            raise EndpointConnectionError(endpoint_url="https://simulated")
        chance = bucket.random.random()
        if chance < bucket.error_rate:
            bucket.faults += 1
            raise (
                _error(operation, 503, "SlowDown") if chance < bucket.error_rate / 2 else _error(operation, 500, "500")
            )
        answer = _OPERATIONS[operation](self, **arguments)
        if chance > 1.0 - bucket.lost_rate:
            bucket.faults += 1
            raise ConnectionClosedError(endpoint_url="https://simulated")
        return {"ResponseMetadata": {"HTTPStatusCode": 200, "HTTPHeaders": {}}, **answer}

    def put(self, Key: str, Body: Any, IfNoneMatch: str = "", **_: Any) -> dict[str, Any]:
        content = Body if isinstance(Body, bytes) else b"".join(iter(lambda: bytes(Body.read()), b""))
        if IfNoneMatch and not self._bucket.ignores_conditions and Key in self._bucket.objects:
            raise _error("put_object", 412, "PreconditionFailed")
        self._bucket.write(Key, content)
        return _about(content)

    def head(self, Key: str, **_: Any) -> dict[str, Any]:
        content = self._content("head_object", Key, "404")
        return {"ContentLength": len(content), **_about(content)}

    def get(self, Key: str, Range: str = "", **_: Any) -> dict[str, Any]:
        content = self._content("get_object", Key, "NoSuchKey")
        answer = _about(content)
        if Range:
            first, last = (int(number) for number in Range.removeprefix("bytes=").split("-"))
            if first >= len(content):
                raise _error("get_object", 416, "InvalidRange")
            answer = {"ContentRange": f"bytes {first}-{last}/{len(content)}", "ETag": answer["ETag"]}
            content = content[first : last + 1]
        return {"ContentLength": len(content), "Body": io.BytesIO(content), **answer}

    def list(self, Prefix: str, ContinuationToken: str = "", **_: Any) -> dict[str, Any]:
        objects = self._bucket.listed()
        keys = self._bucket.keys if objects is self._bucket.objects else sorted(objects)
        first = max(bisect_left(keys, Prefix), bisect_right(keys, ContinuationToken))
        keys = [key for key in keys[first : first + self._bucket.page_keys + 1] if key.startswith(Prefix)]
        page = keys[: self._bucket.page_keys]
        listed = self._listed.setdefault(Prefix, [])
        if not ContinuationToken:
            listed.clear()
        listed += page
        is_truncated = len(keys) > len(page)
        if not is_truncated:
            self._bucket.on_listed(self._node, Prefix, listed)
        contents = [
            {"Key": key, "Size": len(objects[key]), "ETag": _etag(objects[key]), **self._bucket.about_time(key)}
            for key in page
        ]
        return {
            "Contents": contents,
            "IsTruncated": is_truncated,
            **({"NextContinuationToken": page[-1]} if is_truncated else {}),
        }

    def delete(self, Key: str, **_: Any) -> dict[str, Any]:
        if Key in self._bucket.objects:
            self._bucket.write(Key, None)
        return {}

    def delete_batch(self, Delete: dict[str, Any], **_: Any) -> dict[str, Any]:
        for listed in Delete["Objects"]:
            self.delete(listed["Key"])
        return {}

    def list_uploads(self, **_: Any) -> dict[str, Any]:
        return {}

    def _content(self, operation: str, key: str, code: str) -> bytes:
        if key not in self._bucket.objects:
            raise _error(operation, 404, code)
        return self._bucket.objects[key]


_OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "put_object": _Requests.put,
    "head_object": _Requests.head,
    "get_object": _Requests.get,
    "list_objects_v2": _Requests.list,
    "delete_object": _Requests.delete,
    "delete_objects": _Requests.delete_batch,
    "list_multipart_uploads": _Requests.list_uploads,
}


@lru_cache(1000)
def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


def _about(content: bytes) -> dict[str, Any]:
    checksum = base64.b64encode(crc64nvme(content).to_bytes(8, "big")).decode()
    return {"ETag": _etag(content), "ChecksumCRC64NVME": checksum, "ChecksumType": "FULL_OBJECT"}


def _error(operation: str, status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, operation)
