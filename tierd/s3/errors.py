"""What S3 and the network say, as what can be done about it. One place; credentials never show in a message.

Everything that may pass is TierUnreachable: a wrong key or a missing bucket is put right outside, and the daemon
goes on by itself then. `trouble` is what to do before giving the request back.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

from tierd.errors import Corrupt, Full, NotFound, Retained, TierdError, TierUnreachable

_CREDENTIALS = "check what boto3 finds: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, a role"
_PERMISSION = "`tierd doctor` names what this identity may not do; deploy/iam-policy.json has all that it needs"
_ACCESS_KEY = re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{8,}")
_KMS = "correct sse_kms_key_id of this tier, or what the key's policy grants this identity"
_NETWORK = "check endpoint_url and the network; it is tried again"


class Trouble(Enum):
    """What to do about a request that went wrong."""

    TRANSIENT = "the same again, after a moment"
    THROTTLED = "the same again, later, and fewer at once"
    CORRUPT = "altered on its way: the same again"
    CREDENTIALS = "the same again, with credentials read afresh"
    AWAY = "nobody is there: come back later"
    MISCONFIGURED = "a person must change something: tell it, and come back from time to time"
    REFUSED = "an answer to this request: the caller knows what it means"


_TROUBLES: dict[Trouble, set[str]] = {
    Trouble.THROTTLED: {
        *("SlowDown", "503", "429", "ServiceUnavailable", "TooManyRequests", "TooManyRequestsException"),
        *("Throttling", "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded"),
    },
    Trouble.CORRUPT: {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"},
    Trouble.CREDENTIALS: {
        *("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"),
        *("SignatureDoesNotMatch", "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
        *("TokenRetrievalError", "400", "403"),  # all that a HEAD says of an expired token
    },
    Trouble.MISCONFIGURED: {
        *("NoSuchBucket", "InvalidBucketName", "AccessDenied", "AllAccessDisabled", "PermanentRedirect", "301"),
        *("AuthorizationHeaderMalformed", "RequestTimeTooSkewed", "InvalidObjectState", "ProfileNotFound", "SSLError"),
        *("InvalidStorageClass", "IllegalLocationConstraintException", "ParamValidationError"),
        *("KMS.NotFoundException", "KMS.DisabledException", "KMS.KMSInvalidStateException"),
    },
    Trouble.AWAY: {"EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"},
    # 409: "retry the upload", says S3 of two conditional writes at the same instant.
    Trouble.TRANSIENT: {
        *("InternalError", "500", "502", "504", "RequestTimeout", "OperationAborted"),
        *("ConditionalRequestConflict", "409"),
    },
}
_TROUBLE_OF = {code: trouble for trouble, codes in _TROUBLES.items() for code in codes}

_ABSENT = {"NoSuchKey", "404", "NotFound"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "507"}

# S3's error codes, HTTP statuses (all that a HEAD gives), and the names of botocore's exceptions.
_MEANING: dict[str, tuple[str, str]] = {
    "NoSuchBucket": ("there is no such bucket", "create it, or correct the url of this tier"),
    "InvalidBucketName": ("no bucket can have this name", "correct the url of this tier"),
    "InvalidAccessKeyId": ("S3 does not know this access key", _CREDENTIALS),
    "SignatureDoesNotMatch": ("the secret key does not belong to the access key", _CREDENTIALS),
    "ExpiredToken": ("the credentials have expired", _CREDENTIALS),
    "InvalidToken": ("the session token is not valid", _CREDENTIALS),
    "TokenRefreshRequired": ("the credentials have expired", _CREDENTIALS),
    "AccessDenied": ("access denied", _PERMISSION),
    "AllAccessDisabled": ("access denied", _PERMISSION),
    "403": ("access denied", f"{_CREDENTIALS}; {_PERMISSION}"),
    "PermanentRedirect": ("the bucket is in another region", "correct the region of this tier"),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", "correct the region of this tier"),
    "301": ("the bucket is in another region", "correct the region of this tier"),
    "IllegalLocationConstraintException": ("the bucket is in another region", "correct the region of this tier"),
    "KMS.NotFoundException": ("there is no such KMS key", _KMS),
    "KMS.DisabledException": ("the KMS key is disabled", _KMS),
    "KMS.KMSInvalidStateException": ("the KMS key cannot be used now", _KMS),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set it: S3 allows 15 minutes"),
    # What to do is in the message itself: not every verb has room for a hint.
    "InvalidObjectState": (
        "it is archived: restore it with `aws s3api restore-object` first, wait until that is done, and try again",
        "see docs/RUNBOOK.md#archived",
    ),
    "InvalidStorageClass": (
        "this server has no such storage class",
        "correct storage_class and milestone_storage_class of this tier",
    ),
    "BadDigest": ("the bytes were altered on their way", "it is sent again"),
    "XAmzContentChecksumMismatch": ("the bytes were altered on their way", "it is sent again"),
    "XAmzContentSHA256Mismatch": ("the bytes were altered on their way", "it is sent again"),
    "NoSuchUpload": ("the upload is gone", "was it aborted by a lifecycle rule of the bucket? It begins anew"),
    "ServiceUnavailable": ("S3 asks to slow down", "it is tried again, later each time"),
    "TooManyRequests": ("S3 asks to slow down", "it is tried again, later each time"),
    "ConditionalRequestConflict": ("someone else is writing there", "it is tried again"),
    "SlowDown": ("S3 asks to slow down", "it is tried again, later each time"),
    "NoCredentialsError": ("no S3 credentials found", _CREDENTIALS),
    "PartialCredentialsError": ("half of the S3 credentials is missing", _CREDENTIALS),
    "CredentialRetrievalError": ("the S3 credentials could not be fetched", _CREDENTIALS),
    "TokenRetrievalError": ("the S3 credentials could not be fetched", _CREDENTIALS),
    "ProfileNotFound": ("the AWS profile does not exist", "check AWS_PROFILE"),
    "EndpointConnectionError": ("no connection", _NETWORK),
    "ConnectTimeoutError": ("no connection within the deadline", _NETWORK),
    "ReadTimeoutError": ("no answer within the deadline", _NETWORK),
    "ConnectionClosedError": ("the server closed the connection", _NETWORK),
    "ProxyConnectionError": ("no connection to the proxy", "check HTTPS_PROXY; it is tried again"),
    "SSLError": ("no trusted TLS connection", "check endpoint_url, ca_bundle and AWS_CA_BUNDLE"),
    "IncompleteReadError": ("the answer was cut short", _NETWORK),
    "ResponseStreamingError": ("the answer was cut short", _NETWORK),
}


def code_of(error: BaseException | None) -> str:
    """S3's error code, or the HTTP status where it gives none, or the name of the exception."""
    response: dict[str, Any] | None = getattr(error, "response", None)
    if response is None:
        return type(error).__name__
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    return str(response.get("Error", {}).get("Code") or status)


def trouble_of(error: BaseException | None) -> Trouble:
    """Of what boto3 raised; None, or anything that has no answer from S3 in it, is the network's."""
    code = code_of(error)
    if code in _TROUBLE_OF:
        return _TROUBLE_OF[code]
    return Trouble.TRANSIENT if getattr(error, "response", None) is None else Trouble.REFUSED


def retention(head: dict[str, Any], doing: str) -> Retained | None:
    """Why what a HEAD tells of cannot be deleted: Object Lock. None where the HEAD says nothing of it."""
    hint = "nobody needs to do anything, and the deletion comes later; see docs/RUNBOOK.md#retained"
    if head.get("ObjectLockLegalHoldStatus") == "ON":
        return Retained(f"{doing}: retained by Object Lock, for as long as its legal hold is on", hint=hint)
    until: datetime | None = head.get("ObjectLockRetainUntilDate")
    remaining_s = 0.0 if until is None else (until - server_time(head)).total_seconds()
    if until is None or remaining_s <= 0:
        return None
    said = f"{until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return Retained(f"{doing}: retained by Object Lock until {said}", hint=hint, remaining_s=remaining_s)


def server_time(answer: dict[str, Any]) -> datetime:
    """When the server answered, by its own clock. Raises where it does not tell: KeyError, TypeError, ValueError."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])


def translate(error: Exception, doing: str) -> TierdError:
    code = code_of(error)
    if code in _ABSENT:
        return NotFound(f"{doing}: no such object")
    if code in _FULL:
        return Full(f"{doing}: no room ({code})", hint="raise the quota, or keep fewer checkpoints")
    if code == "InvalidRange":
        return Corrupt(f"{doing}: the object ends before that")
    if code in _MEANING:
        meaning, hint = _MEANING[code]
        told = _told(error)
        return TierUnreachable(f"{doing}: {meaning}{told and f', {told}'} ({code})", hint=hint)
    # The first line is the server's own words for what we have none for.
    said = _ACCESS_KEY.sub("…", (str(error).splitlines() or [""])[0][:200])
    return TierUnreachable(f"{doing}: {said}", hint=_NETWORK)


def _told(error: Exception) -> str:
    """What S3's answer says beyond its code: the bucket's region, the action that is not allowed."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    found: dict[str, Any] = response.get("Error", {})
    headers: dict[str, Any] = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = str(found.get("Region") or headers.get("x-amz-bucket-region") or "")
    if "another region" in _MEANING[code_of(error)][0] and re.fullmatch(r"[a-z0-9-]{1,40}", region):
        return region
    action = re.search(r"not authorized to perform: ([a-z0-9]+:[A-Za-z]+)", str(found.get("Message", "")))
    return action[1] if action else ""


def retry_after_s(error: BaseException | None) -> float:
    """What the server asks for, in seconds or as a time by its own clock; 0 where it asks for nothing."""
    response: dict[str, Any] = getattr(error, "response", None) or {}
    headers: dict[str, str] = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    asked = headers.get("retry-after", "").strip()
    if asked.isdecimal():
        return float(asked)
    try:
        return (parsedate_to_datetime(asked) - parsedate_to_datetime(headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return 0.0
