"""Notes and tags that people give to checkpoints. A note is a file that never changes; it may outlive its checkpoint.

Spec: docs/FORMAT.md#notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from tierd.errors import UNDECODABLE, BadRequest, Corrupt
from tierd.format.ids import CheckpointId, Run, parse_name

TEXT_CHARS_MAX = 4000
TAGS_MAX = 16  # in one note
_FOLDER = "notes"
_KEY = re.compile(rf"(?P<run>[^/]+)/{_FOLDER}/(?P<name>[^/]+)-(?P<written>[0-9]{{13}})-[0-9a-f]{{8}}\.json")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """`added` and `removed`: tags. `author`: the user name of who wrote it. `created_at`: ISO 8601, UTC."""

    text: str
    added: list[str]
    removed: list[str]
    author: str
    created_at: str


def check(note: Note) -> None:
    """Raises BadRequest for one that must not be written."""
    if not (note.text or note.added or note.removed):
        raise BadRequest("the note is empty", hint="give a text, --tag NAME or --untag NAME")
    if len(note.text) > TEXT_CHARS_MAX:
        raise BadRequest(f"the note has {len(note.text)} characters, more than {TEXT_CHARS_MAX}", hint="shorten it")
    try:
        note.text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text of the note is no UTF-8: {error.reason}", hint="write it in the terminal's encoding"
        ) from error
    tags = [*note.added, *note.removed]
    if len(tags) > TAGS_MAX:
        raise BadRequest(f"{len(tags)} tags, more than {TAGS_MAX}", hint="write several notes")
    for tag in tags:
        if not _TAG.fullmatch(tag):
            hint = "use 1 to 64 letters, digits, '.', '-' or '_', beginning with a letter or digit"
            raise BadRequest(f"{tag[:80]!r} cannot be a tag", hint=hint)


def note_prefix(run: Run) -> str:
    return f"{run}/{_FOLDER}/"


def note_key(checkpoint: CheckpointId, *, written_ms: int, token: str) -> str:
    """`written_ms`: Unix time; keys of one checkpoint sort by it. `token`: 8 hexadecimal digits."""
    return f"{note_prefix(checkpoint.run)}{checkpoint.name}-{written_ms:013d}-{token}.json"


def parse_note_key(key: str) -> tuple[CheckpointId, int] | None:
    """(its checkpoint, when it was written in milliseconds), or None if it is not the key of a note."""
    match = _KEY.fullmatch(key)
    checkpoint = parse_name(Run(match["run"]), match["name"]) if match else None
    return (checkpoint, int(match["written"])) if match and checkpoint is not None else None


def order(key: str) -> tuple[int, str]:
    """A sort key: when the note was written, then its key."""
    parsed = parse_note_key(key)
    return (parsed[1] if parsed is not None else 0, key)


def decode(raw: bytes, *, key: str, where: str) -> Note:
    """Raises Corrupt."""
    try:
        return msgspec.json.decode(raw, type=Note)
    except UNDECODABLE as error:
        hint = "the note is ignored; delete the file if it is none"
        raise Corrupt(f"decode {key} in {where}: {error}", hint=hint) from error


def tags(notes: Iterable[Note]) -> list[str]:
    """The tags that remain after these notes, which are given in the order in which they were written."""
    current: dict[str, None] = {}
    for note in notes:
        for tag in note.removed:
            current.pop(tag, None)
        current |= dict.fromkeys(note.added)
    return sorted(current)
