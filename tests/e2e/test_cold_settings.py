"""A real daemon with a bucket: the effect of a reload, the report of a wrong bucket, no credential in any output."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.cli import make_checkpoint
from tests.support.daemon import Daemon, serving
from tests.support.processes import run_tierd
from tests.support.s3 import BUCKET, ENVIRONMENT
from tests.support.waiting import wait_until

SHARD_BYTES = 2_000_000
MIB_S = 0.001  # the second shard waits for half an hour


def cold(served: Bucket, *, cap: float = 0.0, region: str = "") -> str:
    return f"""
        [[cold]]
        url = "s3://{BUCKET}/deep"
        endpoint_url = "{served.url}"
        max_upload_mib_s = {cap}
        region = "{region}"
        """


def reload(daemon: Daemon, former: str, fresh: str) -> None:
    daemon.config.write_text(daemon.config.read_text().replace(former, fresh))
    daemon.signal(signal.SIGHUP)


def test_raised_upload_cap_releases_a_waiting_upload_without_a_restart(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hot", size_bytes=SHARD_BYTES)
    with bucket_server() as served, serving(tmp_path, more=cold(served, cap=MIB_S)) as daemon:
        wait_until(served.checkpoint_keys, "for the first shard")
        assert not any(key.endswith("manifest.json") for key in served.objects)
        reload(daemon, f"max_upload_mib_s = {MIB_S}", "max_upload_mib_s = 0.0")
        daemon.wait_log(f"cold.cold.max_upload_mib_s is now 0.0, was {MIB_S}")
        wait_until(lambda: any(key.endswith("manifest.json") for key in served.objects), "for the commit")
        assert daemon.stop() == 0


def test_lowered_lifecycle_applies_without_a_restart(tmp_path: Path) -> None:
    for step in range(1, 6):
        make_checkpoint(tmp_path / "hot", step=step, sequence=step)
    rules = "[lifecycle.hot]\nkeep_last = 5\nkeep_every = 2\n[lifecycle.cold]\nkeep_last = 5\nkeep_every = 0\n"
    with serving(tmp_path, more=rules) as daemon:
        wait_until(lambda: daemon.steps("hot") == [1, 2, 3, 4, 5], "the checkpoints to be listed")
        reload(daemon, "keep_last = 5", "keep_last = 1")
        daemon.wait_log("SIGHUP: lifecycle.cold.keep_last is now 1, was 5")
        daemon.wait_log("SIGHUP: lifecycle.hot.keep_last is now 1, was 5")
        wait_until(lambda: daemon.steps("hot") == [2, 4, 5], "what the new rules do not keep to be deleted")
        assert "restart" not in daemon.log


@pytest.mark.long
def test_reload_tries_at_once_what_waits_after_an_outage(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hot")
    never = {"TIERD_LIMITS_RETRY_MIN_S": "9000", "TIERD_LIMITS_RETRY_MAX_S": "9000"}
    with bucket_server() as served:
        served.script = lambda operation, key: "AccessDenied"
        with serving(tmp_path, more=cold(served), environ=never) as daemon:
            daemon.wait_log("WARNING list: list s3://")
            shown = daemon.tierd("status").stdout
            assert f"tried again within minutes; at once after: kill -HUP {daemon.pid}\n" in shown
            served.script = lambda operation, key: ""
            daemon.signal(signal.SIGHUP)
            wait_until(lambda: daemon.steps("cold") == [100], "the copy")
            assert "kill -HUP" not in daemon.tierd("status").stdout


def test_drain_to_cold_ends_when_the_cold_tier_has_what_it_should(tmp_path: Path) -> None:
    """As where the disk of hot is lost with the job."""
    make_checkpoint(tmp_path / "hot", size_bytes=SHARD_BYTES)
    drain = {"TIERD_DAEMON_DRAIN_COLD_S": "600"}
    with bucket_server() as served, serving(tmp_path, more=cold(served, cap=MIB_S), environ=drain) as daemon:
        wait_until(served.checkpoint_keys, "for the first shard")
        daemon.signal(signal.SIGTERM)
        daemon.wait_log("draining: cold lacks run42/000000000100-g0001")
        reload(daemon, f"max_upload_mib_s = {MIB_S}", "max_upload_mib_s = 0.0")
        assert daemon.wait_exit() == 0
        assert any(key.endswith("manifest.json") for key in served.objects)
        assert "drain_cold_s has passed" not in daemon.log


def test_drain_to_cold_ends_in_time_and_names_what_only_hot_has(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hot", size_bytes=SHARD_BYTES)
    drain = {"TIERD_DAEMON_DRAIN_COLD_S": "0.5"}
    with bucket_server() as served, serving(tmp_path, more=cold(served, cap=MIB_S), environ=drain) as daemon:
        wait_until(served.checkpoint_keys, "for the first shard")
        assert daemon.stop() == 0
        assert "daemon.drain_cold_s has passed: cold lacks run42/" in daemon.log


def test_reload_names_keys_that_need_a_restart_and_ignores_an_invalid_file(tmp_path: Path) -> None:
    with bucket_server() as served, serving(tmp_path, more=cold(served)) as daemon:
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("SIGHUP: the config has not changed")
        reload(daemon, 'region = ""', 'region = "eu-west-1"')
        daemon.wait_log("these keys changed and need a restart: cold.cold.region\n")
        reload(daemon, "max_upload_mib_s = 0.0", "max_upload_mib_s = -1")
        daemon.wait_log("SIGHUP: the config was not changed: read config")
        daemon.config.unlink()
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("no such file")
        assert daemon.status()["is_ready"]
        assert "max_upload_mib_s is now" not in daemon.log
        assert daemon.stop() == 0


def test_a_reload_that_fails_in_any_way_ends_no_daemon(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        text = daemon.config.read_text()
        daemon.config.write_text(text + '[[watch]]\npath = "a\\u0000b"\nrun = "w"\npreset = "dcp"\n')
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("SIGHUP: the config was not changed: ")
        daemon.config.write_text(text)
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("SIGHUP: the config has not changed")
        assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("NoSuchBucket", "there is no such bucket (NoSuchBucket)"),
        pytest.param(
            "PermanentRedirect",
            "the bucket is in another region, eu-west-1 (PermanentRedirect)",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "InvalidAccessKeyId", "S3 does not know this access key (InvalidAccessKeyId)", marks=pytest.mark.long
        ),
        pytest.param(
            "SignatureDoesNotMatch",
            "the secret key does not belong to the access key (SignatureDoesNotMatch)",
            marks=pytest.mark.long,
        ),
        ("", "no S3 credentials found (NoCredentialsError)"),
    ],
)
def test_wrong_bucket_region_or_key_is_reported_in_one_sentence_until_it_is_corrected(
    tmp_path: Path, code: str, sentence: str
) -> None:
    make_checkpoint(tmp_path / "hot")
    environ = {} if code else {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    with bucket_server() as served:
        served.script = lambda operation, key: code
        with serving(tmp_path, more=cold(served), environ=environ) as daemon:
            daemon.wait_log(f"WARNING list: list s3://{BUCKET}/deep in cold: {sentence} (hint: ")
            (tier,) = (one for one in daemon.status()["tiers"] if one["name"] == "cold")
            assert sentence in tier["error"]
            assert "Traceback" not in daemon.log
            assert daemon.request("/healthz")[0] == 200
            if code:
                served.script = lambda operation, key: ""
                wait_until(lambda: daemon.steps("cold") == [100], "the copy, once the error is corrected")
                assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in daemon.log


ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TOKEN = "FwoGZXIvYXdzEXAMPLETOKEN"
PAGES = ("/", "/metrics", "/api/v1/status", "/api/v1/checkpoints", "/api/v1/lifecycle")


def run_at_debug_level(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """The `tierd` command. Its log at debug level goes to the same file as the rest of its output."""
    logging.basicConfig(level=logging.DEBUG, filename=log)
    run_tierd(arguments, environ, log)


def test_no_credential_appears_in_logs_pages_or_files(tmp_path: Path) -> None:
    """Neither at debug level, nor when the server repeats them, nor on a page, in a metric or in a manifest."""
    make_checkpoint(tmp_path / "hot")
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_SESSION_TOKEN": TOKEN}
    with bucket_server() as served:
        served.access_keys = {ACCESS_KEY}
        served.repeats_credentials = True
        to_start = serving(tmp_path, more=cold(served), environ=keys)
        to_start.run_with(run_at_debug_level)
        with to_start as daemon:
            wait_until(lambda: any(key.endswith("manifest.json") for key in served.objects), "for the commit")
            outputs = [stored.content.decode("latin-1") for stored in served.objects.values()]
            for code in ("SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "AccessDenied", "Strange"):
                served.script = lambda operation, key, code=code: code
                step = 100 + len(outputs)
                make_checkpoint(tmp_path / "hot", step=step, sequence=step)
                daemon.wait_log(f"({code})" if code != "Strange" else "(Strange) when calling")
                outputs += [daemon.request(path)[1].decode() for path in PAGES]
            assert daemon.stop() == 0
            assert " DEBUG " in daemon.log or "DEBUG:" in daemon.log
            outputs.append(daemon.log)
    outputs += [path.read_text("latin-1") for path in (tmp_path / "hot").rglob("*") if path.is_file()]
    for secret in (ACCESS_KEY, SECRET_KEY, TOKEN):
        assert [output for output in outputs if secret in output] == []
