"""A config that another user could have written is refused, and credentials cross no network in the clear."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from tests.support.other_user import OTHER_UID, OtherUser, needs_root, open_folder
from tierd.config.file import check_user, load
from tierd.config.sections import ColdConfig, Config, SecurityConfig
from tierd.errors import BadConfig, TierUnreachable
from tierd.s3.client import RequestConnection, S3Client

CONFIG = '[[cold]]\nurl = "s3://bucket"\n'


@needs_root
@pytest.mark.parametrize("how", ["./tierd.toml", "--config", "$TIERD_CONFIG"])
def test_a_config_of_another_user_is_refused_by_name(how: str) -> None:
    with open_folder() as folder, OtherUser() as other:
        path = folder / "tierd.toml"
        other.call(write, str(path), CONFIG)
        environ = {"TIERD_CONFIG": str(path)} if how == "$TIERD_CONFIG" else {}
        with pytest.raises(BadConfig, match=f"read config {path}: it belongs to uid {OTHER_UID}"):
            load(str(path) if how == "--config" else None, environ=environ, cwd=folder)


@pytest.mark.parametrize(("mode", "is_refused"), [(0o600, False), (0o644, False), (0o646, True), (0o666, True)])
def test_a_config_that_others_can_write_is_refused_by_name(tmp_path: Path, mode: int, is_refused: bool) -> None:
    path = tmp_path / "tierd.toml"
    path.write_text(CONFIG)
    path.chmod(mode)
    if is_refused:
        with pytest.raises(BadConfig, match=rf"other users can change it, its mode is {mode:04o}.*chmod go-w"):
            load(environ={}, cwd=tmp_path)
    else:
        load(environ={}, cwd=tmp_path)


@needs_root
def test_a_group_may_write_a_config_only_if_it_is_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "tierd.toml"
    path.write_text(CONFIG)
    path.chmod(0o664)
    load(environ={}, cwd=tmp_path)  # group root, as many systems give each user a group
    os.chown(path, -1, OTHER_UID)
    with pytest.raises(BadConfig, match="other users can change it"):
        load(environ={}, cwd=tmp_path)


@pytest.mark.parametrize(
    ("url", "is_refused"),
    [
        ("https://s3.example.com", False),
        ("http://127.0.0.1:9000", False),
        ("http://[::1]:9000", False),
        ("http://localhost:9000", False),
        ("http://s3.example.com", True),
        ("http://10.0.0.7:9000", True),
        ("http://minio:9000", True),
        ("http://localhost.example.com", True),
    ],
)
def test_plain_http_to_another_machine_has_to_be_allowed_by_name(tmp_path: Path, url: str, is_refused: bool) -> None:
    path = tmp_path / "tierd.toml"
    path.write_text(f'{CONFIG}endpoint_url = "{url}"\n')
    if is_refused:
        with pytest.raises(BadConfig, match="because requests carry credentials; allow_plain_http = true"):
            load(environ={}, cwd=tmp_path)
        path.write_text(f'{CONFIG}endpoint_url = "{url}"\nallow_plain_http = true\n')
    assert load(environ={}, cwd=tmp_path).cold[0].endpoint_url == url


def test_an_endpoint_of_the_environment_is_held_to_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://203.0.113.1:9000")
    client = S3Client(ColdConfig(url="s3://bucket"), "bucket", connections=1, timeout_s=5.0)
    with pytest.raises(TierUnreachable, match=r"http://203\.0\.113\.1:9000 is plain HTTP, and requests carry"):
        client.call("head_bucket", "look", RequestConnection(), lambda answer: answer, {})


@needs_root
def test_a_daemon_of_the_wrong_user_or_without_the_group_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "tierd.toml").write_text(f"[daemon]\nuid = {OTHER_UID}\n")
    config = load(environ={}, cwd=tmp_path)
    with pytest.raises(BadConfig, match=f"serve as uid 0: daemon.uid is {OTHER_UID}"):
        check_user(config)
    with OtherUser() as other:
        assert other.call(refusal_of, config) == ""
        group = msgspec.structs.replace(config, security=SecurityConfig(group="root"))
        assert "this user is not in the group root of security.group" in other.call(refusal_of, group)


@needs_root
def test_root_does_not_start_the_daemon_in_a_hot_directory_of_another_user(tmp_path: Path) -> None:
    """Its files would be of root, and the daemon of that user could not start there any more."""
    (tmp_path / "tierd.toml").write_text('[hot]\npath = "hot"\n')
    config = load(environ={}, cwd=tmp_path)
    check_user(config)  # it is not there yet
    (tmp_path / "hot").mkdir()
    check_user(config)
    os.chown(tmp_path / "hot", OTHER_UID, -1)
    with pytest.raises(BadConfig, match=f"serve as uid 0: .*hot belongs to uid {OTHER_UID}") as caught:
        check_user(config)
    assert "daemon.uid = 0" in caught.value.hint
    check_user(msgspec.structs.replace(config, daemon=msgspec.structs.replace(config.daemon, uid=0)))


def test_an_unknown_group_and_a_host_with_a_port_are_refused(tmp_path: Path) -> None:
    for more, problem in {
        '[security]\ngroup = "no-such-group"\n': "security.group is 'no-such-group', expected the name of a group",
        '[listen]\nhosts = ["gpu-7:9464"]\n': "listen.hosts is 'gpu-7:9464', expected a host name without a port",
        '[listen]\nkey_file = "key.pem"\n': "listen.cert_file is '', expected the certificate",
    }.items():
        (tmp_path / "tierd.toml").write_text(more)
        with pytest.raises(BadConfig, match=problem):
            load(environ={}, cwd=tmp_path)


def refusal_of(config: Config) -> str:
    try:
        check_user(config)
    except BadConfig as error:
        return str(error)
    return ""


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
