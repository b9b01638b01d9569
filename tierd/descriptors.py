"""File descriptors: closes many, opens all or none, reopens, reads, and passes them over a Unix socket (SCM_RIGHTS).

Imports no asyncio and decodes no message: for the daemon, the CLI and the client.
"""

from __future__ import annotations

import array
import os
import resource
import socket
from collections.abc import Iterable, Sequence

from tierd.format.wire import DESCRIPTORS_MAX, MESSAGE_BYTES_MAX


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def open_all(opening: Iterable[int]) -> list[int]:
    """The descriptors of an iterator that opens them one by one, as `map(os.dup, descriptors)`. If it raises, those
    that it has opened are closed."""
    opened: list[int] = []
    try:
        opened.extend(opening)  # keeps those before an error
    except BaseException:
        close_all(opened)
        raise
    return opened


def reopen_read_only(fd: int) -> int:
    """Another descriptor of the same file or memory, through which nothing can be written. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def read_all(fd: int, offset: int, view: memoryview) -> int:
    """Fill the view from `offset`. Returns how many bytes were missing because the file ended."""
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            break
        view, offset = view[count:], offset + count
    return len(view)


# socket.send_fds and recv_fds drop the flags that they are given (seen in CPython 3.11): a send would block, and a
# received descriptor would be inherited by every program that this process starts.


def send_packet(sock: socket.socket, raw: bytes, descriptors: Sequence[int] = ()) -> None:
    """Never blocks, and raises no SIGPIPE. Raises OSError; BlockingIOError when the peer's buffer is full."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([raw], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def receive_packet(sock: socket.socket) -> tuple[bytes, list[int], bool]:
    """(packet, its descriptors, whether both are complete). The caller closes the descriptors, also of an incomplete
    packet. An empty packet: the peer has closed the connection."""
    descriptors = array.array("i")
    ancillary_bytes = socket.CMSG_LEN(DESCRIPTORS_MAX * descriptors.itemsize)
    raw, ancillary, flags, _ = sock.recvmsg(MESSAGE_BYTES_MAX, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return raw, list(descriptors), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


def raise_descriptor_limit() -> None:
    """Each slot and each connection needs two descriptors; the usual soft limit of 1024 exists for select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
