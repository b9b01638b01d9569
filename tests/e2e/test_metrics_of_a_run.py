"""Metrics that only a whole life of a checkpoint moves: copied to a bucket, fetched again, restored."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.bucket import bucket_server
from tests.support.daemon import Daemon
from tests.support.s3 import BUCKET
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until


def test_copy_restore_requests_and_pause_are_measured(tmp_path: Path) -> None:
    with bucket_server() as served:
        cold = f'url = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"'
        with Daemon(tmp_path, cold=cold) as daemon:
            assert daemon.metric('tierd_replicate_seconds_count{tier="cold"}') == 0
            with Trainer() as trainer:
                trainer.connect(daemon.socket)
                trainer.train(1)
                trainer.snapshot()
                trainer.wait_replicated()
                assert daemon.metric('tierd_replicate_seconds_count{tier="cold"}') == 1
                assert daemon.metric('tierd_cold_requests_total{code="200",op="put_object",tier="cold"}') >= 2
                assert daemon.metric('tierd_run_pause_limit_seconds{run="run"}') >= 30
            shutil.rmtree(daemon.hot / "run")
            wait_until(lambda: daemon.steps("hot") == [], "the listing of hot")
            with Trainer(seed=2) as reader:
                reader.connect(daemon.socket)
                assert reader.restore().step == 1
            by_tier = {
                tier: daemon.metric(f'tierd_restore_seconds_count{{tier="{tier}"}}')
                for tier in ("memory", "hot", "cold")
            }
            assert sum(by_tier.values()) >= 1, by_tier
            assert daemon.metric("tierd_event_loop_tasks") > 1
