"""A client gives no snapshot to a process of another user, and what it is given to read it cannot write."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tierd_client.session import DaemonSession
from tierd_client.slots.slot import Slot

from tests.support.daemon import serving
from tests.support.other_user import OTHER_UID, OtherUser, needs_root, open_folder
from tests.support.waiting import wait_until
from tests.support.wire_peer import HELLO, DaemonPeer, Peer, welcome
from tierd.api.operator_socket import find_in_memory
from tierd.errors import WrongUser
from tierd.format import wire
from tierd.format.ids import checkpoint_id
from tierd.peer import connect_to_daemon

_listeners: list[socket.socket] = []


@pytest.fixture
def other() -> Iterator[OtherUser]:
    with OtherUser() as user:
        yield user


@pytest.fixture
def shared() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@needs_root
def test_a_daemon_of_another_user_gets_not_even_a_greeting(shared: Path, other: OtherUser) -> None:
    """Its socket is at the right path, in a directory of ours."""
    other.call(listen, str(shared / "moved.sock"))
    (shared / "ours").mkdir(mode=0o755)
    path = shared / "ours" / "tierd.sock"
    (shared / "moved.sock").rename(path)
    with pytest.raises(WrongUser, match=f"the process that listens runs as uid {OTHER_UID}, not 0"):
        DaemonSession(str(path), HELLO, timeout_s=5.0)
    with pytest.raises(WrongUser, match=f"runs as uid {OTHER_UID}"):
        find_in_memory(path, checkpoint_id("run", 1, 1))
    assert other.call(receive_all, 2) == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        connect_to_daemon(sock, str(path), OTHER_UID)  # the user that the trainer was told to expect


@needs_root
def test_a_daemon_of_another_user_that_takes_the_place_of_a_dead_one_gets_no_snapshot(
    shared: Path, other: OtherUser
) -> None:
    with DaemonPeer() as peer:
        session = peer.open()
        peer.die()
        other.call(listen, str(shared / "moved.sock"))
        (shared / "moved.sock").rename(peer.path)
        wait_until(lambda: session.refusal is not None, "the session to try the new socket")
        assert isinstance(session.refusal, WrongUser)
        assert not session.is_attached
        assert f"runs as uid {OTHER_UID}" in str(session.unreachable(""))
        session.close()
        Path(peer.path).unlink()
    assert other.call(receive_all, 1) == b""


@needs_root
def test_a_socket_in_a_directory_of_another_user_is_refused(shared: Path, other: OtherUser) -> None:
    other.call(os.mkdir, str(shared / "theirs"))
    other.call(listen, str(shared / "theirs" / "tierd.sock"))
    with pytest.raises(WrongUser, match=f"its directory belongs to uid {OTHER_UID}"):
        DaemonSession(str(shared / "theirs" / "tierd.sock"), HELLO, timeout_s=5.0)


@needs_root
def test_in_a_sticky_directory_the_owner_of_the_socket_decides(shared: Path, other: OtherUser) -> None:
    shared.chmod(0o1777)
    other.call(listen, str(shared / "tierd.sock"))
    with pytest.raises(WrongUser, match=f"the socket belongs to uid {OTHER_UID}"):
        DaemonSession(str(shared / "tierd.sock"), HELLO, timeout_s=5.0)


@pytest.mark.parametrize(("mode", "is_refused"), [(0o700, False), (0o755, False), (0o1777, False), (0o777, True)])
def test_a_directory_where_others_can_replace_the_socket_is_refused(mode: int, is_refused: bool) -> None:
    with DaemonPeer() as peer:
        Path(peer.path).parent.chmod(mode)
        if is_refused:
            with pytest.raises(WrongUser, match=rf"the mode of its directory is {mode:04o}.*chmod go-w"):
                DaemonSession(peer.path, HELLO, timeout_s=5.0)
        else:
            opening = peer.begin()
            peer.admit(welcome())
            opening.result(5.0).close()


def test_descriptors_that_are_handed_out_to_read_cannot_be_written(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon, Peer(daemon.socket) as trainer, Peer(daemon.socket) as reader:
        trainer.greet("run")
        trainer.attach(0)
        trainer.seal(0, 1, b"weights")
        trainer.hear(wire.Persisted)
        reader.greet("run", rank=None)
        for tier in ("memory", "hot"):
            reader.find(tier=tier, allow_unhealthy=True)
            manifest, shard = reader.descriptors
            assert fcntl.fcntl(shard, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
                os.pwrite(shard, b"x", 0)
            with pytest.raises(OSError, match=os.strerror(errno.EPERM)):
                os.pwrite(manifest, b"x", 0)
            assert reader.take_files()[1].startswith(b"weights")


def test_memory_of_a_slot_can_be_opened_to_write_by_its_user_alone() -> None:
    slot = Slot.create(4096)
    assert os.fstat(slot.fd).st_mode & 0o777 == 0o644
    slot.close()


def listen(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen(8)
    listener.settimeout(5.0)
    _listeners.append(listener)


def receive_all(connections: int) -> bytes:
    received = b""
    for _ in range(connections):
        connected, _ = _listeners[-1].accept()
        with connected:
            received += connected.recv(65536)
    return received
