"""File descriptors: closes many, opens all or none, reopens, reads, and passes them over a Unix socket (SCM_RIGHTS).

Imports no asyncio and decodes no message: for the daemon, the CLI and the client.
"""

from __future__ import annotations

import array
import fcntl
import os
import resource
import socket
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from tierd.errors import BadRequest
from tierd.format.wire import DESCRIPTORS_MAX, MESSAGE_BYTES_MAX

_ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@contextmanager
def closed_on_error(descriptors: Iterable[int]) -> Generator[None]:
    """Closes the descriptors, also those that are added meanwhile, if the block raises."""
    try:
        yield
    except BaseException:
        close_all(descriptors)
        raise


def open_all(opening: Iterable[int]) -> list[int]:
    """The descriptors of an iterator that opens them one by one, as `map(os.dup, descriptors)`. If it raises, those
    that it has opened are closed."""
    opened: list[int] = []
    with closed_on_error(opened):
        opened.extend(opening)  # keeps those before an error
    return opened


def reopen_read_only(fd: int) -> int:
    """A new descriptor of the same file or memory that is only open for reading. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def read_all(fd: int, offset: int, view: memoryview) -> int:
    """Fill the view from `offset`. Returns how many bytes were missing because the file ended."""
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            break
        view, offset = view[count:], offset + count
    return len(view)


def sealed_memory(name: str, content: bytes) -> int:
    """A descriptor of memory that holds `content` and never changes."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(descriptor, content, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _ALL_SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_sealed(descriptor: int, *, size_max: int) -> bytes:
    """What `sealed_memory` has made, by a process that is not trusted. Raises BadRequest for any other file: reading it
    could wait for a disk, and end early."""
    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == _ALL_SEALS
        size_bytes = os.fstat(descriptor).st_size
    except OSError:  # it is no memfd
        is_sealed, size_bytes = False, 0
    if not is_sealed or size_bytes > size_max:
        raise BadRequest(f"read a memfd of {size_bytes} bytes: expected a sealed one of {size_max} at most")
    content = bytearray(size_bytes)
    read_all(descriptor, 0, memoryview(content))
    return bytes(content)


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
