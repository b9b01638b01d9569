"""One tree of errors, sorted by what the caller can do about them.

The message says what was being done, to what, and what was found; the hint says what to try.
`exit_code` is what the CLI ends with. `kind` is the word used on the wire, in metrics and in logs.
"""

from __future__ import annotations

import math
import re


class TierdError(Exception):
    """Raised when tierd could not do what was asked. The base of all errors that tierd raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message

    @property
    def kind(self) -> str:
        """The class name in snake_case: `DaemonUnreachable` is `daemon_unreachable`."""
        return _snake_case(type(self).__name__)


class Transient(TierdError):
    """Raised when the same call may succeed later: retry with backoff."""


class Full(TierdError):
    """Raised when there is no room: back off until space returns."""

    exit_code = 16


class Corrupt(TierdError):
    """Raised when bytes are not what their checksum, size or format says. Never retried, never deleted: alert."""

    exit_code = 12


class Retained(TierdError):
    """Raised when a store does not let go of an object yet. `remaining_s`: for how long, inf where it does not say."""

    def __init__(self, message: str, *, hint: str = "", remaining_s: float = math.inf) -> None:
        super().__init__(message, hint=hint)
        self.remaining_s = remaining_s


class NewerFormat(TierdError):
    """Raised when something was written by a later tierd than this one can read."""


class Stale(TierdError):
    """Raised when a newer generation of the run has taken over: this writer is fenced and must stop."""


class NotFound(TierdError):
    """Raised when no such run, checkpoint or object exists."""

    exit_code = 10


class BadConfig(TierdError):
    """Raised when a config file, option or argument is wrong. Nothing has been done yet."""

    exit_code = 2


class BadRequest(TierdError):
    """Raised when a caller or a peer asks for something that breaks the rules of the protocol."""

    exit_code = 2


class Unsupported(TierdError):
    """Raised when state has no safe form in a checkpoint. The message names the path of the entry."""

    exit_code = 2


class Torn(TierdError):
    """Raised when state was changed while a snapshot of it was being copied: that snapshot is given up, no other."""


class Mismatch(TierdError):
    """Raised when a checkpoint does not fit the state it is restored into. The message lists what differs."""


class Unhealthy(TierdError):
    """Raised when a checkpoint holds numbers that are not finite, and nobody has said that it is wanted even so."""

    exit_code = 18


class LockHeld(TierdError):
    """Raised when another tierd daemon owns the directory or the socket."""

    exit_code = 11


EXIT_HALTED = 17
"""Not raised by tierd: a trainer that called `halt` ends so, and `tierd stop` that finds its run halted."""


class SlotsBusy(Transient):
    """Raised when no slot became free within the bounded wait. The step was not staged; training may go on."""


class DaemonUnreachable(Transient):
    """Raised when the daemon is absent, dead or silent for longer than the deadline."""

    exit_code = 13


class TierUnreachable(Transient):
    """Raised when a tier cannot be listed, read or written now."""

    exit_code = 14


class TargetNotEmpty(TierdError):
    """Raised when what is to begin is there already: a directory to restore into, a run to start from scratch."""

    exit_code = 15


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _kinds(base: type[TierdError]) -> dict[str, type[TierdError]]:
    found = {_snake_case(base.__name__): base}
    for child in base.__subclasses__():
        found |= _kinds(child)
    return found


def from_kind(kind: str, message: str, hint: str) -> TierdError:
    """The error that a peer named by `kind`; an unknown kind becomes a plain TierdError."""
    return _kinds(TierdError).get(kind, TierdError)(message, hint=hint)
