"""Translates errors of S3 and of the network into TierdErrors. Credentials never appear in a message.

Everything that can be corrected from outside is TierUnreachable, a wrong key or a missing bucket too: the daemon
continues once it is corrected. `Trouble` is what to do about the failed request itself.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

from tierd.errors import Corrupt, Full, NotFound, Retained, TierdError, TierUnreachable

MESSAGE_CHARS_MAX = 200  # of the server's own words
_ACCESS_KEY = re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{8,}")


class Trouble(Enum):
    """What to do about a failed request."""

    TRANSIENT = "retry after a pause"
    THROTTLED = "retry after a pause, with fewer requests at once"
    CORRUPT = "retry: the bytes were altered on their way"
    CREDENTIALS = "retry with credentials that are read again"
    UNREACHABLE = "no connection to the server: try again later"
    MISCONFIGURED = "report it, and try again later: someone must correct the configuration"
    REFUSED = "an answer to this very request: the caller decides"


_CREDENTIALS = "check what boto3 finds: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, a role"
_PERMISSION = "`tierd doctor` names the missing permissions; deploy/iam-policy.json has all that tierd needs"
_KMS = "correct sse_kms_key_id of this tier, or the key's policy"
_AGAIN = "the request is tried again"
_NETWORK = f"check endpoint_url and the network; {_AGAIN}"
_SENT = "they are sent again"
_CLASS = "correct storage_class and milestone_storage_class of this tier"
# The message itself says what to do, because not every verb prints hints.
_ARCHIVED = "it is archived: restore it with `aws s3api restore-object`, wait until that is done, and try again"
_OTHER_REGION = "the bucket is in another region"

# By trouble: (codes, meaning, hint). A code is S3's error code, an HTTP status (a HEAD has no more) or the name of
# botocore's exception. An empty meaning: the message of the server or of botocore says enough.
_ROWS: dict[Trouble, list[tuple[str, str, str]]] = {
    Trouble.THROTTLED: [
        (
            "SlowDown ServiceUnavailable TooManyRequests TooManyRequestsException Throttling ThrottlingException"
            " RequestLimitExceeded BandwidthLimitExceeded 503 429",
            "S3 asks to slow down",
            f"{_AGAIN}, later each time",
        ),
    ],
    Trouble.CORRUPT: [
        (
            "BadDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch",
            "the bytes were altered on their way",
            _SENT,
        ),
    ],
    Trouble.CREDENTIALS: [
        ("ExpiredToken ExpiredTokenException TokenRefreshRequired", "the credentials have expired", _CREDENTIALS),
        ("InvalidToken", "the session token is not valid", _CREDENTIALS),
        ("InvalidAccessKeyId", "S3 does not know this access key", _CREDENTIALS),
        ("SignatureDoesNotMatch", "the secret key does not belong to the access key", _CREDENTIALS),
        ("NoCredentialsError", "no S3 credentials found", _CREDENTIALS),
        ("PartialCredentialsError", "half of the S3 credentials is missing", _CREDENTIALS),
        ("CredentialRetrievalError TokenRetrievalError", "the S3 credentials could not be fetched", _CREDENTIALS),
        ("403", "access denied", f"{_CREDENTIALS}; {_PERMISSION}"),  # or an expired token, in a HEAD
        ("400", "", ""),  # an expired token, in a HEAD
    ],
    Trouble.MISCONFIGURED: [
        ("NoSuchBucket", "there is no such bucket", "create it, or correct the url of this tier"),
        ("InvalidBucketName", "no bucket can have this name", "correct the url of this tier"),
        ("AccessDenied AllAccessDisabled", "access denied", _PERMISSION),
        ("PermanentRedirect AuthorizationHeaderMalformed 301", _OTHER_REGION, "correct the region of this tier"),
        ("IllegalLocationConstraintException", _OTHER_REGION, "correct the region of this tier"),
        ("KMS.NotFoundException", "there is no such KMS key", _KMS),
        ("KMS.DisabledException", "the KMS key is disabled", _KMS),
        ("KMS.KMSInvalidStateException", "the KMS key cannot be used now", _KMS),
        ("RequestTimeTooSkewed", "this machine's clock is wrong", "set it: S3 allows 15 minutes"),
        ("InvalidObjectState", _ARCHIVED, "see docs/RUNBOOK.md#archived"),
        ("InvalidStorageClass", "this server has no such storage class", _CLASS),
        ("ProfileNotFound", "the AWS profile does not exist", "check AWS_PROFILE"),
        ("SSLError", "no trusted TLS connection", "check endpoint_url, ca_bundle and AWS_CA_BUNDLE"),
        ("ParamValidationError", "", ""),
    ],
    Trouble.UNREACHABLE: [
        ("EndpointConnectionError", "no connection", _NETWORK),
        ("ConnectTimeoutError", "no connection within the deadline", _NETWORK),
        ("ProxyConnectionError", "no connection to the proxy", f"check HTTPS_PROXY; {_AGAIN}"),
    ],
    Trouble.TRANSIENT: [
        # Two conditional writes at the same instant: S3's documentation says to retry.
        ("ConditionalRequestConflict 409", "someone else is writing there", _AGAIN),
        ("InternalError RequestTimeout OperationAborted 500 502 504", "", ""),
        ("ReadTimeoutError", "no answer within the deadline", _NETWORK),
        ("ConnectionClosedError", "the server closed the connection", _NETWORK),
        ("IncompleteReadError ResponseStreamingError", "the answer was cut short", _NETWORK),
    ],
    Trouble.REFUSED: [("NoSuchUpload", "the upload is gone", "did a lifecycle rule abort it? A new one begins")],
}
_KNOWN = {
    code: (trouble, meaning, hint)
    for trouble, rows in _ROWS.items()
    for codes, meaning, hint in rows
    for code in codes.split()
}
CONDITION_FAILED = {"PreconditionFailed", "412"}
# Servers that do not support DeleteObjects, or that require an MD5 with it, which boto3 no longer sends.
BATCH_REFUSED = {"NotImplemented", "MissingContentMD5", "InvalidRequest", "InvalidArgument", "MethodNotAllowed", "501"}
# The object is archived, or this identity or its key may not read it. Other objects may be readable.
OF_ONE_OBJECT = {
    *("InvalidObjectState", "AccessDenied", "AllAccessDisabled"),
    *("KMS.NotFoundException", "KMS.DisabledException", "KMS.KMSInvalidStateException"),
}
ABSENT_OR_DENIED = {"AccessDenied", "403"}
_ABSENT = {"NoSuchKey", "404", "NotFound"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "507"}


def code_of(error: BaseException | None) -> str:
    """S3's error code, or the HTTP status where there is none, or the name of the exception."""
    response: dict[str, Any] | None = getattr(error, "response", None)
    if response is None:
        return type(error).__name__
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    return str(response.get("Error", {}).get("Code") or status)


def trouble_of(error: BaseException | None) -> Trouble:
    """The trouble behind boto3's exception. An error without an answer is TRANSIENT, unless its name says more."""
    code = code_of(error)
    if code in _KNOWN:
        return _KNOWN[code][0]
    return Trouble.TRANSIENT if getattr(error, "response", None) is None else Trouble.REFUSED


def translate(error: Exception, action: str) -> TierdError:
    code = code_of(error)
    if code in _ABSENT:
        return NotFound(f"{action}: no such object")
    if code in _FULL:
        return Full(f"{action}: no space ({code})", hint="raise the quota, or keep fewer checkpoints")
    if code == "InvalidRange":
        return Corrupt(f"{action}: the object ends before that")
    _, meaning, hint = _KNOWN.get(code, (None, "", ""))
    if meaning:
        details = _details(error, meaning)
        return TierUnreachable(f"{action}: {meaning}{details and f', {details}'} ({code})", hint=hint)
    message = _ACCESS_KEY.sub("…", (str(error).splitlines() or [""])[0][:MESSAGE_CHARS_MAX])
    return TierUnreachable(f"{action}: {message}", hint=_NETWORK)


def _details(error: Exception, meaning: str) -> str:
    """What the answer says beyond its code: the bucket's region, or the action that is not allowed."""
    details: dict[str, Any] = (getattr(error, "response", None) or {}).get("Error", {})
    region = str(details.get("Region") or _headers(error).get("x-amz-bucket-region") or "")
    if meaning == _OTHER_REGION and re.fullmatch(r"[a-z0-9-]{1,40}", region):
        return region
    action = re.search(r"not authorized to perform: ([a-z0-9]+:[A-Za-z]+)", str(details.get("Message", "")))
    return action[1] if action else ""


def retention(head: dict[str, Any], action: str) -> Retained | None:
    """The error for deleting an object under Object Lock; None where its HEAD shows no lock."""
    hint = "no action is needed, the deletion is tried again later; see docs/RUNBOOK.md#retained"
    if head.get("ObjectLockLegalHoldStatus") == "ON":
        return Retained(f"{action}: retained by Object Lock, for as long as its legal hold is on", hint=hint)
    until: datetime | None = head.get("ObjectLockRetainUntilDate")
    remaining_s = 0.0 if until is None else (until - server_time(head)).total_seconds()
    if until is None or remaining_s <= 0:
        return None
    date = f"{until.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    return Retained(f"{action}: retained by Object Lock until {date}", hint=hint, remaining_s=remaining_s)


def server_time(answer: dict[str, Any]) -> datetime:
    """When the server answered, by its own clock. Raises KeyError, TypeError or ValueError where it does not say."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])


def retry_after_s(error: BaseException | None) -> float:
    """The pause that the server asks for, in seconds; 0 where it asks for none. It may give a time by its own clock."""
    headers = _headers(error)
    pause = headers.get("retry-after", "").strip()
    if pause.isdecimal():
        return float(pause)
    try:
        return (parsedate_to_datetime(pause) - parsedate_to_datetime(headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return 0.0


def _headers(error: BaseException | None) -> dict[str, str]:
    return (getattr(error, "response", None) or {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
