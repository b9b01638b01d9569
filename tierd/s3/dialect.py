"""What of S3 a server refuses to hear: learnt from its first refusal, remembered while the store lives.

Most servers pass over what they do not know. Some refuse a write because it carries a checksum or a condition. It
is sent once more without; only when that goes well is the server believed, so a refusal for another reason costs one
request and changes nothing. Without a checksum the payload is signed: the server compares its SHA-256 then.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

from tierd.s3.errors import code_of

log = logging.getLogger("tierd")


class Extra(Enum):
    """What a request can do without. The value says it to a person."""

    CHECKSUMS = "checksums: each payload is signed instead, at 1.5 CPU-s more for a GB"
    CONDITION = "If-None-Match: commits look first instead"


_WORDS = {Extra.CHECKSUMS: ("checksum", "crc64"), Extra.CONDITION: ("if-none-match", "conditional")}
_NAMELESS = {"NotImplemented", "501"}  # "a header you provided implies functionality that is not implemented"
_REFUSALS = {"InvalidRequest", "InvalidArgument", "MalformedXML", "UnsupportedHeader", *_NAMELESS}


Trial = frozenset[Extra]
NOTHING: Trial = frozenset()
_TRIALS: list[Trial] = [NOTHING, Trial({Extra.CHECKSUMS}), Trial({Extra.CONDITION}), Trial(Extra)]


class Dialect:
    def __init__(self, where: str) -> None:
        self._where = where
        self.without: Trial = NOTHING

    def spoken(self, arguments: dict[str, Any], trial: Trial) -> dict[str, Any]:
        """The arguments of a request without what this server does not take, nor `trial`."""
        for extra in self.without | trial:
            arguments = _without(arguments, extra)
        return arguments

    def signs_payload(self, trial: Trial) -> bool:
        return Extra.CHECKSUMS in self.without | trial

    def suspect(self, error: BaseException | None, arguments: dict[str, Any], trial: Trial) -> Trial:
        """What to leave out next of a request that was refused; NOTHING where that is not the trouble."""
        code = code_of(error)
        if code not in _REFUSALS:
            return NOTHING
        said = str((getattr(error, "response", None) or {}).get("Error", "")).lower()
        there = {extra for extra in Extra if extra not in self.without and _without(arguments, extra) != arguments}
        for one in _TRIALS[_TRIALS.index(trial) + 1 :]:
            is_named = code in _NAMELESS or any(word in said for extra in one for word in _WORDS[extra])
            if is_named and one <= there:
                return one
        return NOTHING

    def learn(self, trial: Trial) -> None:
        """It went well without."""
        for extra in sorted(trial - self.without, key=list(Extra).index):
            log.warning("%s refuses %s", self._where, extra.value)
        self.without |= trial


def _without(arguments: dict[str, Any], extra: Extra) -> dict[str, Any]:
    if extra is Extra.CONDITION:
        return {name: value for name, value in arguments.items() if name != "IfNoneMatch"}
    kept = {name: value for name, value in arguments.items() if not name.startswith("Checksum")}
    if "MultipartUpload" in kept:
        parts: list[dict[str, Any]] = kept["MultipartUpload"]["Parts"]
        kept["MultipartUpload"] = {"Parts": [{name: part[name] for name in ("PartNumber", "ETag")} for part in parts]}
    return kept
