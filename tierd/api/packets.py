"""Packets with descriptors over a SOCK_SEQPACKET Unix socket, for the event loop. Knows no messages.

One packet is one message; the kernel keeps it whole. Descriptors come close-on-exec, and those of a packet that
is refused are closed: a peer can neither exhaust ours nor make us map what it pleases.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

from tierd.errors import BadConfig, BadRequest, LockHeld
from tierd.format.wire import DESCRIPTORS_MAX, MESSAGE_BYTES_MAX

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class PacketConnection:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.peer_pid, self.peer_uid, _ = _CREDENTIALS.unpack(raw)

    async def receive(self) -> tuple[bytes, list[int]]:
        """The next packet with its descriptors, which the taker closes; (b"", []) when the peer has gone.

        Raises BadRequest for a packet that is too long or has too many descriptors.
        """
        while True:
            try:
                raw, descriptors, flags = receive_packet(self._socket)
            except BlockingIOError:
                await self._readable()
                continue
            except ConnectionResetError:
                # Said once when the peer has died with messages unread. What it had sent before is still here.
                continue
            except ConnectionError:
                return b"", []
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                _close(descriptors)
                raise BadRequest(f"read a packet: more than {MESSAGE_BYTES_MAX} bytes or {DESCRIPTORS_MAX} descriptors")
            if not raw:  # the end; an empty packet, which nobody sends, reads the same but for its descriptors
                _close(descriptors)
                return b"", []
            return raw, descriptors

    async def send(self, raw: bytes, descriptors: Sequence[int] = ()) -> None:
        """Raises ConnectionError when the peer has gone. The descriptors stay the caller's."""
        while True:
            try:
                self._socket.sendmsg([raw], _rights(descriptors), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                await self._writable()
            else:
                return

    def shutdown(self) -> None:
        """End the conversation: both sides read the end. The descriptor stays open until `close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._socket)

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._socket)


def receive_packet(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """(packet, its descriptors, the kernel's flags). Not socket.recv_fds: it ignores the flags that it is given."""
    descriptors = array.array("i")
    space = socket.CMSG_LEN(DESCRIPTORS_MAX * descriptors.itemsize)
    raw, ancillary, flags, _ = sock.recvmsg(MESSAGE_BYTES_MAX, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return raw, list(descriptors), flags


def _rights(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def open_listener(path: str) -> socket.socket:
    """The daemon's socket, open to its own user alone from the first instant.

    A stale file of a dead daemon is replaced; anything that is no socket is refused.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadConfig(f"listen on {path}: {error.strerror}", hint="set daemon.socket to a path of yours") from error
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise BadConfig(f"listen on {path}: something that is no socket is there", hint="move it away")
        if _is_answered(path):
            raise LockHeld(f"listen on {path}: another daemon answers there", hint="set another daemon.socket")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    # umask before bind, not chmod after: there is no instant in which others may connect
    former = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise BadConfig(f"listen on {path}: {error.strerror}", hint="set daemon.socket to a path of yours") from error
    finally:
        os.umask(former)
    listener.listen(128)
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its backlog is full: someone lives there
        except OSError:
            return False
        return True
