"""Uploads that are slower than snapshots: cold advances at the pace of the bandwidth, and hot stays bounded."""

from __future__ import annotations

import pytest

from tests.support.simulation.slow_uploads import CHECKPOINTS, INTERVAL_S, KEEP_LAST, MILESTONE, simulate_uploads
from tierd.catalog.catalog import Catalog
from tierd.catalog.decisions import waiting
from tierd.workers.persister import Persister

SHORT = [(0.5, 0)]
LONG = [(0.5, 10), (3.7, 0), (3.7, 10), (6.0, 0), (6.0, 10), (10.0, 0), (10.0, 10)]


@pytest.mark.parametrize(
    ("ratio", "keep_every"), [*SHORT, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)]
)
def test_cold_commits_one_checkpoint_in_the_longer_of_upload_time_and_interval(ratio: float, keep_every: int) -> None:
    uploads = simulate_uploads(ratio, keep_every)
    least = int((CHECKPOINTS - 1) / max(1.0, ratio)) - 1
    assert len(uploads.committed_s) >= least
    assert max(uploads.gaps_s()) <= (max(1.0, ratio) + 0.1) * INTERVAL_S
    assert uploads.kept, "the last commits stay in cold"
    # The last ones, the one in progress, a new one before an old one is evicted, a milestone, a lasting one that waits.
    assert uploads.hot_max <= KEEP_LAST + 3 + (1 if keep_every else 0)
    assert uploads.violation is None


def test_lasting_checkpoints_reach_cold_while_their_copies_alone_fit_the_bandwidth() -> None:
    uploads = simulate_uploads(6.0, 10)
    assert {10, 20, 30, 40, MILESTONE} <= set(uploads.kept)
    newer = [number for number in uploads.committed_s if number % 10]
    assert len(newer) >= 4, "what they leave of the bandwidth is for the newest"
    assert uploads.given_up.keys() == {"replaced"}


@pytest.mark.long
def test_lasting_checkpoints_that_cannot_all_be_copied_leave_room_in_hot_and_are_reported() -> None:
    """U = 20 T: only half of every tenth can be copied, and the disk has room for ten checkpoints."""
    uploads = simulate_uploads(20.0, 10, checkpoints=201, hot_disk_checkpoints=10)
    assert len(uploads.committed_s) >= 201 / 20 - 1
    assert max(uploads.gaps_s()) <= 20.1 * INTERVAL_S
    assert uploads.hot_max <= 10 - 1, "the next checkpoint has room"
    lasting = set(range(10, 202, 10))
    lost = lasting - {*uploads.kept, *uploads.in_hot}
    assert lost
    assert uploads.given_up["no_space"] == len(lost)
    assert {incident.step for incident in uploads.incidents if incident.kind == "given_up"} == lost
    assert MILESTONE in uploads.kept
    order = sorted(uploads.committed_s, key=lambda number: uploads.committed_s[number])
    newest = [max(order[: count + 1]) for count in range(len(order))]
    assert all(later > earlier for earlier, later in zip(newest, newest[2:], strict=False)), "every second one at least"


def test_a_daemon_is_caught_that_does_not_keep_what_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "copying", lambda catalog, tier: None)
    assert len(simulate_uploads(6.0, 0).committed_s) < 3


def test_a_daemon_is_caught_that_waits_for_copies_before_it_persists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket is down. With the unbroken daemon, hot has the last snapshots all the same."""
    run_once = Persister.run_once

    async def wait_for_the_copies(persister: Persister) -> bool:
        context = persister._context
        if any(waiting(context.catalog, context.config).values()):
            return False
        return await run_once(persister)

    def last_in_hot() -> list[int]:
        return simulate_uploads(0.5, 0, checkpoints=10, bucket_fails_s=[(100.0, 1e6)]).in_hot[-KEEP_LAST:]

    assert last_in_hot() == [8, 9, 10]
    monkeypatch.setattr(Persister, "run_once", wait_for_the_copies)
    assert last_in_hot() != [8, 9, 10]


@pytest.mark.long
def test_a_copy_continues_after_each_restart_of_the_daemon() -> None:
    """It takes longer than any daemon lives; the first of two shards is there after the first start."""
    uploads = simulate_uploads(6.0, 0, kill_daemon_every_s=2 * INTERVAL_S)
    assert len(uploads.committed_s) >= CHECKPOINTS / 6 - 1
    assert max(uploads.gaps_s()) <= 6.1 * INTERVAL_S


@pytest.mark.long
def test_a_copy_continues_after_a_short_outage() -> None:
    whole = simulate_uploads(6.0, 0)
    begin_s = 1000.0
    cut = simulate_uploads(6.0, 0, bucket_fails_s=[(begin_s, begin_s + 120.0)])
    in_progress = min(n for n, at_s in whole.committed_s.items() if at_s > begin_s)
    assert in_progress in cut.committed_s


def test_hot_does_not_keep_a_copy_whose_tier_is_down_for_long() -> None:
    uploads = simulate_uploads(6.0, 0, bucket_fails_s=[(1000.0, 1e6)])
    assert uploads.committed_s
    assert uploads.in_hot == sorted([MILESTONE, *range(CHECKPOINTS - KEEP_LAST + 1, CHECKPOINTS + 1)])
