"""What `tierd doctor` says of one thing that it looked at: a verdict, a sentence, and what to do."""

from __future__ import annotations

from typing import Literal

import msgspec

from tierd.errors import TierdError

Verdict = Literal["ok", "note", "warning", "problem"]
"""note: worth knowing, or not to be found out; warning: it works, and somebody will regret it; problem: it does not."""


class Advice(msgspec.Struct, frozen=True):
    check: str
    """What was looked at, in a word that stays the same: `put`, `lifecycle`, `space`."""

    about: str
    """The tier, or config, socket, daemon, machine."""

    verdict: Verdict
    message: str
    hint: str = ""
    exit_code: int = 1
    """What a problem ends the command with."""


def problem_of(check: str, about: str, error: TierdError) -> Advice:
    return Advice(check, about, "problem", error.message, error.hint, error.exit_code)
