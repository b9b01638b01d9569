"""Looks at a bucket as `tierd doctor` does: every request that tierd makes, once, and what is set up beside them.

All of it happens below `.tierd-probe/` in the tier's prefix: no key of a tier begins with a dot, so no listing takes
it for a checkpoint. What was made is removed at the end, also when the probe is cancelled.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from tierd.config import ColdConfig
from tierd.errors import NotFound, TierdError, TierUnreachable
from tierd.format import checksum
from tierd.s3.actions import ACTIONS
from tierd.s3.client import Answer
from tierd.s3.dialect import Extra
from tierd.s3.errors import Trouble, code_of, trouble_of
from tierd.s3.store import S3Store
from tierd.s3.upload import whole_checksum
from tierd.tiers.advice import Advice, Verdict

PREFIX = ".tierd-probe/"
BYTES = b"tierd doctor was here, and removes this again. " * 8
LEFT_OVER_S = 3600.0  # what a probe that was killed has left is removed after so long
CLEAR_TIMEOUT_S = 30.0
SKEW_WARNED_S = 60.0  # S3 refuses what is 15 minutes off
_DENIED = {"AccessDenied", "AllAccessDisabled", "403"}
_MD5_ALONE = {"NotImplemented", "501", "MissingContentMD5", "InvalidRequest", "InvalidArgument", "MethodNotAllowed"}


def endpoint_advice(cold: ColdConfig) -> list[Advice]:
    """What the config alone shows."""

    def warning(check: str, message: str, hint: str) -> Advice:
        return Advice(check, cold.name, "warning", message, hint)

    found: list[Advice] = []
    endpoint = urlsplit(cold.endpoint_url)
    host = endpoint.hostname or ""
    if endpoint.scheme == "http" and not is_private(host):
        message = f"{cold.endpoint_url} is plain http: checksums protect the bytes from damage, nothing from readers"
        found.append(warning("transport", message, "use https:// in endpoint_url"))
    regional = re.fullmatch(r"s3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com(?:\.cn)?", host)
    if regional and cold.region and regional[1] != cold.region:
        message = f"endpoint_url is in {regional[1]}, region says {cold.region}"
        found.append(warning("region", message, "leave endpoint_url empty for AWS, and set the bucket's region"))
    return found


def is_private(host: str) -> bool:
    """Loopback, a private network, or a name that only such a network knows."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".localhost", ".local", ".internal", ".svc"))
    return address.is_loopback or address.is_private or address.is_link_local


class BucketProbe:
    """One look at one bucket. `now`: the wall clock, which is compared with the server's."""

    def __init__(self, store: S3Store, cold: ColdConfig, now: Callable[[], datetime]) -> None:
        self._store = store
        self._cold = cold
        self._now = now
        self._below = store.prefix + PREFIX
        self._own = f"{self._below}{secrets.token_hex(8)}-"
        self._found: list[Advice] = []

    async def run(self) -> list[Advice]:
        self._found += endpoint_advice(self._cold)
        if not await self._reach():
            return self._found
        try:
            await self._write_and_read()
            await self._upload()
            await self._look_at_bucket()
        finally:
            await self._clear()
        return self._found

    # ── one request after the other ──

    async def _reach(self) -> bool:
        """The first request tells whether there is any sense in others."""
        doing = f"list {self._store.url}"
        try:
            answer = await self._store.request("list_objects_v2", doing, Prefix=self._below)
        except TierdError as error:
            if code_of(error.__cause__) not in _DENIED:
                code = TierUnreachable.exit_code
                self._say("reach", "problem", error.message, error.hint, exit_code=code)
                return False
            self._refused("list_objects_v2", "list", error)
            return True
        self._say("list", "ok", "objects can be listed")
        headers: dict[str, str] = answer["ResponseMetadata"]["HTTPHeaders"]
        self._compare_clock(headers)
        region = headers.get("x-amz-bucket-region", "")
        if region and region != self._store.region:
            message = f"the bucket is in {region}, this tier's region is {self._store.region}: each request goes twice"
            self._say("region", "warning", message, f'set region = "{region}"')
        for one in answer.get("Contents", ()):
            if (self._now() - one["LastModified"]).total_seconds() > LEFT_OVER_S:
                await self._request("delete_object", "delete", Key=one["Key"])
        return True

    async def _write_and_read(self) -> None:
        key = self._own + "object"
        tells_absence = await self._is_absent(key)
        sent = {"ChecksumCRC64NVME": checksum.encode(checksum.crc64nvme(BYTES))}
        if await self._request("put_object", "put", Key=key, Body=BYTES, **sent) is None:
            return
        self._say("put", "ok", "objects can be written" + self._encryption())
        await self._head(key, verifies=await self._wrong_checksum())
        if await self._read(key) and not tells_absence:
            message = "an absent object is answered with 403, not 404: tierd cannot tell whether it may write one"
            self._say("absent", "problem", message, "allow s3:ListBucket as deploy/iam-policy.json does: …IfExists")
        await self._condition(key, sent)
        await self._delete(key)

    async def _is_absent(self, key: str) -> bool:
        """Whether nothing forbids the server to say of an object that is not there that it is not there."""
        try:
            await self._store.request("head_object", "look for an absent object", Key=key)
        except TierdError as error:
            return code_of(error.__cause__) not in _DENIED
        return True

    async def _head(self, key: str, *, verifies: bool) -> None:
        head = await self._request("head_object", "head", Key=key, ChecksumMode="ENABLED")
        if head is None:
            return
        if whole_checksum(head) is not None and verifies:
            self._say("checksum", "ok", "the server keeps CRC64NVME: a replica is verified without reading it")
        elif Extra.CHECKSUMS in self._store.dialect.without:
            message = (
                "the server refuses requests with checksums: payloads are signed instead, at 1.5 CPU-s more for a GB"
            )
            self._say("checksum", "note", message)
        else:
            message = (
                "the server computes no CRC64NVME: only reading finds damage, as every restore and `tierd verify` do"
            )
            self._say("checksum", "note", message)
        asked, got = self._cold.sse, head.get("ServerSideEncryption", "")
        if asked and got != asked:
            message = f"sse asks for {asked}, and the object is stored with {got or 'none that the server tells of'}"
            self._say("encryption", "warning", message, "does this server know server-side encryption?")

    async def _read(self, key: str) -> bool:
        begin, end = 7, 70
        doing = "read a range of a probe object"

        def fetch(answer: Answer) -> tuple[bytes, str]:
            return answer["Body"].read(), answer.get("ContentRange", "")

        try:
            found = await self._store.request("get_object", doing, fetch, Key=key, Range=f"bytes={begin}-{end - 1}")
        except TierdError as error:
            self._refused("get_object", "get", error)
            return False
        if found[0] != BYTES[begin:end] or not found[1].startswith(f"bytes {begin}-"):
            message = "the server ignores the range of a GET, or answers with other bytes"
            self._say("get", "problem", message, "tierd needs ranged GETs", exit_code=TierUnreachable.exit_code)
            return False
        self._say("get", "ok", "objects can be read, by ranges too")
        return True

    async def _condition(self, key: str, sent: dict[str, str]) -> None:
        if Extra.CONDITION not in self._store.dialect.without:
            try:
                await self._store.request("put_object", "put again", Key=key, Body=BYTES, IfNoneMatch="*", **sent)
            except TierdError as error:
                if code_of(error.__cause__) in ("PreconditionFailed", "412"):
                    self._say("if_none_match", "ok", "If-None-Match is honoured: one of two writers wins a commit")
                else:
                    self._refused("put_object", "if_none_match", error)
                return
        message = "If-None-Match is ignored: a commit looks first, and two writers at the same instant both win"
        self._say("if_none_match", "note", message, "let no two daemons write one run into this bucket")

    async def _wrong_checksum(self) -> bool:
        """Whether the server finds damage. One that does not may still give back the checksum that it was told."""
        wrong = {"ChecksumCRC64NVME": checksum.encode(checksum.crc64nvme(BYTES[1:]))}
        if Extra.CHECKSUMS in self._store.dialect.without:
            return False
        with suppress(TierdError):
            await self._store.request("put_object", "put damaged bytes", Key=self._own + "wrong", Body=BYTES, **wrong)
            if Extra.CHECKSUMS not in self._store.dialect.without:
                message = "bytes that do not fit their checksum are accepted: nothing is noticed before they are read"
                self._say("damage", "note", message, "use https://, and `tierd verify` from time to time")
                return False
        self._say("damage", "ok", "bytes that do not fit their checksum are refused")
        return True

    async def _delete(self, key: str) -> None:
        batch = {"Objects": [{"Key": self._own + "wrong"}], "Quiet": True}
        try:
            await self._store.request("delete_objects", "delete several", Delete=batch)
        except TierdError as error:
            if code_of(error.__cause__) not in _MD5_ALONE:
                self._refused("delete_objects", "delete", error)
                return
        if await self._request("delete_object", "delete", Key=key) is not None:
            self._say("delete", "ok", "objects can be deleted")

    async def _upload(self) -> None:
        """Multipart: one upload that is completed, and one that is listed and aborted."""
        key = self._own + "upload"
        sums = checksum.encode(checksum.crc64nvme(BYTES))
        begun = await self._begin(key, sums)
        if begun is None:
            return
        upload_id, etag = begun
        parts = [{"PartNumber": 1, "ETag": etag, "ChecksumCRC64NVME": sums}]
        whole = {"ChecksumCRC64NVME": sums, "ChecksumType": "FULL_OBJECT", "MultipartUpload": {"Parts": parts}}
        operation = "complete_multipart_upload"
        if await self._request(operation, "multipart", Key=key, UploadId=upload_id, **whole) is not None:
            self._say("multipart", "ok", "large objects can be written in parts")
        begun = await self._begin(key, sums)
        if begun is None:
            return
        upload_id = begun[0]
        listed = await self._request("list_parts", "list_parts", Key=key, UploadId=upload_id)
        if listed is not None and [one["PartNumber"] for one in listed.get("Parts", ())] == [1]:
            self._say("list_parts", "ok", "an interrupted upload goes on with the parts that are there")
        elif listed is not None:
            self._say("list_parts", "note", "parts are not listed: an interrupted upload begins anew")
        uploads = await self._request("list_multipart_uploads", "list_uploads", Prefix=self._own)
        if uploads is not None and any(one["UploadId"] == upload_id for one in uploads.get("Uploads", ())):
            self._say("list_uploads", "ok", "uploads that nobody finishes are found, and aborted after a day")
        elif uploads is not None:
            self._say("list_uploads", "note", "uploads are not listed: an interrupted one begins anew")
        if await self._request("abort_multipart_upload", "abort", Key=key, UploadId=upload_id) is not None:
            self._say("abort", "ok", "uploads can be aborted")

    async def _begin(self, key: str, sums: str) -> tuple[str, str] | None:
        """(upload id, ETag of its one part)"""
        kind = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        created = await self._request("create_multipart_upload", "multipart", Key=key, **kind)
        if created is None:
            return None
        about: dict[str, Any] = {"UploadId": created["UploadId"], "PartNumber": 1, "ChecksumCRC64NVME": sums}
        part = await self._request("upload_part", "multipart", Key=key, Body=BYTES, **about)
        return None if part is None else (created["UploadId"], part["ETag"])

    # ── how the bucket is set up ──

    async def _look_at_bucket(self) -> None:
        rules: list[Answer] | None = None
        answer = await self._look("get_bucket_lifecycle_configuration", "lifecycle", {"NoSuchLifecycleConfiguration"})
        if answer is not None:
            rules = [rule for rule in answer.get("Rules", ()) if rule["Status"] == "Enabled" and self._covers(rule)]
            if any("AbortIncompleteMultipartUpload" in rule for rule in rules):
                self._say("lifecycle", "ok", "the bucket aborts uploads that nobody finishes")
            else:
                message = (
                    "no lifecycle rule of the bucket aborts incomplete uploads: parts of a lost node cost for ever"
                )
                hint = "add AbortIncompleteMultipartUpload, 7 days, for this prefix: docs/RUNBOOK.md#doctor"
                self._say("lifecycle", "warning", message, hint)
        versioning = await self._look("get_bucket_versioning", "versioning", set())
        if versioning is not None and versioning.get("Status") == "Enabled":
            is_bounded = any("NoncurrentVersionExpiration" in rule for rule in rules or ())
            if is_bounded:
                self._say("versioning", "ok", "versioning is on, and old versions expire")
            elif rules is not None:
                message = (
                    "versioning is on, and no rule expires old versions: what tierd deletes stays and costs for ever"
                )
                hint = "add NoncurrentVersionExpiration for this prefix: docs/RUNBOOK.md#doctor"
                self._say("versioning", "warning", message, hint)
            else:
                self._say("versioning", "note", "versioning is on; whether old versions expire cannot be looked at")
        absent = {"ObjectLockConfigurationNotFoundError", "ObjectLockConfigurationNotFound"}
        lock = await self._look("get_object_lock_configuration", "object_lock", absent)
        kept = (lock or {}).get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention")
        if kept:
            time = f"{kept['Days']} days" if "Days" in kept else f"{kept.get('Years', '?')} years"
            message = (
                f"Object Lock keeps every object for {time} ({kept.get('Mode')}): until then deletion frees nothing"
            )
            self._say("object_lock", "warning", message, "count on that in what you pay, or use another bucket")

    async def _look(self, operation: str, check: str, absent: set[str]) -> Answer | None:
        """The bucket's own configuration; empty where there is none, None where it cannot be looked at."""
        try:
            return await self._store.request(operation, f"look at {check}")
        except TierdError as error:
            code = code_of(error.__cause__)
            if code in absent:
                return {}
            why = f"needs {ACTIONS[operation]}" if code in _DENIED else f"the server says {code}"
            self._say(check, "note", f"{check.replace('_', ' ')} of the bucket cannot be looked at: {why}")
            return None

    def _covers(self, rule: Answer) -> bool:
        filters = rule.get("Filter", {})
        prefix = rule.get("Prefix") or filters.get("Prefix") or filters.get("And", {}).get("Prefix") or ""
        is_of_all = not filters.keys() - {"Prefix", "And"} and not filters.get("And", {}).keys() - {"Prefix"}
        return is_of_all and self._store.prefix.startswith(prefix)

    # ── what is said, and what is left ──

    async def _request(self, operation: str, check: str, **arguments: Any) -> Answer | None:
        """None when it went wrong, which has been said then."""
        try:
            return await self._store.request(operation, f"{check} a probe object in {self._store.url}", **arguments)
        except TierdError as error:
            self._refused(operation, check, error)
            return None

    def _refused(self, operation: str, check: str, error: TierdError) -> None:
        code = code_of(error.__cause__)
        exit_code = TierUnreachable.exit_code
        is_listing = operation in ("list_multipart_uploads", "list_parts")
        if code in _DENIED:
            message = f"access denied ({code}) to {operation}: this identity needs {ACTIONS[operation]}"
            self._say(
                check, "problem", message, "deploy/iam-policy.json allows all that is needed", exit_code=exit_code
            )
        elif is_listing and trouble_of(error.__cause__) is Trouble.REFUSED:
            self._say(check, "note", f"the server does not know {operation}: an interrupted upload begins anew")
        else:
            self._say(check, "problem", error.message, error.hint, exit_code=exit_code)

    def _encryption(self) -> str:
        return f", encrypted with {self._cold.sse}" if self._cold.sse else ""

    def _compare_clock(self, headers: dict[str, str]) -> None:
        try:
            skew_s = (self._now() - parsedate_to_datetime(headers["date"])).total_seconds()
        except (KeyError, ValueError, TypeError):
            return
        if abs(skew_s) > SKEW_WARNED_S:
            message = f"this machine's clock is {skew_s:+.0f} s off the server's; S3 refuses what is 15 minutes off"
            self._say("clock", "warning", message, "let it be set: chronyc tracking")
        else:
            self._say("clock", "ok", "this machine's clock agrees with the server's")

    def _say(self, check: str, verdict: Verdict, message: str, hint: str = "", *, exit_code: int = 1) -> None:
        if any(one.check == check and one.verdict == verdict == "problem" for one in self._found):
            return  # one sentence for one missing permission
        name = self._cold.name
        self._found.append(Advice(check, name, verdict, message, hint, exit_code))

    async def _clear(self) -> None:
        """Whatever may be there of this probe, and what former ones left when they were killed."""
        doing = "remove what the probe made"
        try:
            async with asyncio.timeout(CLEAR_TIMEOUT_S):
                for one in await self._store.uploads(self._below, doing):
                    if one.object_key.startswith(self._own) or one.age_s > LEFT_OVER_S:
                        about = {"Key": one.object_key, "UploadId": one.upload_id}
                        await self._store.request("abort_multipart_upload", doing, **about)
                for name in ("object", "wrong", "upload"):
                    try:
                        await self._store.request("delete_object", doing, Key=self._own + name)
                    except NotFound:
                        continue
        except (TierdError, TimeoutError) as error:
            message = f"what the probe made may still lie below {self._below}: {error}"
            self._say("clear", "warning", message, "remove it by hand, or the next probe does after an hour")
