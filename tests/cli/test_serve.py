"""The verbs with a running daemon: the memory tier is listed, shown and restored; all else is as without a daemon."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.support.cli import House, content, flip_a_bit, make_checkpoint, make_house
from tests.support.daemon import Daemon
from tests.support.waiting import wait_until
from tierd.format import wire
from tierd.format.ids import checkpoint_id

DEADLINE_S = 100.0


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


@contextmanager
def serving(house: House) -> Iterator[None]:
    """`tierd serve` as a process: waits until it is ready, and ends it with SIGTERM."""
    process = house.start("serve")
    log = ""
    try:
        while " serves " not in log:
            assert select.select([process.stderr], [], [], DEADLINE_S)[0], "the daemon printed nothing"
            line = process.stderr.readline()
            assert line, f"the daemon ended: {log}"
            log += line
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, log + rest


@contextmanager
def trainer(house: House, run: str, shard: bytes, *, step: int) -> Iterator[wire.Welcome]:
    """A trainer of one rank with one sealed snapshot, simulated by wire messages."""
    slot = os.memfd_create("slot", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(slot, -(-len(shard) // 4096) * 4096)
    fcntl.fcntl(slot, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(str(house.root / "tierd.sock"))

        def send(message: wire.ToDaemon, *descriptors: int) -> None:
            socket.send_fds(sock, [wire.encode(message)], list(descriptors))

        def wait_for(kind: type[wire.ToClient]) -> wire.ToClient:
            while not isinstance(message := wire.decode_to_client(sock.recv(wire.MESSAGE_BYTES_MAX)), kind):
                assert not isinstance(message, wire.Refused), message
            return message

        send(wire.Hello(protocol=wire.PROTOCOL_VERSION, version="test", run=run, rank=0, world_size=1, generation=None))
        welcome = wait_for(wire.Welcome)
        send(wire.AttachSlot(slot=0, capacity_bytes=os.fstat(slot).st_size), slot)
        send(wire.Filling(slot=0, step=step))
        os.pwrite(slot, shard, 0)
        send(
            wire.Sealed(
                slot=0,
                step=step,
                size_bytes=len(shard),
                created_at="2025-01-01T00:00:00.000+00:00",
                stall_s=0.01,
                metrics={"loss": 2.5},
                milestone=None,
                parent=None,
                architecture_hash="0123abcd",
                versions={},
                resent=False,
            )
        )
        wait_for(wire.Persisted)
        os.close(slot)
        yield welcome
        send(wire.Goodbye())


def test_memory_tier_is_listed_and_restored_byte_for_byte(house: House) -> None:
    checkpoint = checkpoint_id("run42", 700, 1)
    shard = content(checkpoint, 0, 300_001)

    with serving(house), trainer(house, "run42", shard, step=700):
        assert house.json("ls")[0]["tiers"][:2] == ["memory", "hot"]
        assert house.json("show", "run42")["tiers"][:2] == ["memory", "hot"]
        found = house.json("restore", "--tier", "memory", "--to", house.root / "restored")
        auto = house.json("restore", "--to", house.root / "auto")
        status = house.json("status")
        people = house.tierd("status")

    assert (found["tier"], found["step"], auto["tier"]) == ("memory", 700, "memory")
    for target in (house.root / "restored", house.root / "auto"):
        assert (target / "rank-00000-of-00001.safetensors").read_bytes() == shard
        assert msgspec.json.decode((target / "manifest.json").read_bytes())["step"] == 700
    assert status["pid"] is not None
    assert status["runs"][0]["tiers"]["memory"]["step"] == 700
    assert people.exit_code == 0
    assert "memory" in people.stdout
    assert "tierd --config" in people.stdout


def test_ls_prints_the_same_rows_with_and_without_a_daemon(house: House) -> None:
    for step in (1, 2):
        make_checkpoint(house.hot, house.cold, step=step, sequence=step)
    without = house.json("ls")

    with serving(house):
        deadline = time.monotonic() + DEADLINE_S
        while house.tierd("ls").exit_code != 0 and time.monotonic() < deadline:
            continue  # until the daemon has listed the cold tier, `ls` ends with 3
        beside = house.json("ls")

    assert beside == without


def test_second_daemon_is_exit_11_and_a_restore_works_beside_the_first(house: House) -> None:
    make_checkpoint(house.hot, step=1)

    with serving(house):
        second = house.start("serve")
        _, err = second.communicate(timeout=DEADLINE_S)
        assert house.json("restore", "--to", house.root / "restored")["tier"] == "hot"

    assert second.returncode == 11
    assert "held by" in err


def test_a_daemon_that_does_not_know_which_node_it_is_does_not_start(tmp_path: Path) -> None:
    watch = '[[watch]]\npath = "out"\nrun = "ds"\npreset = "deepspeed"\nnodes = 4'
    house = make_house(tmp_path, more=watch)
    assert house.tierd("ls").exit_code == 0, "commands run on other machines too"
    result = house.tierd("serve")
    assert result.exit_code == 2
    assert "it is not said which of the 4 nodes this is" in result.stderr
    assert "SLURM_NODEID" in result.stderr


def test_show_does_not_count_a_replica_that_the_daemon_has_found_damaged(tmp_path: Path) -> None:
    scrub = "[scrub]\ninterval_s = 1.0\ndeep_share = 1.0\nrepair = false\n"
    make_checkpoint(tmp_path / "hot")
    with Daemon(tmp_path, more=scrub, environ={"TIERD_SCRUB_INTERVAL_S": "1.0"}) as daemon:
        wait_until(lambda: daemon.json("show", "run42")["tiers"] == ["hot", "cold"], "the copy")
        flip_a_bit(next((tmp_path / "hot" / "run42").glob("*/*.safetensors")))
        wait_until(lambda: daemon.json("show", "run42")["tiers"] == ["cold"], "the scrub")
        assert "in hot does not count for the daemon: `tierd status` says why" in daemon.tierd("show", "run42").stderr
