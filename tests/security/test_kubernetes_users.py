"""deploy/kustomize/two-users: the trainer has no credentials, and a daemon with this config serves it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.kustomize import build_in_python
from tests.support.other_user import OtherUser, become, needs_root, open_folder
from tests.support.pod_trainer import environ_of_process, train_and_restore
from tests.support.processes import run_tierd
from tierd.config import file as config_file
from tierd.config import sections as config

FOLDER = Path(__file__).parents[2] / "deploy" / "kustomize" / "two-users"


def documents() -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in build_in_python(FOLDER)}


def pod() -> dict[str, Any]:
    return documents()["Job"]["spec"]["template"]["spec"]


SIDECAR, TRAINER = pod()["initContainers"][0], pod()["containers"][0]
DAEMON_UID, TRAINER_UID = (each["securityContext"]["runAsUser"] for each in (SIDECAR, TRAINER))
GROUP: int = pod()["securityContext"]["fsGroup"]
TOML: str = documents()["ConfigMap"]["data"]["tierd.toml"]


def pod_config(tmp_path: Path) -> config.Config:
    (tmp_path / "tierd.toml").write_text(TOML, encoding="utf-8")
    return config_file.load(environ={}, cwd=tmp_path)


def environ_of(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def mounts_of(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["mountPath"] for each in container["volumeMounts"]}


def test_daemon_and_trainer_are_different_users_in_one_group(tmp_path: Path) -> None:
    assert DAEMON_UID != TRAINER_UID
    assert min(DAEMON_UID, TRAINER_UID) > 0
    assert SIDECAR["securityContext"]["runAsGroup"] != TRAINER["securityContext"]["runAsGroup"]
    assert pod_config(tmp_path).security.trainer_group == str(GROUP)
    assert environ_of(TRAINER)["TIERD_DAEMON_UID"] == str(DAEMON_UID)
    for container in (SIDECAR, TRAINER):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_trainer_has_neither_credentials_nor_the_hot_volume() -> None:
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= environ_of(SIDECAR).keys()
    assert not [name for name in environ_of(TRAINER) if name.startswith("AWS_")]
    assert "envFrom" not in TRAINER
    assert mounts_of(TRAINER).keys() == {"socket", "scratch"}
    assert pod()["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod()
    assert environ_of(TRAINER)["TIERD_RUN_SECRET"]["secretKeyRef"]["name"] == "train"


def test_the_socket_is_in_a_folder_of_the_daemons_in_a_volume_of_both(tmp_path: Path) -> None:
    found = pod_config(tmp_path)
    assert environ_of(TRAINER)["TIERD_SOCKET"] == found.daemon.socket
    for container in (SIDECAR, TRAINER):
        assert mounts_of(container)["socket"] == str(found.socket_path.parent.parent)
    assert "emptyDir" in {each["name"]: each for each in pod()["volumes"]}["socket"]
    assert found.hot_path.is_relative_to(mounts_of(SIDECAR)["hot"])


def run_as_in_the_pod(arguments: list[str], environ: dict[str, str], log: str) -> None:
    os.chown(log, DAEMON_UID, -1)
    become(DAEMON_UID, [GROUP])
    run_tierd(arguments, environ, log)


@needs_root
def test_a_trainer_of_the_pod_snapshots_and_restores_and_cannot_read_hot() -> None:
    with open_folder() as root:
        root.chmod(0o755)
        # As Kubernetes gives them: of root and the group, which may write. An emptyDir is open to all.
        for name, mode in (("run", 0o2777), ("data", 0o2775)):
            (root / name).mkdir()
            os.chown(root / name, 0, GROUP)
            os.chmod(root / name, mode)
        daemon = Daemon(root)
        text = TOML.replace("/run/tierd", f"{root}/run").replace("/var/lib/tierd", f"{root}/data")
        text = text.replace("0.0.0.0:9464", "127.0.0.1:0").replace("s3://my-checkpoints", f"file://{root}/data/cold")
        # The examiner starts another Python, which may be in a folder of root's where the tests run.
        daemon.config.write_text(text.replace('region = "us-east-1"\n', "") + "[health]\nexamine = false\n")
        daemon.socket, daemon.hot = f"{root}/run/daemon/tierd.sock", root / "data" / "hot"
        daemon.run_with(run_as_in_the_pod)
        with daemon, OtherUser(TRAINER_UID, [GROUP]) as trainer:
            assert trainer.call(train_and_restore, daemon.socket, DAEMON_UID) == ("hot", True)
            with pytest.raises(PermissionError):
                trainer.call(os.listdir, str(daemon.hot))
            with pytest.raises(PermissionError):
                trainer.call(environ_of_process, daemon.pid)
            assert (os.stat(daemon.hot).st_uid, os.stat(daemon.socket).st_gid) == (DAEMON_UID, GROUP)
