"""The errors of tierd, by what the caller can do about them.

A message says what was being done, to what, and what was found; a hint says what to try. `exit_code`: of the CLI.
`kind`: the name on the wire, in metrics and in logs.
"""

from __future__ import annotations

import math
import re

import msgspec

_BY_KIND: dict[str, type[TierdError]] = {}

UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""The errors of msgspec for bytes from outside: no JSON or msgpack, another type, no UTF-8, or nested too deeply."""


class TierdError(Exception):
    """The base of all errors that tierd raises on purpose."""

    exit_code = 1
    kind = "tierd_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __init_subclass__(cls) -> None:
        if "kind" not in vars(cls):
            cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()  # DaemonUnreachable: daemon_unreachable
        _BY_KIND.setdefault(cls.kind, cls)

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class Transient(TierdError):
    """Raised when the same call may succeed later: retry with backoff."""


class Full(TierdError):
    """Raised when there is no room: back off until space returns."""

    exit_code = 16


class GivenUp(TierdError):
    """Recorded when a checkpoint that a policy keeps is deleted, because hot has no room. It cannot be retried."""


class Corrupt(TierdError):
    """Raised when bytes do not match their checksum, size or format. They are never retried or deleted: alert."""

    exit_code = 12


class Foreign(TierdError):
    """Raised when a manifest or marker is not signed by a key of the config, or is outside the run's claims: alert."""

    exit_code = 12


class Lost(TierdError):
    """Raised when a replica that was committed is gone, and the policy of its tier keeps it: alert."""

    exit_code = 12


class Retained(TierdError):
    """Raised when a store refuses to delete an object yet. `remaining_s`: for how long; inf: not known."""

    def __init__(self, message: str, *, hint: str = "", remaining_s: float = math.inf) -> None:
        super().__init__(message, hint=hint)
        self.remaining_s = remaining_s


class NewerFormat(TierdError):
    """Raised when a later version of tierd wrote something that this one cannot read."""


class Stale(TierdError):
    """Raised when a newer generation of the run has taken over: this writer is fenced and must stop."""

    @classmethod
    def by(cls, newer: int, action: str, generation: int) -> Stale:
        """The error of `action` in a generation that the generation `newer` has replaced."""
        message = f"{action} as generation {generation}: generation {newer} has taken over"
        return cls(message, hint="another trainer of this run was started later; stop this one")


class NotFound(TierdError):
    """Raised when no such run, checkpoint or object exists."""

    exit_code = 10


class Incomplete(NotFound):
    """Raised when the tiers have only parts of a checkpoint over several nodes."""

    exit_code = 3
    kind = NotFound.kind  # clients know this one


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
    """Raised when state was changed while a snapshot of it was being copied. Only that snapshot is given up."""


class Mismatch(TierdError):
    """Raised when a checkpoint does not fit the state it is restored into. The message lists what differs."""


class Unhealthy(TierdError):
    """Raised when a checkpoint contains NaN or Inf, and the caller has not allowed that."""

    exit_code = 18


class LockHeld(TierdError):
    """Raised when another tierd daemon owns the directory or the socket."""

    exit_code = 11


EXIT_HALTED = 17
"""The exit code of a trainer that called `halt`, and of `tierd stop` when the run has halted."""


class SlotsBusy(Transient):
    """Raised when no slot became free within the bounded wait. The step was not staged; training may continue."""


class DaemonUnreachable(Transient):
    """Raised when the daemon is absent, dead or silent for longer than the deadline."""

    exit_code = 13


class WrongUser(TierdError):
    """Raised when a peer, a file or a directory belongs to another user than the expected one. Nothing was sent."""

    exit_code = 13


class WrongSecret(TierdError):
    """Raised when a run has a secret, and a trainer or a command has not proven that it knows it."""

    exit_code = 13


class TierUnreachable(Transient):
    """Raised when a tier cannot be listed, read or written now."""

    exit_code = 14


class PeerUnreachable(TierUnreachable):
    """Raised when the daemon of another node cannot be reached, or does not serve its part of a checkpoint now."""


class PeerRestarted(PeerUnreachable):
    """The daemon of another node does not know the token, or has another certificate: it has restarted since it gave
    them."""

    kind = PeerUnreachable.kind  # clients know this one


class TargetNotEmpty(TierdError):
    """Raised when the target already exists: a directory to restore into, or a run to start from scratch."""

    exit_code = 15


def from_kind(kind: str, message: str, hint: str) -> TierdError:
    """The error that a peer named by `kind`; a plain TierdError for an unknown kind."""
    return _BY_KIND.get(kind, TierdError)(message, hint=hint)


UNHEALTHY = "holds numbers that are not finite, or its loss was bad"


def unhealthy(checkpoint: object, which: str = "it") -> Unhealthy:
    """The refusal to restore a checkpoint. `which`: what of it is unhealthy."""
    hint = "`tierd show` lists the tensors; to restore it even so: --allow-unhealthy, allow_unhealthy=True; "
    return Unhealthy(f"restore {checkpoint}: {which} {UNHEALTHY}", hint=f"{hint}docs/RUNBOOK.md#unhealthy-checkpoint")


def text_of(error: TierdError | TimeoutError) -> str:
    """The error for a message or the log. asyncio's TimeoutError has no text."""
    return str(error) or "no answer in time"
