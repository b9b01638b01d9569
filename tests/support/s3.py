"""Real S3 servers for tests, as subprocesses on free loopback ports, and a proxy that causes faults.

`rclone serve s3` checks signatures and ignores conditional writes and checksums; moto honours them and checks no
signature. Most other servers lie between these two.
"""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3.session
import pytest
from botocore.config import Config

ACCESS_KEY = "tierd-test"
SECRET_KEY = "a-secret-that-no-message-may-show"
BUCKET = "checkpoints"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


def _program(name: str) -> str:
    """The path of a program, which PyPI packages install beside python."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


@contextmanager
def rclone_server(root: Path, *arguments: str) -> Generator[str]:
    """`rclone serve s3` over a directory whose folders are buckets, one of them BUCKET. Yields its URL."""
    (root / BUCKET).mkdir(parents=True, exist_ok=True)
    command = [_program("rclone"), "serve", "s3", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
    with _running([*command, "--addr", "127.0.0.1:0", *arguments, str(root)], r"https?://127\.0\.0\.1:\d+") as url:
        yield url


def s3_client(url: str, **options: Any) -> Any:
    """boto3's client with the keys of the servers here."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        **options,
    )


@contextmanager
def moto_server() -> Generator[str]:
    """moto's S3 with BUCKET in it. Yields its URL."""
    with _running([_program("moto_server"), "-H", "127.0.0.1", "-p", "0"], r"http://127\.0\.0\.1:\d+") as url:
        client = s3_client(url, config=Config(max_pool_connections=1))
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield url


@contextmanager
def _running(command: list[str], address: str) -> Generator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    drain = threading.Thread(target=process.stderr.read)
    try:
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(address, line):
                drain.start()  # a full pipe would block it
                yield found[0]
                return
        raise RuntimeError(f"{command[0]} ended before it listened:\n{said}")
    finally:
        process.kill()
        process.wait()
        if drain.ident is not None:
            drain.join()
        process.stderr.close()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) of a server at 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", *kind, *names, "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


Fault = Callable[[str, str], str]
"""(method, path with query) → "" (pass on), "lose" (apply, then close), "cut" (half of the body),
"flip" (one bit of it), "whole" (the requested range is ignored), or a status."""


@contextmanager
def faulty_proxy(upstream: str, fault: Fault) -> Generator[str]:
    """An HTTP proxy for `upstream` that applies a fault to each request. Yields its URL."""
    target = urlsplit(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            what = fault(self.command, self.path)
            if what.isdigit():
                self._answer(int(what), {}, b"")
                return
            connection = http.client.HTTPConnection(target.hostname or "", target.port)
            try:
                dropped = {"expect", "range"} if what == "whole" else {"expect"}
                headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
            finally:
                connection.close()
            if what == "lose":
                self.close_connection = True
                return
            if what == "flip":
                content = bytes([content[0] ^ 1]) + content[1:]
            length = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
            kept = {n: v for n, v in answer.headers.items() if n.lower() not in ("content-length", "connection")}
            self._answer(answer.status, kept | {"Content-Length": length or "0"}, content, cut=what == "cut")

        def _answer(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items() or [("Content-Length", "0")]:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def silent_server() -> Generator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
