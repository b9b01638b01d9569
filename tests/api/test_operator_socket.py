"""The CLI's side of the trainers' socket."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, serving
from tests.support.descriptors import no_descriptor_leaks
from tests.support.wire_peer import Peer
from tierd.api import operator_socket
from tierd.api.operator_socket import find_in_memory
from tierd.errors import BadRequest, DaemonUnreachable, NotFound
from tierd.format import wire
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import decode


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("asked")) as daemon:
        yield daemon


def test_a_checkpoint_in_memory_is_received_as_its_manifest_and_open_files(daemon: Daemon) -> None:
    with no_descriptor_leaks(), Peer(daemon.socket) as peer:
        generation = peer.greet("run42").generation
        peer.attach(0)
        peer.seal(0, 7, b"seven")
        raw, descriptors = find_in_memory(daemon.socket, checkpoint_id("run42", 7, generation))
        manifest = decode(raw, where="memory")
        assert (manifest.step, [os.pread(descriptor, 5, 0) for descriptor in descriptors]) == (7, [b"seven"])
        for descriptor in descriptors:
            os.close(descriptor)
        with pytest.raises(NotFound):
            find_in_memory(daemon.socket, checkpoint_id("run42", 8, generation))


def test_an_absent_daemon_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="tierd serve"):
        find_in_memory(tmp_path / "absent.sock", CHECKPOINT)


def answer_with(path: Path, talk: Callable[[socket.socket], object]) -> threading.Thread:
    """A socket that is not a daemon's: it receives one message, then calls `talk`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            sock.recv(65536)
            talk(sock)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


CHECKPOINT = checkpoint_id("run42", 7, 1)
NO_DESCRIPTORS = wire.encode(wire.FoundReplica(request=1, tier="memory"))
REFUSED = wire.encode(wire.Refused(request=0, kind="not_found", message="x", hint=""))
WELCOME = wire.encode(
    wire.Welcome(
        protocol=1,
        version="test",
        node="here",
        boot="x",
        generation=0,
        slots=[],
        every_steps=0,
        every_s=0,
        slots_per_rank=2,
        slot_wait_s=1,
        when_busy="wait",
    )
)


def found_after_progress(sock: socket.socket) -> None:
    sock.send(WELCOME)
    sock.recv(65536)
    for done in range(3):
        sock.send(wire.encode(wire.Progress(request=1, done_bytes=done, total_bytes=3)))
    read, write = os.pipe()
    os.write(write, b"{}")
    os.close(write)
    socket.send_fds(sock, [wire.encode(wire.FoundReplica(request=1, tier="memory"))], [read])
    os.close(read)


def test_progress_messages_are_ignored(tmp_path: Path) -> None:
    thread = answer_with(tmp_path / "sock", found_after_progress)
    assert find_in_memory(tmp_path / "sock", CHECKPOINT) == (b"{}", [])
    thread.join()


@pytest.mark.parametrize(
    ("talk", "error"),
    [
        (lambda sock: None, DaemonUnreachable),
        (lambda sock: sock.send(b"\xff\xff"), BadRequest),
        (lambda sock: sock.send(wire.encode(wire.Fenced(generation=1))), BadRequest),
        (lambda sock: sock.send(REFUSED), NotFound),
        (lambda sock: (sock.send(WELCOME), sock.send(NO_DESCRIPTORS), sock.recv(99)),
         BadRequest),
    ],
    ids=["hangs up", "garbage", "another message", "refusal", "no descriptors"],
)  # fmt: skip
def test_an_invalid_answer_raises_a_typed_error(
    tmp_path: Path, talk: Callable[[socket.socket], object], error: type[Exception]
) -> None:
    thread = answer_with(tmp_path / "sock", talk)
    with pytest.raises(error):
        find_in_memory(tmp_path / "sock", CHECKPOINT)
    thread.join()


def test_a_daemon_that_does_not_answer_is_unreachable_after_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_socket, "WELCOME_TIMEOUT_S", 0.05)
    done = threading.Event()
    thread = answer_with(tmp_path / "sock", lambda sock: done.wait(10))
    with pytest.raises(DaemonUnreachable, match=r"does not answer .*do not start another one"):
        find_in_memory(tmp_path / "sock", CHECKPOINT)
    done.set()
    thread.join()
