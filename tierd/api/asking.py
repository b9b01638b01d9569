"""Asks a running daemon for a checkpoint in its memory tier, over its socket: for `tierd restore --tier memory`."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import tierd
from tierd.api.packets import receive_packet
from tierd.errors import BadRequest, DaemonUnreachable, from_kind
from tierd.format import wire

ANSWER_TIMEOUT_S = 60.0  # the daemon may have to read a whole snapshot once for its checksums


def find_in_memory(
    socket_path: Path, run: str, step: int | None = None, generation: int | None = None
) -> tuple[bytes, list[int]]:
    """(manifest bytes, descriptors of its files in order). The taker closes the descriptors.

    Raises DaemonUnreachable, or what the daemon answers: NotFound when nothing of the run is in memory.
    """
    unreachable = f"ask the daemon at {socket_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(ANSWER_TIMEOUT_S)
        try:
            sock.connect(str(socket_path))
            sock.send(
                wire.encode(
                    wire.Hello(
                        protocol=wire.PROTOCOL_VERSION,
                        version=tierd.__version__,
                        run=run,
                        rank=None,
                        world_size=1,
                        generation=None,
                    )
                )
            )
            _expect(sock, wire.Welcome)
            sock.send(
                wire.encode(
                    wire.Find(request=1, step=step, generation=generation, milestone=None, tier="memory", exclude=[])
                )
            )
            descriptors = _expect(sock, wire.Found)
        except OSError as error:
            raise DaemonUnreachable(f"{unreachable}: {error}", hint="is `tierd serve` running?") from error
    if not descriptors:
        raise BadRequest(f"{unreachable}: it sent no descriptors", hint="has this process any left? see ulimit -n")
    with os.fdopen(descriptors[0], "rb") as manifest:
        return manifest.read(), descriptors[1:]


def _expect(sock: socket.socket, kind: type[wire.Welcome | wire.Found]) -> list[int]:
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
