"""A writer to one of two cold tiers, against a real daemon with a key: what a trainer restores, and what stays."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.bucket import Bucket, Stored, bucket_server
from tests.support.daemon import Daemon
from tests.support.forgery import changed_with_the_same_crc
from tests.support.s3 import BUCKET
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tests.support.wire_peer import HELLO, Peer
from tierd.errors import Foreign
from tierd.format import checksum
from tierd.format.layout import TIER_MARKERS, parse_tier_marker, tier_marker_key
from tierd.keys.key_file import make_key_file

DR = '[[cold]]\nname = "dr"\nurl = "file://dr"\n[security]\nkey_file = "key"'


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    make_key_file(tmp_path / "key")
    with Daemon(tmp_path, more=DR) as daemon:
        yield daemon


def train(daemon: Daemon, snapshots: int) -> None:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        for _ in range(snapshots):
            trainer.train(1)
            trainer.durable()
            trainer.wait_replicated("cold")
            trainer.wait_replicated("dr")


def forge(daemon: Daemon, *, step: int, generation: int = 1, tier: str = "cold") -> Path:
    """Copies a genuine checkpoint without its markers to another step, with a manifest that fits it.

    The manifest appears at once: a daemon that lists it while it is written takes it for a damaged one.
    """
    genuine = daemon.folder(1, tier=tier)
    folder = genuine.parent / f"{step:012d}-g{generation:04d}"
    shutil.copytree(genuine, folder, ignore=shutil.ignore_patterns("healthy.json", "manifest.json", "*.partial"))
    manifest = json.loads((genuine / "manifest.json").read_bytes()) | {"step": step, "generation": generation}
    written = daemon.root / "forged.json"
    written.write_text(json.dumps(manifest, indent=1) + "\n")
    written.rename(folder / "manifest.json")
    return folder


@pytest.mark.usefixtures("checkpoints_examined")
def test_forged_newest_checkpoint_is_neither_restored_nor_counted(daemon: Daemon) -> None:
    train(daemon, 2)
    forged = forge(daemon, step=999_999)
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        found = trainer.restore()
        assert found is not None
        assert found.step == 2
        for _ in range(2):
            trainer.train(1)
            trainer.durable()
            trainer.wait_replicated("cold")
    wait_until(lambda: daemon.steps("hot") == [2, 3, 4], "hot to keep the last three genuine ones")
    assert forged.exists()
    wait_until(lambda: daemon.metric('tierd_foreign_checkpoints{tier="cold"}') == 1, "the listing")
    assert "FOREIGN" in daemon.tierd("status").stdout
    assert "999999" in daemon.tierd("ls").stderr
    assert daemon.tierd("verify", "--step", "999999", "--run", "run").returncode == 12


@pytest.mark.long
def test_run_with_unsigned_checkpoints_is_refused_until_they_are_signed(tmp_path: Path) -> None:
    with Daemon(tmp_path, more=DR.replace('key_file = "key"', "")) as daemon:
        train(daemon, 2)
        assert daemon.stop() == 0
    key = tmp_path / "key"
    assert daemon.tierd("key", "new", key).returncode == 0
    daemon.config.write_text(daemon.config.read_text() + f'\nkey_file = "{key}"\n')

    with daemon, Trainer() as trainer:
        trainer.connect(daemon.socket)
        with pytest.raises(Foreign, match="tierd key sign run"):
            trainer.restore()
        held = daemon.tierd("key", "sign", "run", "--yes")
        assert held.returncode == 11, "the daemon has the lock"
    refused = daemon.tierd("restore", "--to", tmp_path / "refused")
    assert (refused.returncode, "is not signed" in refused.stderr) == (12, True)
    latest = daemon.tierd("restore", "--allow-unsigned", "--to", tmp_path / "latest")
    assert latest.returncode == 2, "only by name"
    named = daemon.tierd("restore", "--allow-unsigned", "--step", "2", "--to", tmp_path / "named")
    assert named.returncode == 0, named.stderr

    signed = daemon.tierd("key", "sign", "run", "--yes")
    assert signed.returncode == 0, signed.stderr
    assert daemon.tierd("verify", "--deep").returncode == 0
    assert "0 files signed" in daemon.tierd("key", "sign", "run", "--yes").stdout
    with daemon, Trainer() as trainer:
        assert trainer.connect(daemon.socket) >= 2
        found = trainer.restore()
        assert found is not None
        assert found.step == 2
        assert not daemon.status()["foreign"]


def test_wrong_key_reads_nothing_and_says_why(daemon: Daemon) -> None:
    train(daemon, 1)
    daemon.stop()
    (daemon.root / "key").unlink()
    make_key_file(daemon.root / "key")
    refused = daemon.tierd("restore", "--to", daemon.root / "refused")
    assert (refused.returncode, "not in the key file" in refused.stderr) == (12, True)


def test_hello_with_a_forged_generation_does_not_brick_the_run(daemon: Daemon) -> None:
    train(daemon, 1)
    with Peer(daemon.socket) as peer:
        peer.send(msgspec.structs.replace(HELLO, generation=99_999_999))
        refused = peer.answer()
        assert refused is not None, "the daemon took the generation"
        assert "generation 99999999" in refused.message
    with Trainer() as trainer:
        assert trainer.connect(daemon.socket) == 2


def test_node_that_only_restores_holds_no_secret(tmp_path: Path) -> None:
    key = tmp_path / "key"
    with Daemon(tmp_path, more=DR.replace('key_file = "key"', "")) as daemon:
        daemon.stop()
        made = daemon.tierd("key", "new", key, "--ed25519")
        assert made.returncode == 0, made.stderr
        daemon.config.write_text(daemon.config.read_text() + f'\nkey_file = "{key}"\n')
        with daemon:
            train(daemon, 1)
        public = daemon.tierd("key", "public", key)
        assert public.stdout.startswith("ed25519-public:")
        key.write_text(public.stdout)
        restored = daemon.tierd("restore", "--tier", "cold", "--to", tmp_path / "restored")
        assert restored.returncode == 0, restored.stderr
        daemon.launch()
        assert daemon.wait_exit() == 2
        assert "only public keys" in daemon.log


def put(served: Bucket, key: str, content: bytes) -> None:
    served.objects[key] = Stored(content, f'"{hashlib.md5(content).hexdigest()}"', checksum.crc64nvme(content))


@pytest.mark.usefixtures("checkpoints_examined")
def test_writer_to_an_s3_bucket_changes_nothing_that_is_restored(tmp_path: Path) -> None:
    """The hot disk is lost too: what a restore gets can only come from the bucket."""
    key = tmp_path / "key"
    make_key_file(key)
    with bucket_server(part_bytes_min=1024) as served:
        cold = f'url = "s3://{BUCKET}"\nendpoint_url = "{served.url}"'
        with Daemon(tmp_path, cold=cold, more=f'[security]\nkey_file = "{key}"') as daemon:
            with Trainer() as trainer:
                trainer.connect(daemon.socket)
                for _ in range(2):
                    trainer.train(1)
                    trainer.durable()
                    trainer.wait_replicated("cold")
                digests = {2: trainer.digest()}
            daemon.kill()
            shutil.rmtree(daemon.hot)

            newest, forged = "run/000000000002-g0001", "run/000000999999-g0001"
            for name in [name for name in served.objects if name.startswith(newest)]:
                put(served, name.replace(newest, forged), served.objects[name].content)
            put(served, "run/generation-0007.json", b'{"node":"elsewhere"}\n')
            put(served, f"{newest}/unhealthy.json", b'{"healthy":false}\n')
            with daemon, Trainer() as trainer:
                assert trainer.connect(daemon.socket) == 8, (
                    "the number of the claim is not used, and it counts for nothing else"
                )
                found = trainer.restore()
                assert found is not None
                assert (found.step, trainer.digest()) == (2, digests[2])
                assert "999999" in daemon.tierd("ls").stderr
            shutil.rmtree(daemon.hot)

            [shard] = [name for name in served.objects if name.startswith(f"{newest}/rank-")]
            put(served, shard, changed_with_the_same_crc(served.objects[shard].content))
            with daemon, Trainer() as trainer:
                trainer.connect(daemon.socket)
                found = trainer.restore()
                assert found is not None
                assert found.step == 1, "the newest one that is whole"


@pytest.mark.parametrize("read", ["the claims in cold", pytest.param("the marker of dr", marks=pytest.mark.long)])
def test_a_tier_that_is_named_as_another_one_keeps_no_daemon_from_starting(daemon: Daemon, read: str) -> None:
    """By the identity that marks the other tier. That of hot is in no object of a bucket."""
    train(daemon, 1)
    assert daemon.stop() == 0
    markers = [path.name for path in (daemon.root / "dr").glob(f"{TIER_MARKERS}*")]
    if read == "the claims in cold":
        claims = [json.loads(path.read_bytes()) for path in (daemon.cold / "run").glob("generation-*.json")]
        names = [tier_marker_key(str(value)) for claim in claims for value in claim.values()]
        markers = [name for name in names if parse_tier_marker(name)]
    for marker in markers:
        (daemon.cold / marker).touch()
    daemon.launch()
    wait_until(lambda: " serves " in daemon.log or "the same place as" in daemon.log, "the daemon to start or refuse")
    assert " serves " in daemon.log
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.restore()
        trainer.train(1)
        trainer.durable()
        if read == "the claims in cold":  # else one of the two tiers cannot be used until the object is deleted
            trainer.wait_replicated("cold")
            trainer.wait_replicated("dr")


def test_daemon_that_lost_its_key_does_not_start_beside_signed_checkpoints(daemon: Daemon) -> None:
    """What it would write is foreign to all other nodes."""
    train(daemon, 1)
    daemon.stop()
    daemon.config.write_text(daemon.config.read_text().replace('key_file = "key"', ""))
    files = [path for path in daemon.hot.rglob("*") if path.name != ".tierd.lock"]
    sizes = [path.stat().st_size for path in files]
    daemon.launch()
    wait_until(lambda: " serves " in daemon.log or "TIERD_KEY_FILE" in daemon.log, "the daemon to start or to refuse")
    assert " serves " not in daemon.log
    assert daemon.wait_exit() == 2
    assert [path.stat().st_size for path in files] == sizes, "nothing was deleted or written to the audit trail"
    restored = daemon.tierd("restore", "--to", daemon.root / "restored")
    assert restored.returncode == 0
    assert "is not checked: there is no key file" in restored.stderr


def test_newer_unsigned_checkpoint_in_hot_is_refused_by_name(daemon: Daemon) -> None:
    train(daemon, 2)
    forge(daemon, step=7, tier="hot")
    refused = daemon.tierd("restore", "--to", daemon.root / "refused")
    assert (refused.returncode, "000000000007-g0001, the newest in hot" in refused.stderr) == (12, True)
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        with pytest.raises(Foreign, match="000000000007-g0001"):
            trainer.restore()
    older = daemon.tierd("restore", "--step", "2", "--to", daemon.root / "older")
    assert older.returncode == 0, older.stderr
