"""`tierd log --audit`: prints the audit trail of this config's hot directory, and checks its chain. Needs no daemon.

Also has the functions with which other commands append events of their own to a trail.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.audit import AuditTrail, TrailFiles, Who
from tierd.cli import options
from tierd.cli.console import now, print_json, print_note, print_result, timestamp
from tierd.cli.options import settings_of
from tierd.config.sections import Config
from tierd.errors import BadConfig, Corrupt, NotFound, TierdError
from tierd.format import audit
from tierd.format.audit import Event, EventKind
from tierd.format.ids import CheckpointId, check_run
from tierd.format.text import parse_time
from tierd.keys.key_file import keyring_of
from tierd.tiers.tree import translated

_AGE = re.compile(r"([0-9]{1,5})([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


class Trail(msgspec.Struct, kw_only=True):
    """`count`: of all events that were checked, `events` are those that were asked for. `problem`: the first line that
    does not fit into the chain; empty if all do."""

    count: int
    problem: str
    notes: list[str]
    events: list[Event]


def log(
    context: typer.Context,
    is_audit: Annotated[bool, typer.Option("--audit", help="Print the audit trail; required.")] = False,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only this run.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="ISO 8601, or an age such as 30m, 24h or 7d.")
    ] = None,
    trail: options.TrailFolder = None,
    json: options.Json = False,
) -> int:
    """Print who committed, marked, deleted and restored what, and check that the trail is whole."""
    if not is_audit:
        raise BadConfig(
            "print a log: --audit is missing, and the audit trail is the only log that this command prints",
            hint="`tierd log --audit`; the daemon's own log goes to stderr: `journalctl -u tierd`",
        )
    run = None if run is None else check_run(run)
    begin = None if since is None else _begin(since)
    config = settings_of(context).config()
    keyring = keyring_of(config.security.key_file)
    folder = trail or config.hot_path
    with translated(f"read the audit trail in {folder}"):
        files = TrailFiles(folder, keyring, create=False).read()
    if not files:
        raise NotFound(f"read the audit trail in {folder}: there is none", hint="a daemon begins it when it starts")
    chain = audit.check(files, keyring)
    events = [event for event in chain.events if run in (None, event.run) and _is_after(event, begin)]
    if json:
        print_json(Trail(count=len(chain.events), problem=chain.problem, notes=chain.notes, events=events))
    else:
        for event in events:
            print_result(f"{event.at} {event.node} {event.sentence()}")
        for note in chain.notes:
            print_note(f"tierd: {note}")
        whole = f"chain whole: {len(chain.events)} events"
        print_note(f"tierd: the chain is broken: {chain.problem}" if chain.problem else whole)
    return Corrupt.exit_code if chain.problem else 0


def _begin(text: str) -> datetime:
    """Raises BadConfig unless the text is a time or an age."""
    if match := _AGE.fullmatch(text):
        return now() - timedelta(**{_UNITS[match[2]]: int(match[1])})
    if (time := parse_time(text)) is None:
        raise BadConfig(f"--since {text!r} is no time", hint="2026-01-31T12:00:00+00:00, or 30m, 24h, 7d")
    return time


def _is_after(event: Event, begin: datetime | None) -> bool:
    """Whether the event is not before `begin`. True if the event has no time."""
    time = None if begin is None else parse_time(event.at)
    return begin is None or time is None or time >= begin


def check_key(config: Config) -> None:
    """Raises BadConfig where this node signs and no key is configured here: the daemons would refuse a marker of this
    command, and an event without a signature would break the chain."""
    if config.security.key_file:
        return
    with translated(f"read the audit trail in {config.hot_path}"), suppress(PermissionError):
        if TrailFiles(config.hot_path, None, create=False).is_signed():
            raise BadConfig(
                f"use {config.hot_path} without a key: its audit trail is signed",
                hint="set [security] key_file or $TIERD_KEY_FILE to the key file of the daemon",
            )


def command_trail(config: Config, folder: Path | None, on_event: Callable[[], object]) -> AuditTrail:
    """The trail for the events of a command that makes many: in `folder`, else in the hot directory where a daemon has
    begun one, else only in the log. Raises BadConfig where a key is configured that cannot sign."""
    files = TrailFiles(folder or config.hot_path, None, create=folder is not None)
    if folder is not None or files.exists():
        keyring = keyring_of(config.security.key_file, to_sign=True)
        files = TrailFiles(folder or config.hot_path, keyring, create=folder is not None)
    else:
        files = None
    return AuditTrail(
        files,
        node=config.daemon.node,
        now=timestamp,
        on_event=on_event,
        by="command",
    )


async def record(config: Config, action: EventKind, checkpoint: CheckpointId, tier: str, *, reason: str) -> None:
    """Append what a command has done to the trail that a daemon has begun. Where that fails, only a note is printed."""
    trail = AuditTrail(node=config.daemon.node, now=timestamp)
    event = trail.record(action, checkpoint=checkpoint, tier=tier, reason=reason, who=Who.this_process("command"))
    try:
        keyring = keyring_of(config.security.key_file, to_sign=True)
        with translated(f"append to the audit trail in {config.hot_path}"):
            await asyncio.to_thread(TrailFiles(config.hot_path, keyring, create=False).append, deque([event]))
    except NotFound:
        pass  # no daemon has run on this node
    except TierdError as error:
        print_note(f"tierd: not in the audit trail: {error}")
