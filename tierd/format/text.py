"""Makes text from outside safe to print: from messages, manifests, markers, keys, host names and errors about them.

What could move a cursor, begin a line of a log, or reorder what a reader sees is shown as an escape such as \\x1b. All
that tierd writes to a log, a terminal or a page goes through here. JSON keeps the text, with escapes of JSON. Sizes,
times and counts that people read have one form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

TEXT_CHARS_MAX = 4096  # of one text that is shown: an error with its hint has some hundred characters
CUT = "…"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def printable(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """The text on one line, with an escape for each character that is not printable. Longer text ends in `…`."""
    if len(text) > chars_max:
        text = text[: max(0, chars_max - len(CUT))] + CUT
    if text.isprintable():
        return text
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if len(shown) <= chars_max else shown[: max(0, chars_max - len(CUT))] + CUT


_NOT_PRINTABLE = re.compile("[^\x20-\x7e\n]")


def printable_json(encoded: bytes) -> str:
    """JSON text with the same content, where only newlines between tokens are not printable."""

    def escape(match: re.Match[str]) -> str:
        char = match[0]
        if char.isprintable():
            return char
        units = char.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))

    decoded = encoded.decode()
    if decoded.isascii() and decoded.isprintable():  # much faster, and most often so
        return decoded
    return _NOT_PRINTABLE.sub(escape, decoded)


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 run`, `2 runs`; with a plural of its own `1 step is`, `2 steps are`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def listed(names: Sequence[object], names_max: int = 5) -> str:
    """`a, b and 3 more`: at most `names_max` names."""
    more = f" and {len(names) - names_max} more" if len(names) > names_max else ""
    return ", ".join(map(str, names[:names_max])) + more


def size(size_bytes: float) -> str:
    """Decimal units, as disks and buckets are sold: `6.24 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size_bytes) < 999.5:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:,.0f} PB"


def duration(seconds: float) -> str:
    """The two largest units: `3 min 12 s`."""
    if seconds < 60:
        return f"{max(seconds, 0):.3g} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit_s, unit, below_s, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit} {int(seconds % unit_s // below_s)} {below}"
    return f"{seconds:.0f} s"


def parse_time(text: str) -> datetime | None:
    """A time in ISO 8601, in UTC, which is also assumed if it has no zone. None if it is no time."""
    try:
        time = datetime.fromisoformat(text)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def time_text(unix_ns: int) -> str:
    """ISO 8601 in UTC, to the microsecond. 1970 for a time that no calendar has."""
    try:
        time = _EPOCH + timedelta(microseconds=unix_ns // 1000)
    except OverflowError:
        time = _EPOCH
    return time.isoformat(timespec="microseconds")
