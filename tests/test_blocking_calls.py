"""No call blocks the event loop. The tests of single workers check it too: a fixture in conftest.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.format import wire
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.lock import Lock

BlockingError = pytest.importorskip("blockbuster").BlockingError

GUARDED = """
import sys
from tests.support.blocking import detector
from tierd.cli import main
detector().activate()
sys.argv[0] = "tierd"
main()
"""
ROUTES = ("/", "/metrics", "/healthz", "/readyz", "/api/v1/status", "/api/v1/checkpoints", "/api/v1/lifecycle")
PAGES = ("/runs/run", f"/runs/run/{6:012}-g0001", "/static/page.css", "/static/live.js")


async def test_a_call_that_blocks_the_event_loop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    async with DirectoryStore(tmp_path) as store:
        assert await store.get_bytes("file", size_max=100) == b"content"
        with pytest.raises(BlockingError):
            store.open_blocking("file")
    with pytest.raises(BlockingError):
        Lock(tmp_path)


def test_daemon_makes_no_blocking_call_from_its_start_to_its_end(tmp_path: Path) -> None:
    """Snapshots, copies, deletions, restores from every tier, the scrub, a drill, each route, a reload, the drain."""
    more = """
        [scrub]
        interval_s = 0.5
        deep_share = 1.0
        [drill]
        interval_s = 0.5
        """
    # The empty value replaces the one of the fixture, with which no daemon scrubs.
    daemon = Daemon(tmp_path, more=more, command=("-c", GUARDED), environ={"TIERD_SCRUB_INTERVAL_S": "0.5"})
    with daemon, Peer(daemon.socket) as peer:
        peer.greet("run")
        for index in range(2):
            peer.attach(index)
        for step in range(1, 7):
            peer.seal(step % 2, step, b"state")
            assert peer.hear(wire.Persisted).step == step
            assert peer.hear(wire.Replicated).step == step
        for tier in ("memory", "hot", "cold"):
            assert peer.find(tier=tier).tier == tier
            peer.take_files()
        wait_until(lambda: daemon.steps("hot") == daemon.steps("cold") == [4, 5, 6], "the deletions")
        wait_until(lambda: daemon.metric('tierd_scrubbed_checkpoints_total{proof="deep",tier="cold"}') > 0, "the scrub")
        wait_until(lambda: daemon.metric('tierd_drill_restore_seconds{tier="cold"}') > 0, "a drill")
        assert [daemon.request(route)[0] for route in (*ROUTES, *PAGES)] == [200] * len(ROUTES + PAGES)
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("SIGHUP: ")
        # A checkpoint that is only in cold is fetched into hot.
        os.rename(daemon.folder(6, run="run"), tmp_path / "aside")
        wait_until(lambda: 6 not in daemon.steps("hot"), "the hot replica to be missed")
        assert peer.find(tier="cold").tier == "cold"
        peer.take_files()
        assert "bug" not in [failure["kind"] for failure in daemon.status()["failures"]], daemon.log
        assert daemon.stop() == 0, daemon.log
        assert "Blocking call" not in daemon.log
