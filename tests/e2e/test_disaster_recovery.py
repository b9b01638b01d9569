"""docs/guides/disaster-recovery.md: its commands, run in their order after the loss that each section is about."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.support.cli import make_checkpoint, make_house
from tests.support.daemon import Daemon
from tests.support.guide import Section
from tests.support.s3 import moto_server, s3_client
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.errors import Corrupt

PAGE = "disaster-recovery"
LISTED_OFTEN = "cold_list_interval_s = 1.0\n"
KEEP = LISTED_OFTEN + "[lifecycle.hot]\nkeep_last = 1\n[lifecycle.cold]\nkeep_last = {cold}\nkeep_every = 0\n"

pytestmark = pytest.mark.long
needs_aws = pytest.mark.skipif(shutil.which("aws") is None, reason="the command line of AWS is not installed")


@pytest.fixture(scope="module")
def server() -> Generator[str]:
    with moto_server() as url:
        yield url


class Bucket:
    """A bucket of its own, with versions."""

    def __init__(self, url: str) -> None:
        self.name = uuid4().hex
        self.environ = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
        self.cold = f'url = "s3://{self.name}/prefix"\nendpoint_url = "{url}"\nregion = "us-east-1"'
        client = s3_client(url)
        client.create_bucket(Bucket=self.name)
        client.put_bucket_versioning(Bucket=self.name, VersioningConfiguration={"Status": "Enabled"})
        client.close()


@pytest.fixture
def bucket(server: str) -> Bucket:
    return Bucket(server)


def environ_of(daemon: Daemon, bucket: Bucket | None = None) -> dict[str, str]:
    return {"TIERD_CONFIG": str(daemon.config), **(bucket.environ if bucket else {})}


def save(trainer: Trainer, tier: str = "cold") -> str:
    trainer.train(1)
    trainer.snapshot()
    trainer.wait_replicated(tier)
    return trainer.digest()


@contextmanager
def restarted(daemon: Daemon, seed: int = 2) -> Generator[tuple[Trainer, Any]]:
    with Trainer(seed=seed) as trainer:
        trainer.connect(daemon.socket)
        yield trainer, trainer.restore()


def test_a_node_is_lost(tmp_path: Path, bucket: Bucket) -> None:
    with Daemon(tmp_path / "lost", cold=bucket.cold) as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket)
        digest = save(trainer)
        trainer.kill()
    shutil.rmtree(tmp_path / "lost")
    with Daemon(tmp_path / "other", cold=bucket.cold) as other, restarted(other) as (trainer, found):
        assert (found.step, found.tier) == (1, "cold")
        assert trainer.digest() == digest
    values = {"BUCKET": bucket.name, "PREFIX": "prefix", "RUN": "run", "DIR": tmp_path / "copy"}
    section = Section(PAGE, "A node is lost", bucket.environ, **values)
    section.run_next("tierd restore --from")
    section.assert_done()
    assert (tmp_path / "copy" / "manifest.json").exists()


def test_the_hot_disk_is_lost(tmp_path: Path) -> None:
    with Daemon(tmp_path, more="[lifecycle.hot]\nkeep_last = 5\n") as daemon:
        with Trainer() as trainer:
            trainer.connect(daemon.socket)
            save(trainer)
            daemon.hot.rename(tmp_path / "dead")
            digest = save(trainer)  # not durable in hot, so it goes to cold
            trainer.kill()
        section = Section(PAGE, "The hot disk is lost", environ_of(daemon), RUN="run", HOT=daemon.hot, FOLDER="")
        section.replaces("systemctl stop tierd")
        daemon.stop()
        shutil.rmtree(daemon.hot, ignore_errors=True)
        daemon.hot.mkdir(mode=0o700)
        section.run_next("tierd doctor --tier hot")
        section.replaces("systemctl start tierd")
        daemon.start()
        section.run_next("tierd status")
        section.values["FOLDER"] = daemon.folder(2, tier="cold").name
        section.run_in_prose("tierd restore --run RUN --tier cold --to HOT/RUN/FOLDER")
        wait_until(lambda: daemon.steps("hot") == [2], "hot to find what was put there")
        with restarted(daemon) as (trainer, found):
            assert (found.step, found.tier) == (2, "hot")
            assert trainer.digest() == digest
        section.assert_done()


@needs_aws
def test_a_region_is_lost(tmp_path: Path, server: str, bucket: Bucket) -> None:
    new = Bucket(server)
    lost = 'url = "file://cold"\n'
    dr = f'[[cold]]\nname = "dr"\n{bucket.cold}\n'
    with Daemon(tmp_path, cold=lost + dr, more=KEEP.format(cold=5)) as daemon:
        with Trainer() as trainer:
            trainer.connect(daemon.socket)
            for _ in range(2):
                save(trainer)
            trainer.wait_replicated("dr")
            daemon.cold.rename(tmp_path / "away")
            digest = save(trainer, "dr")
            trainer.kill()
        values = {"BUCKET": bucket.name, "PREFIX": "prefix", "NEW": new.name, "RUN": "run", "DIR": tmp_path / "copy"}
        section = Section(PAGE, "A region is lost", environ_of(daemon, bucket), **values)
        daemon.stop()
        text = daemon.config.read_text()
        former = f'[[cold]]\nname = "cold"\n{lost}'
        assert former in text
        daemon.config.write_text(text.replace(former, ""))
        daemon.start()
        section.run_next("tierd verify --tier dr")
        section.run_next("tierd restore --run RUN --tier dr")
        section.run_next("aws s3 sync")
        daemon.stop()
        third = f'[[cold]]\nname = "third"\n{new.cold}\n'
        daemon.config.write_text(text.replace(former, third))
        daemon.start()
        section.run_next("tierd doctor --tier third", expected=1)  # moto has no rules for old versions and uploads
        section.run_next("tierd verify --tier third --deep")
        section.assert_done()
        wait_until(lambda: daemon.steps("third") == daemon.steps("dr") == [1, 2, 3], "the third region")
        with restarted(daemon) as (trainer, found):
            assert found.step == 3
            assert trainer.digest() == digest


def deleted_by_someone(bucket: Bucket) -> str:
    """Everything, at once. Returns a time shortly before."""
    at = datetime.now(UTC) - timedelta(seconds=2)
    client = s3_client(bucket.environ["AWS_ENDPOINT_URL"])
    keys = [{"Key": each["Key"]} for each in client.list_objects_v2(Bucket=bucket.name)["Contents"]]
    client.delete_objects(Bucket=bucket.name, Delete={"Objects": keys})
    client.close()
    return at.strftime("%Y-%m-%dT%H:%M:%S")


@needs_aws
def test_a_bucket_was_emptied(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Daemon(tmp_path / "node", cold=bucket.cold, more=KEEP.format(cold=5)) as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket)
        for _ in range(3):
            save(trainer)
        wait_until(lambda: daemon.steps("hot") == [3], "the policy of hot")
        time = deleted_by_someone(bucket)
        wait_until(lambda: daemon.steps("cold") == [3], "what hot sends again")
        values = {"BUCKET": bucket.name, "AT": "prefix/", "TIME": time}
        section = Section(PAGE, "A bucket was emptied", environ_of(daemon, bucket), **values)
        section.run_next("aws s3api list-object-versions")
        section.run_next("(grep -v")
        section.run_next("tierd verify --tier cold --deep")
        section.assert_done()
        wait_until(lambda: daemon.steps("cold") == [1, 2, 3], "the next listing")


@needs_aws
def test_a_milestone_was_removed_by_mistake(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noticed before the lifecycle has deleted it, and once more when it has."""
    monkeypatch.chdir(tmp_path)
    with Daemon(tmp_path / "node", cold=bucket.cold, more=KEEP.format(cold=1)) as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket)
        save(trainer)
        assert daemon.tierd("milestone", "--run", "run", "--step", "1", "best").returncode == 0
        assert daemon.tierd("milestone", "--run", "run", "--remove", "best").returncode == 0
        values = {"BUCKET": bucket.name, "PREFIX": "prefix", "RUN": "run", "STEP": 1, "NEWNAME": "best-2"}
        environ = environ_of(daemon, bucket)
        section = Section(PAGE, "A milestone was removed by mistake", environ, **values)
        assert "unmarked" in section.run_next("tierd log --audit --run RUN")
        section.run_next("tierd milestone --run RUN --step STEP NEWNAME")
        for _ in range(2):
            save(trainer)
        wait_until(lambda: daemon.steps("hot") == [3] and daemon.steps("cold") == [1, 3], "the policies")

        time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
        assert daemon.tierd("milestone", "--run", "run", "--remove", "best-2").returncode == 0
        wait_until(lambda: daemon.steps("cold") == [3], "the deletion")
        wait_until(lambda: "gone.json" in keys_of(bucket), "its tombstone")
        daemon.stop()
        daemon.config.write_text(daemon.config.read_text().replace(LISTED_OFTEN, ""))
        daemon.start()
        folder = next(name for name in keys_of(bucket).split() if name.endswith("/gone.json")).split("/")[-2]
        undo = Section(PAGE, "A bucket was emptied", environ, BUCKET=bucket.name, AT=f"prefix/run/{folder}/", TIME=time)
        undo.run_next("aws s3api list-object-versions")
        undo.run_next("(grep -v")
        section.values |= {"FOLDER": folder, "NEWNAME": "best-3"}
        section.run_next("aws s3 rm")
        section.run_next("tierd milestone --run RUN --step STEP NEWNAME")
        section.assert_done()
        daemon.stop()
        daemon.start()
        wait_until(lambda: daemon.steps("cold") == [1, 3], "the checkpoint that was brought back")
        assert daemon.tierd("verify", "--run", "run", "--step", "1", "--deep").returncode == 0


def keys_of(bucket: Bucket) -> str:
    client = s3_client(bucket.environ["AWS_ENDPOINT_URL"])
    keys = [each["Key"] for each in client.list_objects_v2(Bucket=bucket.name)["Contents"]]
    client.close()
    return "\n".join(keys)


def test_the_key_is_lost(tmp_path: Path) -> None:
    house = make_house(tmp_path, more='[security]\nkey_file = "key"')
    make_checkpoint(house.hot, house.cold, run="run", milestones=("best",))
    key = tmp_path / "key"
    old = house.tierd("key", "new", key).stdout.strip()
    assert house.tierd("key", "sign", "run", "--yes").exit_code == 0
    section = Section(PAGE, "The key is lost", {"TIERD_CONFIG": str(house.config)}, RUN="run", KEY=key, FILE=key)
    assert old in section.run_in_prose("tierd key show FILE")
    key.unlink()
    new = section.run_next("tierd key new KEY").strip()
    assert new != old
    refused = house.tierd("verify", "--run", "run")
    assert (refused.exit_code, old in refused.output) == (Corrupt.exit_code, True)
    assert "would sign" in section.run_next("tierd key sign RUN --dry-run")
    section.run_next("tierd key sign RUN --yes")
    section.run_next("tierd verify --run RUN")
    section.assert_done()


def test_what_comes_first_and_what_comes_before(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket)
        save(trainer)
        first = Section(PAGE, "", environ_of(daemon), RUN="run")
        first.run_next("tierd status")
        first.run_next("tierd ls")
        first.assert_done()
        section = Section(PAGE, "Before it happens", environ_of(daemon))
        section.run_next("tierd drill")
        section.assert_done()
