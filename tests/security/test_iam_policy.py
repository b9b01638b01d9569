"""deploy/iam-policy.json gives access to one prefix of a bucket, and the S3 store works with no more than that.

The policy is evaluated by the rules of
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_condition_operators.html: a condition on a
key that the request lacks does not hold, except with the suffix IfExists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.support.bucket import BUCKET, bucket_server
from tests.support.s3_store import s3_store
from tests.support.store_contract import BytesSource
from tierd.errors import NotFound, TierUnreachable
from tierd.format.checksum import CHUNK_BYTES

POLICY = Path(__file__).parents[2] / "deploy" / "iam-policy.json"
BUCKET_ARN = f"arn:aws:s3:::{BUCKET}"


def policy() -> Any:
    return json.loads(POLICY.read_text().replace("BUCKET", BUCKET).replace("PREFIX", "team/runs"))


def is_allowed(action: str, resource: str, context: Mapping[str, str]) -> bool:
    """Whether a statement allows the action. There are only Allow statements with StringLike conditions."""
    for statement in policy()["Statement"]:
        assert statement["Effect"] == "Allow"
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        conditions = statement.get("Condition", {})
        assert conditions.keys() <= {"StringLike", "StringLikeIfExists"}
        holds = all(
            fnmatchcase(context[key], pattern) if key in context else operator.endswith("IfExists")
            for operator, patterns in conditions.items()
            for key, pattern in patterns.items()
        )
        if action in actions and fnmatchcase(resource, statement["Resource"]) and holds:
            return True
    return False


@pytest.mark.parametrize("prefix", [None, "", "t", "team/", "team/runs", "team/runs-of-others/", "other/"])
def test_nothing_outside_of_the_prefix_can_be_listed(prefix: str | None) -> None:
    context = {} if prefix is None else {"s3:prefix": prefix}
    assert not is_allowed("s3:ListBucket", BUCKET_ARN, context)


@pytest.mark.parametrize("prefix", ["team/runs/", "team/runs/gpt/", "team/runs/gpt/generation-0001.json"])
def test_what_is_below_the_prefix_can_be_listed(prefix: str) -> None:
    assert is_allowed("s3:ListBucket", BUCKET_ARN, {"s3:prefix": prefix})


@pytest.mark.parametrize("action", ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"])
def test_objects_below_the_prefix_can_be_used_and_no_others(action: str) -> None:
    assert is_allowed(action, f"{BUCKET_ARN}/team/runs/gpt/x", {})
    assert not is_allowed(action, f"{BUCKET_ARN}/team/runs-of-others/x", {})
    assert not is_allowed(action, f"{BUCKET_ARN}/x", {})


async def test_the_store_works_where_an_absent_object_is_answered_with_403() -> None:
    """As AWS answers when the bucket may be listed only with the prefix, since a HEAD or GET has none."""
    with bucket_server() as served:

        def deny(operation: str, key: str) -> str:
            return "AccessDenied" if operation in ("head_object", "get_object") and key not in served.objects else ""

        served.script = deny
        store = s3_store(f"s3://{BUCKET}/team/runs", endpoint_url=served.url, retry_min_s=0.001)
        with pytest.raises(NotFound):
            await store.get_bytes("run/manifest.json", size_max=10)
        assert await store.put_bytes("run/manifest.json", b"{}", if_absent=True)
        assert not await store.put_bytes("run/manifest.json", b"{}", if_absent=True)
        assert await store.get_bytes("run/manifest.json", size_max=10) == b"{}"
        entry = await store.put("run/shard", BytesSource(b"bytes"), size_bytes=5, chunk_bytes=CHUNK_BYTES)
        await store.put("run/other", BytesSource(b"bytes"), size_bytes=5, chunk_bytes=CHUNK_BYTES, expect=entry)
        with pytest.raises(NotFound):
            await store.stored_checksum("run/absent")
        served.script = lambda operation, key: "AccessDenied" if operation == "get_object" else ""
        with pytest.raises(TierUnreachable, match="access denied"):
            await store.get_bytes("run/manifest.json", size_max=10)  # it is there, and may not be read
        await store.close()
