"""Packets with descriptors over a SOCK_SEQPACKET Unix socket, for the event loop. Knows no messages.

One packet is one message; the kernel keeps it whole. Descriptors come close-on-exec, and those of a packet that
is refused are closed: a peer can neither exhaust ours nor make us map what it pleases.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Sequence

from tierd.errors import BadRequest
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
                raw, descriptors, flags, _ = socket.recv_fds(
                    self._socket, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await self._readable()
                continue
            except ConnectionError:
                return b"", []
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                for descriptor in descriptors:
                    os.close(descriptor)
                raise BadRequest(f"read a packet: more than {MESSAGE_BYTES_MAX} bytes or {DESCRIPTORS_MAX} descriptors")
            return raw, list(descriptors)

    async def send(self, raw: bytes, descriptors: Sequence[int] = ()) -> None:
        """Raises ConnectionError when the peer has gone. The descriptors stay the caller's."""
        while True:
            try:
                socket.send_fds(self._socket, [raw], descriptors, socket.MSG_NOSIGNAL)
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
