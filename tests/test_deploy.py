"""The files in deploy/ load and validate, and they agree with the code and with each other."""

from __future__ import annotations

import configparser
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from tests.support.cli import make_checkpoint
from tests.support.daemon import serving
from tests.support.waiting import DEADLINE_S
from tierd.config import file as config_file
from tierd.config import sections as config
from tierd.errors import EXIT_HALTED, BadConfig, LockHeld

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.33"  # the release in which native sidecars became stable


# ── tierd.toml ──


def keys_of(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        items = value if isinstance(value, list) else [value]
        for one in items:
            if isinstance(one, dict):
                yield from keys_of(one, f"{above}{name}.")
            else:
                yield f"{above}{name}", value


def test_reference_configuration_is_exactly_the_defaults(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "tierd.toml", tmp_path / "given.toml")
    assert config_file.load("given.toml", environ={}, cwd=tmp_path) == config_file.load(environ={}, cwd=tmp_path)


def test_reference_configuration_shows_every_key_at_its_default() -> None:
    text = (DEPLOY / "tierd.toml").read_text(encoding="utf-8")
    shown = dict(keys_of(tomllib.loads(text)))
    expected = dict(keys_of(as_tree(config.Config(cold=[config.ColdConfig()]))))
    # TOML has no null: such a key is shown in a comment.
    absent = [key for key, value in expected.items() if value is None]
    assert shown == {key: value for key, value in expected.items() if key not in absent}
    assert [key for key in absent if f"# {key.rpartition('.')[2]} = " not in text] == []


def as_tree(struct: Any) -> dict[str, Any]:
    return msgspec.to_builtins(struct)


# ── tierd.service ──


def unit() -> configparser.ConfigParser:
    # systemd allows repeated keys and is case-sensitive; the first section that has a key is enough here.
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read(DEPLOY / "tierd.service", encoding="utf-8")
    return parser


def test_unit_expects_the_messages_that_the_daemon_sends(tmp_path: Path) -> None:
    service = unit()["Service"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(DEADLINE_S)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "50000"}
        with serving(tmp_path, environ=environ) as daemon:
            messages = [systemd.recv(100)]
            daemon.stop()
            while messages[-1] != b"STOPPING=1":
                messages.append(systemd.recv(100))
    assert (service["Type"] == "notify") == (b"READY=1" in messages)
    assert ("WatchdogSec" in service) == (b"WATCHDOG=1" in messages)


def test_unit_gives_the_daemon_time_to_drain() -> None:
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) > config.DaemonConfig().drain_timeout_s
    assert service["KillMode"] == "mixed"


def test_unit_does_not_restart_after_an_error_that_a_restart_cannot_fix() -> None:
    service = unit()["Service"]
    assert service["Restart"] == "on-failure"
    assert set(service["RestartPreventExitStatus"].split()) == {str(BadConfig.exit_code), str(LockHeld.exit_code)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("ProtectSystem", "strict"),
        ("PrivateTmp", "yes"),
        ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6"),
        ("SystemCallArchitectures", "native"),
        ("UMask", "0077"),
        ("RuntimeDirectory", "tierd"),
        ("StateDirectory", "tierd"),
    ],
)
def test_unit_is_hardened(key: str, value: str) -> None:
    assert unit()["Service"][key] == value


def test_unit_starts_our_command() -> None:
    command = unit()["Service"]["ExecStart"].split()
    assert [Path(command[0]).name, *command[1:]] == ["tierd", "serve"]


def test_command_with_which_the_unit_reloads_makes_the_daemon_read_its_configuration(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        subprocess.run(unit()["Service"]["ExecReload"].replace("$MAINPID", str(daemon.pid)).split(), check=True)
        daemon.wait_log("SIGHUP: ")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Checks a copy that starts /bin/true, because systemd-analyze requires that the program exists."""
    text = (DEPLOY / "tierd.service").read_text(encoding="utf-8")
    (tmp_path / "tierd.service").write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "tierd.service")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if "tierd.service" in line]
    assert done.returncode == 0, done.stderr
    assert complaints == []


# ── Dockerfile ──


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest), with continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word
    ]


def test_every_path_that_the_image_copies_exists() -> None:
    copied = [
        path
        for instruction, rest in dockerfile()
        if instruction in ("COPY", "ADD") and "--from" not in rest
        for path in rest.split()[:-1]
    ]
    assert "pyproject.toml" in copied
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_image_copies_what_the_build_of_the_wheel_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    needed |= {"tierd", "client", "examples"}  # examples: client/tierd_client/examples links to it
    copied = {path for instruction, rest in dockerfile() if instruction == "COPY" for path in rest.split()[:-1]}
    assert needed <= copied


def test_image_runs_our_command_and_not_as_root() -> None:
    found = dict(dockerfile())
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert json.loads(found["ENTRYPOINT"])[0] in scripts
    assert json.loads(found["CMD"]) == ["serve"]
    assert not found["USER"].startswith(("0", "root"))


def test_environment_of_the_image_is_a_configuration_that_loads(tmp_path: Path) -> None:
    environ = dict(re.findall(r"(\w+)=(\S+)", dict(dockerfile())["ENV"]))
    found = config_file.load(environ=environ, cwd=tmp_path)
    assert found.listen_address[0] == "0.0.0.0", "else nothing outside the container reaches it"
    assert found.hot.path == environ["TIERD_HOT_PATH"]
    assert found.daemon.socket == environ["TIERD_DAEMON_SOCKET"]
    assert dict(dockerfile())["EXPOSE"] == str(found.listen_address[1])


# ── kustomize/base/kubernetes.yaml ──


def documents() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load_all((DEPLOY / "kustomize/base/kubernetes.yaml").read_text(encoding="utf-8"))
    return {one["kind"]: one for one in found}


def pod() -> dict[str, Any]:
    return documents()["Job"]["spec"]["template"]["spec"]


def sidecar() -> dict[str, Any]:
    return pod()["initContainers"][0]


def trainer() -> dict[str, Any]:
    return pod()["containers"][0]


def pod_config(tmp_path: Path) -> config.Config:
    (tmp_path / "tierd.toml").write_text(documents()["ConfigMap"]["data"]["tierd.toml"], encoding="utf-8")
    return config_file.load(environ={}, cwd=tmp_path)


def test_every_document_fits_the_kubernetes_schema() -> None:
    found = list(documents().values())
    assert len(found) == 3
    for document in found:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_schema_check_rejects_an_unknown_key() -> None:
    job = documents()["Job"]
    job["spec"]["template"]["spec"]["initContainers"][0]["startupProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_job_fails_at_once_when_the_trainer_halts_and_ignores_disruptions() -> None:
    """The API server refuses podFailurePolicy with another restartPolicy than Never; the schema does not."""
    halt, disruption = documents()["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert (halt["action"], halt["onExitCodes"]["values"]) == ("FailJob", [EXIT_HALTED])
    assert halt["onExitCodes"]["containerName"] in [one["name"] for one in pod()["containers"]]
    assert (disruption["action"], disruption["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert pod()["restartPolicy"] == "Never"


def test_cache_of_the_image_is_on_a_volume_that_the_next_pod_mounts(tmp_path: Path) -> None:
    environ = dict(re.findall(r"(\w+)=(\S+)", dict(dockerfile())["ENV"]))
    cache = config_file.cache_folder(environ)
    volumes = {one["mountPath"]: one["name"] for one in sidecar()["volumeMounts"]}
    assert cache is not None
    assert [name for path, name in volumes.items() if cache.is_relative_to(path)] == ["hot"]
    assert not cache.is_relative_to(pod_config(tmp_path).hot_path)


def test_daemon_is_a_native_sidecar_that_the_trainer_waits_for(tmp_path: Path) -> None:
    assert sidecar()["restartPolicy"] == "Always"
    assert sidecar()["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert sidecar()["livenessProbe"]["httpGet"]["path"] == "/healthz"
    with serving(tmp_path) as daemon:
        assert [daemon.request(path)[0] for path in ("/readyz", "/healthz")] == [200, 200]


def test_ports_of_probes_annotations_and_configuration_agree(tmp_path: Path) -> None:
    ports = {one["name"]: one["containerPort"] for one in sidecar()["ports"]}
    found = pod_config(tmp_path)
    assert found.listen_address == ("0.0.0.0", ports["metrics"])
    assert {sidecar()[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe")} == {"metrics"}
    annotations = documents()["Job"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])
    assert annotations["prometheus.io/scrape"] == "true"


def test_both_containers_mount_the_volume_of_the_socket_and_use_the_same_path(tmp_path: Path) -> None:
    found = pod_config(tmp_path)
    assert {one["name"]: one["value"] for one in trainer()["env"]}["TIERD_SOCKET"] == found.daemon.socket
    for container in (sidecar(), trainer()):
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        # In a folder of the daemon's own: every user of the pod can write into the volume itself.
        assert mounts["socket"] == str(found.socket_path.parent.parent)
    volumes = {one["name"]: one for one in pod()["volumes"]}
    assert "emptyDir" in volumes["socket"]


def test_daemons_configuration_and_hot_directory_lie_in_mounted_volumes(tmp_path: Path) -> None:
    mounts = {one["mountPath"] for one in sidecar()["volumeMounts"]}
    found = pod_config(tmp_path)
    assert any(found.hot_path.is_relative_to(mount) for mount in mounts)
    file = Path({one["name"]: one["value"] for one in sidecar()["env"]}["TIERD_CONFIG"])
    assert str(file.parent) in mounts
    assert file.name in documents()["ConfigMap"]["data"]


def test_every_volume_is_mounted_and_every_mount_has_a_volume() -> None:
    volumes = {one["name"] for one in pod()["volumes"]}
    mounted = {one["name"] for container in (sidecar(), trainer()) for one in container["volumeMounts"]}
    assert volumes == mounted
    claims = {one["persistentVolumeClaim"]["claimName"] for one in pod()["volumes"] if "persistentVolumeClaim" in one}
    assert claims == {documents()["PersistentVolumeClaim"]["metadata"]["name"]}


def test_both_run_as_one_ordinary_user_without_privileges() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["runAsUser"] > 0
    for container in (sidecar(), trainer()):
        context = container["securityContext"]
        assert "runAsUser" not in context, "the daemon serves its own user only"
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_grace_period_leaves_time_to_drain(tmp_path: Path) -> None:
    daemon = pod_config(tmp_path).daemon
    assert pod()["terminationGracePeriodSeconds"] > daemon.drain_timeout_s + daemon.drain_cold_s


def test_memory_of_the_daemon_is_bounded_and_has_room() -> None:
    assert sidecar()["resources"]["limits"]["memory"] == "1Gi"
    assert trainer()["resources"]["limits"]["memory"]


# ── kubernetes-nodes.yaml ──


def test_jobset_has_jobs_that_fit_the_schema_and_agree_with_the_training(tmp_path: Path) -> None:
    """The schema of JobSet itself is not in this release of Kubernetes; that of its jobs and of the config is."""
    found = yaml.safe_load_all((DEPLOY / "kubernetes-nodes.yaml").read_text(encoding="utf-8"))
    config_map, jobset = found
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    kubernetes_validate.validate(config_map, KUBERNETES, strict=True)
    alone = documents()["ConfigMap"]
    config_map["data"]["tierd.toml"], _, peers = config_map["data"]["tierd.toml"].partition("\n[peers]\n")
    assert config_map == alone
    (nodes,) = jobset["spec"]["replicatedJobs"]
    job: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": nodes["name"]},
        **nodes["template"],
    }
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    inner = spec["template"]["spec"]
    options = dict(word.lstrip("-").split("=") for word in inner["containers"][0]["command"] if "=" in word)
    assert options["nnodes"] == str(spec["parallelism"])
    assert options["nproc-per-node"] == inner["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert options["master-addr"] == f"{jobset['metadata']['name']}-{nodes['name']}-0-0.{jobset['metadata']['name']}"
    # The sidecar is the same as of one node, except for the other nodes, and the volumes too, except for the hot tier.
    (daemon,) = inner["initContainers"]
    advertise, port = daemon["env"].pop(), daemon["ports"].pop()
    assert advertise == {"name": "TIERD_PEERS_ADVERTISE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    (tmp_path / "tierd.toml").write_text(f"[peers]\n{peers}")
    loaded = config_file.load("tierd.toml", environ={advertise["name"]: "10.1.2.3"}, cwd=tmp_path)
    assert (loaded.peers.listen, loaded.peers_host) == (f"0.0.0.0:{port['containerPort']}", "10.1.2.3")
    assert inner["initContainers"] == pod()["initContainers"]
    assert inner["securityContext"] == pod()["securityContext"]
    differing = [one["name"] for one, other in zip(inner["volumes"], pod()["volumes"], strict=True) if one != other]
    assert differing == ["hot"]


# ── slurm.sbatch ──

TRAIN = """
import os, signal, tierd_client, torch
state = tierd_client.TrainingState(model=torch.nn.Linear(2, 2))
with tierd_client.connect("gpt-124m") as client:
    found = client.restore(state)
    for step in range(found.step + 1 if found else 1, 4):
        if step == 2 and found is None:
            os.kill(os.getpid(), signal.SIGTERM)
        if client.due(step) or client.stopping:
            client.snapshot(step, state)
        if client.stopping:
            break
"""


@pytest.mark.long
def test_slurm_job_is_requeued_when_it_was_stopped_and_not_when_it_is_finished(tmp_path: Path) -> None:
    """Runs the script itself, with scripts in place of srun and scontrol."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "tierd.toml").write_text(
        '[daemon]\nlisten = "127.0.0.1:0"\n[snapshot]\nevery_steps = 0\n[hot]\npath = "hot"\n'
    )
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, line in (("srun", 'shift; exec "$@"'), ("scontrol", f'echo "$@" >> {tmp_path}/said')):
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
        "TIERD_CONFIG": str(tmp_path / "tierd.toml"),
        "SLURM_JOB_ID": f"test-{os.getpid()}",
    }
    said = tmp_path / "said"
    for expected in (f"requeue {environ['SLURM_JOB_ID']}\n", ""):
        command = ["bash", str(DEPLOY / "slurm.sbatch")]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert (said.read_text() if said.exists() else "") == expected
        said.unlink(missing_ok=True)


# ── slurm-prolog.sh, slurm-epilog.sh ──

# Does what the options say that matter here: the environment, the folder below /run, and to return when it is ready.
SYSTEMD_RUN = """
import os, socket, subprocess, sys
options = [word.removeprefix("--").partition("=") for word in sys.argv[1:] if word.startswith("--")]
command = [word for word in sys.argv[1:] if not word.startswith("--")]
unit = next(value for name, _, value in options if name == "unit")
environ = dict(value.split("=", 1) for name, _, value in options if name == "setenv")
environ = {name: value.replace("/run/", os.environ["RUN"] + "/") for name, value in environ.items()}
os.makedirs(f"{os.environ['RUN']}/{unit}", mode=0o700)
ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ready.bind(f"{os.environ['RUN']}/{unit}.notify")
ready.settimeout(60)
log = open(f"{os.environ['RUN']}/{unit}.log", "wb")
command[0] = os.path.basename(command[0])
environ = {**os.environ, **environ, "NOTIFY_SOCKET": ready.getsockname()}
daemon = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
open(f"{os.environ['RUN']}/{unit}.pid", "w").write(str(daemon.pid))
while b"READY=1" not in ready.recv(1000):
    pass
"""
SYSTEMCTL = """
import os, signal, sys
assert sys.argv[1] == "stop"
pid = int(open(f"{os.environ['RUN']}/{sys.argv[2]}.pid").read())
end = os.pidfd_open(pid)
os.kill(pid, signal.SIGTERM)
import select
assert select.select([end], [], [], 60)[0]
"""


def test_slurm_epilog_brings_the_last_checkpoint_to_the_cold_tier(tmp_path: Path) -> None:
    """Runs the scripts themselves, with scripts in place of systemd-run and systemctl."""
    (tmp_path / "tierd.toml").write_text(
        '[daemon]\nlisten = "127.0.0.1:0"\n[[cold]]\nname = "cold"\nurl = "file://cold"\n'
    )
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, program in (("systemd-run", SYSTEMD_RUN), ("systemctl", SYSTEMCTL)):
        (commands / name).write_text(f"#!{sys.executable}\n{program}")
        (commands / name).chmod(0o755)
    user = pwd.getpwuid(os.getuid()).pw_name
    environ = {
        **os.environ,
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
        "RUN": str(tmp_path),
        "TIERD_CONFIG": str(tmp_path / "tierd.toml"),
        "LOCAL_DISK": str(tmp_path / "local"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_USER": user,
    }
    make_checkpoint(tmp_path / "local" / user, size_bytes=20_000_000)  # copied in the drain, or before
    try:
        for script in ("slurm-prolog.sh", "slurm-epilog.sh"):
            done = subprocess.run([DEPLOY / script], env=environ, capture_output=True, timeout=120, check=False)
            assert (done.returncode, done.stderr) == (0, b"")
    finally:
        for file in tmp_path.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)  # a test that fails leaves no daemon
    log = (tmp_path / "tierd-7.log").read_text()
    assert "SIGTERM: draining" in log
    assert list((tmp_path / "cold").glob("run42/*/manifest.json")), log


# ── slurm-nodes.sbatch ──

SRUN = """
import os, signal, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + len(options):]
per_node = 1 if "--ntasks-per-node=1" in options else 2
socket = os.environ["TIERD_SOCKET"]
tasks = []
for number in range(2 * per_node):
    node = number // per_node
    at = f"{socket}.{node}" if node else socket
    own = {"TIERD_SOCKET": at, "TIERD_DAEMON_SOCKET": at, "SLURM_PROCID": str(number)}
    own |= {"TIERD_HOT_PATH": "hot-1"} if node else {}
    own |= {"SLURM_LOCALID": str(number % per_node), "SLURM_NTASKS": str(2 * per_node)}
    tasks.append(subprocess.Popen(command, env=os.environ | own))
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
TRAIN_ON_NODES = """
import os, signal, time, tierd_client, torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(1)
state = tierd_client.TrainingState(model=torch.nn.Linear(2, 2))
with tierd_client.connect("gpt-124m") as client:
    found = client.restore(state)
    begun = found.step if found else 0
    for step in range(begun + 1, begun + (3 if found else 2000)):
        time.sleep(0.02)
        if step == 2 and dist.get_rank() == 0:
            os.kill(int(os.environ["BATCH_PID"]), signal.SIGTERM)  # as Slurm does before the time limit
        if client.due(step) or client.stopping:
            client.snapshot(step, state)
        if client.stopping:
            break
"""


@pytest.mark.long
def test_slurm_job_on_several_nodes_is_requeued_when_it_was_stopped_and_not_when_it_is_finished(tmp_path: Path) -> None:
    """Runs the script itself. Two nodes of two tasks are on this machine, each node with a socket and a hot tier."""
    (tmp_path / "train.py").write_text(TRAIN_ON_NODES)
    (tmp_path / "tierd.toml").write_text(
        '[daemon]\nlisten = "127.0.0.1:0"\n[snapshot]\nevery_steps = 0\n[hot]\npath = "hot"\n'
        '[[cold]]\nname = "cold"\nurl = "file://cold"\n'
    )
    (tmp_path / "srun.py").write_text(SRUN)
    commands = tmp_path / "bin"
    commands.mkdir()
    said = tmp_path / "said"
    for name, line in (
        ("srun", f'exec "{sys.executable}" "{tmp_path}/srun.py" "$@"'),
        ("scontrol", f'[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> {said}'),
    ):
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
        "TIERD_CONFIG": str(tmp_path / "tierd.toml"),
        "SLURM_JOB_ID": f"nodes-{os.getpid()}",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_NUM_NODES": "2",
        "OMP_NUM_THREADS": "1",
    }
    script = str(DEPLOY / "slurm-nodes.sbatch")
    for expected in (f"requeue {environ['SLURM_JOB_ID']}\n", ""):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            environ["MASTER_PORT"] = str(probe.getsockname()[1])
        command = ["bash", "-c", f'export BATCH_PID=$$; exec bash "{script}"']
        job = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            said_all = job.communicate(timeout=240)[0].decode()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)  # a job that hangs leaves no tasks
        assert job.returncode == 0, said_all
        assert (said.read_text() if said.exists() else "") == expected, said_all
        said.unlink(missing_ok=True)
