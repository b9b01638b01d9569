"""The CLI's side of the trainers' socket: asks a running daemon for a checkpoint in memory, or a run for something."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import tierd
from tierd.api.packets import receive_packet
from tierd.errors import BadRequest, DaemonUnreachable, Transient, from_kind
from tierd.format import wire

ANSWER_TIMEOUT_S = 60.0  # the daemon may have to read a whole snapshot once for its checksums
LOOK_MIN_S = 0.05


def find_in_memory(
    socket_path: Path, run: str, step: int | None = None, generation: int | None = None
) -> tuple[bytes, list[int]]:
    """(manifest bytes, descriptors of its files in order). The taker closes the descriptors.

    Raises DaemonUnreachable, or what the daemon answers: NotFound when nothing of the run is in memory.
    """
    with _greeted(socket_path, run) as sock:
        find = wire.Find(
            request=1,
            step=step,
            generation=generation,
            milestone=None,
            tier="memory",
            exclude=[],
            allow_unhealthy=True,  # who asks by step has decided that
        )
        sock.send(wire.encode(find))
        descriptors = _expect(sock, wire.FoundReplica)
    if not descriptors:
        raise BadRequest(
            f"ask the daemon at {socket_path}: it sent no descriptors",
            hint="has this process any left? see ulimit -n",
        )
    with os.fdopen(descriptors[0], "rb") as manifest:
        return manifest.read(), descriptors[1:]


def stop_run(socket_path: Path, run: str, *, is_forced: bool, wait_s: float) -> wire.Agreed:
    """Ask the run's trainers to stop, and wait for rank 0's answer.

    Raises NotFound when no trainer of the run is attached, Transient when there is no answer in time (what was asked
    for stays so), DaemonUnreachable, or what rank 0 answers.
    """
    with _greeted(socket_path, run) as sock:
        agreed, _ = _request(sock, run, "force" if is_forced else "stop", None, time.monotonic() + wait_s)
    return agreed


def take_snapshot(socket_path: Path, run: str, milestone: str | None, *, wait_s: float) -> wire.Agreed:
    """Ask the run's trainers for a snapshot, and wait until it is durable. Raises as `stop_run` does."""
    deadline_s = time.monotonic() + wait_s
    with _greeted(socket_path, run) as sock:
        agreed, heard = _request(sock, run, "snapshot", milestone, deadline_s)
        while (agreed.step, agreed.generation) not in heard:
            message = _hear(sock, deadline_s)
            if message is None:
                raise Transient(
                    f"wait for step {agreed.step} of {run}: sealed in memory, and not in the hot tier in time",
                    hint="`tierd status` says what has gone wrong",
                )
            if isinstance(message, wire.Persisted):
                heard.add((message.step, message.generation))
            if isinstance(message, wire.Failed) and message.is_final and message.step == agreed.step:
                raise from_kind(message.kind, message.message, message.hint)
    return agreed


def _request(
    sock: socket.socket, run: str, kind: str, milestone: str | None, deadline_s: float
) -> tuple[wire.Agreed, set[tuple[int, int]]]:
    """Rank 0's answer, and (step, generation) of what became durable before it came."""
    heard: set[tuple[int, int]] = set()
    sock.send(wire.encode(wire.Request(request=1, kind=kind, milestone=milestone)))
    while message := _hear(sock, deadline_s):
        if isinstance(message, wire.Agreed):
            return message, heard
        if isinstance(message, wire.Persisted):
            heard.add((message.step, message.generation))
    raise Transient(
        f"ask {run} for {kind}: no answer in time; it is still asked for",
        hint="ranks answer at the end of a step, when the loop calls due() or snapshot(); wait longer with --wait, or "
        "is the training stuck?",
    )


def _hear(sock: socket.socket, deadline_s: float) -> wire.ToClient | None:
    """The next message that is no refusal; None when it is too late for one."""
    sock.settimeout(max(LOOK_MIN_S, deadline_s - time.monotonic()))
    try:
        raw, descriptors, _ = receive_packet(sock)
    except TimeoutError:
        return None
    for descriptor in descriptors:
        os.close(descriptor)
    if not raw:
        raise ConnectionResetError("the daemon closed the connection")
    message = wire.decode_to_client(raw)
    if isinstance(message, wire.Refused):
        raise from_kind(message.kind, message.message, message.hint)
    return message


@contextmanager
def _greeted(socket_path: Path, run: str) -> Generator[socket.socket]:
    """A socket whose Hello was answered. What goes wrong on it, but for a time that is over, is DaemonUnreachable."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(ANSWER_TIMEOUT_S)
            sock.connect(str(socket_path))
            hello = wire.Hello(
                protocol=wire.PROTOCOL_VERSION,
                version=tierd.__version__,
                run=run,
                rank=None,
                world_size=1,
                generation=None,
            )
            sock.send(wire.encode(hello))
            _expect(sock, wire.Welcome)
            yield sock
    except OSError as error:
        raise DaemonUnreachable(
            f"ask the daemon at {socket_path}: {error}", hint="is `tierd serve` running?"
        ) from error


def _expect(sock: socket.socket, kind: type[wire.Welcome | wire.FoundReplica]) -> list[int]:
    while True:
        raw, descriptors, _ = receive_packet(sock)
        if not raw:
            raise ConnectionResetError("the daemon closed the connection")
        message = wire.decode_to_client(raw)
        if isinstance(message, kind):
            return descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(message, wire.Refused):
            raise from_kind(message.kind, message.message, message.hint)
        if not isinstance(message, wire.Progress):
            raise BadRequest(f"wait for {kind.__name__}: the daemon said {type(message).__name__}")
