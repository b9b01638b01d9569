"""deploy/iam-policy.json allows exactly the requests that a server receives from tierd."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.bucket import Bucket
from tests.support.s3 import ACCESS_KEY, BUCKET
from tests.support.s3_store import s3_store
from tests.support.store_contract import KEY, BytesSource, content, entry_of
from tierd.config.sections import ColdConfig
from tierd.errors import TierUnreachable
from tierd.s3.probe import BucketProbe
from tierd.s3.requests import ACTIONS, DOCTOR_ACTIONS, NEEDED_ACTIONS

ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 16 << 10
SIZE_BYTES = 3 * CHUNK_BYTES


def statements() -> list[dict[str, object]]:
    return json.loads((ROOT / "deploy/iam-policy.json").read_text(encoding="utf-8"))["Statement"]


def allowed() -> dict[str, str]:
    """Action → resource."""
    return {
        action: str(one["Resource"])
        for one in statements()
        for action in (one["Action"] if isinstance(one["Action"], list) else [one["Action"]])
    }


async def use_everything(served: Bucket) -> None:
    """Uses every operation of a store, also an interrupted upload and its removal."""
    store = s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url, part_bytes_min=1024, retry_min_s=0.001)
    data = content(SIZE_BYTES)
    entry = entry_of(data, chunk_bytes=CHUNK_BYTES)

    async def put(key: str) -> None:
        await store.put(key, BytesSource(data), size_bytes=SIZE_BYTES, chunk_bytes=CHUNK_BYTES, expect=entry)

    served.script = lambda operation, key: "ServiceUnavailable" if operation == "complete_multipart_upload" else ""
    for key in (KEY, "run/abandoned"):
        with pytest.raises(TierUnreachable):
            await put(key)
    served.script = lambda operation, key: ""
    await put(KEY)
    now = served.now
    served.now = lambda: now() + timedelta(days=2)
    assert await store.remove_unfinished(lambda key: True, grace_s=3600.0) == 1
    served.now = now
    await store.put_bytes("run/x", b"x", if_absent=True)
    await store.read(KEY, 5, memoryview(bytearray(10)))
    await store.get_many(["run/x", "run/absent"], size_max=10)
    listed = [one.key for one in await store.list()]
    await store.delete([*listed, "run/absent"])
    await store.close()


async def test_iam_policy_allows_exactly_the_actions_of_store_and_doctor(served: Bucket) -> None:
    await use_everything(served)
    used = {one.operation for one in served.seen}
    assert used == set(NEEDED_ACTIONS), "NEEDED_ACTIONS lists every operation in use and no other"
    cold = ColdConfig(url=f"s3://{BUCKET}/deep", endpoint_url=served.url)
    store = s3_store(cold.url, endpoint_url=served.url)
    await BucketProbe(store.requests, cold, lambda: datetime.now(UTC)).run()
    await store.close()
    probed = {one.operation for one in served.seen} - used
    assert probed == set(DOCTOR_ACTIONS)
    assert set(allowed()) == set(ACTIONS.values())


def test_writer_cannot_delete_and_reaper_cannot_write() -> None:
    """Together they have what one identity for both has. The reaper may only create a tombstone or a manifest
    that is absent."""

    def of(name: str) -> dict[tuple[str, str, str], set[str]]:
        listed = json.loads((ROOT / "deploy" / name).read_text(encoding="utf-8"))["Statement"]
        return {
            (each["Sid"], str(each["Resource"]), json.dumps(each.get("Condition"))): {each["Action"]}
            if isinstance(each["Action"], str)
            else set(each["Action"])
            for each in listed
        }

    both, writer, reaper = map(of, ("iam-policy.json", "iam-policy-writer.json", "iam-policy-reaper.json"))
    assert {key: both[key] - writer[key] for key in both if both[key] != writer.get(key)} == {
        next(key for key in both if key[0] == "Objects"): {"s3:DeleteObject"}
    }
    assert {key: writer.get(key, set()) | reaper.get(key, set()) for key in both} == both
    (created,) = (key for key, actions in reaper.items() if "s3:PutObject" in actions)
    assert created[1:] == (
        str([f"arn:aws:s3:::BUCKET/PREFIX/*/{name}" for name in ("gone.json", "manifest.json")]),
        json.dumps({"Null": {"s3:if-none-match": "false"}}),
    )
    assert reaper.pop(created) == {"s3:PutObject"}
    assert set().union(*reaper.values()) == {
        *("s3:GetObject", "s3:DeleteObject", "s3:ListBucket", "s3:ListBucketMultipartUploads")
    }


async def test_doctor_says_whether_the_identity_of_a_tier_without_deletions_can_delete(served: Bucket) -> None:
    cold = ColdConfig(url=f"s3://{BUCKET}/deep", endpoint_url=served.url, deletes=False)
    for policies, verdict in (({}, "warning"), ({ACCESS_KEY: frozenset(ACTIONS.values()) - {"s3:DeleteObject"}}, "ok")):
        served.policies = policies
        store = s3_store(cold.url, endpoint_url=served.url)
        advice = await BucketProbe(store.requests, cold, lambda: datetime.now(UTC)).run()
        assert [each.verdict for each in advice if each.check == "delete"] == [verdict]
        assert not [each for each in advice if each.verdict == "problem"]
        await store.close()


async def test_doctor_tries_every_operation_of_a_store(served: Bucket) -> None:
    cold = ColdConfig(url=f"s3://{BUCKET}/deep", endpoint_url=served.url)
    store = s3_store(cold.url, endpoint_url=served.url)
    await BucketProbe(store.requests, cold, lambda: datetime.now(UTC)).run()
    await store.close()
    assert {one.operation for one in served.seen} == set(ACTIONS)


def test_iam_policy_allows_objects_below_the_prefix_only() -> None:
    for action, resource in allowed().items():
        is_of_objects = bool(re.search(r"Object$|Parts$|Upload$", action))
        assert resource == "arn:aws:s3:::BUCKET" + ("/PREFIX/*" if is_of_objects else ""), action
    assert not any("*" in action for action in allowed())


async def test_every_requested_key_is_below_the_prefix(served: Bucket) -> None:
    await use_everything(served)
    assert {one.key for one in served.seen if one.key and not one.key.startswith("deep/")} == set()
