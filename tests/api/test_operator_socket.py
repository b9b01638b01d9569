"""The CLI's side of the trainers' door."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, serving
from tests.support.wire_peer import Peer
from tierd.api import operator_socket as asking
from tierd.api.operator_socket import find_in_memory
from tierd.errors import BadRequest, DaemonUnreachable, NotFound
from tierd.format import wire
from tierd.format.manifest import decode


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("asked")) as found:
        yield found


def test_checkpoint_in_memory_comes_as_its_manifest_and_open_files(daemon: Daemon) -> None:
    gc.collect()  # what tests before this one have left to it
    before = len(os.listdir("/proc/self/fd"))
    with Peer(daemon.socket) as peer:
        peer.greet("run42")
        peer.attach(0)
        peer.seal(0, 7, b"seven")
        raw, descriptors = find_in_memory(daemon.socket, "run42", step=7)
        manifest = decode(raw, where="memory")
        assert (manifest.step, [os.pread(one, 5, 0) for one in descriptors]) == (7, [b"seven"])
        for one in descriptors:
            os.close(one)
        with pytest.raises(NotFound):
            find_in_memory(daemon.socket, "run42", step=8)
    assert len(os.listdir("/proc/self/fd")) == before


def test_daemon_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="tierd serve"):
        find_in_memory(tmp_path / "absent.sock", "run42")


def answering(path: Path, talk: Callable[[socket.socket], object]) -> threading.Thread:
    """Something that listens there and is no daemon."""
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


def test_news_of_progress_is_passed_by(tmp_path: Path) -> None:
    thread = answering(tmp_path / "sock", found_after_progress)
    assert find_in_memory(tmp_path / "sock", "run42") == (b"{}", [])
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
def test_answer_that_is_none_is_told_as_such(
    tmp_path: Path, talk: Callable[[socket.socket], object], error: type[Exception]
) -> None:
    thread = answering(tmp_path / "sock", talk)
    with pytest.raises(error):
        find_in_memory(tmp_path / "sock", "run42")
    thread.join()


def test_silence_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ANSWER_TIMEOUT_S", 0.05)
    done = threading.Event()
    thread = answering(tmp_path / "sock", lambda sock: done.wait(10))
    with pytest.raises(DaemonUnreachable):
        find_in_memory(tmp_path / "sock", "run42")
    done.set()
    thread.join()
