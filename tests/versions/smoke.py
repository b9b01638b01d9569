"""A smoke test of an installed tierd: a training killed and resumed from each tier, and every verb of the CLI once.

`python -P smoke.py [S3_URL]`, with the Python of an environment that has `tierd[client]` and safetensors and nothing
else. With S3_URL, an S3 server that checks no signatures, the cold tier is a bucket there; without, a directory.
Raises at the first thing that is wrong. tests/versions/matrix.py runs it for each combination of versions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3.session
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

from tierd.cli.app import VERBS

TIERD = Path(sys.executable).with_name("tierd")
RUN = "smoke"
STEPS = 120
EVERY = 5  # steps from one snapshot to the next
DEADLINE_S = 300.0  # for each wait
TRAIN = (
    *(sys.executable, "-P", "-m", "tierd_client.examples.train_gpt", "--run", RUN, "--steps", str(STEPS)),
    *("--every", str(EVERY), "--model-size", "tiny", "--batch-size", "2", "--block-size", "32"),
    *("--threads", "1", "--device", "cpu"),
)
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("TIERD_", "AWS_", "PYTHON"))},
    "OMP_NUM_THREADS": "1",  # the threads of several processes would wait for each other on a small machine
    "AWS_ACCESS_KEY_ID": "tierd-test",
    "AWS_SECRET_ACCESS_KEY": "tierd-test",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


class Smoke:
    """A daemon and a trainer that can be killed, and the verbs that have been run so far."""

    def __init__(self, root: Path, s3_url: str) -> None:
        self.root = root
        self.losses = root / "loss.jsonl"
        self.socket = root / "tierd.sock"
        self.verbs: set[str] = set()
        self.trainer: subprocess.Popen[bytes] | None = None
        self.daemon: subprocess.Popen[bytes] | None = None
        self.step_delay_s = 0.1
        cold = 'url = "file://cold"'
        if s3_url:
            cold = f'url = "s3://{make_bucket(s3_url)}/smoke"\nregion = "us-east-1"\nendpoint_url = "{s3_url}"'
        (root / "tierd.toml").write_text(
            f'[daemon]\nsocket = "{self.socket}"\nlisten = "127.0.0.1:0"\n[hot]\npath = "hot"\n'
            f'[[cold]]\nname = "cold"\n{cold}\n[lifecycle.hot]\nkeep_last = 5\n'
        )

    # ── processes ──

    def start_daemon(self) -> None:
        self.verbs.add("serve")
        self.socket.unlink(missing_ok=True)
        began = time.monotonic()
        with (self.root / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen([TIERD, "serve"], cwd=self.root, env=ENVIRONMENT, stdout=log, stderr=log)
        self.wait(self.socket.is_socket, "the daemon to listen")
        # A verb must start and act within few steps, on a busy machine too.
        self.step_delay_s = max(self.step_delay_s, (time.monotonic() - began) / 10)

    def start_trainer(self) -> None:
        with (self.root / "trainer.log").open("wb") as log:
            command = [*TRAIN, "--socket", self.socket, "--loss-file", self.losses]
            command += ["--step-delay-s", f"{self.step_delay_s:.3f}"]
            self.trainer = subprocess.Popen(command, cwd=self.root, env=ENVIRONMENT, stdout=log, stderr=log)

    def kill_trainer(self) -> None:
        assert self.trainer is not None
        self.trainer.kill()
        self.trainer.wait()

    def kill_daemon(self) -> None:
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    def end(self) -> None:
        for process in (self.trainer, self.daemon):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    # ── progress ──

    def wait(self, is_so: Callable[[], Any], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert self.daemon is None or self.daemon.poll() is None, f"the daemon ended while waiting for {what}"
            assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:.0f} s for {what}"
            time.sleep(0.02)

    def log(self) -> str:
        return (self.root / "trainer.log").read_text()

    def wait_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.trainer is not None
            assert self.trainer.poll() is None, "the trainer ended"
            complete = self.losses.read_bytes().rpartition(b"\n")[0].splitlines() if self.losses.exists() else []
            return bool(complete) and json.loads(complete[-1])["step"] >= step

        self.wait(reached, f"step {step}")

    def wait_resumed(self, tier: str) -> None:
        self.wait(lambda: "resumed at step" in self.log() or "starting fresh" in self.log(), "the trainer to resume")
        assert f" from {tier} in " in self.log(), f"expected a resume from {tier}"

    def wait_replicated(self, step: int) -> None:
        def newest() -> int:
            return max((row["step"] for row in self.json("ls") if "cold" in row["tiers"]), default=0)

        self.wait(lambda: newest() >= step, f"step {step} to reach the cold tier")

    # ── verbs ──

    def tierd(self, verb: str, *arguments: str | Path) -> str:
        self.verbs.add(verb)
        command = [TIERD, verb, *arguments]
        result = subprocess.run(command, cwd=self.root, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{' '.join(map(str, command))}: {result.stdout}{result.stderr}"
        return result.stdout

    def json(self, verb: str, *arguments: str | Path) -> Any:
        return json.loads(self.tierd(verb, *arguments, "--json"))


def make_bucket(url: str) -> str:
    session = boto3.session.Session(ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"])
    name = f"smoke-{os.getpid()}"
    client = session.client("s3", endpoint_url=url, region_name="us-east-1")
    client.create_bucket(Bucket=name)
    # Without this rule `tierd doctor` warns and ends with 1.
    abort: dict[str, Any] = {"ID": "abort", "Status": "Enabled", "Filter": {"Prefix": ""}}
    abort["AbortIncompleteMultipartUpload"] = {"DaysAfterInitiation": 7}
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration={"Rules": [abort]})
    return name


def resume_from_each_tier(smoke: Smoke) -> None:
    """Kills what must die for each tier to be the newest that is left, and resumes."""
    smoke.start_daemon()
    smoke.start_trainer()

    smoke.wait_step(12)
    smoke.kill_trainer()
    smoke.start_trainer()
    smoke.wait_resumed("memory")

    smoke.wait_step(22)
    smoke.kill_trainer()
    smoke.kill_daemon()
    smoke.start_daemon()
    smoke.start_trainer()
    smoke.wait_resumed("hot")

    smoke.wait_step(32)
    smoke.wait_replicated(30)
    smoke.kill_trainer()
    smoke.kill_daemon()
    shutil.rmtree(smoke.root / "hot")
    smoke.start_daemon()
    smoke.start_trainer()
    smoke.wait_resumed("cold")


def stop_and_finish(smoke: Smoke) -> None:
    smoke.wait_step(42)
    smoke.tierd("snapshot", "--run", RUN, "--milestone", "kept")
    smoke.json("restore", "--tier", "memory", "--to", "restored-memory")
    smoke.tierd("stop", "--run", RUN)
    assert smoke.trainer is not None
    assert smoke.trainer.wait(DEADLINE_S) == 0, "the trainer did not end with 0 after a stop"
    assert "stopping at step" in smoke.log(), "the trainer finished before it was stopped"
    smoke.start_trainer()
    smoke.wait_resumed("hot")
    assert smoke.trainer.wait(DEADLINE_S) == 0, "the trainer did not finish"
    smoke.wait_replicated(STEPS)


def run_every_other_verb(smoke: Smoke) -> None:
    status = smoke.json("status")
    assert {tier["name"] for tier in status["tiers"]} >= {"hot", "cold"}, status
    rows = smoke.json("ls")
    assert rows[0]["step"] == STEPS
    assert rows[0]["tiers"] == ["hot", "cold"], rows[0]
    assert any(row["milestone"] == "kept" for row in rows), rows
    assert f"{STEPS}" in smoke.tierd("show", RUN)
    smoke.tierd("verify", "--deep")
    smoke.tierd("drill")
    smoke.tierd("milestone", "last", "--step", "latest")
    smoke.tierd("lifecycle", "--explain")
    smoke.tierd("reap", "--dry-run")
    smoke.tierd("doctor")
    assert smoke.json("version")["python"] == ".".join(map(str, sys.version_info[:3]))
    for tier in ("hot", "cold"):
        assert smoke.json("restore", "--tier", tier, "--to", f"restored-{tier}")["step"] == STEPS
    for format in ("safetensors", "torch", "dcp"):
        smoke.tierd("export", "--format", format, "--to", f"exported-{format}")
    smoke.tierd("demo", "--fast")
    assert smoke.verbs == set(VERBS), f"not run: {set(VERBS) - smoke.verbs}"


def read_with_stock_tools(smoke: Smoke) -> list[str]:
    """Opens the restored checkpoint and the exports with safetensors and torch alone. Returns the readers' names."""
    warnings.simplefilter("ignore")  # torch warns that it loads in one process
    folder = smoke.root / "restored-cold"
    shard = load_file(folder / "rank-00000-of-00001.safetensors")
    assert len(shard) > 20
    readers = ["safetensors"]

    exported = load_file(smoke.root / "exported-safetensors" / "model.safetensors")
    assert exported.keys() == shard.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in shard.items())

    whole = torch.load(smoke.root / "exported-torch", weights_only=True)["model"]
    model = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    load({"model": model}, checkpoint_id=smoke.root / "exported-dcp")
    assert all(torch.equal(tensor, shard[f"model.{name}"]) for name, tensor in whole.items())
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.items())
    readers += ["torch.load", "dcp.load"]

    reader = getattr(dcp, "HuggingFaceStorageReader", None)
    if reader is not None:
        state = {name: torch.zeros_like(tensor) for name, tensor in shard.items()}
        load(state, storage_reader=reader(str(folder)))
        assert all(torch.equal(tensor, shard[name]) for name, tensor in state.items())
        readers.append("HuggingFaceStorageReader")
    return readers


def main(s3_url: str = "") -> None:
    # A short path, because a Unix socket path is at most 107 bytes long.
    root = Path(tempfile.mkdtemp(prefix="tierd-smoke-"))
    smoke = Smoke(root, s3_url)
    try:
        undisturbed = root / "undisturbed.jsonl"
        command = [*TRAIN, "--no-tierd", "--loss-file", undisturbed]
        subprocess.run(command, env=ENVIRONMENT, cwd=root, stdout=subprocess.DEVNULL, check=True)
        resume_from_each_tier(smoke)
        stop_and_finish(smoke)
        assert smoke.losses.read_bytes() == undisturbed.read_bytes(), "the loss curves differ"
        run_every_other_verb(smoke)
        readers = read_with_stock_tools(smoke)
    except BaseException:
        for log in (root / "daemon.log", root / "trainer.log"):
            if log.exists():
                print(f"── the end of {log.name} ──\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
        raise
    finally:
        smoke.end()
        shutil.rmtree(root, ignore_errors=True)
    print(f"smoke passed: resumed from memory, hot and cold; {len(VERBS)} verbs; read by {', '.join(readers)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
