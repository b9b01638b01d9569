"""Who is at the other end of a Unix socket, as the kernel says, and whether a socket may be the daemon's.

The daemon gets a writable descriptor of every snapshot, so a client gives none to a process of another user: it expects
the daemon to run as its own user, as root, or as the user that it was given.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from tierd.access import others_can_write
from tierd.errors import WrongUser

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_HINT = "start the daemon as this user, or name its user id: daemon.uid, TIERD_DAEMON_UID, connect(daemon_uid=...)"


_SO_PEERGROUPS = 59  # Linux 4.13; not in the socket module
_GROUPS_BYTES_MAX = 1024  # 256 groups: the longest answer that Python accepts


@dataclass(frozen=True, slots=True)
class Peer:
    """`pid` is 0 for a process in a PID namespace that is not visible here."""

    pid: int
    uid: int
    gid: int


def process_state(pid: int) -> str | None:
    """As `ps` has it, such as "T"; None where there is no such process here."""
    try:
        # The name of the program, in parentheses, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def peer_of(connected: socket.socket) -> Peer:
    """The process that has connected, or of the one that listens: as it was when it began to listen."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


def is_in_group(connected: socket.socket, group: int) -> bool:
    """Whether the process that has connected was in this group then, as its own or as a supplementary one."""
    if peer_of(connected).gid == group:
        return True
    try:
        raw = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    except OSError:  # an older kernel, or a process in more groups
        return False
    return group in memoryview(raw).cast("I").tolist()


def connect_to_daemon(connecting: socket.socket, path: str, daemon_uid: int | None = None) -> None:
    """Connects to the daemon's socket. Raises OSError, and WrongUser before anything is sent if the process that
    listens, or a user who could put a socket there, is another than expected. `daemon_uid`: besides this user and
    root."""
    expected = {0, os.geteuid()} | ({daemon_uid} if daemon_uid is not None else set())
    folder = os.stat(os.path.dirname(path) or ".")
    if folder.st_uid not in expected:
        raise WrongUser(f"connect to {path}: its directory belongs to uid {folder.st_uid}", hint=_HINT)
    if others_can_write(folder):
        owner = os.lstat(path).st_uid
        if not folder.st_mode & stat.S_ISVTX:
            mode = f"{stat.S_IMODE(folder.st_mode):04o}"
            raise WrongUser(
                f"connect to {path}: other users can replace it, because the mode of its directory is {mode}",
                hint="chmod go-w on the directory, or set daemon.socket to a path in a directory of the daemon's own",
            )
        if owner not in expected:
            raise WrongUser(f"connect to {path}: the socket belongs to uid {owner}", hint=_HINT)
    connecting.connect(path)
    if (uid := peer_of(connecting).uid) not in expected:
        users = " or ".join(map(str, sorted(expected)))
        raise WrongUser(f"connect to {path}: the process that listens runs as uid {uid}, not {users}", hint=_HINT)
