"""Who may read what tierd writes: its own user, and with `[security] group` the members of that group too.

Folders get mode 0700 and files 0600 whatever the umask; with a group 0750 and 0640, and a socket 0660. Only what is
made now gets these modes: what exists keeps its own, and `exposure` says who can reach it.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Access:
    """`group`: the group id of those who may read besides the user; None: nobody."""

    group: int | None = None

    @property
    def folder_mode(self) -> int:
        return 0o700 if self.group is None else 0o750

    @property
    def file_mode(self) -> int:
        return 0o600 if self.group is None else 0o640

    @property
    def umask(self) -> int:
        """The umask for another program that writes files for tierd."""
        return 0o777 & ~self.folder_mode

    def share(self, fd: int) -> None:
        """Gives a file or folder that this process has made to the group. Raises OSError."""
        if self.group is not None:
            os.fchown(fd, -1, self.group)
            # After the creation, because the umask may have removed the group's rights.
            os.fchmod(fd, self.folder_mode if stat.S_ISDIR(os.fstat(fd).st_mode) else self.file_mode)

    def share_socket(self, path: str) -> None:
        """Lets the group connect to a socket that this process has made. Raises OSError."""
        if self.group is not None:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.chown(f"/proc/self/fd/{fd}", -1, self.group)
                os.chmod(f"/proc/self/fd/{fd}", 0o660)
            finally:
                os.close(fd)

    def exposure(self, path: Path) -> str:
        """Who besides the user, root and the group can reach a folder, such as "its mode is 0755"; empty: nobody."""
        stat_result = os.stat(path)
        mode = stat.S_IMODE(stat_result.st_mode)
        if stat_result.st_uid not in (0, os.geteuid()):
            return f"it belongs to uid {stat_result.st_uid}"
        allowed = 0o700 if stat_result.st_gid != self.group else 0o750
        return f"its mode is {mode:04o}" if mode & 0o777 & ~allowed else ""


PRIVATE = Access()
"""The user alone."""


@functools.lru_cache
def access_of(group: str) -> Access:
    """For the group with this name or number; empty: the user alone. Raises KeyError if there is no such group."""
    if group.isascii() and group.isdecimal():
        return Access(int(group))  # a container may have no name for it
    return Access(grp.getgrnam(group).gr_gid) if group else PRIVATE


def is_own_file(fd: int) -> bool:
    """Whether this is a regular file of this process's user that nobody else can change, under this name alone: a hard
    link may lead to any file of the user."""
    stat_result = os.fstat(fd)
    is_single = stat.S_ISREG(stat_result.st_mode) and stat_result.st_nlink == 1
    return is_single and stat_result.st_uid == os.geteuid() and not others_can_write(stat_result)


def is_own_folder(path: Path) -> bool:
    """Whether the folder is this process's user's, and nobody else can write into it. Raises OSError."""
    stat_result = os.stat(path)
    return stat_result.st_uid == os.geteuid() and not others_can_write(stat_result)


def others_can_write(stat_result: os.stat_result) -> bool:
    """Whether the mode lets another user than the owner write. A group that is the user's alone is no other user: many
    systems give each user one, and a umask of 002."""
    if stat_result.st_mode & stat.S_IWOTH:
        return True
    return bool(stat_result.st_mode & stat.S_IWGRP) and not _is_own_group(stat_result.st_gid)


def _is_own_group(group: int) -> bool:
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
