"""What the tests of the daemon share: a real `tierd serve` process, and a peer that speaks the wire to it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tierd.config import ColdConfig, Config, DaemonConfig, HealthConfig, HotConfig, LimitsConfig
from tierd.format import wire
from tierd.memory.slot import MappedSlot
from tierd.memory.slot_states import SlotEvent, SlotState

DEADLINE_S = 60.0
CREATED_AT = "2025-01-01T00:00:00.000+00:00"
PAGE_BYTES = 4096

M = TypeVar("M", bound=wire.ToClient)


def make_config(root: Path, *, cold: tuple[str, ...] = ("cold",), **sections: Any) -> Config:
    """Everything below `root`, patient nowhere. Nobody looks for NaN: what these tests seal are plain bytes."""
    found = Config(
        daemon=DaemonConfig(socket=str(root / "tierd.sock"), listen="127.0.0.1:0", node="here", drain_timeout_s=10.0),
        hot=HotConfig(path=str(root / "hot")),
        cold=[ColdConfig(name=name, url=f"file://{root / name}") for name in cold],
        health=HealthConfig(examine=False),
        limits=LimitsConfig(hello_timeout_s=2.0, reconcile_interval_s=0.2, retry_min_s=0.05, retry_max_s=0.2),
    )
    return msgspec.structs.replace(found, **sections)


def wait_until(is_so: Callable[[], object], what: str = "", timeout_s: float = DEADLINE_S) -> None:
    """Looks again and again, for what another process does cannot be waited for otherwise."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.01)


# ── slots ──


def make_memfd(size_bytes: int, *, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    descriptor = os.memfd_create("slot", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def make_slot(
    content: bytes = b"", *, capacity_bytes: int = 4 * PAGE_BYTES, state: SlotState = SlotState.FREE
) -> MappedSlot:
    """A slot of real memory in a state that real events have led to."""
    descriptor = make_memfd(capacity_bytes)
    os.pwrite(descriptor, content, 0)
    slot = MappedSlot(descriptor, capacity_bytes)
    way = {
        SlotState.FREE: [],
        SlotState.FILLING: [SlotEvent.FILL],
        SlotState.SEALED: [SlotEvent.FILL, SlotEvent.SEAL],
    }
    for event in way[state]:
        slot.move(event)
    return slot


def make_sealed(step: int, size_bytes: int = 100, *, slot: int = 0, **fields: Any) -> wire.Sealed:
    plain: dict[str, Any] = {
        "slot": slot,
        "step": step,
        "size_bytes": size_bytes,
        "created_at": CREATED_AT,
        "stall_s": 0.01,
        "metrics": {"loss": 2.5},
        "milestone": None,
        "parent": None,
        "architecture_hash": "0123",
        "versions": {"tierd": "test"},
        "resent": False,
    }
    return wire.Sealed(**plain | fields)


# ── the daemon ──


class Daemon:
    """A `tierd serve` of its own."""

    def __init__(
        self,
        root: Path,
        *,
        more: str = "",
        environ: dict[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "tierd"),
    ) -> None:
        self.root = root
        self.socket = root / "tierd.sock"
        self.hot = root / "hot"
        self.config = root / "tierd.toml"
        self.config.write_text(
            f"""
            [daemon]
            socket = "tierd.sock"
            listen = "127.0.0.1:0"
            node = "here"
            drain_timeout_s = 10.0
            [hot]
            path = "hot"
            [limits]
            hello_timeout_s = 2.0
            reconcile_interval_s = 0.2
            retry_min_s = 0.05
            retry_max_s = 0.2
            {more}
            """
        )
        # A file, for a pipe that nobody reads would fill and stop the daemon.
        self._log = root / f"log-{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "--config", str(self.config), "serve"],
                stderr=log,
                # Nobody looks through the tiers by chance where a test damages them.
                env={**os.environ, "TIERD_SCRUB_INTERVAL_S": "0", **(environ or {})},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> Daemon:
        self.wait_log(" serves ")
        self.address = self.log.partition("http://")[2].split()[0]
        return self

    def wait_log(self, said: str) -> None:
        wait_until(lambda: said in self.log or self.process.poll() is not None, f"for {said!r} in:\n{self.log}")
        assert said in self.log, f"the daemon ended with {self.process.returncode}:\n{self.log}"

    def get(self, path: str) -> tuple[int, bytes, str]:
        """(status, body, content type)"""
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=DEADLINE_S) as answer:
                return answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers["Content-Type"]

    def json(self, path: str) -> Any:
        return json.loads(self.get(path)[1])

    def status(self) -> Any:
        return self.json("/api/v1/status")

    def metric(self, name: str) -> float:
        lines = self.get("/metrics")[1].decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), math.nan)

    def checkpoints(self, run: str, tier: str) -> list[int]:
        """Steps of the run in the tier, newest first."""
        rows = self.json(f"/api/v1/checkpoints?run={run}")
        return [row["step"] for row in rows if tier in row["tiers"]]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_end(self) -> int:
        return self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait_end()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait_end()


@contextmanager
def serving(root: Path, **options: Any) -> Iterator[Daemon]:
    """A daemon that is ready; killed at the end if it still lives then."""
    daemon = Daemon(root, **options)
    try:
        yield daemon.wait_ready()
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


class Peer:
    """One rank, or with `rank` None one that only asks. It says nothing that a test does not tell it to say."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(path))
        self.heard: list[wire.ToClient] = []
        self.descriptors: list[int] = []
        self.slots: dict[int, int] = {}

    def send(self, message: wire.ToDaemon, *descriptors: int) -> None:
        self.send_raw(wire.encode(message), *descriptors)

    def send_raw(self, raw: bytes, *descriptors: int) -> None:
        socket.send_fds(self.socket, [raw], list(descriptors))

    def hear(self, kind: type[M]) -> M:
        """The next message of this kind; what comes before it is in `heard`, its descriptors in `descriptors`."""
        while True:
            raw, descriptors, _, _ = socket.recv_fds(self.socket, wire.MESSAGE_BYTES_MAX, wire.DESCRIPTORS_MAX)
            assert raw, f"waited for {kind.__name__}, and the daemon hung up; before: {self.heard}"
            message = wire.decode_to_client(raw)
            self.heard.append(message)
            if isinstance(message, kind):
                self.descriptors = list(descriptors)
                return message
            for descriptor in descriptors:
                os.close(descriptor)
            assert not isinstance(message, wire.Refused), message

    def is_dropped(self) -> bool:
        """Reads to the end of the conversation."""
        try:
            while raw := self.socket.recv(wire.MESSAGE_BYTES_MAX):
                self.heard.append(wire.decode_to_client(raw))
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    def greet(self, run: str, *, rank: int | None = 0, world_size: int = 1, generation: int | None = None) -> Any:
        self.send(
            wire.Hello(
                protocol=wire.PROTOCOL_VERSION,
                version="test",
                run=run,
                rank=rank,
                world_size=world_size,
                generation=generation,
            )
        )
        return self.hear(wire.Welcome)

    def attach(self, index: int, *, size_bytes: int = 4 * PAGE_BYTES, descriptor: int | None = None) -> None:
        """A slot of our own, or one that was adopted."""
        self.slots[index] = make_memfd(size_bytes) if descriptor is None else descriptor
        self.send(wire.AttachSlot(slot=index, capacity_bytes=size_bytes), self.slots[index])

    def fill(self, index: int, step: int, content: bytes) -> None:
        self.send(wire.Filling(slot=index, step=step))
        os.pwrite(self.slots[index], content, 0)

    def seal(self, index: int, step: int, content: bytes, **fields: Any) -> None:
        """Fills and seals; true when the daemon has accepted it."""
        self.fill(index, step, content)
        self.send(make_sealed(step, len(content), slot=index, **fields))
        self.hear(wire.Accepted)

    def find(self, **fields: Any) -> wire.FoundReplica:
        plain: dict[str, Any] = {
            "request": 7,
            "step": None,
            "generation": None,
            "milestone": None,
            "tier": "auto",
            "exclude": [],
        }
        self.send(wire.Find(**plain | fields))
        return self.hear(wire.FoundReplica)

    def take_files(self) -> list[bytes]:
        """What the descriptors of the last Found hold: the manifest, then the files."""
        found: list[bytes] = []
        for descriptor in self.descriptors:
            found.append(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            os.close(descriptor)
        self.descriptors = []
        return found

    def close(self) -> None:
        self.socket.close()
        for descriptor in (*self.slots.values(), *self.descriptors):
            os.close(descriptor)
        self.slots, self.descriptors = {}, []

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
