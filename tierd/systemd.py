"""Reports the daemon's state to systemd with sd_notify(3). Where systemd did not start the daemon, does nothing."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

SEND_TIMEOUT_S = 1.0  # systemd reads at once; without a limit, a full queue would block the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Systemd:
    """`notify_socket`: a path, or `@` and an abstract name; empty: report nothing. `watchdog_s`: systemd ends the
    daemon when WATCHDOG=1 does not arrive for so long; 0: never."""

    notify_socket: str = ""
    watchdog_s: float = 0.0

    def notify(self, state: str) -> None:
        """Send one datagram. A failure is ignored: systemd acts on the absence of the message."""
        path = self.notify_socket
        if not path:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.settimeout(SEND_TIMEOUT_S)
            sock.connect("\0" + path[1:] if path.startswith("@") else path)
            sock.send(state.encode())
