"""What `tierd doctor` checks of a bucket: every request that tierd makes, once, and the bucket's configuration.

All objects are below `.tierd-probe/` in the tier's prefix. No key of a tier begins with a dot, so no listing takes them
for checkpoints. They are removed at the end, also when the probe is cancelled.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from tierd.config.sections import ColdConfig, is_exposed_endpoint
from tierd.errors import NotFound, TierdError, TierUnreachable, text_of
from tierd.format import checksum
from tierd.s3.client import Answer
from tierd.s3.dialect import Extra
from tierd.s3.errors import BATCH_REFUSED, CONDITION_FAILED, Trouble, code_of, server_time, trouble_of
from tierd.s3.requests import ACTIONS, S3Requests
from tierd.s3.upload import abort_upload, unfinished_uploads, whole_checksum
from tierd.tiers.probe import Advice, Severity

PREFIX = ".tierd-probe/"
BYTES = b"tierd doctor was here, and removes this again. " * 8
RANGE = (7, 70)  # of BYTES
LEFT_OVER_S = 3600.0  # objects of an earlier probe, which was killed, are removed after this age
CLEAR_TIMEOUT_S = 30.0
SKEW_WARNED_S = 60.0  # S3 refuses a clock that is 15 minutes off
_DENIED = {"AccessDenied", "AllAccessDisabled", "403"}


def endpoint_advice(cold: ColdConfig) -> Iterator[Advice]:
    """What can be seen from the config alone."""
    endpoint = urlsplit(cold.endpoint_url)
    host = endpoint.hostname or ""
    if is_exposed_endpoint(cold.endpoint_url):
        message = f"{cold.endpoint_url} is plain http: anyone on the way can read, and change what is sent"
        yield Advice("transport", cold.name, "warning", message, "use https:// in endpoint_url")
    regional = re.fullmatch(r"s3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com(?:\.cn)?", host)
    if regional and cold.region and regional[1] != cold.region:
        message = f"endpoint_url is in {regional[1]}, region says {cold.region}"
        hint = "leave endpoint_url empty for AWS, and set the bucket's region"
        yield Advice("region", cold.name, "warning", message, hint)


class BucketProbe:
    """One check of one bucket. `now`: the wall clock, which is compared with the server's."""

    def __init__(self, requests: S3Requests, cold: ColdConfig, now: Callable[[], datetime]) -> None:
        self._requests = requests
        self._cold = cold
        self._now = now
        self._folder = requests.prefix + PREFIX
        self._own = f"{self._folder}{secrets.token_hex(8)}-"
        self._advice: list[Advice] = []

    async def run(self) -> list[Advice]:
        self._advice += endpoint_advice(self._cold)
        if await self._reach():
            try:
                await self._write_and_read()
                await self._upload()
                await self._check_configuration()
            finally:
                await self._clear()
        return self._advice

    # ── one request after the other ──

    async def _reach(self) -> bool:
        """False when the bucket does not answer, so that further requests are pointless."""
        try:
            action = f"list {self._requests.url}"
            answer = await self._requests.request("list_objects_v2", action, Prefix=self._folder)
        except TierdError as error:
            if code_of(error.__cause__) in _DENIED:
                self._add_refusal("list_objects_v2", "list", error)
                return True
            self._add("reach", "problem", error.message, error.hint, exit_code=TierUnreachable.exit_code)
            return False
        self._add("list", "ok", "objects can be listed")
        headers: dict[str, str] = answer["ResponseMetadata"]["HTTPHeaders"]
        self._check_clock(answer)
        region, configured = headers.get("x-amz-bucket-region", ""), self._requests.client.region
        if region and region != configured:
            message = f"the bucket is in {region}, this tier's region is {configured}: each request is redirected"
            self._add("region", "warning", message, f'set region = "{region}"')
        for listed in answer.get("Contents", ()):
            if self._cold.deletes and (self._now() - listed["LastModified"]).total_seconds() > LEFT_OVER_S:
                await self._request("delete_object", "delete", Key=listed["Key"])
        return True

    async def _write_and_read(self) -> None:
        key = self._own + "object"
        reports_absence = await self._is_absent(key)
        sums = {"ChecksumCRC64NVME": checksum.encode(checksum.crc64nvme(BYTES))}
        ok = "objects can be written" + (f", encrypted with {self._cold.sse}" if self._cold.sse else "")
        if await self._request("put_object", "put", ok, Key=key, Body=BYTES, **sums) is None:
            return
        await self._head(key, verifies=await self._detects_damage())
        if await self._read(key) and not reports_absence:
            message = "whether an object is absent cannot be told: its HEAD is refused, and its key cannot be listed"
            self._add("absent", "problem", message, "allow s3:ListBucket as deploy/iam-policy.json does")
        await self._condition(key, sums)
        await self._delete(key)

    async def _is_absent(self, key: str) -> bool:
        """Whether it can be told that an absent object is absent."""
        try:
            await self._requests.head(key, "look for an absent object")
        except TierdError as error:
            return code_of(error.__cause__) not in _DENIED
        return True

    async def _head(self, key: str, *, verifies: bool) -> None:
        head = await self._request("head_object", "head", Key=key, ChecksumMode="ENABLED")
        if head is None:
            return
        if whole_checksum(head) is not None and verifies:
            self._add("checksum", "ok", "the server keeps CRC64NVME: a replica is verified without reading it")
        else:
            message = "the server computes no CRC64NVME: damage is found by reading, in a restore or `tierd verify`"
            if Extra.CHECKSUMS in self._requests.dialect.refused:
                message = "the server refuses checksums: payloads are signed instead, at 1.5 CPU-s more for a GB"
            self._add("checksum", "note", message)
        wanted, stored = self._cold.sse, head.get("ServerSideEncryption", "")
        if wanted and stored != wanted:
            message = f"sse asks for {wanted}, and the server stores the object with {stored or 'none that it reports'}"
            self._add("encryption", "warning", message, "does this server support server-side encryption?")

    async def _read(self, key: str) -> bool:
        begin, end = RANGE

        def fetch(answer: Answer) -> tuple[bytes, str]:
            return answer["Body"].read(), answer.get("ContentRange", "")

        read = await self._request("get_object", "get", use=fetch, Key=key, Range=f"bytes={begin}-{end - 1}")
        if read is None:
            return False
        if read[0] != BYTES[begin:end] or not read[1].startswith(f"bytes {begin}-"):
            message = "the server ignores the range of a GET, or answers with other bytes"
            self._add("get", "problem", message, "tierd needs ranged GETs", exit_code=TierUnreachable.exit_code)
            return False
        self._add("get", "ok", "objects can be read, by ranges too")
        return True

    async def _condition(self, key: str, sums: dict[str, Any]) -> None:
        if Extra.CONDITION not in self._requests.dialect.refused:
            try:
                await self._requests.request("put_object", "put again", Key=key, Body=BYTES, IfNoneMatch="*", **sums)
            except TierdError as error:
                if code_of(error.__cause__) in CONDITION_FAILED:
                    self._add("if_none_match", "ok", "If-None-Match is honoured: one of two writers wins a commit")
                else:
                    self._add_refusal("put_object", "if_none_match", error)
                return
        message = "If-None-Match is ignored: a commit checks first, and two writers at the same instant both win"
        self._add("if_none_match", "note", message, "let no two daemons write one run into this bucket")

    async def _detects_damage(self) -> bool:
        """A server that does not may still return the checksum that it was sent."""
        wrong: dict[str, Any] = {"ChecksumCRC64NVME": checksum.encode(checksum.crc64nvme(BYTES[1:]))}
        if Extra.CHECKSUMS in self._requests.dialect.refused:
            return False
        with suppress(TierdError):
            key = self._own + "wrong"
            await self._requests.request("put_object", "put damaged bytes", Key=key, Body=BYTES, **wrong)
            if Extra.CHECKSUMS not in self._requests.dialect.refused:
                message = "bytes that do not match their checksum are accepted: damage is found only by reading"
                self._add("damage", "note", message, "use https://, and `tierd verify` from time to time")
                return False
        self._add("damage", "ok", "bytes that do not match their checksum are refused")
        return True

    async def _check_deletion_is_denied(self, key: str) -> None:
        """Of a tier with `deletes = false`. The probe's objects stay then; the probe of another credential removes them
        after an hour."""
        try:
            await self._requests.request("delete_object", "try to delete a probe object", Key=key)
        except TierdError as error:
            if code_of(error.__cause__) in _DENIED:
                self._add("delete", "ok", "this identity cannot delete objects, which suits deletes = false")
            else:
                self._add_refusal("delete_object", "delete", error)
            return
        message = "this identity can delete objects, although the tier has deletes = false"
        self._add("delete", "warning", message, "take s3:DeleteObject from it, as deploy/iam-policy-writer.json does")

    async def _delete(self, key: str) -> None:
        if not self._cold.deletes:
            await self._check_deletion_is_denied(key)
            return
        batch = {"Objects": [{"Key": self._own + "wrong"}], "Quiet": True}
        try:
            await self._requests.request("delete_objects", "delete several", Delete=batch)
        except TierdError as error:
            if code_of(error.__cause__) not in BATCH_REFUSED:
                self._add_refusal("delete_objects", "delete", error)
                return
        await self._request("delete_object", "delete", "objects can be deleted", Key=key)

    async def _upload(self) -> None:
        """Multipart: one upload that is listed and completed, and one that is aborted."""
        key = self._own + "upload"
        crc = checksum.encode(checksum.crc64nvme(BYTES))
        kind = {"Key": key, "ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        created = await self._request("create_multipart_upload", "multipart", **kind)
        if created is None:
            return
        upload: dict[str, Any] = {"Key": key, "UploadId": created["UploadId"]}
        part: dict[str, Any] = {"PartNumber": 1, "ChecksumCRC64NVME": crc}
        sent = await self._request("upload_part", "multipart", Body=BYTES, **upload, **part)
        if sent is None:
            return
        listed = await self._request("list_parts", "list_parts", **upload)
        if listed is not None and [each["PartNumber"] for each in listed.get("Parts", ())] == [1]:
            self._add("list_parts", "ok", "an interrupted upload continues with the parts that are there")
        elif listed is not None:
            self._add("list_parts", "note", "parts are not listed: an interrupted upload begins again")
        uploads = await self._request("list_multipart_uploads", "list_uploads", Prefix=self._own)
        if uploads is not None and created["UploadId"] in [each["UploadId"] for each in uploads.get("Uploads", ())]:
            self._add("list_uploads", "ok", "abandoned uploads are found, and aborted after a day")
        elif uploads is not None:
            self._add("list_uploads", "note", "uploads are not listed: an interrupted one begins again")
        whole = {"MultipartUpload": {"Parts": [{**part, "ETag": sent["ETag"]}]}, "ChecksumType": "FULL_OBJECT"}
        ok = "large objects can be written in parts"
        await self._request("complete_multipart_upload", "multipart", ok, ChecksumCRC64NVME=crc, **upload, **whole)
        if created := await self._request("create_multipart_upload", "multipart", **kind):
            upload["UploadId"] = created["UploadId"]
            await self._request("abort_multipart_upload", "abort", "uploads can be aborted", **upload)

    # ── the bucket's configuration ──

    async def _check_configuration(self) -> None:
        rules: list[Answer] | None = None
        absent = {"NoSuchLifecycleConfiguration"}
        answer = await self._configured("get_bucket_lifecycle_configuration", "lifecycle", absent)
        if answer is not None:
            rules = [rule for rule in answer.get("Rules", ()) if rule["Status"] == "Enabled" and self._covers(rule)]
            if any("AbortIncompleteMultipartUpload" in rule for rule in rules):
                self._add("lifecycle", "ok", "the bucket aborts incomplete uploads")
            else:
                message = "no lifecycle rule aborts incomplete uploads: parts from a lost node are billed forever"
                hint = "add AbortIncompleteMultipartUpload, 7 days, for this prefix: docs/RUNBOOK.md#doctor"
                self._add("lifecycle", "warning", message, hint)
        versioning = await self._configured("get_bucket_versioning", "versioning", set())
        if versioning is not None and versioning.get("Status") == "Enabled":
            if rules is None:
                self._add("versioning", "note", "versioning is on; whether old versions expire cannot be read")
            elif any("NoncurrentVersionExpiration" in rule for rule in rules):
                self._add("versioning", "ok", "versioning is on, and old versions expire")
            else:
                message = "versioning is on, and no rule expires old versions: deleted objects are billed forever"
                hint = "add NoncurrentVersionExpiration for this prefix: docs/RUNBOOK.md#doctor"
                self._add("versioning", "warning", message, hint)
        absent = {"ObjectLockConfigurationNotFoundError", "ObjectLockConfigurationNotFound"}
        lock = await self._configured("get_object_lock_configuration", "object_lock", absent)
        rule = (lock or {}).get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention")
        if rule:
            time = f"{rule['Days']} days" if "Days" in rule else f"{rule.get('Years', '?')} years"
            mode = rule.get("Mode")
            message = f"Object Lock keeps every object for {time} ({mode}): until then deletion frees nothing"
            self._add("object_lock", "warning", message, "include that in the costs, or use another bucket")

    async def _configured(self, operation: str, check: str, absent: set[str]) -> Answer | None:
        """A part of the bucket's configuration; empty where there is none, None where it cannot be read."""
        try:
            return await self._requests.request(operation, f"read the bucket's {check} configuration")
        except TierdError as error:
            code = code_of(error.__cause__)
            if code in absent:
                return {}
            why = f"needs {ACTIONS[operation]}" if code in _DENIED else f"the server says {code}"
            self._add(check, "note", f"{check.replace('_', ' ')} of the bucket cannot be read: {why}")
            return None

    def _covers(self, rule: Answer) -> bool:
        """Whether a lifecycle rule applies to every object of the tier."""
        filters = rule.get("Filter", {})
        prefix = rule.get("Prefix") or filters.get("Prefix") or filters.get("And", {}).get("Prefix") or ""
        is_of_all = not filters.keys() - {"Prefix", "And"} and not filters.get("And", {}).keys() - {"Prefix"}
        return is_of_all and self._requests.prefix.startswith(prefix)

    # ── advice, and the objects of the probe ──

    async def _request(self, operation: str, check: str, ok: str = "", **arguments: Any) -> Any:
        """None when it failed, with the advice added. `ok`: the advice when it succeeds."""
        try:
            answer = await self._requests.request(
                operation, f"{check} a probe object in {self._requests.url}", **arguments
            )
        except TierdError as error:
            self._add_refusal(operation, check, error)
            return None
        if ok:
            self._add(check, "ok", ok)
        return answer

    def _add_refusal(self, operation: str, check: str, error: TierdError) -> None:
        code = code_of(error.__cause__)
        message, hint = error.message, error.hint
        if code in _DENIED:
            message = f"access denied ({code}) to {operation}: this identity needs {ACTIONS[operation]}"
            hint = "deploy/iam-policy.json allows all that is needed"
        elif operation in ("list_multipart_uploads", "list_parts") and trouble_of(error.__cause__) is Trouble.REFUSED:
            self._add(check, "note", f"the server does not support {operation}: an interrupted upload begins again")
            return
        self._add(check, "problem", message, hint, exit_code=TierUnreachable.exit_code)

    def _check_clock(self, answer: Answer) -> None:
        try:
            skew_s = (self._now() - server_time(answer)).total_seconds()
        except (KeyError, ValueError, TypeError):
            return
        if abs(skew_s) > SKEW_WARNED_S:
            message = f"this machine's clock is {skew_s:+.0f} s off the server's; S3 refuses one that is 15 minutes off"
            self._add("clock", "warning", message, "synchronize it: chronyc tracking")
        else:
            self._add("clock", "ok", "this machine's clock agrees with the server's")

    def _add(self, check: str, severity: Severity, message: str, hint: str = "", *, exit_code: int = 1) -> None:
        if any(advice.check == check and advice.verdict == severity == "problem" for advice in self._advice):
            return  # one missing permission is reported once
        self._advice.append(Advice(check, self._cold.name, severity, message, hint, exit_code))

    async def _clear(self) -> None:
        """Removes every object of this probe, and what earlier ones left when they were killed."""
        action = "remove the probe's objects"
        try:
            async with asyncio.timeout(CLEAR_TIMEOUT_S):
                for upload in await unfinished_uploads(self._requests, self._folder, action):
                    if upload.object_key.startswith(self._own) or upload.age_s > LEFT_OVER_S:
                        await abort_upload(self._requests, upload.object_key, upload.upload_id, action)
                for name in ("object", "wrong", "upload") if self._cold.deletes else ():
                    with suppress(NotFound):
                        await self._requests.request("delete_object", action, Key=self._own + name)
        except (TierdError, TimeoutError) as error:
            message = f"objects of the probe may remain below {self._folder}: {text_of(error)}"
            self._add("clear", "warning", message, "remove them by hand, or the next probe does after an hour")
