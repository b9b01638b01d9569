"""Failpoints: named instants at which a test kills the daemon, delays it, or makes a step fail.

Each durable step of the daemon has at least one. They do nothing unless $TIERD_FAILPOINTS is set when `tierd serve`
starts, and only tests set it: `file.link=kill@3 s3.part=0.5@1 file.sync=ENOSPC@2`. An action is `kill` (SIGKILL), a
number of seconds to sleep, or the errno of an OSError. It happens the n-th time that the daemon gets there.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping

from tierd.errors import BadConfig

VARIABLE = "TIERD_FAILPOINTS"
FAILPOINTS = frozenset(
    f"{subject}.{instant}"
    for subject, instants in {
        "run": ("claim", "claimed"),
        "slot": ("map", "adopt"),
        "snapshot": ("accept", "accepted"),
        "trainer": ("answer", "send", "sent"),
        "persist": ("begin", "commit", "committed", "repeat", "answer"),
        "adopt": ("commit", "committed"),
        "watch": ("announce", "announced"),
        "root": ("create",),
        "folder": ("sync",),
        "file": ("created", "write", "sync", "link", "linked", "exists", "rename", "sync_folder", "done", "abandon"),
        "tier": ("mark", "diagnose", "commit", "committed", "delete"),
        "cold": ("copy", "copied", "node_file", "part_sent", "assemble", "assembled"),
        "reap": ("delete", "deleted"),
        "delete": ("unlink", "sync", "folder", "folder_sync"),
        "s3": (
            "put",
            "create",
            "part",
            "part_sent",
            "complete",
            "completed",
            "abort",
            "put_bytes",
            "placed",
            "delete",
            "batch",
        ),
        "recover": ("delete",),
        "leftover": ("delete",),
        "sweep": ("unlink",),
        "sidecar": ("put", "delete"),
        "fetch": ("begin", "write", "sync", "rename", "sync_folder", "commit"),
        "repair": ("keep",),
    }.items()
    for instant in instants
)

_armed: dict[str, tuple[str, int, Iterator[int]]] = {}  # by name: action, at which hit, the count of hits


def arm(environ: Mapping[str, str] = os.environ) -> None:
    """Arm what $TIERD_FAILPOINTS names. Raises BadConfig for what it does not understand."""
    for entry in environ.get(VARIABLE, "").split():
        name, _, rest = entry.partition("=")
        action, _, hit = rest.partition("@")
        is_action = action == "kill" or hasattr(errno, action) or action.replace(".", "", 1).isdigit()
        if name not in FAILPOINTS or not is_action or not hit.isdigit():
            what = "an unknown failpoint" if name not in FAILPOINTS else "not NAME=ACTION@HIT"
            hint = "an action is kill, seconds, or an errno; unset this variable unless you test tierd"
            raise BadConfig(f"read ${VARIABLE}: {entry!r} is {what}", hint=hint)
        _armed[name] = action, int(hit), itertools.count(1)
        logging.getLogger("tierd").warning("failpoint %s: this daemon is under test", entry)


def failpoint(name: str) -> None:
    """Marks an instant of the daemon. Does nothing unless it is armed; then it may raise an OSError."""
    if not _armed or name not in _armed:
        return
    action, hit, hits = _armed[name]
    if next(hits) != hit:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if code := getattr(errno, action, 0):
        raise OSError(code, os.strerror(code))
    time.sleep(float(action))
