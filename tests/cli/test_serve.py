"""The verbs with a running daemon: the memory tier is listed, shown and restored; all else is as without a daemon."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.support.cli import House, content, flip_a_bit, make_checkpoint, make_house
from tests.support.daemon import Daemon
from tests.support.slots import PAGE_BYTES
from tests.support.waiting import DEADLINE_S, wait_until
from tests.support.wire_peer import Peer
from tierd.format import wire
from tierd.format.ids import checkpoint_id


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
def trainer(house: House, run: str, shard: bytes, *, step: int) -> Iterator[None]:
    """A trainer of one rank with one snapshot that is persisted."""
    with Peer(house.root / "tierd.sock") as peer:
        peer.greet(run)
        peer.attach(0, size_bytes=-(-len(shard) // PAGE_BYTES) * PAGE_BYTES)
        peer.seal(0, step, shard)
        peer.hear(wire.Persisted)
        yield
        peer.send(wire.Goodbye())


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
        wait_until(lambda: house.tierd("ls").exit_code == 0, "the listing of cold: until then `ls` ends with 3")
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
