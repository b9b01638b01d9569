"""The identity of a bucket: emptied, under two names, or without permission to mark it."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.bucket import Bucket
from tests.support.rooms import Rooms, rooms_at
from tests.support.s3 import BUCKET
from tests.support.s3_store import s3_store
from tierd.catalog.decisions import lost
from tierd.config.sections import ColdConfig
from tierd.errors import BadConfig, TierUnreachable
from tierd.format import layout
from tierd.tiers.tier import Tier
from tierd.workers.lister import Lister
from tierd.workers.replicator import Replicator

URL = f"s3://{BUCKET}/deep"


@asynccontextmanager
async def rooms_with(root: Path, **endpoints: str) -> AsyncIterator[Rooms]:
    """Rooms whose cold tiers are one bucket, by the names of the tiers at these endpoints."""
    cold = tuple(ColdConfig(name=name, url=URL, endpoint_url=endpoint) for name, endpoint in endpoints.items())
    async with rooms_at(root, cold=cold) as rooms:
        for section in cold:
            await rooms.cold[section.name].store.close()
            store = s3_store(URL, endpoint_url=section.endpoint_url, part_bytes_min=1024, retry_min_s=0.001)
            rooms.cold[section.name] = Tier(section.name, store)  # type: ignore[index]
        rooms.tiers = rooms.context.tiers
        rooms.listers = {name: Lister(rooms.context, tier, 10.0) for name, tier in rooms.tiers.items()}
        yield rooms


def markers(served: Bucket) -> list[str]:
    return [key for key in served.objects if key.startswith(f"deep/{layout.TIER_MARKERS}")]


def lost_steps(rooms: Rooms) -> list[int]:
    return [checkpoint.step for checkpoint in lost(rooms.catalog, rooms.config, "cold")]


@pytest.mark.parametrize("served", [{}, {"honours_conditions": False}], indirect=True)
async def test_emptied_bucket_is_reported_and_gets_again_what_hot_has(served: Bucket, tmp_path: Path) -> None:
    """A server answers, so that it is no absent mount. The marker is gone with all the rest."""
    async with rooms_with(tmp_path, cold=served.url) as rooms:
        await rooms.commit("cold", step=10, sequence=10)
        for step in (100, 200):
            await rooms.commit("hot", "cold", step=step, sequence=step)
        await rooms.list_tiers()
        (marker,) = markers(served)
        served.objects.clear()
        await rooms.list_tiers()
        assert rooms.catalog.tiers["cold"].is_known
        assert markers(served) == [marker], "other daemons remember this one too"
        assert lost_steps(rooms) == [200, 100, 10]
        messages = [incident.message for incident in rooms.incidents.recent()]
        assert [incident.kind for incident in rooms.incidents.recent()] == ["lost", "lost"]
        assert "has none now" in messages[1]
        await Replicator(rooms.context, rooms.cold["cold"]).run_once()
        await rooms.list_tiers()
        assert sorted(manifest.step for manifest in rooms.catalog.manifests_in("cold")) == [100, 200]
        assert lost_steps(rooms) == [10]


async def test_bucket_that_was_emptied_while_no_daemon_ran_is_reported(served: Bucket, tmp_path: Path) -> None:
    async with rooms_with(tmp_path, cold=served.url) as rooms:
        await rooms.list_tiers()
    served.objects.clear()
    async with rooms_with(tmp_path, cold=served.url) as rooms:
        await rooms.context.identities.begin(rooms.tiers)
        await rooms.list_tiers()
        (incident,) = rooms.incidents.recent()
        assert (incident.stage, incident.kind) == ("list", "lost")
        assert len(markers(served)) == 1


async def test_another_bucket_is_unreachable_until_the_command_in_the_hint(served: Bucket, tmp_path: Path) -> None:
    async with rooms_with(tmp_path / "a", cold=served.url) as rooms:
        await rooms.list_tiers()
    served.objects.clear()
    async with rooms_with(tmp_path / "b", cold=served.url) as rooms:
        await rooms.list_tiers()
    async with rooms_with(tmp_path / "a", cold=served.url) as rooms:
        with pytest.raises(TierUnreachable, match="another place is there") as raised:
            await rooms.list_tiers()
        words = shlex.split(raised.value.message.partition("from now on: ")[2].partition(";")[0])
        assert words[:5] == ["aws", "--endpoint-url", served.url, "s3api", "put-object"]
        options = dict(zip(words[5::2], words[6::2], strict=True))
        assert options["--bucket"] == BUCKET
        await rooms.cold["cold"].store.put_bytes(options["--key"].removeprefix("deep/"), b"")
        await rooms.list_tiers()


async def test_one_bucket_under_two_names_is_refused(served: Bucket, tmp_path: Path) -> None:
    other = served.url.replace("127.0.0.1", "localhost")
    async with rooms_with(tmp_path, cold=served.url, dr=other) as rooms:
        with pytest.raises(BadConfig, match=r"dr: .* is the same place as cold"):
            await rooms.context.identities.begin(rooms.tiers)


async def test_one_bucket_under_two_names_is_found_by_the_first_listings(served: Bucket, tmp_path: Path) -> None:
    other = served.url.replace("127.0.0.1", "localhost")
    async with rooms_with(tmp_path, cold=served.url, dr=other) as rooms:
        await rooms.list_tiers("hot", "cold")
        with pytest.raises(TierUnreachable, match="is the same place as cold"):
            await rooms.list_tiers("dr")


async def test_identity_without_permission_to_write_uses_the_bucket_as_before(served: Bucket, tmp_path: Path) -> None:
    async with rooms_with(tmp_path, cold=served.url) as rooms:
        await rooms.commit("cold", step=100)
        served.script = lambda operation, key: "AccessDenied" if operation == "put_object" else ""
        await rooms.list_tiers()
        assert [manifest.step for manifest in rooms.catalog.manifests_in("cold")] == [100]
        assert markers(served) == []


async def test_a_start_does_not_wait_for_a_bucket_that_does_not_answer(served: Bucket, tmp_path: Path) -> None:
    def silent(operation: str, key: str) -> str:
        return "silence"

    async with rooms_with(tmp_path, cold=served.url) as rooms:
        served.script = silent
        await rooms.context.identities.begin(rooms.tiers)  # within START_WAIT_S, where a request may take minutes


async def test_a_listing_costs_no_further_request_for_the_identity(served: Bucket, tmp_path: Path) -> None:
    async with rooms_with(tmp_path, cold=served.url) as rooms:
        await rooms.commit("cold", step=100)
        await rooms.list_tiers()
        seen = len(served.seen)
        await rooms.list_tiers("cold")
        assert [each.operation for each in served.seen[seen:]] == ["list_objects_v2"]
