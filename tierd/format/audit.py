"""The lines of the audit trail: one JSON object for each event, in a chain of SHA-256 digests. Pure: no I/O.

Each line has the digest of the line before. With a key, each line is signed too: nobody without the key can write one.
A chain shows lines that were changed, removed or reordered. It cannot show that lines are missing at the end.
Spec: docs/FORMAT.md#audit-trail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from tierd.errors import UNDECODABLE, Foreign
from tierd.format.layout import AUDIT
from tierd.format.signature import Keyring
from tierd.format.text import printable

LINE_BYTES_MAX = 16 << 10  # the longest reason, all of it escaped, and a signature
REASON_CHARS_MAX = 1000
FILES_MAX = 4  # the oldest is deleted when a fifth is begun
FILE_BYTES_MAX = 8 << 20
_SIGNATURE = b'"signature":"'  # inside a string of JSON, the quotation marks would be escaped


class EventKind(StrEnum):
    """What happened. The values are stable: programs search for them."""

    STARTED = "started"
    ENDED = "ended"
    CLAIMED = "claimed"
    JOINED = "joined"
    BOUND = "bound"
    COMMITTED = "committed"
    REPLICATED = "replicated"
    MARKED = "marked"
    UNMARKED = "unmarked"
    DIAGNOSED = "diagnosed"
    EVICTED = "evicted"
    EXPIRED = "expired"
    REPAIRED = "repaired"
    RESTORED = "restored"
    REQUESTED = "requested"
    SIGNED = "signed"
    FOREIGN_SEEN = "foreign_seen"
    GENERATION_UNKNOWN = "generation_unknown"
    TRAIL_CUT = "trail_cut"


LEAVING = {
    EventKind.EVICTED,
    EventKind.EXPIRED,
    EventKind.RESTORED,
}  # in a sentence: `from` a tier; the others: `in` a tier


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`by`: daemon, trainer, operator or command. `uid`, `pid`: of that process, as the kernel names a peer; a pid of 0
    is in a PID namespace that is not visible here. `previous`: SHA-256 of the line before, with its newline; empty on
    the first line of a trail. `lost`: events before this one that could not be written."""

    sequence: int
    at: str
    action: str
    by: str
    uid: int
    pid: int
    node: str
    previous: str
    run: str = ""
    step: int | None = None
    generation: int | None = None
    tier: str = ""
    reason: str = ""
    lost: int = 0

    def sentence(self) -> str:
        """What happened, on one line, such as `evicted run/000000000001-g0001 from hot: newest 1 kept`."""
        subject = self.run
        if self.step is not None:
            subject += f"/{self.step:012d}-g{self.generation or 0:04d}"
        elif self.generation is not None:
            subject += f" generation {self.generation}"
        text = " ".join(filter(None, (self.action, subject)))
        if self.tier:
            text += f" {'from' if self.action in LEAVING else 'in'} {self.tier}"
        lost = f"; {self.lost} earlier events were not written" if self.lost else ""
        reason = f": {self.reason}" if self.reason else ""
        who = "" if self.by == "daemon" else f" ({self.by}, uid {self.uid}, pid {self.pid})"
        return printable(f"{text}{reason}{lost}{who}")


def encode(event: Event, keyring: Keyring | None) -> bytes:
    """The line of an event, signed where there is a key."""
    line = msgspec.json.encode(event) + b"\n"
    return line if keyring is None else keyring.sign(AUDIT, line)


def digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


@dataclass(kw_only=True)
class Tail:
    """The end of a trail, where the next event goes. `torn_bytes`: of an incomplete last line, which a loss of power or
    a full disk leaves. `is_signed`: whether the last whole line is."""

    sequence: int = 0
    previous: str = ""
    torn_bytes: int = 0
    is_signed: bool = False


def tail_of(content: bytes, *, first: int) -> Tail:
    """The tail of a trail. `content`: of its last files. `first`: the sequence number of the first line there. If the
    last line is not an event, it counts with the number that it should have: `check` reports it, and the chain goes on
    after it."""
    *lines, torn = content.split(b"\n")
    if not lines:
        return Tail(sequence=first - 1, torn_bytes=len(torn))
    line = lines[-1] + b"\n"
    try:
        sequence = msgspec.json.decode(line, type=Event).sequence
    except UNDECODABLE:
        sequence = first - 1 + len(lines)
    return Tail(sequence=sequence, previous=digest(line), torn_bytes=len(torn), is_signed=_has_signature(line))


@dataclass(kw_only=True)
class Chain:
    """`events`: all that could be read, in order. `problem`: the first line that does not fit; empty if all do.
    `notes`: what a reader should know about a chain that fits."""

    events: list[Event] = field(default_factory=list[Event])
    problem: str = ""
    notes: list[str] = field(default_factory=list[str])


def check(files: Sequence[tuple[int, bytes]], keyring: Keyring | None) -> Chain:
    """Checks every line of a trail. `files`: (the sequence number in the name, content) of each, oldest first.

    With a key, lines that it cannot check may only precede those that it has signed: they were written before there was
    a key, or with one that was removed since, and the first line that it has signed has their digest."""
    chain = Chain()
    if not files:
        return chain
    expected, previous = files[0][0], None if files[0][0] > 1 else ""
    unsigned = signed = trusted = 0
    if expected > 1:
        if len(files) < FILES_MAX:
            chain.problem = f"the files before event {expected} are missing: only {len(files)} of {FILES_MAX} exist"
        chain.notes.append(f"events before {expected} are not here: the trail keeps its newest {FILES_MAX} files")
    for number, (first, content) in enumerate(files):
        *lines, torn = content.split(b"\n")
        where = f"the file of event {first}"
        if first != expected:
            chain.problem = chain.problem or f"{where}: expected the file of event {expected}"
        for position, text in enumerate(lines, start=1):
            line = text + b"\n"
            is_signed = _has_signature(line)
            why, event = _problem(line, expected=expected, previous=previous)
            if event is not None:
                chain.events.append(event)
            is_of_removed_key = is_signed and not trusted and keyring is not None and keyring.lacks_key_of(line)
            if not why and keyring is not None and (is_signed or signed) and not is_of_removed_key:
                try:
                    keyring.check(AUDIT, line, where="the audit trail")
                    trusted += 1
                except Foreign as error:
                    why = error.message
            chain.problem = chain.problem or (why and f"{where}, line {position}: {why}")
            signed += is_signed
            unsigned += not is_signed
            expected = (event.sequence if event is not None else expected) + 1
            previous = digest(line)
        if torn and number < len(files) - 1:
            chain.problem = chain.problem or f"{where}: its last line is not complete"
        elif torn:
            chain.notes.append("the last line is not complete: it is being written, or a loss of power cut it off")
    if keyring is None and signed:
        chain.notes.append(f"{signed} events are signed, and no key is configured here to check them")
    if keyring is not None and unsigned and signed:
        chain.notes.append(
            f"{unsigned} events were written before there was a key: anyone who can write here could have written them"
        )
    if keyring is not None and (of_removed_keys := signed - trusted) and not chain.problem:
        chain.notes.append(
            f"{of_removed_keys} events are signed by keys that are not in the key file: anyone who can write here "
            "could have written them before the first event of a present key"
        )
    if keyring is not None and not trusted and not chain.problem:
        chain.problem = "no event is signed by a key of the key file"
    return chain


def _problem(line: bytes, *, expected: int, previous: str | None) -> tuple[str, Event | None]:
    """Why a line does not fit into the chain, and its event if it is one. `previous`: None where it is not known."""
    if len(line) > LINE_BYTES_MAX:
        return f"{len(line)} bytes, more than {LINE_BYTES_MAX}", None
    try:
        event = msgspec.json.decode(line, type=Event)
    except UNDECODABLE as error:
        return f"it is no event: {error}", None
    if event.sequence != expected:
        return f"event {event.sequence}, expected {expected}", event
    if previous is not None and event.previous != previous:
        return f"event {event.sequence} has another digest of the line before: that line was changed", event
    return "", event


def _has_signature(line: bytes) -> bool:
    return _SIGNATURE in line
