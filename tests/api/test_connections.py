"""Many connections, and peers that die in a conversation: the daemon serves the others and keeps nothing of them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, serving
from tests.support.processes import ForkedProcess
from tests.support.slots import PAGE_BYTES
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.format import wire

IDLE = 1000
AT_ONCE = 25  # the daemon accepts them later: more would not fit into the queue of its socket


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with serving(tmp_path, more=f"connections_max = {IDLE + 2}\nhello_timeout_s = 60.0") as daemon:
        yield daemon
        assert "Traceback" not in daemon.log, daemon.log


@pytest.mark.long
def test_a_thousand_idle_connections_delay_no_trainer_and_one_too_many_is_refused(daemon: Daemon) -> None:
    before = daemon.descriptors()
    with ExitStack() as stack:
        for _ in range(IDLE // 2 // AT_ONCE):
            greeted: list[Peer] = []
            for _ in range(AT_ONCE):
                silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                silent.connect(daemon.socket)  # and not even a Hello
                peer = stack.enter_context(Peer(daemon.socket))
                peer.send(peer.hello("run", rank=None))
                greeted.append(peer)
            for peer in greeted:
                peer.hear(wire.Welcome)
        trainer = stack.enter_context(Peer(daemon.socket))
        trainer.greet("run")
        trainer.attach(0)
        trainer.seal(0, 1, b"one")
        assert trainer.hear(wire.Persisted).step == 1

        last, refused = stack.enter_context(Peer(daemon.socket)), stack.enter_context(Peer(daemon.socket))
        assert last.greet("run", rank=None)
        assert refused.is_dropped()
        assert not refused.heard
        trainer.send(wire.Ask(step=1, generation=1))
        assert trainer.hear(wire.Persisted).step == 1
    wait_until(lambda: daemon.descriptors() <= before + 3, "the descriptors to be closed")  # 3: the slot's


def die(path: str, run: str, how: str) -> None:
    """Runs in a process of its own, as a trainer that is killed after some messages."""
    peer = Peer(path)
    peer.greet(run)
    peer.attach(0, size_bytes=256 * PAGE_BYTES)
    if how != "attached":
        peer.send(wire.Filling(slot=0, step=1))
        os.pwrite(peer.slots[0], b"half", 0)
    if how == "asked":
        peer.send(wire.Find(request=1, step=None, generation=None, milestone=None, tier="auto", exclude=[]))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["attached", "filling", "asked"])
def test_trainers_that_die_after_sending_a_descriptor_leave_one_slot(daemon: Daemon, how: str) -> None:
    """The last slot stays for the next start, which here replaces it. Three descriptors: the memfd, its mapping, and
    the pidfd of its writer."""
    before = daemon.descriptors()
    for _ in range(3):
        process = ForkedProcess(die, daemon.socket, "run", how)
        assert process.wait() == -signal.SIGKILL
        wait_until(lambda: daemon.status()["runs"][0]["ranks_attached"] == 0, "the daemon to notice the death")
    wait_until(lambda: daemon.descriptors() <= before + 3, "the descriptors to be closed")
    assert daemon.status()["slots"] == {"free": 1, "filling": 0, "sealed": 0, "persisting": 0, "retained": 0}
    assert daemon.steps("hot", "run") == []
    with Peer(daemon.socket) as next_start:
        assert [(kept.slot, kept.is_free) for kept in next_start.greet("run").slots] == [(0, True)]
        os.close(next_start.descriptors.pop())
