"""`tierd doctor` on one of several nodes: whether cold is shared, the partner's port, clock and lifecycle."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

from tests.support.daemon import Daemon
from tests.support.handmade_nodes import handmade_nodes
from tests.support.waiting import wait_until
from tierd.format import layout, wire
from tierd.format.ids import Generation, Rank, Run
from tierd.format.peers import PeerAddress


def doctor(daemon: Daemon, about: str) -> dict[str, tuple[str, str]]:
    """By check: the verdict and the message."""
    found: list[dict[str, Any]] = json.loads(daemon.tierd("doctor", "--json").stdout)
    return {one["check"]: (one["verdict"], one["message"]) for one in found if one["about"] == about}


def test_cold_that_the_other_nodes_do_not_write_to_is_named(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 2) as nodes:
        daemon = nodes.daemons[1]
        verdict, message = doctor(daemon, "cold")["shared"]
        assert (verdict, message) == ("ok", "it has the claim of generation 1 of run, as for all nodes of the run")
        # The tier is another directory now; where its config is read again, the trainers have joined long ago.
        daemon.config.write_text(daemon.config.read_text().replace(str(tmp_path / "cold"), str(tmp_path / "own")))
        (tmp_path / "own").mkdir()
        verdict, message = doctor(daemon, "cold")["shared"]
        assert (verdict, message) == (
            "warning",
            "cold has no claim of generation 1 of run, whose ranks are on several nodes",
        )
        claim = layout.generation_key(Run("run"), Generation(1)).rpartition("/")[2]
        (tmp_path / "own" / "run").mkdir()
        content = json.loads((tmp_path / "cold" / "run" / claim).read_text()) | {"claim": "0" * 32, "node": "n7"}
        (tmp_path / "own" / "run" / claim).write_text(json.dumps(content))
        verdict, message = doctor(daemon, "cold")["shared"]
        assert (verdict, message) == ("problem", "cold has a claim of generation 1 of run by another start, on n7")


def status_of(daemon: Daemon) -> Any:
    (run,) = daemon.status()["runs"]
    return run["nodes"]


@contextmanager
def partner(answer: bytes) -> Generator[str]:
    """The address of a server that answers every request so."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def refusal(hours: float) -> bytes:
    date = format_datetime(datetime.now(UTC) + timedelta(hours=hours), usegmt=True)
    return f"HTTP/1.1 401 Unauthorized\r\nDate: {date}\r\nContent-Length: 0\r\n\r\n".encode()


def test_clock_of_the_partner_that_is_wrong_is_named(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 2) as nodes:
        daemon = nodes.daemons[0]
        assert "clock" not in doctor(daemon, "peers")
        assert doctor(daemon, "peers")["partner"][0] == "ok"
        name = layout.node_file_name(Rank(1), 2)
        for answer, said in (
            (refusal(1.0), "ahead of the one here"),
            (refusal(-1.0), "behind the one here"),
            (b"HTTP/1.1 401 Unauthorized\r\nDate: yesterday\r\n\r\n", ""),
            (b"HTTP/1.1 401 Unauthorized\r\nDate: Mon, 01 Jan 2026 00:00:00 +" + b"9" * 20 + b"\r\n\r\n", ""),
            (b"\0" * 100, ""),
            (b"", ""),
        ):
            with partner(answer) as address:
                told = wire.Partner(peer=PeerAddress(address=address, token="0"), node_file=name)
                nodes.ranks[0].send(told)
                wait_until(lambda at=address: status_of(daemon)["partner"]["address"] == at, "the daemon to note it")
                found = doctor(daemon, "peers")
                assert address in found["partner"][1]
                assert found["partner"][0] == "ok"
                assert bool(said) == ("clock" in found)
                if said:
                    verdict, message = found["clock"]
                    assert verdict == "warning"
                    assert message.startswith(f"the clock of the node at {address} is ")
                    assert message.endswith(said)


def test_a_partner_that_is_stopped_or_gone_is_a_problem(tmp_path: Path) -> None:
    """The kernel goes on accepting connections for a process that is stopped."""
    with handmade_nodes(tmp_path, 2) as nodes:
        daemon, other = nodes.daemons
        other.signal(signal.SIGSTOP)
        verdict, message = doctor(daemon, "peers")["partner"]
        assert verdict == "problem"
        assert message.endswith("cannot be read: it is connected, and answers nothing within 3 s")
        other.signal(signal.SIGCONT)
        other.kill()
        verdict, message = doctor(daemon, "peers")["partner"]
        assert verdict == "problem"
        assert message.endswith("cannot be read: connection refused")
