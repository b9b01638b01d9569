"""All ranks of one run, spoken by hand in the test's process, that continue after each death of their daemon.

As the client does, they connect again and send again what the daemon has not acknowledged; or they start anew, as after
their own death: with a new generation, from what a restore gives them.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from typing import Any, TypeVar

from tests.support.kills import shards
from tests.support.kills.audit import COLD, Audit, checkpoint_of
from tests.support.kills.daemon import Gone
from tests.support.simulation.checker import Id
from tests.support.slots import make_memfd, make_sealed
from tests.support.wire_peer import Peer
from tierd.format import wire

M = TypeVar("M", bound=wire.ToClient)
SLOTS = 2
MILESTONE_EVERY = 7


class Ranks:
    """Tells the audit what the daemon says. `is_replicated`: each step waits until the cold tier has it."""

    def __init__(self, audit: Audit, *, is_replicated: bool) -> None:
        self._audit = audit
        self._is_replicated = is_replicated
        self._peers: list[Peer] = []
        self._sizes = [len(shards.encode(bytes(size))) for size in audit.sizes]
        self._slots = [[make_memfd(size) for _ in range(SLOTS)] for size in self._sizes]
        self._generation: int | None = None
        self._step = 0
        self._unanswered: int | None = None  # the step that is staged and not acknowledged

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()
        for descriptor in (descriptor for slots in self._slots for descriptor in slots):
            os.close(descriptor)

    def disconnect(self) -> None:
        for peer in self._peers:
            peer.close()
        self._peers = []

    # ── what raises Gone when the daemon dies ──

    def connect(self, path: str, *, anew: bool = False) -> None:
        """`anew`: as a trainer that was killed too."""
        self.disconnect()
        claims = anew or self._generation is None
        if claims:
            self._generation, self._unanswered = None, None
        for rank in range(len(self._sizes)):
            try:
                self._peers.append(Peer(path))
            except OSError as error:
                raise Gone from error
            world_size = len(self._sizes)
            hello = wire.Hello(
                protocol=wire.PROTOCOL_VERSION,
                version="test",
                run=self._audit.run,
                rank=rank,
                world_size=world_size,
                generation=self._generation,
            )
            self._send(rank, hello)
            welcome = self._hear(rank, wire.Welcome)
            if self._generation is None:
                self._generation = welcome.generation
                self._audit.claim(welcome.generation)
        if claims:
            self._restore()
        for rank, slots in enumerate(self._slots):
            for index, descriptor in enumerate(slots):
                self._send(rank, wire.AttachSlot(slot=index, capacity_bytes=self._sizes[rank]), descriptor)
        if self._unanswered is not None:
            self._seal(self._unanswered, resent=True)

    def step(self) -> None:
        """Takes a snapshot, unless one is not acknowledged yet, and waits until the daemon says that it is durable."""
        if self._unanswered is None:
            self._step += 1
            self._unanswered = self._step
            for rank, size_bytes in enumerate(self._audit.sizes):
                index = self._step % SLOTS
                content = shards.weight(self._audit.run, self._now.generation, self._step, rank, size_bytes)
                self._send(rank, wire.Filling(slot=index, step=self._step))
                os.pwrite(self._slots[rank][index], shards.encode(content), 0)
            self._seal(self._step, resent=False)
        step = self._unanswered
        while self._hear(0, wire.Persisted).step != step:
            pass
        self._audit.acknowledged.add(self._now)
        self._unanswered = None
        self._send(0, wire.Ask(step=step, generation=self._now.generation))  # as a client whose answer was lost
        if self._is_replicated:
            while self._now not in self._audit.replicated:
                self._hear(0, wire.Replicated)
        for peer in self._peers[1:]:
            _discard(peer)

    @property
    def _now(self) -> Id:
        assert self._generation is not None
        return self._audit.id(self._generation, self._step)

    def _seal(self, step: int, *, resent: bool) -> None:
        milestone = f"at-{step}" if step % MILESTONE_EVERY == 0 else None
        if milestone:
            self._audit.milestones.add(self._now)
        for rank, size_bytes in enumerate(self._sizes):
            sealed = make_sealed(step, size_bytes, slot=step % SLOTS, milestone=milestone, resent=resent)
            self._send(rank, sealed)

    def _restore(self) -> None:
        least = max(self._audit.acknowledged, default=None)
        find = wire.Find(request=1, step=None, generation=None, milestone=None, tier="auto", exclude=[])
        self._send(0, find)
        if self._hear(0, wire.FoundReplica, or_not_found=True) is None:
            self._audit.restored(None, [], least)
            self._step = 0
            return
        manifest, *files = self._peers[0].take_files()
        checkpoint = checkpoint_of(manifest)
        self._audit.restored(checkpoint, files, least)
        self._step = checkpoint.step

    def _send(self, rank: int, message: wire.ToDaemon, *descriptors: int) -> None:
        try:
            self._peers[rank].send(message, *descriptors)
        except OSError as error:
            raise Gone from error

    def _hear(self, rank: int, kind: type[M], *, or_not_found: bool = False) -> M | Any:
        """The next message of this kind, or with `or_not_found` None where there is no checkpoint."""
        peer = self._peers[rank]
        while True:
            try:
                raw, descriptors, _, _ = socket.recv_fds(peer.socket, wire.MESSAGE_BYTES_MAX, wire.DESCRIPTORS_MAX)
            except ConnectionError as error:
                raise Gone from error
            if not raw:
                raise Gone
            message = wire.decode_to_client(raw)
            if isinstance(message, wire.Replicated) and message.tier == COLD:
                self._audit.replicated.add(self._audit.id(message.generation, message.step))
            if isinstance(message, kind):
                peer.descriptors = list(descriptors)
                return message
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(message, wire.Refused):
                assert or_not_found, message
                assert message.kind == "not_found", message
                return None


def _discard(peer: Peer) -> None:
    """Reads what has arrived, so that the daemon does not disconnect a rank that does not listen."""
    with suppress(ConnectionError):
        while select.select([peer.socket], [], [], 0)[0] and peer.socket.recv(wire.MESSAGE_BYTES_MAX):
            pass
