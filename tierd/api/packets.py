"""Packets with descriptors over a SOCK_SEQPACKET Unix socket, for the event loop. Does not decode messages.

One packet is one message; the kernel never splits it. Received descriptors are close-on-exec. Descriptors of a
refused packet are closed, so a peer cannot exhaust the daemon's descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import stat
from collections.abc import Generator, Sequence
from pathlib import Path

from tierd.access import PRIVATE, Access
from tierd.descriptors import close_all, receive_packet, send_packet
from tierd.errors import BadConfig, BadRequest, LockHeld
from tierd.format.wire import DESCRIPTORS_MAX, MESSAGE_BYTES_MAX
from tierd.peer import is_in_group, peer_of
from tierd.tiers.tree import make_folder


class PacketConnection:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        peer = peer_of(sock)
        self.peer_pid, self.peer_uid = peer.pid, peer.uid

    def is_in_group(self, group: int | None) -> bool:
        """Whether the peer's process was in this group when it connected; None: no group."""
        return group is not None and is_in_group(self._socket, group)

    async def receive(self) -> tuple[bytes, list[int]]:
        """The next packet with its descriptors, which the caller closes; (b"", []) when the peer has disconnected.

        Raises BadRequest for a packet that is too long or has too many descriptors.
        """
        while True:
            try:
                raw, descriptors, is_complete = receive_packet(self._socket)
            except BlockingIOError:
                await self._ready()
                continue
            except ConnectionResetError:
                # Raised once when the peer died with unread messages. Packets that it sent before can still be read.
                continue
            except ConnectionError:
                return b"", []
            if not is_complete:
                close_all(descriptors)
                raise BadRequest(f"read a packet: more than {MESSAGE_BYTES_MAX} bytes or {DESCRIPTORS_MAX} descriptors")
            if not raw:  # the end of the stream, or an empty packet, which may have descriptors
                close_all(descriptors)
                return b"", []
            return raw, descriptors

    def has_ended(self) -> bool:
        """Whether the peer has closed its end, as at its death. Packets that it sent before can still be read."""
        poll = select.poll()
        poll.register(self._socket, 0)  # POLLHUP and POLLERR are always reported
        return bool(poll.poll(0))

    async def send(self, raw: bytes, descriptors: Sequence[int] = ()) -> None:
        """Raises ConnectionError when the peer has disconnected. Does not close the descriptors."""
        while True:
            try:
                return send_packet(self._socket, raw, descriptors)
            except BlockingIOError:
                await self._ready(to_write=True)

    async def _ready(self, *, to_write: bool = False) -> None:
        """Wait until the socket can be read, or written."""
        loop = asyncio.get_running_loop()
        add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)
        ready = asyncio.Event()
        add(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            remove(self._socket)

    @contextlib.contextmanager
    def ended_by_death(self) -> Generator[None]:
        """Inside, the connection ends when the peer's process does, even if a child of it still has the socket open.

        Without effect for a peer in another PID namespace, and where the kernel has no pidfd.
        """
        loop = asyncio.get_running_loop()
        try:
            process = os.pidfd_open(self.peer_pid) if self.peer_pid > 0 else -1
        except OSError:
            process = -1

        def end() -> None:
            loop.remove_reader(process)
            self.shutdown()  # packets that have arrived can still be read

        if process >= 0:
            loop.add_reader(process, end)
        try:
            yield
        finally:
            if process >= 0:
                loop.remove_reader(process)
                os.close(process)

    def shutdown(self) -> None:
        """End the connection: both sides read the end of the stream. The descriptor stays open until `close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def open_listener(path: str, access: Access = PRIVATE) -> socket.socket:
    """The daemon's listening socket, which only its own user, and the group of `access`, can connect to.

    Replaces the socket file of a dead daemon. Raises LockHeld when another daemon listens, BadConfig for a path that
    cannot be used.
    """
    try:
        make_folder(Path(path).parent, access)
    except OSError as error:
        raise BadConfig(f"listen on {path}: {error.strerror}", hint="set daemon.socket to a path of yours") from error
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise BadConfig(f"listen on {path}: the path exists and is not a socket", hint="move it away")
        if _is_answered(path):
            raise LockHeld(f"listen on {path}: another daemon listens there", hint="set another daemon.socket")
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    # umask before bind: with chmod after bind, other users could connect in between
    former = os.umask(0o177)
    try:
        listener.bind(path)
        access.share_socket(path)
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
            return True  # its backlog is full
        except OSError:
            return False
        return True
