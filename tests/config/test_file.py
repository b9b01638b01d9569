"""The configuration: where it is read from, precedence, and the message for each wrong value."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from tierd.config import sections as config
from tierd.config.file import cache_folder, load, systemd
from tierd.config.sections import Config, TierPolicy
from tierd.config.watches import check_nodes
from tierd.errors import BadConfig
from tierd.systemd import Systemd


def write(folder: Path, text: str, name: str = "tierd.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, text: str, **environ: str) -> Config:
    write(folder, text)
    return load(environ=environ, cwd=folder)


def refusal(folder: Path, text: str, **environ: str) -> str:
    with pytest.raises(BadConfig) as caught:
        loaded(folder, text, **environ)
    assert caught.value.exit_code == 2
    return str(caught.value)


# ── location ──


def test_without_a_file_everything_is_under_one_hidden_folder(tmp_path: Path) -> None:
    defaults = load(environ={}, cwd=tmp_path)
    assert defaults.socket_path == tmp_path / ".tierd/tierd.sock"
    assert defaults.hot_path == tmp_path / ".tierd/hot"
    assert [cold.url for cold in defaults.cold] == [f"file://{tmp_path}/.tierd/cold"]
    assert defaults.lifecycle.hot == TierPolicy(keep_last=3)
    assert (defaults.lifecycle.cold.keep_last, defaults.lifecycle.cold.keep_every) == (3, 10)
    assert defaults.lifecycle.cold.milestones


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/cache/tierd"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/tierd"),
        ({"HOME": "/home/me"}, "/home/me/.cache/tierd"),
        ({}, None),
    ],
)
def test_the_cache_folder_follows_xdg(environ: dict[str, str], folder: str | None) -> None:
    assert cache_folder(environ) == (None if folder is None else Path(folder))


def test_the_option_overrides_the_environment_and_that_the_working_directory(tmp_path: Path) -> None:
    for name in ("option", "environment", "tierd"):
        write(tmp_path, f'[hot]\npath = "/{name}"', f"{name}.toml")
    environ = {"TIERD_CONFIG": "environment.toml"}
    assert load("option.toml", environ=environ, cwd=tmp_path).hot.path == "/option"
    assert load(environ=environ, cwd=tmp_path).hot.path == "/environment"
    assert load(environ={}, cwd=tmp_path).hot.path == "/tierd"


@pytest.mark.parametrize("environ", [{}, {"TIERD_CONFIG": "absent.toml"}])
def test_a_named_file_that_is_absent_is_an_error(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(BadConfig, match=r"absent\.toml: no such file"):
        load(None if environ else "absent.toml", environ=environ, cwd=tmp_path)


def test_the_environment_and_the_working_directory_of_the_process_are_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIERD_HOT_PATH", "fast")
    monkeypatch.delenv("TIERD_CONFIG", raising=False)
    assert load().hot_path == Path(os.path.realpath(tmp_path)) / "fast"


def test_a_file_without_cold_tiers_configures_none(tmp_path: Path) -> None:
    assert loaded(tmp_path, "").cold == []


# ── paths ──


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    text = '[daemon]\nsocket = "run/s"\n[hot]\npath = "../hot"\n[[cold]]\nurl = "file://cold/./deep"'
    write(tmp_path / "etc", text)
    parsed = load(str(tmp_path / "etc/tierd.toml"), environ={}, cwd=Path("/"))
    assert parsed.daemon.socket == f"{tmp_path}/etc/run/s"
    assert parsed.hot.path == f"{tmp_path}/hot"
    assert parsed.cold[0].url == f"file://{tmp_path}/etc/cold/deep"


def test_absolute_paths_and_buckets_are_unchanged(tmp_path: Path) -> None:
    text = '[hot]\npath = "/nvme/tierd"\n[[cold]]\nurl = "s3://bucket/some/prefix"\n[[cold]]\nname = "nas"\nurl = "file:///nas"'
    parsed = loaded(tmp_path, text)
    assert parsed.hot.path == "/nvme/tierd"
    assert [cold.url for cold in parsed.cold] == ["s3://bucket/some/prefix", "file:///nas"]


COLD = '[[cold]]\nurl = "file://cold"\n'
WATCH = '[[watch]]\npath = "out"\nrun = "hf"\npreset = "hf-trainer"\n'


def test_a_watch_has_its_defaults_and_an_absolute_path(tmp_path: Path) -> None:
    (watch,) = loaded(tmp_path, WATCH).watch
    assert (watch.path, watch.source, watch.quiet_s) == (f"{tmp_path}/out", "keep", 10.0)
    assert loaded(tmp_path, WATCH.replace('preset = "hf-trainer"', 'pattern = "ckpt-{step}.pt"')).watch[0].pattern


@pytest.mark.parametrize("text", ['[hot]\npath = "~/tierd"', WATCH.replace('"out"', '"~/out"')])
def test_a_home_directory_in_short_is_refused_because_a_folder_with_that_name_would_be_made(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(BadConfig, match="expected a path in full: ~ is not expanded"):
        loaded(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (WATCH + WATCH.replace("hf", "b", 1), "another place than that of another watch"),
        (WATCH + WATCH.replace('"out"', '"./x/../out/"').replace('"hf"', '"b"'), "another place than that of another"),
        (WATCH + WATCH.replace("out", "other"), "another run than that of another watch"),
        (WATCH.replace("out", ".tierd/hot/x"), "a folder outside of the tiers"),
        (WATCH.replace('"out"', '""'), "watch.path"),
        (WATCH.replace('"hf"', '"../x"'), "run"),
        (WATCH.replace("hf-trainer", "other"), "preset"),
        (WATCH.replace('preset = "hf-trainer"', ""), "a preset or a pattern"),
        (WATCH + 'pattern = "a{step}"', "a preset or a pattern"),
        (WATCH.replace('preset = "hf-trainer"', 'pattern = "step"'), "{step} once"),
        (WATCH.replace('preset = "hf-trainer"', 'pattern = "a/{step}"'), "the name of a file"),
        (WATCH.replace('preset = "hf-trainer"', 'pattern = "a{step}/"'), "the file that is written last"),
        (WATCH.replace("hf-trainer", "lightning") + 'marker = "x"', "a checkpoint that is a folder"),
        (COLD + WATCH + "nodes = 4\nnode = 4", "node is 4, expected 0 to 3"),
        (COLD + WATCH + "node = 1", "left out without nodes"),
        (COLD + WATCH + "nodes = 0", "nodes is 0"),
        (WATCH + "nodes = 4\nnode = 0", "nodes is 4, expected a cold tier that all nodes share"),
        (
            COLD + WATCH.replace("hf-trainer", "step-bin") + "nodes = 4\nnode = 0",
            "1 where a checkpoint is a single file",
        ),
        (WATCH + "renamed = true", "renamed"),
    ],
)
def test_watches_that_contradict_each_other_or_themselves_are_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(named)):
        loaded(tmp_path, text)


def test_node_defaults_to_the_host_name(tmp_path: Path) -> None:
    assert load(environ={}, cwd=tmp_path).daemon.node == socket.gethostname()
    assert loaded(tmp_path, '[daemon]\nnode = "gpu-017"').daemon.node == "gpu-017"


@pytest.mark.parametrize(
    ("listen", "address"),
    [("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:0", ("::1", 0)), ("localhost:65535", ("localhost", 65535))],
)
def test_listen_address_has_host_and_port(tmp_path: Path, listen: str, address: tuple[str, int]) -> None:
    assert loaded(tmp_path, f'[daemon]\nlisten = "{listen}"').listen_address == address


# ── the environment ──


def test_every_scalar_key_can_be_set_in_the_environment(tmp_path: Path) -> None:
    parsed = loaded(
        tmp_path,
        '[hot]\npath = "/file"\n[lifecycle.cold]\nkeep_every = 5',
        TIERD_HOT_PATH="/env",
        TIERD_SNAPSHOT_EVERY_STEPS="7",
        TIERD_SNAPSHOT_SLOT_WAIT_S="0.5",
        TIERD_SNAPSHOT_WHEN_BUSY="skip",
        TIERD_LIFECYCLE_COLD_KEEP_LAST="9",
        TIERD_LIFECYCLE_COLD_MILESTONES="false",
        TIERD_LIMITS_PARTS_IN_FLIGHT="2",
    )
    assert parsed.hot.path == "/env"
    assert (parsed.snapshot.every_steps, parsed.snapshot.slot_wait_s, parsed.snapshot.when_busy) == (7, 0.5, "skip")
    cold = parsed.lifecycle.cold
    assert (cold.keep_last, cold.keep_every, cold.milestones) == (9, 5, False)
    assert parsed.limits.parts_in_flight == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIERD_SNAPSHOT_EVERY_STEPS", "often"),
        ("TIERD_SNAPSHOT_EVERY_STEPS", ""),
        ("TIERD_LIFECYCLE_COLD_MILESTONES", "maybe"),
        ("TIERD_LIMITS_RETRY_MIN_S", "1s"),
    ],
)
def test_a_wrong_value_in_the_environment_is_refused_with_the_name_of_the_variable(
    tmp_path: Path, name: str, value: str
) -> None:
    assert f"${name}={value!r}" in refusal(tmp_path, "", **{name: value})


def test_a_large_finite_number_means_never_and_inf_is_refused(tmp_path: Path) -> None:
    assert loaded(tmp_path, "[snapshot]\nevery_s = 1e300\n").snapshot.every_s == 1e300
    assert "snapshot.every_s is inf" in refusal(tmp_path, "[snapshot]\nevery_s = inf\n")
    assert "snapshot.every_s is nan" in refusal(tmp_path, "[snapshot]\nevery_s = nan\n")


def test_the_environment_does_not_hide_an_error_in_the_file(tmp_path: Path) -> None:
    assert "hot is" in refusal(tmp_path, 'hot = "x"', TIERD_HOT_PATH="/y")
    assert "lifecycle is 3" in refusal(tmp_path, "lifecycle = 3", TIERD_LIFECYCLE_HOT_KEEP_LAST="3")


# ── errors ──


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[daemn]", "there is no key daemn; did you mean daemon?"),
        ("[hot]\npaht = '/x'", "there is no key hot.paht; did you mean path?"),
        ("[lifecycle.warm]\nkeep_last = 3", "there is no key lifecycle.warm"),
        ("[[cold]]\nsecret_key = 'x'", "there is no key cold[0].secret_key"),
        ("[[cold]]\n[cold.lifecycle]\nkeep_lst = 3", "cold[0].lifecycle.keep_lst; did you mean keep_last?"),
        ("[hot]\npath = 3", "hot.path is 3"),
        ('[snapshot]\ncadence = "often"', "snapshot.cadence is 'often', expected 'fixed' or 'auto'"),
        ("[snapshot]\nevery_steps = true", "snapshot.every_steps is True"),
        ("[snapshot]\nwhen_busy = 'panic'", "snapshot.when_busy is 'panic', expected 'wait' or 'skip'"),
        ("[cold]\nname = 'cold'", "cold is"),
        ("[hot", "Expected"),
        ("[hot]\npath = '/a'\npath = '/b'", "Cannot overwrite"),
    ],
)
def test_unknown_keys_wrong_types_and_invalid_toml_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(tmp_path, text)
    assert expected in message
    assert str(tmp_path / "tierd.toml") in message
    assert "hint: deploy/tierd.toml" in message


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tierd.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadConfig, match=r"tierd\.toml"):
        load(environ={}, cwd=tmp_path)


def test_cadence_auto_beside_an_interval_is_refused(tmp_path: Path) -> None:
    auto = '[snapshot]\ncadence = "auto"\n'
    assert "snapshot.every_s is 60.0, expected nothing" in refusal(tmp_path, auto + "every_s = 60")
    assert "snapshot.every_steps is 500, expected nothing" in refusal(tmp_path, auto + "every_steps = 500")
    assert loaded(tmp_path, auto + "mtbf_s = 7594").snapshot.mtbf_s == 7594


@pytest.mark.parametrize("listen", ["9464", ":9464", "host:", "host:x", "host:65536", "host:-1", "", "[]:1", "h:1_0"])
def test_listen_must_be_host_and_port(tmp_path: Path, listen: str) -> None:
    assert "daemon.listen" in refusal(tmp_path, f'[daemon]\nlisten = "{listen}"')


@pytest.mark.parametrize("node", ["", "a b", "-x", "a/b", "../x", "n" * 65])
def test_node_must_be_a_valid_file_name(tmp_path: Path, node: str) -> None:
    assert "daemon.node" in refusal(tmp_path, f'[daemon]\nnode = "{node}"')


def test_a_socket_path_that_is_too_long_is_refused_with_a_hint(tmp_path: Path) -> None:
    assert "use one under /run or /tmp" in refusal(tmp_path, f'[daemon]\nsocket = "/{"s" * 107}"')
    assert loaded(tmp_path, f'[daemon]\nsocket = "/{"s" * 106}"').daemon.socket == "/" + "s" * 106


@pytest.mark.parametrize("key", ["daemon.socket", "hot.path"])
def test_an_empty_path_is_refused(tmp_path: Path, key: str) -> None:
    section, name = key.split(".")
    assert key in refusal(tmp_path, f'[{section}]\n{name} = ""')


@pytest.mark.parametrize("slots", [0, 1, 17])
def test_slots_must_be_2_to_16(tmp_path: Path, slots: int) -> None:
    assert "snapshot.slots" in refusal(tmp_path, f"[snapshot]\nslots = {slots}")


@pytest.mark.parametrize("name", ["", "hot", "memory", "auto", "Cold", "a b", "-x", "x/y", "n" * 33])
def test_the_name_of_a_cold_tier_must_be_valid_in_commands_and_labels(tmp_path: Path, name: str) -> None:
    assert "cold.name" in refusal(tmp_path, f'[[cold]]\nname = "{name}"')


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/prefix",
        "/data",
        "s3://",
        "s3:///prefix",
        "http://host/x",
        "file://",
        "FILE:///x",
        "s3://key:secret@bucket",
        "s3://bucket/x?versionId=1",
        "s3://bucket/x#y",
    ],
)
def test_the_url_of_a_cold_tier_must_be_a_bucket_or_a_directory(tmp_path: Path, url: str) -> None:
    assert "cold.url of cold" in refusal(tmp_path, f'[[cold]]\nurl = "{url}"')


@pytest.mark.parametrize("endpoint", ["host:9000", "ftp://host", "https://", "https://key:secret@host"])
def test_an_endpoint_must_be_http_without_credentials(tmp_path: Path, endpoint: str) -> None:
    text = f'[[cold]]\nurl = "s3://bucket"\nendpoint_url = "{endpoint}"'
    assert "cold.endpoint_url of cold" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("hot", "cold"), [("/d", "/d"), ("/d", "/d/"), ("/d", "/x/../d"), ("/d", "/d/cold"), ("/d/hot", "/d")]
)
def test_hot_and_cold_must_be_separate_directories(tmp_path: Path, hot: str, cold: str) -> None:
    message = refusal(tmp_path, f'[hot]\npath = "{hot}"\n[[cold]]\nurl = "file://{cold}"')
    assert "a directory apart from that of hot" in message


def test_directories_with_a_common_name_prefix_are_separate(tmp_path: Path) -> None:
    loaded(tmp_path, '[hot]\npath = "/data/tier"\n[[cold]]\nurl = "file:///data/tierd"')


@pytest.mark.parametrize(
    ("first", "second"),
    [("file:///a", "file:///a"), ("file:///a", "file:///a/b"), ("s3://b/p", "s3://b/p/"), ("s3://b", "s3://b")],
)
def test_two_cold_tiers_at_one_place_are_refused(tmp_path: Path, first: str, second: str) -> None:
    text = f'[[cold]]\nname = "a"\nurl = "{first}"\n[[cold]]\nname = "b"\nurl = "{second}"'
    assert "cold.url of b" in refusal(tmp_path, text)


def test_one_bucket_name_at_two_endpoints_is_two_places(tmp_path: Path) -> None:
    text = '[[cold]]\nurl = "s3://b"\n[[cold]]\nname = "dr"\nurl = "s3://b"\nendpoint_url = "https://other"'
    assert len(loaded(tmp_path, text).cold) == 2


def test_two_cold_tiers_with_one_name_are_refused(tmp_path: Path) -> None:
    assert "a different name" in refusal(tmp_path, '[[cold]]\nurl = "s3://a"\n[[cold]]\nurl = "s3://b"')


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("daemon", "drain_timeout_s", "-1"),
        ("daemon", "memory_grace_s", "inf"),
        ("snapshot", "every_steps", "-1"),
        ("snapshot", "every_s", "nan"),
        ("snapshot", "slot_wait_s", "-0.1"),
        ("lifecycle.hot", "keep_last", "0"),
        ("lifecycle.cold", "keep_last", "-1"),
        ("lifecycle.cold", "keep_every", "-1"),
        ("lifecycle.hot", "keep_every_steps", "-1"),
        ("limits", "connections_max", "0"),
        ("limits", "request_timeout_s", "0"),
        ("limits", "parts_in_flight", "0"),
        ("limits", "retry_max_s", "0.5"),
        ("daemon", "nice", "20"),
        ("daemon", "write_min_mib_s", "0.0"),
        ("daemon", "slowdown_max", "-0.1"),
    ],
)
def test_numbers_out_of_range_are_refused_with_their_key(tmp_path: Path, section: str, key: str, value: str) -> None:
    assert f"{section}.{key} is {value}" in refusal(tmp_path, f"[{section}]\n{key} = {value}")


def test_the_upload_limit_must_not_be_negative(tmp_path: Path) -> None:
    assert "cold[0].max_upload_mib_s" in refusal(tmp_path, '[[cold]]\nurl = "s3://b"\nmax_upload_mib_s = -1')


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ('ca_bundle = "absent.pem"', "cold.ca_bundle of cold is '{root}/absent.pem', expected a file"),
        ('sse_kms_key_id = "alias/x"', "cold.sse of cold is '', expected 'aws:kms', since sse_kms_key_id is set"),
        ('sse = "AES-256"', "cold[0].sse is 'AES-256', expected '' or 'AES256' or 'aws:kms'"),
    ],
)
def test_encryption_and_ca_bundle_of_a_bucket_are_checked(tmp_path: Path, keys: str, expected: str) -> None:
    assert expected.format(root=tmp_path) in refusal(tmp_path, f'[[cold]]\nurl = "s3://b"\n{keys}')


def test_ca_bundle_is_relative_to_the_config_file(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    parsed = loaded(tmp_path, '[[cold]]\nurl = "s3://b"\nca_bundle = "ca.pem"\nsse = "aws:kms"')
    assert parsed.cold[0].ca_bundle == str(tmp_path / "ca.pem")


def test_zero_is_accepted_where_it_means_never_or_no_limit(tmp_path: Path) -> None:
    loaded(tmp_path, "[snapshot]\nevery_steps = 0\nevery_s = 0\nslot_wait_s = 0\n[daemon]\nmemory_grace_s = 0")


# ── the lifecycle ──


def test_setting_one_key_of_the_cold_policy_keeps_the_defaults_of_the_others(tmp_path: Path) -> None:
    """Otherwise `keep_last = 5` alone would silently stop keeping every tenth checkpoint and every milestone."""
    for parsed in (
        loaded(tmp_path, "[lifecycle.cold]\nkeep_last = 5"),
        loaded(tmp_path, "", TIERD_LIFECYCLE_COLD_KEEP_LAST="5"),
    ):
        cold = parsed.lifecycle.cold
        assert (cold.keep_last, cold.keep_every, cold.milestones) == (5, 10, True)


def test_all_defaults_are_valid(tmp_path: Path) -> None:
    assert loaded(tmp_path, "").limits == config.LimitsConfig()


RULES = 'keep_hourly = 24\nkeep_daily = 7\nkeep_weekly = 4\nkeep_best = 2\nbest_metric = "loss"\nbest_mode = "max"'


def test_rules_by_time_and_by_metric_are_loaded(tmp_path: Path) -> None:
    parsed = loaded(tmp_path, f"[lifecycle.cold]\n{RULES}").lifecycle.cold
    assert (parsed.keep_hourly, parsed.keep_daily, parsed.keep_weekly) == (24, 7, 4)
    assert (parsed.keep_best, parsed.best_metric, parsed.best_mode) == (2, "loss", "max")


def test_a_cold_tier_can_have_its_own_lifecycle(tmp_path: Path) -> None:
    text = """
        [[cold]]
        url = "s3://a"
        [[cold]]
        name = "dr"
        url = "s3://b"
        lifecycle = { keep_last = 1, keep_every = 100 }
        [lifecycle.cold]
        keep_last = 9
        keep_weekly = 4
    """
    parsed = loaded(tmp_path, text)
    assert parsed.own_policies == {"dr": config.ColdPolicy(keep_last=1, keep_every=100)}
    assert parsed.own_policies["dr"].keep_weekly == 0, "it replaces all of lifecycle.cold"
    assert parsed.own_policies["dr"].milestones


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("keep_best = 2", "best_metric is ''"),
        ('best_metric = "loss"', "keep_best is 0"),
        ('keep_best = 2\nbest_metric = "loss"\nbest_mode = "median"', "best_mode"),
        ("keep_weekly = -1", "keep_weekly is -1"),
        ("keep_monthly = 1", "keep_monthly"),
        ("keep_last = 0", "keep_last is 0"),
    ],
)
@pytest.mark.parametrize("section", ["[lifecycle.hot]", "[lifecycle.cold]", "[[cold]]\n[cold.lifecycle]"])
def test_a_rule_that_keeps_nothing_or_is_unknown_is_refused(
    tmp_path: Path, section: str, policy: str, expected: str
) -> None:
    assert expected in refusal(tmp_path, f"{section}\n{policy}")


# ── storage classes ──


def test_storage_classes_of_a_bucket_are_loaded(tmp_path: Path) -> None:
    text = '[[cold]]\nurl = "s3://b"\nstorage_class = "STANDARD_IA"\nmilestone_storage_class = "DEEP_ARCHIVE"'
    (cold,) = loaded(tmp_path, text).cold
    assert (cold.storage_class, cold.milestone_storage_class) == ("STANDARD_IA", "DEEP_ARCHIVE")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('url = "file:///c"\nstorage_class = "STANDARD"', "only a bucket has storage classes"),
        ('url = "file:///c"\nmilestone_storage_class = "GLACIER_IR"', "only a bucket has storage classes"),
        ('url = "s3://b"\nstorage_class = "GLACIER"', "takes hours to restore"),
        ('url = "s3://b"\nstorage_class = "DEEP_ARCHIVE"', "takes hours to restore"),
        ('url = "s3://b"\nstorage_class = "glacier_ir"', "as S3 spells it"),
        ('url = "s3://b"\nmilestone_storage_class = "GLACIER IR"', "as S3 spells it"),
        (
            'url = "s3://b"\nmilestone_storage_class = "GLACIER_IR"\nlifecycle = { milestones = false }',
            "keeps no milestones",
        ),
        ('url = "s3://b"\nmilestone_storage_class = "GLACIER_IR"\n[lifecycle.cold]\nmilestones = false', "keeps no"),
    ],
)
def test_an_unusable_storage_class_is_refused_with_the_reason(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(tmp_path, f"[[cold]]\n{text}")
    assert expected in message
    assert "storage_class of cold" in message


def test_watchdog_of_systemd_counts_for_the_process_that_it_names() -> None:
    environ = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "60000000"}
    assert systemd(environ) == Systemd(notify_socket="/run/notify", watchdog_s=60.0)
    ours, other = environ | {"WATCHDOG_PID": str(os.getpid())}, environ | {"WATCHDOG_PID": "1"}
    assert systemd(ours).watchdog_s == 60.0
    assert systemd(other).watchdog_s == 0.0
    assert systemd({}) == Systemd()


# ── peers ──


@pytest.mark.parametrize(
    ("listen", "advertise", "host"),
    [
        ("10.0.0.7:9465", "", "10.0.0.7"),
        ("0.0.0.0:9465", "", "gpu-7"),
        ("[::]:9465", "", "gpu-7"),
        ("[fd00::7]:9465", "", "fd00::7"),
        ("0.0.0.0:9465", "fd00::7", "fd00::7"),
        ("0.0.0.0:9465", "gpu-7.cluster", "gpu-7.cluster"),
    ],
)
def test_other_nodes_use_the_address_that_is_advertised(tmp_path: Path, listen: str, advertise: str, host: str) -> None:
    text = f'[daemon]\nnode = "gpu-7"\n[peers]\nlisten = "{listen}"\nadvertise = "{advertise}"'
    assert loaded(tmp_path, text).peers_host == host


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("listen", "9465"), ("listen", "host:70000"), ("advertise", "gpu-7:9465"), ("advertise", "gpu-7..rack")],
)
def test_wrong_address_for_other_nodes_is_refused(tmp_path: Path, key: str, wrong: str) -> None:
    assert f"peers.{key} is '{wrong}', expected" in refusal(tmp_path, f'[peers]\n{key} = "{wrong}"')


@pytest.mark.parametrize(
    ("text", "domain"),
    [("", "s1.s7"), ('[peers]\ndomain = ""', "s1.s7"), ('[peers]\ndomain = "rack 4"', "rack 4")],
)
def test_domain_is_the_switches_that_slurm_tells_unless_the_file_has_one(
    tmp_path: Path, text: str, domain: str
) -> None:
    switches = "s1.s7.node3"
    assert loaded(tmp_path, text, SLURM_TOPOLOGY_ADDR=switches).peers.domain == domain
    assert loaded(tmp_path, text, SLURM_TOPOLOGY_ADDR=switches, TIERD_PEERS_DOMAIN="mine").peers.domain == "mine"


def test_peers_that_are_no_table_are_refused_also_under_slurm(tmp_path: Path) -> None:
    assert "peers" in refusal(tmp_path, "peers = 3", SLURM_TOPOLOGY_ADDR="s1.s7.node3")


@pytest.mark.parametrize(("more", "node"), [("nodes = 4", 3), ("nodes = 4\nnode = 1", 1), ("", -1), ("nodes = 1", -1)])
def test_slurm_tells_the_number_of_the_node_of_a_watch(tmp_path: Path, more: str, node: int) -> None:
    (watch,) = loaded(tmp_path, COLD + WATCH + more, SLURM_NODEID="3").watch
    assert watch.node == node


@pytest.mark.parametrize("number", ["x", "-1", "", "²"])
def test_another_number_of_slurm_is_no_number_of_a_node(tmp_path: Path, number: str) -> None:
    config = loaded(tmp_path, COLD + WATCH + "nodes = 4", SLURM_NODEID=number)
    assert config.watch[0].node == -1, "commands run there too"
    with pytest.raises(BadConfig, match="it is not said which of the 4 nodes this is"):
        check_nodes(config)
    check_nodes(loaded(tmp_path, COLD + WATCH + "nodes = 4", SLURM_NODEID="3"))


def test_a_watch_that_is_no_list_of_tables_is_refused_also_under_slurm(tmp_path: Path) -> None:
    for text in ("watch = 3", "watch = [3]", '[watch]\npath = "out"'):
        assert "watch" in refusal(tmp_path, text, SLURM_NODEID="3")
