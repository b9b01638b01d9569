"""The daemon's HTTP server: every route, with a real catalog, memory tier and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from tests.support.hung_directory import hung_directory
from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.slots import CREATED_AT
from tierd.api.operator import Operator
from tierd.api.web_pages import WebPages
from tierd.copies import Reason
from tierd.errors import Corrupt
from tierd.format.ids import Generation, Rank, Run, checkpoint_id
from tierd.format.manifest import REPORTED_UNHEALTHY
from tierd.format.node_messages import NodeRanks
from tierd.metrics import OTHER_RUNS

NOW = datetime.fromisoformat(CREATED_AT) + timedelta(seconds=90)


class House:
    """The parts of a daemon, with the HTTP server."""

    def __init__(self, rooms: Rooms, operator: Operator, client: TestClient[Any, Any]) -> None:
        self.rooms = rooms
        self.operator = operator
        self.client = client

    async def get(self, path: str) -> tuple[int, str, str]:
        """(status, body, content type)"""
        async with self.client.get(path) as answer:
            return answer.status, await answer.text(), answer.headers["Content-Type"]

    async def json(self, path: str) -> Any:
        async with self.client.get(path) as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            return await answer.json()

    async def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """By name and label values, sorted by label."""
        _, body, _ = await self.get("/metrics")
        return {
            (one.name, tuple(value for _, value in sorted(one.labels.items()))): one.value
            for family in text_string_to_metric_families(body)
            for one in family.samples
        }


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with rooms_at(tmp_path) as rooms:
        operator = Operator(replace(rooms.context, now=lambda: NOW), {}, pid=42, peer_lag_s=lambda run: 7.0)
        app = operator.app()
        WebPages(operator).add_to(app)
        async with TestClient(TestServer(app)) as client:
            yield House(rooms, operator, client)


async def with_history(house: House) -> None:
    """Step 7 committed in hot, waiting for cold; step 8 in memory, waiting for hot; one failure."""
    house.rooms.seal(7, [b"seven", b"7"], milestone="best")
    await house.rooms.persister().run_once()
    await house.rooms.look()
    house.rooms.seal(8, [b"eight!", b"8"])
    house.rooms.incidents.record("persist", Corrupt("x"), checkpoint_id(RUN, 8, 1))
    house.operator.is_ready = True


async def test_healthz_does_not_depend_on_the_tiers(house: House) -> None:
    house.rooms.catalog.listing_failed("hot", "I/O error")
    assert (await house.get("/healthz"))[:2] == (200, "alive\n")


async def test_readyz_needs_recovery_and_a_listed_hot_tier(house: House) -> None:
    assert (await house.get("/readyz"))[0] == 503
    await house.rooms.look()
    assert (await house.get("/readyz"))[0] == 503
    house.operator.is_ready = True
    assert (await house.get("/readyz"))[:2] == (200, "ready\n")
    house.rooms.catalog.listing_failed("cold", "503 everywhere")
    assert (await house.get("/readyz"))[0] == 200, "S3 does not count"
    house.rooms.catalog.listing_failed("hot", "I/O error")
    assert (await house.get("/readyz"))[:2] == (503, "not ready: I/O error\n")


async def test_status_reports_newest_checkpoints_tiers_and_queues(house: House) -> None:
    await with_history(house)
    status = await house.json("/api/v1/status")
    (run,) = status["runs"]
    assert (run["run"], run["generation"], run["world_size"], run["ranks_attached"]) == (RUN, 1, 2, 2)
    assert {tier: found and found["step"] for tier, found in run["tiers"].items()} == {
        "memory": 8,
        "hot": 7,
        "cold": None,
    }
    assert run["tiers"]["hot"]["age_s"] == 90.0
    assert [(one["name"], one["is_known"], one["checkpoints"], one["used_bytes"]) for one in status["tiers"]] == [
        ("hot", True, 1, 6),
        ("cold", True, 0, 0),
    ]
    assert [(one["tier"], one["checkpoints"]) for one in status["queues"]] == [("hot", 1), ("cold", 1)]
    assert status["queues"][1]["oldest_age_s"] == 90.0
    assert status["slots"] == {"free": 0, "filling": 0, "sealed": 2, "persisting": 0, "retained": 2}
    assert [(one["stage"], one["step"]) for one in status["failures"]] == [("persist", 8)]
    assert (status["is_ready"], status["halted"], status["pid"]) == (True, [], 42)


async def test_a_start_that_has_saved_nothing_puts_only_its_own_work_at_risk(house: House) -> None:
    await with_history(house)
    memory, monotonic_s = house.rooms.memory, house.rooms.context.monotonic_s
    memory.progress.entered(Run(RUN), monotonic_s())
    risks = (await house.json("/api/v1/status"))["runs"][0]["at_risk"]
    assert [risk["seconds"] for risk in risks if risk["lost"] == "trainers"] == [90.0]
    memory.enter(Run(RUN), Generation(2), Rank(0), 2)
    memory.progress.entered(Run(RUN), monotonic_s(), is_start=True)
    (run,) = (await house.json("/api/v1/status"))["runs"]
    (risk,) = (risk for risk in run["at_risk"] if risk["lost"] == "trainers")
    assert (run["generation"], risk["step"]) == (2, 8)
    assert risk["seconds"] < 60.0
    assert run["attached_s"] < 60.0


async def test_a_part_is_never_reported_as_a_checkpoint_that_can_be_restored(house: House) -> None:
    node = NodeRanks(ranks=[0, 1], lowest=[0, 2], claim="0" * 32, base=0)
    house.rooms.seal(7, [b"seven", b"7"], node=node, world_size=4, number=1)
    await house.rooms.persister().run_once()
    await house.rooms.look()
    house.rooms.seal(8, [b"eight!", b"8"], node=node, world_size=4, number=2)
    status = await house.json("/api/v1/status")
    (run,) = status["runs"]
    assert set(run["tiers"].values()) == {None}
    assert (run["nodes"]["ranks"], run["nodes"]["world_size"]) == ([0, 1], 4)
    assert {tier: part["step"] for tier, part in run["nodes"]["parts"].items()} == {"memory": 8, "hot": 7}
    assert [(one["name"], one["checkpoints"], one.get("parts")) for one in status["tiers"]] == [
        ("hot", 1, 1),
        ("cold", 0, None),
    ]
    part = {"ranks": [0, 1], "world_size": 4}
    rows = await house.json("/api/v1/checkpoints")
    assert [(row["step"], row["tiers"], row["parts"]) for row in rows] == [
        (8, [], {"memory": part}),
        (7, [], {"memory": part, "hot": part}),
    ]
    shown = await house.json(f"/api/v1/checkpoints/{RUN}/000000000008-g0001")
    assert (shown["tiers"], shown["parts"]) == ([], {"memory": part})
    names = {name for name, _ in await house.samples()}
    assert not names & {"tierd_last_committed_step", "tierd_everywhere_age_seconds"}
    house.rooms.catalog.saw_everywhere(checkpoint_id(RUN, 7, 1))
    house.rooms.catalog.awaited["cold"] = {Run(RUN): (checkpoint_id(RUN, 7, 1), [2, 3])}
    samples = await house.samples()
    assert samples["tierd_everywhere_age_seconds", (RUN,)] == 90.0
    assert samples["tierd_peer_lag_seconds", (RUN,)] == 7.0
    assert samples["tierd_commit_missing_ranks", (RUN, "cold")] == 2
    assert "7: part 2/4 ranks" in (await house.get("/"))[1]


async def test_snapshot_whose_loss_was_bad_is_not_what_a_restart_takes(house: House) -> None:
    """It is in memory alone, and nothing has examined it."""
    await with_history(house)
    house.rooms.seal(9, [b"nine!!", b"9"], metrics={REPORTED_UNHEALTHY: 1.0})
    (run,) = (await house.json("/api/v1/status"))["runs"]
    assert (run["tiers"]["memory"]["step"], run["at_risk"][0]["step"], run["unhealthy_steps"]) == (8, 8, [9])
    rows = await house.json("/api/v1/checkpoints")
    assert [(row["step"], row["healthy"]) for row in rows] == [(9, False), (8, None), (7, None)]


async def test_gauges_equal_the_current_state(house: House) -> None:
    await with_history(house)
    for _ in range(2):
        samples = await house.samples()
        assert samples["tierd_last_committed_step", (RUN, "hot")] == 7
        assert samples["tierd_last_committed_timestamp_seconds", (RUN, "hot")] == NOW.timestamp() - 90
        assert samples["tierd_checkpoints", (RUN, "hot")] == 1
        assert samples["tierd_checkpoints", (RUN, "cold")] == 0
        assert samples["tierd_tier_used_bytes", ("hot",)] == 6
        assert samples["tierd_tier_free_bytes", ("hot",)] > 0
        assert samples["tierd_tier_room_bytes", ("hot",)] == 2 * 6
        assert samples["tierd_queue_checkpoints", ("hot",)] == 1
        assert samples["tierd_queue_checkpoints", ("cold",)] == 1
        assert samples["tierd_queue_oldest_age_seconds", ("cold",)] == 90
        assert samples["tierd_slots", ("sealed",)] == 2
        assert samples["tierd_snapshots_total", ("persisted", RUN)] == 1
        assert samples["tierd_failures_total", ("corrupt", "persist")] == 1
        assert samples["tierd_halted", ("unreadable_manifest",)] == 0
        assert ("tierd_last_committed_step", (RUN, "cold")) not in samples, "0 would be wrong"
    house.rooms.catalog.drop(checkpoint_id(RUN, 7, 1), "hot")
    samples = await house.samples()
    assert ("tierd_last_committed_step", (RUN, "hot")) not in samples
    assert samples["tierd_checkpoints", (RUN, "hot")] == 0


async def test_a_tier_that_was_never_listed_has_no_used_bytes(house: House) -> None:
    """0 would say that it is empty."""
    name = "tierd_tier_used_bytes"
    assert {labels for each, labels in await house.samples() if each == name} == set()
    await house.rooms.list_tiers("hot")
    assert {labels for each, labels in await house.samples() if each == name} == {("hot",)}
    assert (await house.samples())[name, ("hot",)] == 0, "known to be empty"
    await house.rooms.look()
    house.rooms.catalog.listing_failed("cold", "503")
    assert {labels for each, labels in await house.samples() if each == name} == {("hot",)}


async def test_a_tier_that_was_never_listed_has_no_number_of_checkpoints(house: House) -> None:
    house.rooms.seal(7)
    await house.rooms.persister().run_once()
    await house.rooms.list_tiers("hot")
    samples = await house.samples()
    assert samples["tierd_checkpoints", (RUN, "hot")] == 1
    assert ("tierd_checkpoints", (RUN, "cold")) not in samples, "0 would say that it has none"
    await house.rooms.look()
    assert (await house.samples())["tierd_checkpoints", (RUN, "cold")] == 0, "known to be empty"


async def test_metrics_parse_as_prometheus_text_and_have_no_step_labels(house: House) -> None:
    await with_history(house)
    _, body, content_type = await house.get("/metrics")
    assert content_type.startswith("text/plain; version=0.0.4")
    labels = {key for family in text_string_to_metric_families(body) for one in family.samples for key in one.labels}
    assert labels <= {"run", "tier", "outcome", "direction", "state", "stage", "kind", "op", "code", "reason", "le",
                      "version", "python", "verdict", "proof"}  # fmt: skip


async def test_only_the_newest_runs_have_series_of_their_own(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who names a run by its time makes a new one for each start."""
    monkeypatch.setattr("tierd.api.gauges.RUNS_MAX", 2)
    rooms = house.rooms
    for number in range(4):
        await rooms.commit("hot", "cold", run=f"old{number}", step=number + 1)
        rooms.metrics.examinations_total.labels(f"old{number}", "healthy").inc()
    rooms.seal(7, run="live")
    await rooms.look()
    rooms.catalog.saw_generation(Run("claimed-only"), 3)
    samples = await house.samples()
    assert {labels[0] for name, labels in samples if name == "tierd_unhealthy_checkpoints"} == {"live", "old0"}
    assert {labels[0] for name, labels in samples if name == "tierd_checkpoints"} == {"live", "old0", OTHER_RUNS}
    assert samples["tierd_checkpoints", (OTHER_RUNS, "cold")] == 3
    assert samples["tierd_snapshots_total", ("persisted", "live")] == 0
    assert all("old3" not in labels and "claimed-only" not in labels for _, labels in samples)


async def test_halted_deletion_shows_in_status_and_metrics(house: House) -> None:
    await with_history(house)
    (house.rooms.folder("hot", checkpoint_id(RUN, 7, 1)) / "manifest.json").write_text("{")
    await house.rooms.look()
    house.rooms.catalog.listing_failed("cold", "503")
    halted = (await house.json("/api/v1/status"))["halted"]
    assert [one.partition(":")[0] for one in halted] == ["unreadable_manifest", "tier_unreachable"]
    samples = await house.samples()
    assert samples["tierd_halted", ("unreadable_manifest",)] == 1
    assert samples["tierd_halted", ("tier_unreachable",)] == 1


async def test_status_and_metrics_answer_while_a_directory_hangs(house: House) -> None:
    await with_history(house)
    assert ("tierd_tier_free_bytes", ("cold",)) in await house.samples()
    with hung_directory(house.rooms.folder("cold", checkpoint_id(RUN, 7, 1)).parent.parent):
        for _ in range(3):
            free = {tier["name"]: tier["free_bytes"] for tier in (await house.json("/api/v1/status"))["tiers"]}
            assert free["hot"] is not None
            assert free["cold"] is None
            assert ("tierd_tier_free_bytes", ("cold",)) not in await house.samples()


async def test_queue_of_an_unreachable_tier_is_not_empty(house: House) -> None:
    """Otherwise the alert on a stalled queue could not fire while the tier is unreachable."""
    await with_history(house)
    house.rooms.catalog.listing_failed("cold", "503")
    queues = (await house.json("/api/v1/status"))["queues"]
    assert [(one["tier"], one["checkpoints"], one["oldest_age_s"]) for one in queues][1] == ("cold", 1, 90.0)


async def test_what_an_unreachable_tier_had_does_not_wait_for_it(house: House) -> None:
    """Otherwise old checkpoints that cold has would fire the alert on a late copy as soon as cold is down."""
    await with_history(house)
    await house.rooms.replicator().run_once()
    await house.rooms.look()
    assert (await house.json("/api/v1/status"))["queues"][1]["checkpoints"] == 0
    house.rooms.catalog.listing_failed("cold", "503")
    queue = (await house.json("/api/v1/status"))["queues"][1]
    assert (queue["checkpoints"], queue["oldest_age_s"]) == (0, 0.0)
    assert (await house.samples())["tierd_queue_checkpoints", ("cold",)] == 0


async def test_facts_of_slow_copies_are_in_status_metrics_and_page(house: House) -> None:
    await with_history(house)
    copies = house.rooms.context.copies
    assert ("tierd_last_copy_timestamp_seconds", ("cold",)) not in await house.samples(), "0 would be wrong"
    for seconds in (300.0, 360.0, 420.0):
        copies.committed("cold", seconds=seconds, at_s=NOW.timestamp() - 50)
    for _ in range(5):
        copies.gave_up("cold", Reason.REPLACED, at_s=NOW.timestamp() - 7)
    house.rooms.catalog.set_copying("cold", checkpoint_id(RUN, 7, 1))
    queue = (await house.json("/api/v1/status"))["queues"][1]
    assert (queue["copying"], queue["copy_s"], queue["last_copy_age_s"], queue["given_up"]) == (
        f"{RUN}/000000000007-g0001",
        360.0,
        50.0,
        {"replaced": 5},
    )
    assert queue["given_up_age_s"] == {"replaced": 7.0}
    samples = await house.samples()
    assert samples["tierd_last_copy_timestamp_seconds", ("cold",)] == NOW.timestamp() - 50


async def test_checkpoints_are_listed_with_sizes_including_the_memory_tier(house: House) -> None:
    await with_history(house)
    rows = await house.json("/api/v1/checkpoints")
    assert [(row["step"], row["tiers"], row["size_bytes"], row["milestone"]) for row in rows] == [
        (8, ["memory"], 7, None),
        (7, ["memory", "hot"], 6, "best"),
    ]
    assert await house.json("/api/v1/checkpoints?run=another") == []
    assert await house.json("/api/v1/checkpoints?run=../..") == []


async def test_one_checkpoint_is_shown_with_its_manifest(house: House) -> None:
    await with_history(house)
    shown = await house.json(f"/api/v1/checkpoints/{RUN}/000000000007-g0001")
    assert (shown["tiers"], shown["milestones"], shown["manifest"]["step"]) == (["memory", "hot"], ["best"], 7)
    shown = await house.json(f"/api/v1/checkpoints/{RUN}/000000000008-g0001")
    assert (shown["tiers"], len(shown["manifest"]["files"])) == (["memory"], 2)
    for absent in (f"{RUN}/000000000009-g0001", f"{RUN}/nonsense", "..%2f/000000000007-g0001", "a/b/c"):
        assert (await house.get(f"/api/v1/checkpoints/{absent}"))[0] == 404


async def test_lifecycle_route_returns_plan_and_forecast(house: House) -> None:
    await with_history(house)
    report = await house.json("/api/v1/lifecycle")
    assert {one["tier"] for one in report["forecast"]} == {"hot", "cold"}
    (planned,) = report["planned"]
    assert planned == {
        "run": RUN,
        "step": 7,
        "generation": 1,
        "tier": "cold",
        "action": "replicate",
        "reason": "milestone best",
    }


async def test_checkpoint_of_unknown_age_is_shown_without_one(house: House) -> None:
    await with_history(house)
    entry = house.rooms.catalog.get(checkpoint_id(RUN, 7, 1))
    assert entry is not None
    house.rooms.catalog.add(msgspec.structs.replace(entry.manifest, created_at="some day"), "hot")
    (run,) = (await house.json("/api/v1/status"))["runs"]
    assert run["tiers"]["hot"]["age_s"] is None
    assert ("tierd_last_committed_timestamp_seconds", (RUN, "hot")) not in await house.samples()


async def test_routes_are_read_only_and_unknown_paths_are_404(house: House) -> None:
    for path in ("/", "/metrics", "/api/v1/status"):
        async with house.client.post(path, data=b"x") as answer:
            assert answer.status == 405
    assert (await house.get("/etc/passwd"))[0] == 404


# ── fresh answers ──


async def test_fresh_status_waits_for_new_listings(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        operator = Operator(rooms.context, rooms.listers, pid=42)
        async with TestClient(TestServer(operator.app())) as client, asyncio.TaskGroup() as group:
            await rooms.list_tiers()
            await rooms.commit("cold", step=100)
            answer = group.create_task(client.get("/api/v1/status?fresh=1"))
            while {("relist", "hot"), ("relist", "cold")} - {*rooms.events}:
                await asyncio.sleep(0.001)
            await rooms.list_tiers()
            status = await (await answer).json()
        assert [(tier["name"], tier["checkpoints"]) for tier in status["tiers"]] == [("hot", 0), ("cold", 1)]
        assert all(tier["listed_age_s"] >= 0 for tier in status["tiers"])


async def test_fresh_status_of_a_tier_that_does_not_answer_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd.api.operator.LOOK_S", 0.05)
    async with rooms_at(tmp_path) as rooms:
        operator = Operator(rooms.context, rooms.listers, pid=42)
        await rooms.list_tiers("hot")
        async with TestClient(TestServer(operator.app())) as client:
            status = await (await client.get("/api/v1/status?fresh=1")).json()  # no lister runs
        assert [tier["listed_age_s"] is None for tier in status["tiers"]] == [False, True]
