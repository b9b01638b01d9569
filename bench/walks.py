"""Counts the path of the code through the source: how many functions a snapshot and two restores enter.

For each of three walks, `client.snapshot()` until the checkpoint is committed in a bucket, `client.restore()` from the
hot tier, and `tierd restore --tier cold`, prints the number of distinct functions of tierd that were entered, the
number of files they are in, and how often the walk came back to a file that it had left: the file changes along the
functions in the order in which they were first entered, minus the files. Fewer means less to read. Every process
records its own calls (`sys.setprofile`), the daemon too; the threads of a process are recorded together, in the order
of time.

    python bench/walks.py [--json FILE] [--functions FOLDER]
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

Call = tuple[float, str, str]  # when, file, function

DEADLINE_S = 60.0
KEYS = {"AWS_ACCESS_KEY_ID": "walks", "AWS_SECRET_ACCESS_KEY": "walks", "AWS_EC2_METADATA_DISABLED": "true"}


def source_file(path: str) -> str | None:
    """The path below the repository of a file of tierd or its client; None for anything else."""
    for package in ("/tierd/", "/client/tierd_client/"):
        before, found, after = path.rpartition(package)
        if found and (package != "/tierd/" or "/client" not in before):
            return f"{package[1:]}{after}"
    return None


class Recorder:
    """The first call of every function of tierd in this process since `reset`."""

    def __init__(self) -> None:
        self._known: dict[object, str | None] = {}
        self.calls: dict[object, Call] = {}

    def start(self) -> None:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def stop(self) -> list[Call]:
        sys.setprofile(None)
        threading.setprofile(None)
        return sorted(self.calls.values())

    def reset(self) -> None:
        self.calls = {}

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a class, which an import runs
        if event != "call" or code in self.calls or not is_function or code.co_name.startswith("<"):
            return
        if code not in self._known:
            self._known[code] = source_file(code.co_filename)
        file = self._known[code]
        if file is not None:
            self.calls[code] = (time.time(), file, code.co_qualname)


def record_program(output: str, arguments: list[str]) -> None:
    """Run `tierd` with these arguments, recorded into `output`. SIGUSR2 begins the record anew."""
    recorder = Recorder()
    signal.signal(signal.SIGUSR2, lambda number, frame: recorder.reset())
    sys.argv = ["tierd", *arguments]
    recorder.start()
    try:
        runpy.run_module("tierd", run_name="__main__")
    finally:
        Path(output).write_text(json.dumps(recorder.stop()), encoding="utf-8")


def summary(calls: list[Call]) -> dict[str, int]:
    files = [file for _, file, _ in sorted(calls)]
    moves = sum(before != after for before, after in itertools.pairwise(files)) + 1
    return {"functions": len(files), "files": len(set(files)), "returns": moves - len(set(files))}


@contextmanager
def bucket_server(folder: Path) -> Iterator[str]:
    program = Path(sys.executable).with_name("moto_server")
    with (folder / "bucket.log").open("w") as log:
        child = subprocess.Popen([str(program), "-H", "127.0.0.1", "-p", "0"], stdout=log, stderr=log)
    try:
        wait(lambda: "http://" in (folder / "bucket.log").read_text(), "the bucket")
        port = (folder / "bucket.log").read_text().partition("http://127.0.0.1:")[2].split()[0]
        url = f"http://127.0.0.1:{port}"
        import boto3

        boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket="walks")
        yield url
    finally:
        child.terminate()
        child.wait()


def wait(is_true: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_true():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited {DEADLINE_S:g} s for {what}")
        time.sleep(0.02)


def program(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        __file__,
        "--record",
        str(folder / f"{name}.json"),
        "--config",
        str(folder / "tierd.toml"),
    ]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen([*command, *arguments], stderr=log, stdout=log)


def measure(folder: Path) -> dict[str, list[Call]]:
    import tierd_client
    import torch

    def make_state() -> tierd_client.TrainingState:
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        return tierd_client.TrainingState(model=model, optimizer=optimizer)

    def connect() -> tierd_client.Client:
        return tierd_client.connect("walks", socket=str(folder / "tierd.sock"))

    with bucket_server(folder) as url:
        (folder / "tierd.toml").write_text(
            '[daemon]\nsocket = "tierd.sock"\nlisten = "127.0.0.1:0"\n[hot]\npath = "hot"\n[health]\nexamine = false\n'
            f'[[cold]]\nname = "cold"\nurl = "s3://walks/x"\nregion = "us-east-1"\nendpoint_url = "{url}"\n'
        )
        walks: dict[str, list[Call]] = {}
        recorder = Recorder()
        for walk in ("client.snapshot() to the bucket's commit", "client.restore()"):
            daemon = program(folder, "daemon", "serve")
            wait(lambda: " serves " in (folder / "daemon.log").read_text(), "the daemon")
            client, state = connect(), make_state()
            if walk.startswith("client.snapshot"):
                client.snapshot(1, state).wait_replicated("cold", DEADLINE_S)  # what happens once has happened
            time.sleep(0.5)
            daemon.send_signal(signal.SIGUSR2)
            time.sleep(0.1)
            began_s = time.time()
            recorder.reset()
            recorder.start()
            if walk.startswith("client.snapshot"):
                client.snapshot(2, state).wait_replicated("cold", DEADLINE_S)
            else:
                client.restore(state)
            calls = recorder.stop()
            ended_s = time.time()
            client.close()
            daemon.terminate()
            daemon.wait(DEADLINE_S)
            calls += [tuple(call) for call in json.loads((folder / "daemon.json").read_text())]
            walks[walk] = [call for call in calls if began_s <= call[0] <= ended_s]
        restore = program(folder, "restore", "restore", "--tier", "cold", "--to", str(folder / "restored"))
        if restore.wait(DEADLINE_S) != 0:
            raise SystemExit((folder / "restore.log").read_text())
        walks["tierd restore --tier cold"] = [tuple(call) for call in json.loads((folder / "restore.json").read_text())]
    return walks


def main() -> None:
    if sys.argv[1:2] == ["--record"]:
        record_program(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--functions", metavar="FOLDER", type=Path, help="write the functions of each walk there")
    options = parser.parse_args()
    os.environ.update(KEYS)
    with tempfile.TemporaryDirectory(prefix="tierd-walks-", dir="/tmp") as folder:
        walks = measure(Path(folder))
    measured = {walk: summary(calls) for walk, calls in walks.items()}
    for walk, counts in measured.items():
        print(f"{walk:45} functions {counts['functions']:4}  files {counts['files']:3}  returns {counts['returns']:4}")
        if options.functions:
            options.functions.mkdir(parents=True, exist_ok=True)
            lines = (f"{file}  {function}\n" for _, file, function in sorted(walks[walk]))
            (options.functions / f"{walk.replace(' ', '_').replace('/', '_')}.txt").write_text("".join(lines))
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
