"""Which optional parts of S3's protocol a server refuses: learned from its first refusal, kept while the store lives.

Most servers ignore what they do not know. Some refuse a write because it carries a checksum or a condition. Such a
request is sent once more without; only when that succeeds is the refusal remembered, so a refusal for another reason
costs one request and changes nothing. Without a checksum the payload is signed: the server then compares its SHA-256.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tierd.s3.errors import code_of

log = logging.getLogger("tierd")


class Extra(Enum):
    """An optional part of a request. The value is for the log."""

    CHECKSUMS = "checksums: each payload is signed instead, at 1.5 CPU-s more for a GB"
    CONDITION = "If-None-Match: writes check first instead"


Extras = frozenset[Extra]
NO_EXTRAS: Extras = frozenset()
_ATTEMPTS: list[Extras] = [NO_EXTRAS, Extras({Extra.CHECKSUMS}), Extras({Extra.CONDITION}), Extras(Extra)]

_WORDS = {Extra.CHECKSUMS: ("checksum", "crc64"), Extra.CONDITION: ("if-none-match", "conditional")}
_UNSPECIFIC = {"NotImplemented", "501"}  # "a header you provided implies functionality that is not implemented"
_REFUSALS = {"InvalidRequest", "InvalidArgument", "MalformedXML", "UnsupportedHeader", *_UNSPECIFIC}


@dataclass(eq=False)
class Dialect:
    where: str
    refused: Extras = NO_EXTRAS

    def adapt(self, arguments: dict[str, Any], omitted: Extras) -> dict[str, Any]:
        """The arguments of a request without what the server refuses and without `omitted`."""
        for extra in self.refused | omitted:
            arguments = _without(arguments, extra)
        return arguments

    def to_omit(self, error: BaseException | None, arguments: dict[str, Any], omitted: Extras) -> Extras:
        """What to omit in the next attempt, after a refusal without `omitted`; empty if that is not the cause."""
        code = code_of(error)
        if code not in _REFUSALS:
            return NO_EXTRAS
        message = str((getattr(error, "response", None) or {}).get("Error", "")).lower()
        present = {extra for extra in Extra if extra not in self.refused and _without(arguments, extra) != arguments}
        for extras in _ATTEMPTS[_ATTEMPTS.index(omitted) + 1 :]:
            is_named = code in _UNSPECIFIC or any(word in message for extra in extras for word in _WORDS[extra])
            if is_named and extras <= present:
                return extras
        return NO_EXTRAS

    def learn(self, omitted: Extras) -> None:
        """A request succeeded without `omitted`."""
        for extra in sorted(omitted - self.refused, key=list(Extra).index):
            log.warning("%s refuses %s", self.where, extra.value)
        self.refused |= omitted


def _without(arguments: dict[str, Any], extra: Extra) -> dict[str, Any]:
    if extra is Extra.CONDITION:
        return {name: value for name, value in arguments.items() if name != "IfNoneMatch"}
    rest = {name: value for name, value in arguments.items() if not name.startswith("Checksum")}
    if "MultipartUpload" in rest:
        parts: list[dict[str, Any]] = rest["MultipartUpload"]["Parts"]
        rest["MultipartUpload"] = {"Parts": [{name: part[name] for name in ("PartNumber", "ETag")} for part in parts]}
    return rest
