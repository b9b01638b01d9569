"""One of two cold tiers fails in some way: the other receives its copies, and the first one once it works again."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.daemon import Daemon
from tests.support.s3 import BUCKET
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.format import layout
from tierd.format.ids import Generation, Run

STEPS = [1, 2, 3, 4, 5]
ABSENT = "nobody listens"
DEAD = [
    pytest.param(ABSENT),
    pytest.param("silence", marks=pytest.mark.long),
    pytest.param("ServiceUnavailable", marks=pytest.mark.long),
    pytest.param("reset", marks=pytest.mark.long),
]


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with Trainer() as trainer:
        yield trainer


@contextmanager
def free_port() -> Iterator[int]:
    """A port that is bound, but on which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def daemon_with(root: Path, cold: str, dr: str) -> Daemon:
    """The hot tier keeps the last checkpoint, and the cold tiers at these URLs keep all."""
    more = f"""
    request_timeout_s = 3.0
    [lifecycle.hot]
    keep_last = 1
    [lifecycle.cold]
    keep_last = 100
    [[cold]]
    name = "dr"
    url = "s3://{BUCKET}/dr"
    endpoint_url = "{dr}"
    """
    return Daemon(root, cold=f'url = "s3://{BUCKET}/cold"\nendpoint_url = "{cold}"', more=more)


def begin(daemon: Daemon, trainer: Trainer) -> None:
    """Starts a run that the daemon knows. For an unknown run it would wait for every tier."""
    claimed = daemon.hot / layout.generation_key(Run("run"), Generation(1))
    claimed.parent.mkdir(parents=True)
    claimed.write_text("{}")
    wait_until(lambda: any(one["run"] == "run" for one in daemon.status()["runs"]), "the run to be known")
    trainer.connect(daemon.socket)


def train_through(daemon: Daemon, trainer: Trainer, *, check: Callable[[], None]) -> None:
    """One checkpoint per step. Each is in the good tier before the next is taken."""
    for step in STEPS:
        trainer.train(1)
        trainer.durable()
        trainer.wait_replicated("cold")
        assert daemon.steps("cold") == STEPS[:step]
        check()
    assert daemon.metric('tierd_queue_checkpoints{tier="cold"}') == 0
    assert daemon.metric('tierd_queue_oldest_age_seconds{tier="cold"}') == 0


def objects(served: Bucket, prefix: str) -> dict[str, bytes]:
    """Of the checkpoints, below the tier's root; of verdicts the fact, for details go with the replica in hot."""
    found: dict[str, bytes] = {}
    for key, stored in served.objects.items():
        if layout.parse_key(key.removeprefix(prefix)):
            is_verdict = key.endswith((f"/{layout.HEALTHY}", f"/{layout.UNHEALTHY}"))
            found[key.removeprefix(prefix)] = b"" if is_verdict else stored.content
    return found


@pytest.mark.parametrize("how", DEAD)
@pytest.mark.usefixtures("checkpoints_examined")
def test_dead_cold_tier_does_not_delay_the_other_and_catches_up_by_itself(
    tmp_path: Path, trainer: Trainer, how: str
) -> None:
    with ExitStack() as stack:
        good = stack.enter_context(bucket_server())
        with free_port() as port, ExitStack() as death:
            if how == ABSENT:
                dr_url = f"http://127.0.0.1:{port}"
            else:
                dr = stack.enter_context(bucket_server())
                dr.script = lambda operation, key: how
                dr_url = dr.url
            daemon = stack.enter_context(daemon_with(tmp_path / "node", good.url, dr_url))
            begin(daemon, trainer)

            def is_dead() -> None:
                assert daemon.steps("dr") == []

            train_through(daemon, trainer, check=is_dead)
            assert daemon.steps("hot") == STEPS, "what the dead tier has not yet is kept for it"
            wait_until(lambda: daemon.status()["failures"], "the failures to be reported")
            said = daemon.tierd("status").stdout
            assert re.search(r"^dr .*NOT REACHABLE: .*dr", said, re.MULTILINE), said
            assert re.search(r"^waiting for dr: 5, the oldest for \d", said, re.MULTILINE), said
            assert "waiting for cold" not in said
            assert daemon.metric('tierd_queue_checkpoints{tier="dr"}') == 5
            assert daemon.metric('tierd_queue_oldest_age_seconds{tier="dr"}') > 0

            answer = daemon.json("restore", "--tier", "cold", "--run", "run", "--to", tmp_path / "restored")
            assert (answer["step"], answer["tier"]) == (5, "cold")
            death.close()
        if how == ABSENT:
            dr = stack.enter_context(bucket_server(port=port))
        dr.script = lambda operation, key: ""

        wait_until(lambda: daemon.steps("dr") == STEPS, "the other tier to catch up")
        wait_until(lambda: objects(dr, "dr/") == objects(good, "cold/"), "the last health marker in both tiers")
        wait_until(lambda: daemon.steps("hot") == [5], "the hot tier to evict what it kept for the dead tier")
        wait_until(lambda: "waiting for" not in daemon.tierd("status").stdout, "nothing to wait for")


@pytest.mark.long
def test_run_continues_from_the_other_cold_tier_when_the_node_is_lost(tmp_path: Path, trainer: Trainer) -> None:
    with bucket_server() as good, bucket_server() as dr:
        dr.script = lambda operation, key: "ServiceUnavailable"
        with daemon_with(tmp_path / "node", good.url, dr.url) as daemon:
            begin(daemon, trainer)
            train_through(daemon, trainer, check=lambda: None)
            digest = trainer.digest()
            trainer.kill()
            daemon.kill()
            shutil.rmtree(daemon.hot)

            daemon.start()
            with Trainer(seed=2) as second:
                second.connect(daemon.socket)
                found = second.restore()
                assert (found.step, found.tier) == (5, "cold")
                assert second.digest() == digest

                second.train(1)
                second.durable()
                second.wait_replicated("cold")
                dr.script = lambda operation, key: ""
                second.wait_replicated("dr")


@pytest.mark.long
@pytest.mark.parametrize("answers", ["late", "drip"])
def test_slow_cold_tier_does_not_delay_the_other(tmp_path: Path, trainer: Trainer, answers: str) -> None:
    with bucket_server() as good, bucket_server() as slow:
        is_slow = True

        def drag(operation: str, key: str) -> str:
            """Writes one second late, or every answer byte by byte."""
            if is_slow and answers == "drip":
                return "drip"
            if is_slow and operation == "put_object":
                slow.closing.wait(1.0)
            return ""

        slow.script = drag
        with daemon_with(tmp_path / "node", good.url, slow.url) as daemon:
            begin(daemon, trainer)
            behind: list[int] = []
            train_through(daemon, trainer, check=lambda: behind.append(len(daemon.steps("dr"))))
            assert behind[-1] < len(STEPS) or answers == "drip", "it was not even slow"
            is_slow = False
            wait_until(lambda: daemon.steps("dr") == STEPS, "the slow tier")
            wait_until(lambda: objects(slow, "dr/") == objects(good, "cold/"), "the last health marker in both tiers")
