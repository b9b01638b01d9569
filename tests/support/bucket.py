"""Our own S3 server, which fails on a script: one bucket in memory, on a free loopback port.

It checks what AWS checks (checksums, signed payloads, conditions, sizes and order of parts) and refuses with AWS's
codes. A script chooses the fault of each request. The server counts every byte that it receives.
"""

from __future__ import annotations

import hashlib
import re
import select
import socket
import ssl
import struct
import sys
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.support.s3 import ACCESS_KEY, BUCKET
from tierd.format import checksum, layout
from tierd.s3.requests import ACTIONS

# S3's error codes with their statuses. Each is a fault too: the answer in place of the result.
STATUSES = {
    "SlowDown": 503,
    "ServiceUnavailable": 503,
    "InternalError": 500,
    "TooManyRequests": 429,
    "RequestTimeout": 400,
    "ExpiredToken": 400,
    "InvalidAccessKeyId": 403,
    "AccessDenied": 403,
    "RequestTimeTooSkewed": 403,
    "InvalidObjectState": 403,
    "InvalidStorageClass": 400,
    "PermanentRedirect": 301,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchLifecycleConfiguration": 404,
    "ObjectLockConfigurationNotFoundError": 404,
    "SignatureDoesNotMatch": 403,
    "AuthorizationHeaderMalformed": 400,
    "NoSuchUpload": 404,
    "PreconditionFailed": 412,
    "ConditionalRequestConflict": 409,
    "BadDigest": 400,
    "XAmzContentSHA256Mismatch": 400,
    "InvalidRange": 416,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "EntityTooSmall": 400,
    "InvalidRequest": 400,
    "InvalidArgument": 400,
    "MalformedXML": 400,
    "NotImplemented": 501,
    "Strange": 400,
}
FAULTS = {
    "reset": "half of the body is read, then the connection is reset",
    "silence": "the request is read and never answered",
    "hold": "half of the body is read, and then nothing happens",
    "lose": "it is done, and the answer is lost",
    "garble": "one bit of the body flips on its way here",
    "flip": "one bit of the answer's body flips",
    "cut": "half of the answer's body comes, then the connection ends",
    "drip": "the answer's body comes byte by byte",
    "error-in-200": "CompleteMultipartUpload is refused with status 200, as AWS does after its first white space",
}
STORAGE_CLASSES = {"", "STANDARD", "STANDARD_IA", "GLACIER_IR", "GLACIER", "DEEP_ARCHIVE"}
ARCHIVED = {"GLACIER", "DEEP_ARCHIVE"}
SKEW_MAX = timedelta(minutes=15)


@dataclass(frozen=True)
class Seen:
    """One request: its operation, the bytes of its body that arrived, and its status, 0 for none."""

    operation: str
    key: str
    received_bytes: int
    status: int
    fault: str


@dataclass(frozen=True)
class Stored:
    content: bytes
    etag: str
    crc64nvme: int
    part_count: int = 0
    storage_class: str = ""
    encryption: str = ""
    kms_key_id: str = ""


@dataclass
class Begun:
    """A multipart upload in progress."""

    key: str
    initiated: datetime
    algorithm: str
    storage_class: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    parts: dict[int, Stored] = field(default_factory=dict)


Script = Callable[[str, str], str]
"""(operation, key) → "" (no fault), a key of FAULTS, or a code of STATUSES."""


class Refused(Exception):
    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(code)
        self.code = code
        self.message = message or MESSAGES.get(code, code)


MESSAGES = {
    "InvalidAccessKeyId": "The AWS Access Key Id you provided does not exist in our records.",
    "SignatureDoesNotMatch": "The request signature we calculated does not match the signature you provided.",
    "Strange": "The key AKIAIOSFODNN7EXAMPLE is strange to us.",
    "NotImplemented": "A header you provided implies functionality that is not implemented.",
}


@dataclass
class Answer:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Bucket:
    """The objects of the server and its record of requests. Set `script` to choose faults.

    `honours_conditions`: If-None-Match counts. `keeps_checksums`: as AWS, else checksums are neither kept nor checked,
    as on Ceph. `lists_uploads`: ListMultipartUploads is known. `page`: entries in one page of any listing. `thawed`:
    keys of archived objects that can be read for a while. `locked`: until when a key is retained, or None for a legal
    hold; there it refuses even a plain delete, as servers without versions do.
    `refuses`: beginnings of headers, in lower case, that make it refuse a write, with the code that it says then.
    `policies`: by access key, the IAM actions that it is allowed; a key without a policy is allowed everything.
    `configuration`: what the bucket has of lifecycle, versioning, object-lock, as XML. `headers`: in every answer.
    """

    def __init__(
        self,
        *,
        honours_conditions: bool = True,
        keeps_checksums: bool = True,
        lists_uploads: bool = True,
        part_bytes_min: int = 5 << 20,
        page: int = 1000,
        refuses: dict[str, str] | None = None,
        configuration: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.refuses = refuses or {}
        self.configuration = configuration or {}
        self.headers = headers or {}
        self.honours_conditions = honours_conditions
        self.keeps_checksums = keeps_checksums
        self.lists_uploads = lists_uploads
        self.part_bytes_min = part_bytes_min
        self.page = page
        self.script: Script = lambda operation, key: ""
        self.objects: dict[str, Stored] = {}
        self.modified: dict[str, datetime] = {}
        self.uploads: dict[str, Begun] = {}
        self.thawed: set[str] = set()
        self.locked: dict[str, datetime | None] = {}
        self.access_keys = {ACCESS_KEY}
        self.policies: dict[str, frozenset[str]] = {}
        self.repeats_credentials = False
        self.lists_times = True
        self.written: Counter[tuple[str, str]] = Counter()  # (key, ETag) of every object that was put in place
        self.seen: list[Seen] = []
        self.sent: Counter[str] = Counter()  # bytes of answers that were sent, by operation
        self.held = threading.Event()  # a request is held
        self.closing = threading.Event()
        self.bugs: list[BaseException] = []
        self.now: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.lock = threading.RLock()
        self.url = ""

    def fill(self, root: Path, prefix: str) -> None:
        """Adds every file below `root` as an object."""
        for path in root.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                etag = f'"{hashlib.md5(content).hexdigest()}"'
                key = f"{prefix}/{path.relative_to(root).as_posix()}"
                self.objects[key] = Stored(content, etag, checksum.crc64nvme(content))

    def checkpoint_keys(self) -> list[str]:
        """The keys of all objects but those that are markers of a tier's identity."""
        return [key for key in self.objects if layout.TIER_MARKERS not in key]

    def received_bytes(self) -> int:
        return sum(one.received_bytes for one in self.seen)

    def count(self, operation: str) -> int:
        return sum(one.operation == operation for one in self.seen)

    def faults(self) -> Counter[str]:
        return Counter(one.fault for one in self.seen if one.fault)

    # ── what S3 does ──

    def put_object(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        stored = _encrypted(self._stored(headers, body), headers)
        self._place(key, stored, headers)
        return Answer(headers={"ETag": stored.etag, **self._checksum(stored)})

    def get_object(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        stored = self._object(key)
        if stored.storage_class in ARCHIVED and key not in self.thawed:
            raise Refused("InvalidObjectState")
        return self._shown(stored, headers)

    def head_object(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        found = self._shown(self._object(key), headers)
        if key in self.locked:
            until = self.locked[key]
            mode = {"x-amz-object-lock-mode": "COMPLIANCE"}
            found.headers |= (
                {"x-amz-object-lock-legal-hold": "ON"}
                if until is None
                else mode | {"x-amz-object-lock-retain-until-date": until.isoformat()}
            )
        return found

    def _is_locked(self, key: str) -> bool:
        if key not in self.objects or key not in self.locked:
            return False
        until = self.locked[key]
        return until is None or until > self.now()

    def _shown(self, stored: Stored, headers: Any) -> Answer:
        found = Answer(headers={"ETag": stored.etag}, body=stored.content)
        if stored.storage_class not in ("", "STANDARD"):
            found.headers["x-amz-storage-class"] = stored.storage_class
        if stored.encryption:
            found.headers["x-amz-server-side-encryption"] = stored.encryption
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", "")):
            begin, end, size = int(wanted[1]), int(wanted[2]), len(stored.content)
            if begin >= size:
                raise Refused("InvalidRange")
            found.status, found.body = 206, stored.content[begin : end + 1]
            found.headers["Content-Range"] = f"bytes {begin}-{min(end, size - 1)}/{size}"
        elif headers.get("x-amz-checksum-mode") == "ENABLED":
            found.headers |= self._checksum(stored)
        return found

    def delete_object(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        if self._is_locked(key):
            raise Refused("AccessDenied")
        self.objects.pop(key, None)
        return Answer(204)

    def delete_objects(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        keys = [one.text or "" for one in ElementTree.fromstring(body).iter() if one.tag.endswith("Key")]
        if len(keys) > 1000:
            raise Refused("MalformedXML")
        refused = [one for one in keys if self._is_locked(one)]
        for one in set(keys) - set(refused):
            self.objects.pop(one, None)
        return Answer(body=_xml("DeleteResult", *(_element("Error", Key=one, Code="AccessDenied") for one in refused)))

    def list_objects_v2(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", query.get("start-after", ""))
        keys = [one for one in sorted(self.objects) if one.startswith(prefix) and one > after]
        page = keys[: min(self.page, int(query.get("max-keys", "1000")))]
        more = {"NextContinuationToken": page[-1]} if len(page) < len(keys) else {}
        contents = [
            _element(
                "Contents",
                Key=one,
                Size=len(self.objects[one].content),
                ETag=self.objects[one].etag,
                **({"LastModified": self.modified.get(one, self.now()).isoformat()} if self.lists_times else {}),
            )
            for one in page
        ]
        return Answer(body=_xml("ListBucketResult", *contents, IsTruncated=str(bool(more)).lower(), **more))

    def create_multipart_upload(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        upload_id = hashlib.sha256(f"{key} {len(self.uploads)} {time.monotonic_ns()}".encode()).hexdigest()
        about = {name.lower(): value for name, value in headers.items()}
        algorithm = headers.get("x-amz-checksum-algorithm", "")
        self.uploads[upload_id] = Begun(key, self.now(), algorithm, self._storage_class(headers), about)
        return Answer(
            body=_xml("InitiateMultipartUploadResult", _element_text("Key", key), _element_text("UploadId", upload_id))
        )

    def upload_part(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        upload, number = self._upload(key, query), int(query["partNumber"])
        if not 1 <= number <= 10_000:
            raise Refused("InvalidArgument")
        if self.keeps_checksums and headers.get("x-amz-checksum-crc64nvme") and upload.algorithm != "CRC64NVME":
            raise Refused("InvalidRequest")  # "Checksum Type mismatch occurred"
        stored = self._stored(headers, body)
        upload.parts[number] = stored
        return Answer(headers={"ETag": stored.etag, **self._checksum(stored)})

    def complete_multipart_upload(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        upload = self._upload(key, query)
        named = [
            {child.tag.rpartition("}")[2]: child.text or "" for child in one}
            for one in ElementTree.fromstring(body)
            if one.tag.endswith("Part")
        ]
        numbers = [int(one["PartNumber"]) for one in named]
        if numbers != sorted(set(numbers)) or not numbers:
            raise Refused("InvalidPartOrder" if numbers else "MalformedXML")
        parts: list[Stored] = []
        for one in named:
            part = upload.parts.get(int(one["PartNumber"]))
            if part is None or part.etag.strip('"') != one["ETag"].strip('"'):
                raise Refused("InvalidPart")
            if self.keeps_checksums and one.get("ChecksumCRC64NVME") not in (None, checksum.encode(part.crc64nvme)):
                raise Refused("InvalidPart")
            parts.append(part)
        if any(len(part.content) < self.part_bytes_min for part in parts[:-1]):
            raise Refused("EntityTooSmall")
        md5s = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
        whole = Stored(
            b"".join(part.content for part in parts),
            f'"{hashlib.md5(md5s).hexdigest()}-{len(parts)}"',
            checksum.combine((part.crc64nvme, len(part.content)) for part in parts),
            len(parts),
            upload.storage_class,
        )
        if self.keeps_checksums:
            self._compare("x-amz-checksum-crc64nvme", headers, checksum.encode(whole.crc64nvme))
        self._place(key, _encrypted(whole, upload.headers), headers)
        del self.uploads[query["uploadId"]]
        sums = {"ChecksumCRC64NVME": checksum.encode(whole.crc64nvme), "ChecksumType": "FULL_OBJECT"}
        returned = sums if self._sums(upload) else {}
        return Answer(body=_xml("CompleteMultipartUploadResult", Key=key, ETag=whole.etag, **returned))

    def abort_multipart_upload(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        self._upload(key, query)
        del self.uploads[query["uploadId"]]
        return Answer(204)

    def list_parts(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        upload, after = self._upload(key, query), int(query.get("part-number-marker", "0"))
        numbers = [number for number in sorted(upload.parts) if number > after]
        page = numbers[: self.page]
        more = {"NextPartNumberMarker": page[-1]} if len(page) < len(numbers) else {}
        parts: list[str] = []
        for number in page:
            part = upload.parts[number]
            sums = {"ChecksumCRC64NVME": checksum.encode(part.crc64nvme)} if self._sums(upload) else {}
            parts.append(_element("Part", PartNumber=number, Size=len(part.content), ETag=part.etag, **sums))
        algorithm = {"ChecksumAlgorithm": upload.algorithm} if self._sums(upload) else {}
        return Answer(body=_xml("ListPartsResult", *parts, IsTruncated=str(bool(more)).lower(), **more, **algorithm))

    def list_multipart_uploads(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        if not self.lists_uploads:
            raise Refused("NotImplemented")
        after = (query.get("key-marker", ""), query.get("upload-id-marker", "\x7f" * 80))
        found = sorted((one.key, upload_id) for upload_id, one in self.uploads.items())
        found = [one for one in found if one[0].startswith(query.get("prefix", "")) and one > after]
        page = found[: self.page]
        more = dict(
            zip(("NextKeyMarker", "NextUploadIdMarker"), page[-1] if len(page) < len(found) else (), strict=False)
        )
        uploads = [
            _element("Upload", Key=one, UploadId=upload_id, Initiated=self.uploads[upload_id].initiated.isoformat())
            for one, upload_id in page
        ]
        return Answer(body=_xml("ListMultipartUploadsResult", *uploads, IsTruncated=str(bool(more)).lower(), **more))

    def get_bucket_lifecycle_configuration(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        return self._configured("lifecycle", "NoSuchLifecycleConfiguration")

    def get_bucket_versioning(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        return Answer(body=self.configuration.get("versioning", "<VersioningConfiguration/>").encode())

    def get_object_lock_configuration(self, key: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        return self._configured("object-lock", "ObjectLockConfigurationNotFoundError")

    def _configured(self, name: str, absent: str) -> Answer:
        if name not in self.configuration:
            raise Refused(absent)
        return Answer(body=self.configuration[name].encode())

    # ── what it checks ──

    def check(self, operation: str, headers: Any, body: bytes, *, is_write: bool) -> None:
        """Checks the key, its policy, time and payload mode of the signature, and every checksum of the request."""
        signed = re.match(r"AWS4-HMAC-SHA256 Credential=([^/]+)/", headers.get("Authorization", ""))
        if signed is None:
            raise Refused("AccessDenied")
        if signed[1] not in self.access_keys | self.policies.keys():
            raise Refused("InvalidAccessKeyId")
        if signed[1] in self.policies and ACTIONS[operation] not in self.policies[signed[1]]:
            raise Refused("AccessDenied")
        date = datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if abs(datetime.now(UTC) - date) > SKEW_MAX:
            raise Refused("RequestTimeTooSkewed")
        for name in headers:
            for beginning, code in self.refuses.items():
                if is_write and name.lower().startswith(beginning):
                    raise Refused(code, "" if code == "NotImplemented" else f"Unsupported header '{name}' received")
        mode = headers.get("x-amz-content-sha256", "")
        if mode.startswith("STREAMING") or headers.get("x-amz-trailer"):
            raise Refused("NotImplemented")
        sums = [name for name in headers if name.lower().startswith("x-amz-checksum-crc") or name == "Content-MD5"]
        if mode == "UNSIGNED-PAYLOAD":
            if is_write and body and not sums:
                raise Refused("InvalidRequest")  # over http nothing protects these bytes
        elif mode != hashlib.sha256(body).hexdigest():
            raise Refused("XAmzContentSHA256Mismatch")
        self._compare("Content-MD5", headers, b64encode(hashlib.md5(body).digest()).decode())
        if self.keeps_checksums and is_write and body:
            self._compare("x-amz-checksum-crc32", headers, b64encode(struct.pack(">I", zlib.crc32(body))).decode())

    def _compare(self, name: str, headers: Any, found: str) -> None:
        if headers.get(name) is not None and b64decode(headers[name]) != b64decode(found):
            raise Refused("BadDigest")

    def _stored(self, headers: Any, body: bytes) -> Stored:
        crc64nvme = checksum.crc64nvme(body)
        if self.keeps_checksums:
            self._compare("x-amz-checksum-crc64nvme", headers, checksum.encode(crc64nvme))
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        return Stored(body, etag, crc64nvme, storage_class=self._storage_class(headers))

    def _storage_class(self, headers: Any) -> str:
        found = headers.get("x-amz-storage-class", "")
        if found not in STORAGE_CLASSES:
            raise Refused("InvalidStorageClass")
        return found

    def _place(self, key: str, stored: Stored, headers: Any) -> None:
        if self.honours_conditions and headers.get("If-None-Match") == "*" and key in self.objects:
            raise Refused("PreconditionFailed")
        self.objects[key] = stored
        self.modified[key] = self.now()
        self.written[key, stored.etag] += 1

    def _object(self, key: str) -> Stored:
        if key not in self.objects:
            raise Refused("NoSuchKey")
        return self.objects[key]

    def _upload(self, key: str, query: dict[str, str]) -> Begun:
        upload = self.uploads.get(query["uploadId"])
        if upload is None or upload.key != key:
            raise Refused("NoSuchUpload")
        return upload

    def _sums(self, upload: Begun) -> bool:
        return self.keeps_checksums and upload.algorithm == "CRC64NVME"

    def _checksum(self, stored: Stored) -> dict[str, str]:
        if not self.keeps_checksums:
            return {}
        return {"x-amz-checksum-crc64nvme": checksum.encode(stored.crc64nvme), "x-amz-checksum-type": "FULL_OBJECT"}


_CONFIGURATIONS = {
    "lifecycle": "get_bucket_lifecycle_configuration",
    "versioning": "get_bucket_versioning",
    "object-lock": "get_object_lock_configuration",
}


def _encrypted(stored: Stored, headers: Any) -> Stored:
    """With KMS, an ETag has the form of an MD5 but is none."""
    encryption = headers.get("x-amz-server-side-encryption", "")
    found = replace(
        stored,
        encryption=encryption,
        kms_key_id=headers.get("x-amz-server-side-encryption-aws-kms-key-id", ""),
    )
    if encryption != "aws:kms":
        return found
    count = f"-{stored.part_count}" if stored.part_count else ""
    return replace(found, etag=f'"{hashlib.md5(b"key" + stored.content).hexdigest()}{count}"')


def _operation(method: str, key: str, query: dict[str, str]) -> str:
    """The operation of a request, as boto3 spells it."""
    if "uploadId" in query:
        part = "upload_part" if "partNumber" in query else ""
        whole = {"POST": "complete_multipart_upload", "DELETE": "abort_multipart_upload", "GET": "list_parts"}
        return part or whole[method]
    for name in _CONFIGURATIONS.keys() & query.keys():
        return _CONFIGURATIONS[name]
    if not key:
        return {"POST": "delete_objects"}.get(
            method, "list_multipart_uploads" if "uploads" in query else "list_objects_v2"
        )
    if method == "POST":
        return "create_multipart_upload"
    return f"{method.lower()}_object"


def _element_text(name: str, text: object) -> str:
    return f"<{name}>{escape(str(text))}</{name}>"


def _element(name: str, **fields: object) -> str:
    return f"<{name}>{''.join(_element_text(*one) for one in fields.items())}</{name}>"


def _xml(name: str, *children: str, **fields: object) -> bytes:
    inner = "".join(_element_text(*one) for one in fields.items()) + "".join(children)
    space = "" if name == "Error" else ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{space}>{inner}</{name}>'.encode()


class _Conversation(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    server: _Server

    def do_GET(self) -> None:
        bucket = self.server.bucket
        parts = urlsplit(self.path)
        name, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        operation = _operation(self.command, key, query)
        with bucket.lock:
            fault = bucket.script(operation, key)
        length = int(self.headers.get("Content-Length") or 0)
        if fault in ("reset", "hold"):
            begun = len(self.rfile.read(length // 2))
            self._note(operation, key, begun, 0, fault)
            if fault == "hold":
                bucket.held.set()
                self._wait()
            return self._hang_up()
        body = self.rfile.read(length)
        if len(body) < length:  # the client is gone
            self._note(operation, key, len(body), 0, fault)
            return self._hang_up()
        if fault == "garble" and body:
            body = _flipped(body)
        answer = self._answer(bucket, operation, name, key, query, body, fault)
        self._note(operation, key, length, 0 if fault in ("lose", "silence") else answer.status, fault)
        if fault == "silence":
            self._wait()
        if fault in ("lose", "silence"):
            return self._hang_up()
        self._send(operation, answer, fault)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def _answer(
        self, bucket: Bucket, operation: str, name: str, key: str, query: dict[str, str], body: bytes, fault: str
    ) -> Answer:
        """The answer of S3, or that of the fault."""
        try:
            bucket.check(operation, self.headers, body, is_write=self.command in ("PUT", "POST"))
            if name != BUCKET:
                raise Refused("NoSuchBucket")
            if fault in STATUSES:
                raise Refused(fault)
            if fault == "silence":
                return Answer()
            if fault == "error-in-200":
                return Answer(body=_xml("Error", Code="InternalError", Message="We encountered an internal error."))
            with bucket.lock:
                return getattr(bucket, operation)(key, query, self.headers, body)
        except Refused as refused:
            is_elsewhere = refused.code in ("PermanentRedirect", "AuthorizationHeaderMalformed")
            more = {"Region": "eu-west-1"} if is_elsewhere else {}
            if self.server.bucket.repeats_credentials:  # as AWS does in some errors
                signed = self.headers.get("Authorization", "")
                token = self.headers.get("x-amz-security-token", "")
                more |= {"AWSAccessKeyId": signed, "Token-0": token, "CanonicalRequest": f"{self.headers}"}
            if refused.code == "AccessDenied":
                refused.message = f"User: arn:aws:iam::1:user/u is not authorized to perform: {ACTIONS[operation]}"
            return Answer(
                STATUSES[refused.code], body=_xml("Error", Code=refused.code, Message=refused.message, **more)
            )

    def _send(self, operation: str, answer: Answer, fault: str) -> None:
        body = _flipped(answer.body) if fault == "flip" and answer.body else answer.body
        self.send_response_only(answer.status)
        self.send_header("Date", format_datetime(self.server.bucket.now(), usegmt=True))
        for header, value in {**self.server.bucket.headers, **answer.headers}.items():
            self.send_header(header, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD" or answer.status == 204:
            return
        if fault == "drip":
            for byte in body:
                self.wfile.write(bytes([byte]))
                if self._is_over(0.01):
                    break
            return self._hang_up()
        part = body[: len(body) // 2] if fault == "cut" else body
        for begin in range(0, len(part), 1 << 20):
            self.wfile.write(part[begin : begin + (1 << 20)])
            with self.server.bucket.lock:
                self.server.bucket.sent[operation] += len(part[begin : begin + (1 << 20)])
        if fault == "cut":
            self._hang_up()

    def _wait(self) -> None:
        """Waits until the client hangs up or the server ends."""
        while not self._is_over(0.02):
            pass

    def _is_over(self, seconds: float) -> bool:
        if self.server.bucket.closing.wait(seconds):
            return True
        is_readable = bool(select.select([self.connection], [], [], 0)[0])
        return is_readable and self.connection.recv(1 << 20) == b""

    def _hang_up(self) -> None:
        self.close_connection = True
        # Closing then sends a reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _note(self, operation: str, key: str, received_bytes: int, status: int, fault: str) -> None:
        with self.server.bucket.lock:
            self.server.bucket.seen.append(Seen(operation, key, received_bytes, status, fault))

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 64

    def __init__(self, bucket: Bucket, tls: tuple[Path, Path] | None, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Conversation)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.bucket = bucket
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        self._open.discard(request)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # the client may hang up at any time
            self.bucket.bugs.append(error)

    def end(self) -> None:
        """Closes connections that are kept alive, so that their threads end."""
        for one in list(self._open):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


@contextmanager
def bucket_server(tls: tuple[Path, Path] | None = None, port: int = 0, **manners: Any) -> Iterator[Bucket]:
    """Serves a bucket at its `url`. Raises errors of the server itself. `tls`: certificate, key."""
    bucket = Bucket(**manners)
    server = _Server(bucket, tls, port)
    bucket.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield bucket
    finally:
        bucket.closing.set()
        server.shutdown()
        thread.join()
        server.end()
        server.server_close()
    if bucket.bugs:
        raise bucket.bugs[0]
