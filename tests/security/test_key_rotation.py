"""The key is rotated while a checkpoint is on its way to a bucket: nothing is lost, and the removed key counts nowhere.

Also: two daemons with different keys at one bucket, and checkpoints that the holder of a removed key writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.test_bucket_writer import put
from tests.support.bucket import Bucket, bucket_server
from tests.support.daemon import Daemon
from tests.support.s3 import BUCKET
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.failpoints import VARIABLE
from tierd.format.signature import new_key, parse_keys, without_signature


def write_keys(path: Path, *lines: str) -> None:
    path.write_text("".join(lines))
    path.chmod(0o600)


@pytest.fixture
def served() -> Iterator[Bucket]:
    with bucket_server(part_bytes_min=1024) as served:
        yield served


def make_daemon(root: Path, served: Bucket, *, failpoints: str = "") -> Daemon:
    cold = f'url = "s3://{BUCKET}"\nendpoint_url = "{served.url}"'
    environ = {VARIABLE: failpoints}
    return Daemon(root, cold=cold, more=f'[security]\nkey_file = "{root / "key"}"', environ=environ)


def snapshot(daemon: Daemon, *, is_copied: bool = True) -> str:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.restore()
        trainer.train(1)
        trainer.durable()
        if is_copied:
            trainer.wait_replicated("cold")
        return trainer.digest()


def manifests(served: Bucket) -> list[str]:
    return sorted(key for key in served.objects if key.endswith("manifest.json"))


@pytest.mark.parametrize("killed_at", ["tier.commit=kill@2", pytest.param("s3.put=kill@1", marks=pytest.mark.long)])
@pytest.mark.parametrize("is_old_key_kept", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.long
def test_a_key_that_is_rotated_during_an_upload_loses_no_checkpoint(
    tmp_path: Path, served: Bucket, killed_at: str, is_old_key_kept: bool
) -> None:
    old, new = new_key().line, new_key().line
    write_keys(tmp_path / "key", old)  # the second commit is that in cold
    with make_daemon(tmp_path, served, failpoints=killed_at) as daemon:
        digest = snapshot(daemon, is_copied=False)
        daemon.wait_exit()
        assert manifests(served) == [], "the upload is not complete"
        write_keys(tmp_path / "key", new, *([old] if is_old_key_kept else []))
        if not is_old_key_kept:
            signed = daemon.tierd("key", "sign", "run", "--yes")
            assert signed.returncode == 0, signed.stderr
        daemon.restart_armed("")
        wait_until(lambda: manifests(served), "the rest of the upload")
        daemon.kill()
        shutil.rmtree(daemon.hot)
        daemon.start()
        with Trainer() as trainer:
            trainer.connect(daemon.socket)
            found = trainer.restore()
            assert found is not None
            assert (found.step, found.tier, trainer.digest()) == (1, "cold", digest)


def test_what_the_holder_of_a_removed_key_writes_is_neither_restored_nor_counted(
    tmp_path: Path, served: Bucket
) -> None:
    """He can read the bucket, so he signs a copy of the newest checkpoint under a higher step and generation."""
    old, new = new_key().line, new_key().line
    write_keys(tmp_path / "key", old)
    with make_daemon(tmp_path, served) as daemon:
        snapshot(daemon)
        write_keys(tmp_path / "key", new, old)
        daemon.restart_armed("")
        snapshot(daemon)
        daemon.kill()
        write_keys(tmp_path / "key", new)
        forger = parse_keys(old, where="test")
        genuine, forged = "run/000000000002-g0002", "run/000000000009-g0009"
        for key in [key for key in served.objects if key.startswith(genuine)]:
            content = served.objects[key].content
            name = key.replace(genuine, forged)
            if key.endswith(".json"):
                changed = content.replace(b'"step": 2', b'"step": 9').replace(b'"generation": 2', b'"generation": 9')
                content = forger.sign(name, without_signature(changed))
            put(served, name, content)
        put(served, "run/generation-0050.json", forger.sign("run/generation-0050.json", b'{"node":"forger"}\n'))
        shutil.rmtree(daemon.hot)
        daemon.start()
        with Trainer() as trainer:
            assert trainer.connect(daemon.socket) == 51, "no number is used twice"
            found = trainer.restore()
            assert found is not None
            assert (found.step, found.generation) == (2, 2)
        status = "\n".join(daemon.status()["foreign"])
        assert "000000000009-g0009" in status
        assert "run/generation-0050.json" not in status.replace("up to generation 50", ""), "one line for all claims"


@pytest.mark.long
def test_daemons_with_different_keys_at_one_bucket_delete_nothing_of_each_other(tmp_path: Path, served: Bucket) -> None:
    roots = [tmp_path / name for name in ("a", "b")]
    for root in roots:
        root.mkdir()
        write_keys(root / "key", new_key().line)
    with make_daemon(roots[0], served) as first, make_daemon(roots[1], served) as second:
        snapshot(first)
        before = dict(served.objects)
        for _ in range(5):  # more than cold keeps
            with Trainer() as trainer:
                trainer.connect(second.socket)
                trainer.restore(resume="scratch", force=True)
                trainer.train(1)
                trainer.durable()
                trainer.wait_replicated("cold")
        assert {key: stored.etag for key, stored in before.items() if key in served.objects} == {
            key: stored.etag for key, stored in before.items()
        }
        with Trainer() as trainer:
            trainer.connect(first.socket)
            found = trainer.restore()
            assert found is not None
            assert (found.step, found.generation) == (1, 1)
