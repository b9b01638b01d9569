"""The key file of [security] key_file: makes one, and reads the keys that sign manifests and markers.

Only its owner may read it, or the group that root gave it, unless it has public keys only. One key per line: the first
one that can sign signs, and signatures of all are accepted.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tierd.errors import BadConfig
from tierd.format.signature import HMAC, Keyring, new_key, parse_keys

KEY_FILE_BYTES_MAX = 64 << 10


def make_key_file(path: Path, algorithm: str = HMAC) -> Keyring:
    """Makes a key file with one new key, durable. Raises BadConfig where it exists or cannot be made."""
    line = new_key(algorithm).line.encode()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise BadConfig(
            f"make the key file {path}: it exists",
            hint="to rotate the key, name another file; docs/guides/security.md#rotate-a-key",
        ) from None
    except OSError as error:
        raise BadConfig(
            f"make the key file {path}: {error.strerror}",
            hint="name a path in a folder that exists and that this user can write",
        ) from error
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
        os.write(fd, line)
        os.fsync(fd)
    finally:
        os.close(fd)
    return parse_keys(line.decode(), where=str(path))


def read_key_file(path: Path) -> Keyring:
    """The keys of a key file. Raises BadConfig where it cannot be read, has no key, or belongs to another user than
    this one and root, and where others may write it, or may read a secret in it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = (
            "`tierd key new PATH` makes one, which its owner alone can read; set [security] key_file or $TIERD_KEY_FILE"
        )
        raise BadConfig(f"read the key file {path}: {error.strerror}", hint=hint) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise BadConfig(f"read the key file {path}: it is not a file", hint="`tierd key new PATH` makes a key file")
    with os.fdopen(fd, "rb") as file:
        keyring = parse_keys(file.read(KEY_FILE_BYTES_MAX).decode("utf-8", "replace"), where=str(path))
    not_allowed = 0o077 if any(key.can_sign for key in keyring.keys) else 0o022
    if status.st_uid == 0 and os.geteuid() != 0:
        not_allowed &= ~0o040  # root chose the group: a Secret of Kubernetes, with fsGroup, is mounted so
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & not_allowed:
        owners = " or ".join(map(str, sorted({0, os.geteuid()})))
        raise BadConfig(
            f"read the key file {path}: it belongs to uid {status.st_uid} and has mode "
            f"{stat.S_IMODE(status.st_mode):o}; expected uid {owners}, and mode 600 (440 or 640 if it is root's and "
            "this user is not root), or 644 with public keys only",
            hint="chmod 600, and run this command as the file's owner, such as the daemon's user (sudo -u); "
            "docs/guides/security.md#sign-checkpoints",
        )
    return keyring


def keyring_of(key_file: str, *, to_sign: bool = False) -> Keyring | None:
    """The keys of the config; None where no key file is set. `to_sign`: raises BadConfig where no key can sign."""
    if not key_file:
        return None
    keyring = read_key_file(Path(key_file))
    if to_sign:
        _ = keyring.signing_key
    return keyring
