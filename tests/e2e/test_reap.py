"""A daemon whose credential cannot delete in the bucket, and `tierd reap` with another one that can."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.bucket import Bucket
from tests.support.daemon import Daemon
from tests.support.s3 import ACCESS_KEY, BUCKET
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.cli.app import make_app

pytestmark = pytest.mark.usefixtures("checkpoints_examined")

DEPLOY = Path(__file__).parents[2] / "deploy"
DELETIONS = {"delete_object", "delete_objects"}
POLICIES = """cold_list_interval_s = 0.2
[lifecycle.hot]
keep_last = 1
[lifecycle.cold]
keep_last = 1
keep_every = 0
"""


def actions(name: str) -> frozenset[str]:
    statements: list[dict[str, Any]] = json.loads((DEPLOY / name).read_text(encoding="utf-8"))["Statement"]
    lists = ([each["Action"]] if isinstance(each["Action"], str) else each["Action"] for each in statements)
    return frozenset(action for listed in lists for action in listed)


@pytest.fixture
def daemon(tmp_path: Path, served: Bucket) -> Iterator[Daemon]:
    served.policies[ACCESS_KEY] = actions("iam-policy-writer.json")
    served.policies["reaper"] = actions("iam-policy-reaper.json")
    cold = f'url = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"\ndeletes = false'
    with Daemon(tmp_path, cold=cold, more=POLICIES) as daemon:
        yield daemon


def train(trainer: Trainer, snapshots: int) -> None:
    for _ in range(snapshots):
        trainer.train(1)
        trainer.durable()
        trainer.wait_replicated()


def reap(daemon: Daemon) -> Any:
    """With the credential in the environment of this process, not with the daemon's."""
    result = CliRunner().invoke(make_app(["reap", "ls"]), ["--config", str(daemon.config), "reap", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def tier(daemon: Daemon) -> Any:
    return next(each for each in daemon.status()["tiers"] if each["name"] == "cold")


def test_reap_deletes_with_its_own_credential_what_the_daemon_leaves(
    daemon: Daemon, served: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        train(trainer, 4)
        wait_until(lambda: daemon.steps("hot") == [4], "hot goes on deleting")
        wait_until(lambda: tier(daemon)["to_reap"] == 3, "the status counts what is left")
        assert daemon.steps("cold") == [1, 2, 3, 4]
        assert daemon.status()["failures"] == []
        assert "left to `tierd reap`: 3 checkpoints in cold" in daemon.tierd("status").stdout
        assert "left to `tierd reap`" in daemon.tierd("lifecycle").stdout
        assert not DELETIONS & {each.operation for each in served.seen}

        refused = daemon.tierd("reap")  # with the credential of the daemon
        assert refused.returncode == 14
        assert "access denied" in refused.stderr
        assert daemon.steps("cold") == [1, 2, 3, 4]

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reaper")
        trainer.begin("apply", train_more, 3)  # the daemon writes at the same time
        reaped = reap(daemon)
        trainer.end()
        assert [each["step"] for each in reaped["deletions"]][:3] == [1, 2, 3]
        assert reaped["errors"] == []

        def is_only_the_newest_left() -> bool:
            """An older one stays until the newest was found healthy."""
            reap(daemon)
            return daemon.steps("cold") == [7]

        wait_until(is_only_the_newest_left, "the lifecycle")
        wait_until(lambda: tier(daemon)["to_reap"] == 0, "nothing is left")
    status = daemon.status()
    assert (status["failures"], status["lost"]) == ([], [])
    assert reap(daemon)["deletions"] == []


def train_more(trainer: Any, snapshots: int) -> None:
    train(trainer, snapshots)
