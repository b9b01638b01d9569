"""Incidents of cold tiers, staged as those of test_incidents: with the intervals of tierd.toml, so that what happens
between two listings must be noticed by a look.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.bucket import bucket_server
from tests.support.stage import KEEP_ALL, Stage, bucket, named, staged
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.errors import TierUnreachable

AS_SHIPPED = "request_timeout_s = 3.0\n"  # cold is listed every ten minutes


@pytest.mark.long
@pytest.mark.parametrize("is_idle", [True, False])
def test_s3_down(tmp_path: Path, is_idle: bool) -> None:
    """Nothing listens; later the server is back with all that it had. `is_idle`: no copy waits that would notice it."""
    with ExitStack() as server, ExitStack() as later:
        served = server.enter_context(bucket_server())
        with staged(tmp_path, cold=bucket(served), limits=AS_SHIPPED) as stage:
            objects, port = served.objects, int(served.url.rpartition(":")[2])
            server.close()
            if not is_idle:
                stage.save(durable_in="hot")
            section = stage.assert_named("TierdColdRequestsFail", "no connection")
            assert stage.run(section.command("tierd doctor --tier cold")).returncode == 14
            section.says("all tiers keep what they have")
            stage.save(durable_in="hot")
            again = later.enter_context(bucket_server(port=port))
            again.objects = objects
            stage.reload(section)
            stage.save()
            stage.assert_cured()
            stage.assert_nothing_lost()


@pytest.mark.long
def test_bucket_gone(tmp_path: Path) -> None:
    """Deleted by somebody, and made again from a replica of the provider."""
    with bucket_server() as served, staged(tmp_path, cold=bucket(served), limits=AS_SHIPPED) as stage:
        served.script = lambda operation, key: "NoSuchBucket"
        section = stage.assert_named("TierdColdRequestsFail", "NoSuchBucket")
        section.says("Missing bucket: tierd never creates one.")
        served.script = lambda operation, key: ""
        stage.reload(section)
        stage.save()
        stage.assert_cured()
        stage.assert_nothing_lost()


@pytest.mark.long
def test_bucket_emptied_is_named_long_before_the_next_listing(tmp_path: Path) -> None:
    """Hot has all, and sends it again."""
    with bucket_server() as served, staged(tmp_path, cold=bucket(served), limits=AS_SHIPPED) as stage:
        stage.save()
        with served.lock:
            served.objects.clear()
        section = stage.assert_named("TierdCheckpointsLost", "LOST: ", "disappeared from cold")
        section.says("Hot sends again what it has.")
        wait_until(lambda: stage.daemon.steps("cold") == [1, 2], "what hot sends again")
        stage.assert_cured("TierdCheckpointsLost")
        shutil.rmtree(stage.daemon.hot / "run")
        stage.assert_nothing_lost()


@pytest.mark.long
def test_region_lost(tmp_path: Path) -> None:
    """One of two, and for good: the runs go on, new ones start as the runbook says, and in the end it is taken out."""
    with bucket_server() as near, ExitStack() as server:
        far = server.enter_context(bucket_server())
        tier = f'[[cold]]\nname = "far"\n{bucket(far)}\n'
        with staged(tmp_path, cold=bucket(near), limits=AS_SHIPPED, more=tier + KEEP_ALL) as stage:
            wait_until(lambda: stage.daemon.steps("far") == [1], "the copy in the other region")
            server.close()
            section = stage.assert_named("TierdColdRequestsFail", "far is NOT REACHABLE", "no connection")
            stage.save()
            assert stage.daemon.steps("cold") == [1, 2], "the other region goes on"
            with pytest.raises(TierUnreachable, match="far"):
                start_another(stage)
            refused = section.next("new-run-refused")
            refused.says("`TIERD_RESUME=scratch`")
            start_another(stage, "scratch")
            section.says(
                "gone for good, as a region that is lost: take its `[[cold]]` out of the config and restart the daemon"
            )
            stage.edit(tier, "")
            assert stage.daemon.stop() == 0
            stage.daemon.start()
            stage.save()
            stage.assert_cured()
            assert stage.daemon.status()["halted"] == []
            shutil.rmtree(stage.daemon.hot / "run")
            stage.assert_nothing_lost()


def set_resume(training: Any, resume: str) -> None:
    os.environ["TIERD_RESUME"] = resume


def start_another(stage: Stage, resume: str = "auto") -> None:
    """A run that nobody knows, which ends normally. `resume`: TIERD_RESUME in its environment."""
    with Trainer() as other:
        other.apply(set_resume, resume)
        other.connect(stage.daemon.socket, run="another")
        other.restore()
        other.train(1)
        other.durable()
        other.close()


@pytest.mark.long
def test_bandwidth_too_small_for_the_cadence(tmp_path: Path) -> None:
    """Hot and cold keep the newest only, so those between are replaced while a copy goes on."""
    keep = "[lifecycle.hot]\nkeep_last = 1\n[lifecycle.cold]\nkeep_last = 1\n"
    cap = "max_upload_mib_s = 0.02"
    with bucket_server() as served, staged(tmp_path, more=keep, cold=f"{bucket(served)}\n{cap}", width=64) as stage:
        for _ in range(5):
            stage.save(durable_in="hot")
        section = stage.assert_named("TierdColdTooSlow", "cold DOES NOT KEEP UP", "a copy takes")
        section.says("Raise `max_upload_mib_s`")
        stage.edit(cap, "max_upload_mib_s = 0.0")
        stage.reload(section)
        newest = stage.save()
        wait_until(lambda: stage.daemon.steps("cold") == [newest], "the policy of cold")
        stage.assert_cured()
        assert "TierdColdTooSlow" not in named(stage.daemon)
        stage.digests = {newest: stage.digests[newest]}
        stage.assert_nothing_lost()
