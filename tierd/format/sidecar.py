"""The segments of the files that a run writes beside its checkpoints, such as a loss history.

A segment is an object that never changes: bytes of the file from `begin` to `end`. Its name has a digest of the file
up to `begin` and up to `end`, so a listing shows which segments fit together, whoever wrote them, and which bytes of
the file they cover. Spec: docs/FORMAT.md#sidecar-files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from tierd.errors import UNDECODABLE, Corrupt
from tierd.format.ids import Run, is_run
from tierd.format.signature import Keyring

NAME_CHARS_MAX = 120
VERSION_MAX = 99_999_999
SEGMENT_BYTES_MAX = 8 << 20
UNSETTLED = b"]} \t\r\n"  # what closes a JSON document
TAIL_BYTES = 4096
UNSETTLED_BYTES_MAX = 64
EMPTY = hashlib.sha256().hexdigest()
_FOLDER = "sidecars"
_DIGEST_CHARS = 16  # of a digest in a name; the header has all of it
_HEADER_BYTES_MAX = 4096
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_CHARS_MAX}}}")
_KEY = re.compile(
    rf"(?P<run>[^/]+)/{_FOLDER}(?:-(?P<phase>[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}))?/file-(?P<file>[A-Za-z0-9._-]{{1,{NAME_CHARS_MAX}}})-v(?P<version>[0-9]{{4,8}})"
    r"-(?P<begin>[0-9]{15})-(?P<end>[0-9]{15})-(?P<before>[0-9a-f]{16})-(?P<after>[0-9a-f]{16})\.(?P<kind>seg|tail)"
)


class Segment(NamedTuple):
    """`before`, `after`: the first 16 hexadecimal digits of SHA-256 of the file's bytes up to `begin`, and up to `end`.
    `is_tail`: its bytes only close a document, and may be written anew. `phase`: the milestone of the phase of the run
    that the file belongs to; empty: to all of the run."""

    run: Run
    file: str
    version: int
    begin: int
    end: int
    before: str
    after: str
    is_tail: bool = False
    phase: str = ""

    @property
    def key(self) -> str:
        kind = "tail" if self.is_tail else "seg"
        span = f"{self.begin:015d}-{self.end:015d}-{self.before}-{self.after}.{kind}"
        return f"{version_prefix(self.run, self.phase, self.file, self.version)}{span}"


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """`before`, `after`: as in Segment, whole."""

    begin: int
    end: int
    before: str
    after: str


def segment_prefix(run: Run, phase: str = "") -> str:
    """The prefix of the keys of a phase's segments, or of the segments of files that belong to the whole run."""
    return f"{run}/{_FOLDER}-{phase}/" if phase else f"{run}/{_FOLDER}/"


def version_prefix(run: Run, phase: str, file: str, version: int) -> str:
    """Of the keys of the segments of one version of a file."""
    return f"{segment_prefix(run, phase)}file-{file}-v{version:04d}-"


def all_segments_prefix(run: Run) -> str:
    """The prefix of the keys of all segments of the run, and of nothing else that tierd writes."""
    return f"{run}/{_FOLDER}"


def is_file_name(name: str) -> bool:
    """Whether a file of this name can be kept: it becomes part of a key."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def short(digest: str) -> str:
    """A digest as names have it."""
    return digest[:_DIGEST_CHARS]


def parse_segment(key: str) -> Segment | None:
    """None if it is not the key of a segment."""
    match = _KEY.fullmatch(key)
    if match is None or not is_run(match["run"]) or not is_file_name(match["file"]):
        return None
    segment = Segment(
        Run(match["run"]),
        match["file"],
        int(match["version"]),
        int(match["begin"]),
        int(match["end"]),
        match["before"],
        match["after"],
        match["kind"] == "tail",
        match["phase"] or "",
    )
    return segment if segment.key == key and segment.begin < segment.end else None


def chain(segments: Iterable[Segment]) -> list[Segment]:
    """The segments of one version of one file that together give the most of its bytes, in their order, without holes.

    Segments may overlap, because small ones are merged, and differ, because two daemons may have written different
    files under one name. A segment fits behind another one if the digests agree.
    """
    return _longest(_paths(segments))


def branches(segments: Iterable[Segment]) -> list[list[Segment]]:
    """`chain`, and then what else begins at 0 and ends where no segment goes on, the longest one first. That is the
    beginning of the same file if merged segments were not deleted, or another file: only the bytes show which."""
    listed = list(segments)
    paths = _paths(listed)
    longest = _longest(paths)
    inner = {(each.begin, each.before) for each in listed if not each.is_tail}
    inner |= {(each.end, each.after) for each in longest}
    closed = {(path[-1].begin, path[-1].before): path for path in paths.values() if path and path[-1].is_tail}
    others = [
        closed.get(state, path) for state, path in paths.items() if path and not path[-1].is_tail and state not in inner
    ]
    return [longest, *sorted(others, key=lambda path: -path[-1].end)] if longest else []


def _paths(segments: Iterable[Segment]) -> dict[tuple[int, str], list[Segment]]:
    """By where they end, and the digest of the file up to there: segments without holes from 0."""
    by_begin = sorted(segments, key=lambda each: (each.is_tail, each.begin, -each.end, each.after))
    reached: dict[tuple[int, str], list[Segment]] = {(0, short(EMPTY)): []}
    for each in by_begin:  # whatever leads to `begin` has a smaller begin, and tails come last
        path = reached.get((each.begin, each.before))
        state = (each.end, each.after)
        if path is not None and state not in reached:
            reached[state] = [*path, each]
    return reached


def _longest(paths: dict[tuple[int, str], list[Segment]]) -> list[Segment]:
    return paths[max(paths, key=lambda state: state[0])]


def unsettled_bytes(tail: bytes) -> int:
    """How many bytes at the end of a file only close its JSON document, so that a program that appends to the document
    writes them anew. `tail`: the last TAIL_BYTES of the file. A file of lines has none."""
    line = tail[tail.rfind(b"\n", 0, len(tail) - 1) + 1 :]
    is_line = tail.endswith(b"\n") and len(line) < len(tail) and line.lstrip()[:1] in (b"{", b"[")
    end = tail[-UNSETTLED_BYTES_MAX:]
    closing = end[len(end.rstrip(UNSETTLED)) :]
    return len(closing) if (b"]" in closing or b"}" in closing) and not is_line else 0


def encode_segment(segment: Segment, content: bytes, *, before: str, after: str, keyring: Keyring | None) -> bytes:
    """The object of a segment: a line of JSON, signed where there is a key, and the bytes."""
    header = _Header(begin=segment.begin, end=segment.end, before=before, after=after)
    line = msgspec.json.encode(header) + b"\n"
    return (line if keyring is None else keyring.sign(segment.key, line)) + content


def decode_segment(segment: Segment, raw: bytes, *, keyring: Keyring | None, where: str) -> tuple[bytes, str]:
    """(its bytes, the digest of the file up to its end). Raises Corrupt, and Foreign where there is a keyring that has
    not signed it."""
    end = raw.find(b"\n", 0, _HEADER_BYTES_MAX) + 1
    line, content = raw[:end], raw[end:]
    if keyring is not None:
        keyring.check(segment.key, line, where=where)
    try:
        header = msgspec.json.decode(line, type=_Header)
    except UNDECODABLE as error:
        raise Corrupt(f"decode {segment.key} in {where}: {error}", hint=_HINT) from error
    found = (header.begin, header.end, short(header.before), short(header.after))
    if found != (segment.begin, segment.end, segment.before, segment.after):
        raise Corrupt(f"decode {segment.key} in {where}: its header says {found}", hint=_HINT)
    if len(content) != segment.end - segment.begin:
        expected = segment.end - segment.begin
        raise Corrupt(f"decode {segment.key} in {where}: {len(content)} bytes, expected {expected}", hint=_HINT)
    return content, header.after


_HINT = "another tier may have it whole: `tierd sidecars --tier TIER`"
