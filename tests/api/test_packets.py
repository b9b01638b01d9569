"""Packets with descriptors: whole or refused, and no descriptor is ever left behind."""

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

from tierd.api.packets import PacketConnection, open_listener
from tierd.errors import BadConfig, BadRequest, LockHeld
from tierd.format.wire import DESCRIPTORS_MAX, MESSAGE_BYTES_MAX

Pair = tuple[PacketConnection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Our end, and the peer's."""
    before = len(os.listdir("/proc/self/fd"))
    ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = PacketConnection(ours)
    yield connection, peer
    connection.close()
    peer.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_packet_comes_with_its_descriptors(pair: Pair) -> None:
    connection, peer = pair
    read, write = os.pipe()
    socket.send_fds(peer, [b"hello"], [read, write])
    raw, descriptors = await connection.receive()
    assert (raw, len(descriptors)) == (b"hello", 2)
    os.write(descriptors[1], b"x")
    assert os.read(read, 1) == b"x"
    assert not os.get_inheritable(descriptors[0]), "a child that we start must not get them"
    for descriptor in (read, write, *descriptors):
        os.close(descriptor)


async def test_receiving_waits_without_holding_up_the_loop(pair: Pair) -> None:
    connection, peer = pair
    waiting = asyncio.ensure_future(connection.receive())
    await asyncio.sleep(0)
    peer.send(b"late")
    assert await waiting == (b"late", [])


async def test_packet_that_is_too_long_is_refused_with_its_descriptors_closed(pair: Pair) -> None:
    connection, peer = pair
    read, write = os.pipe()
    socket.send_fds(peer, [b"x" * (MESSAGE_BYTES_MAX + 1)], [read, write] * 20)
    with pytest.raises(BadRequest, match="more than"):
        await connection.receive()
    os.close(read)
    os.close(write)


async def test_empty_packet_with_descriptors_leaves_none_open(pair: Pair) -> None:
    connection, peer = pair
    socket.send_fds(peer, [b""], [peer.fileno()] * DESCRIPTORS_MAX)
    assert await connection.receive() == (b"", [])


async def test_what_a_killed_peer_had_sent_is_still_read(pair: Pair) -> None:
    """With messages of ours unread in its socket, the kernel says ECONNRESET first; the sealed snapshot comes after."""
    connection, peer = pair
    await connection.send(b"unread")
    peer.send(b"sealed")
    peer.close()
    assert await connection.receive() == (b"sealed", [])
    assert await connection.receive() == (b"", [])


async def test_sending_to_a_peer_that_does_not_read_waits_until_it_does(pair: Pair) -> None:
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


async def test_shutdown_ends_a_send_that_waits(pair: Pair) -> None:
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


def test_credentials_are_those_of_the_kernel(pair: Pair) -> None:
    assert (pair[0].peer_pid, pair[0].peer_uid) == (os.getpid(), os.getuid())


# ── the listener ──


def test_socket_is_its_owners_alone_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "run" / "tierd" / "tierd.sock"
    with open_listener(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_socket_of_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "tierd.sock")
    code = (
        f"from tierd.api.packets import open_listener; keep = open_listener({path!r}); print('up', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        with pytest.raises(LockHeld, match="another daemon answers there"):
            open_listener(path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    open_listener(path).close()


def test_what_is_no_socket_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("mine")
    (tmp_path / "link").symlink_to(path)
    for one in (path, tmp_path / "link"):
        with pytest.raises(BadConfig, match="no socket"):
            open_listener(str(one))
    assert path.read_text() == "mine"
    with pytest.raises(BadConfig, match="listen on"):
        open_listener(str(path / "tierd.sock"))
