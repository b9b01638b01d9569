"""The CLI's side of the trainers' socket: asks for a checkpoint in memory, a run's nodes, a stop, or a snapshot."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import tierd
from tierd.descriptors import close_all, closed_on_error, read_sealed, receive_packet
from tierd.errors import BadRequest, DaemonUnreachable, Transient, from_kind
from tierd.format import wire
from tierd.format.ids import HOT, MEMORY, CheckpointId
from tierd.format.peers import ROSTER_BYTES_MAX, NodeAddress
from tierd.peer import connect_to_daemon

WELCOME_TIMEOUT_S = 10.0  # a daemon that is silent for longer counts as hung, as for its trainers
ANSWER_TIMEOUT_S = 60.0  # the daemon may have to read a whole snapshot for its checksums
RECEIVE_TIMEOUT_MIN_S = 0.05  # 0 would make the socket non-blocking


def find_in_memory(
    socket_path: Path, checkpoint: CheckpointId, *, daemon_uid: int | None = None, proof: str = ""
) -> tuple[bytes, list[int]]:
    """(manifest bytes, descriptors of its files in order). The caller closes the descriptors.

    Raises DaemonUnreachable, or what the daemon answers: NotFound when it is not in memory.
    """
    with _connected(socket_path, checkpoint.run, daemon_uid, proof) as sock:
        find = wire.Find(
            request=1,
            step=checkpoint.step,
            generation=checkpoint.generation,
            milestone=None,
            tier=MEMORY,
            exclude=[],
            allow_unhealthy=True,  # the caller decides
        )
        sock.send(wire.encode(find))
        descriptors = _expect(sock, wire.FoundReplica)
    if not descriptors:
        raise BadRequest(
            f"receive a checkpoint from the daemon at {socket_path}: it sent no descriptors",
            hint="has this process reached its limit of open files (ulimit -n)?",
        )
    with os.fdopen(descriptors[0], "rb") as manifest:
        return manifest.read(), descriptors[1:]


def find_nodes(socket_path: Path, run: str, *, daemon_uid: int | None = None, proof: str = "") -> list[NodeAddress]:
    """The nodes of the run, with what opens their parts, as the daemon was told by the trainers; empty if it was not.

    Raises as `find_in_memory` does."""
    with _connected(socket_path, run, daemon_uid, proof) as sock:
        sock.send(wire.encode(wire.FindNodes(request=1)))
        descriptors = _expect(sock, wire.FoundReplica)
    try:
        raw = read_sealed(descriptors[0], size_max=ROSTER_BYTES_MAX) if descriptors else b"[]"
    finally:
        close_all(descriptors)
    return msgspec.json.decode(raw, type=list[NodeAddress])


def stop_run(
    socket_path: Path, run: str, *, is_forced: bool, wait_s: float, daemon_uid: int | None = None, proof: str = ""
) -> wire.Agreed:
    """Request a stop of the run's trainers, and wait for rank 0's answer.

    Raises NotFound when no trainer of the run is connected, Transient without an answer in time (the request stays
    pending), DaemonUnreachable, or what rank 0 answers.
    """
    with _connected(socket_path, run, daemon_uid, proof) as sock:
        agreed, _ = _request(sock, run, "force" if is_forced else "stop", None, time.monotonic() + wait_s)
    return agreed


def take_snapshot(
    socket_path: Path,
    run: str,
    milestone: str | None,
    *,
    wait_s: float,
    daemon_uid: int | None = None,
    proof: str = "",
) -> tuple[wire.Agreed, str]:
    """Request a snapshot of the run, and wait until it is durable. The second value is the tier: hot, or a cold one
    when hot has no space. Raises as `stop_run` does."""
    deadline_s = time.monotonic() + wait_s
    with _connected(socket_path, run, daemon_uid, proof) as sock:
        agreed, durable = _request(sock, run, "snapshot", milestone, deadline_s)
        while (agreed.step, agreed.generation) not in durable:
            message = _receive_until(sock, deadline_s)
            if message is None:
                raise Transient(
                    f"wait for step {agreed.step} of {run}: it is sealed in memory, but not yet in the hot tier",
                    hint="wait longer with --wait; `tierd status` shows what failed",
                )
            _note_durable(durable, message)
            if isinstance(message, wire.Failed) and message.is_final and message.step == agreed.step:
                raise from_kind(message.kind, message.message, message.hint)
    return agreed, durable[agreed.step, agreed.generation]


def _note_durable(durable: dict[tuple[int, int], str], message: wire.ToClient) -> None:
    """`durable`: the tier that first had it, by (step, generation)."""
    if isinstance(message, wire.Persisted | wire.Replicated):
        tier = message.tier if isinstance(message, wire.Replicated) else HOT
        durable.setdefault((message.step, message.generation), tier)


def _request(
    sock: socket.socket, run: str, kind: str, milestone: str | None, deadline_s: float
) -> tuple[wire.Agreed, dict[tuple[int, int], str]]:
    """Rank 0's answer, and the checkpoints that became durable before it, as `_note_durable` notes them."""
    durable: dict[tuple[int, int], str] = {}
    sock.send(wire.encode(wire.Request(request=1, kind=kind, milestone=milestone)))
    while message := _receive_until(sock, deadline_s):
        if isinstance(message, wire.Agreed):
            return message, durable
        _note_durable(durable, message)
    raise Transient(
        f"request {kind} of {run}: no answer in time; the request stays pending",
        hint="ranks answer at the end of a step, when the loop calls due() or snapshot(); wait longer with --wait, or "
        "check whether the training is stuck",
    )


def _receive_until(sock: socket.socket, deadline_s: float) -> wire.ToClient | None:
    """The next message, or None after the deadline."""
    sock.settimeout(max(RECEIVE_TIMEOUT_MIN_S, deadline_s - time.monotonic()))
    try:
        message, descriptors = _receive(sock)
    except TimeoutError:
        return None
    close_all(descriptors)
    return message


@contextmanager
def _connected(socket_path: Path, run: str, daemon_uid: int | None, proof: str) -> Generator[socket.socket]:
    """A socket whose Hello was answered. `daemon_uid`: as of `connect_to_daemon`; `proof`: as of Hello. Raises
    WrongUser, WrongSecret, and DaemonUnreachable for every OSError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(WELCOME_TIMEOUT_S)
            connect_to_daemon(sock, str(socket_path), daemon_uid)
            hello = wire.Hello(
                protocol=wire.PROTOCOL_VERSION,
                version=tierd.__version__,
                run=run,
                rank=None,
                world_size=1,
                generation=None,
                proof=proof,
            )
            sock.send(wire.encode(hello))
            _expect(sock, wire.Welcome)
            sock.settimeout(ANSWER_TIMEOUT_S)
            yield sock
    except TimeoutError as error:
        raise DaemonUnreachable(
            f"talk to the daemon at {socket_path}: it does not answer",
            hint="do not start another one: `tierd status` names its process and says what to type",
        ) from error
    except OSError as error:
        raise DaemonUnreachable(
            f"talk to the daemon at {socket_path}: {error.strerror or error}", hint="is `tierd serve` running?"
        ) from error


def _expect(sock: socket.socket, kind: type[wire.Welcome | wire.FoundReplica]) -> list[int]:
    """The descriptors of the next message of this kind; Progress before it is ignored."""
    while True:
        message, descriptors = _receive(sock)
        if isinstance(message, kind):
            return descriptors
        close_all(descriptors)
        if not isinstance(message, wire.Progress):
            raise BadRequest(f"wait for {kind.__name__}: the daemon sent {type(message).__name__}")


def _receive(sock: socket.socket) -> tuple[wire.ToClient, list[int]]:
    """The next message and its descriptors. Raises the error of a Refused, and ConnectionResetError at the end."""
    raw, descriptors, _ = receive_packet(sock)
    with closed_on_error(descriptors):
        if not raw:
            raise ConnectionResetError("the daemon closed the connection")
        message = wire.decode_to_client(raw)
        if isinstance(message, wire.Refused):
            raise from_kind(message.kind, message.message, message.hint)
    return message, descriptors
