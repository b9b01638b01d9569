"""Packets with descriptors: complete or refused, and no descriptor leaks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.descriptors import no_descriptor_leaks
from tierd.api.packets import PacketConnection, open_listener
from tierd.errors import BadConfig, BadRequest, LockHeld
from tierd.format.wire import DESCRIPTORS_MAX, MESSAGE_BYTES_MAX

Pair = tuple[PacketConnection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection, and the peer's socket."""
    with no_descriptor_leaks():
        ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection = PacketConnection(ours)
        yield connection, peer
        connection.close()
        peer.close()


async def test_a_packet_is_received_with_its_descriptors(pair: Pair) -> None:
    connection, peer = pair
    read, write = os.pipe()
    socket.send_fds(peer, [b"hello"], [read, write])
    raw, descriptors = await connection.receive()
    assert (raw, len(descriptors)) == (b"hello", 2)
    os.write(descriptors[1], b"x")
    assert os.read(read, 1) == b"x"
    assert not os.get_inheritable(descriptors[0]), "child processes must not inherit them"
    for descriptor in (read, write, *descriptors):
        os.close(descriptor)


async def test_receiving_does_not_block_the_event_loop(pair: Pair) -> None:
    connection, peer = pair
    waiting = asyncio.ensure_future(connection.receive())
    await asyncio.sleep(0)
    peer.send(b"late")
    assert await waiting == (b"late", [])


async def test_a_packet_that_is_too_long_is_refused_and_its_descriptors_are_closed(pair: Pair) -> None:
    connection, peer = pair
    read, write = os.pipe()
    socket.send_fds(peer, [b"x" * (MESSAGE_BYTES_MAX + 1)], [read, write] * 20)
    with pytest.raises(BadRequest, match="more than"):
        await connection.receive()
    os.close(read)
    os.close(write)


async def test_the_descriptors_of_an_empty_packet_are_closed(pair: Pair) -> None:
    connection, peer = pair
    socket.send_fds(peer, [b""], [peer.fileno()] * DESCRIPTORS_MAX)
    assert await connection.receive() == (b"", [])


async def test_packets_of_a_killed_peer_are_still_received(pair: Pair) -> None:
    """If the peer died with unread messages, the kernel reports ECONNRESET before its last packets."""
    connection, peer = pair
    await connection.send(b"unread")
    peer.send(b"sealed")
    peer.close()
    assert await connection.receive() == (b"sealed", [])
    assert await connection.receive() == (b"", [])


async def test_sending_waits_until_the_peer_reads(pair: Pair) -> None:
    connection, peer = pair
    sent = 0

    async def send_many() -> None:
        nonlocal sent
        for _ in range(100):
            await connection.send(b"x" * 32768)
            sent += 1

    sending = asyncio.ensure_future(send_many())
    while not sent:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not sending.done()
    for _ in range(100):
        while True:
            try:
                peer.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                await asyncio.sleep(0)
    await sending


async def test_shutdown_ends_a_waiting_send(pair: Pair) -> None:
    connection, _ = pair

    async def send_for_ever() -> None:
        while True:
            await connection.send(b"x" * 32768)

    sending = asyncio.ensure_future(send_for_ever())
    await asyncio.sleep(0.01)
    connection.shutdown()
    with pytest.raises(OSError, match="pipe"):
        await sending
    connection.shutdown()


def test_credentials_come_from_the_kernel(pair: Pair) -> None:
    assert (pair[0].peer_pid, pair[0].peer_uid) == (os.getpid(), os.getuid())


# ── the listener ──


def test_the_socket_is_private_to_its_user_and_its_folder_is_created(tmp_path: Path) -> None:
    path = tmp_path / "run" / "tierd" / "tierd.sock"
    with open_listener(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_the_socket_of_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "tierd.sock")
    code = (
        f"from tierd.api.packets import open_listener; keep = open_listener({path!r}); print('up', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        with pytest.raises(LockHeld, match="another daemon listens there"):
            open_listener(path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    open_listener(path).close()


def test_a_file_that_is_not_a_socket_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("mine")
    (tmp_path / "link").symlink_to(path)
    for existing in (path, tmp_path / "link"):
        with pytest.raises(BadConfig, match="is not a socket"):
            open_listener(str(existing))
    assert path.read_text() == "mine"
    with pytest.raises(BadConfig, match="listen on"):
        open_listener(str(path / "tierd.sock"))
