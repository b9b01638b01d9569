"""What a client of the HTTP listener can cost the daemon, and which requests it answers."""

from __future__ import annotations

import asyncio
import base64
import logging
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from tests.support.config import make_config
from tests.support.daemon import serving
from tests.support.processes import run_tierd
from tests.support.waiting import DEADLINE_S, wait_until
from tierd.api import http_server
from tierd.api.http_server import HttpServer, is_named, read_token
from tierd.config.sections import Config, DaemonConfig, LimitsConfig, ListenConfig
from tierd.errors import BadConfig
from tierd.status.log_limit import LINES_MAX, PERIOD_S, LogLimit

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
CONNECTIONS = 4
LONG_BYTES = 32 << 20  # more than the kernel's buffers hold


def config_of(root: Path, **listen: object) -> Config:
    return msgspec.structs.replace(
        make_config(root),
        daemon=DaemonConfig(listen="127.0.0.1:0", node="gpu-7"),
        limits=LimitsConfig(http_connections_max=CONNECTIONS),
        listen=ListenConfig(**listen),  # type: ignore[arg-type]
    )


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def status(self, raw: bytes = GET) -> int:
        await self.send(raw)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
        await self.reader.readexactly(length)
        return int(head.split()[1])

    async def is_dropped(self) -> bool:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self.reader.read() == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True


class Served:
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._clients: list[Client] = []

    async def connect(self) -> Client:
        host, _, port = self._server.address.rpartition(":")
        self._clients.append(client := Client(*await asyncio.open_connection(host, int(port))))
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.writer.close()
            with suppress(OSError):
                await client.writer.wait_closed()
        await self._server.close()


@asynccontextmanager
async def served(config: Config) -> AsyncIterator[Served]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="answer")

    app = web.Application()

    async def answer_at_length(_: web.Request) -> web.Response:
        return web.Response(body=bytes(LONG_BYTES))

    for path in ("/healthz", "/metrics"):
        app.router.add_get(path, answer)
    app.router.add_get("/long", answer_at_length)
    server = HttpServer(app, config)
    await server.start()
    running = Served(server)
    try:
        yield running
    finally:
        await running.close()


async def test_half_open_connections_keep_no_client_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 3600.0)  # else they would be ended by it
    async with served(config_of(tmp_path)) as server:
        half_open = [await server.connect() for _ in range(5 * CONNECTIONS)]
        for client in half_open:
            await client.send(b"GET /healthz HT")
        assert await (await server.connect()).status() == 200
        for client in half_open[:-CONNECTIONS]:
            assert await client.is_dropped()


async def test_a_request_has_a_limited_time_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.05)
    async with served(config_of(tmp_path)) as server:
        slow, idle, large = [await server.connect() for _ in range(3)]
        await slow.send(GET[:-2])
        assert await slow.is_dropped()
        assert await idle.is_dropped()
    monkeypatch.undo()
    async with served(config_of(tmp_path)) as server:
        large = await server.connect()
        line = b"X-Filler: " + b"x" * 4000 + b"\r\n"
        try:
            await large.send(GET[:-2] + line * 20)
        except ConnectionError:
            return
        assert await large.is_dropped()


async def test_a_client_that_reads_a_long_answer_slowly_gets_it_and_one_that_stops_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.5)
    async with served(config_of(tmp_path)) as server:
        slow, stuck = await server.connect(), await server.connect()
        for client in (slow, stuck):
            await client.send(GET.replace(b"/healthz", b"/long"))
        await slow.reader.readuntil(b"\r\n\r\n")
        for _ in range(8):
            await slow.reader.readexactly(LONG_BYTES // 8)
            await asyncio.sleep(0.15)
        read_bytes = 0
        with suppress(ConnectionError):
            while piece := await stuck.reader.read(1 << 20):
                read_bytes += len(piece)
        assert read_bytes < LONG_BYTES


async def test_a_client_that_keeps_its_connection_is_served_again(tmp_path: Path) -> None:
    async with served(config_of(tmp_path)) as server:
        client = await server.connect()
        assert [await client.status() for _ in range(50)] == [200] * 50


def run_without_a_request_timeout(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """Half-open connections are ended because there are too many, not because they are too slow."""
    http_server.REQUEST_TIMEOUT_S = 3600.0
    run_tierd(arguments, environ, log)


def test_half_open_connections_leave_the_descriptors_to_the_trainers(tmp_path: Path) -> None:
    """As in the attack: 20,000 of them exhausted the daemon's descriptors."""
    daemon = serving(tmp_path)
    daemon.run_with(run_without_a_request_timeout)
    with daemon:
        before = daemon.descriptors()
        host, _, port = daemon.url.removeprefix("http://").rpartition(":")
        attackers = [socket.create_connection((host, int(port))) for _ in range(400)]
        wait_until(lambda: daemon.descriptors() <= before + 128 + 8, "connections to be ended")
        assert daemon.status()["is_ready"]
        for attacker in attackers:
            attacker.close()
        assert daemon.log.count("connections are open") <= LINES_MAX


# ── Host: DNS rebinding ──


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost:9464", True), ("LOCALHOST", True), ("127.0.0.1:9464", True), ("[::1]:9464", True), ("[::1]", True),
        ("10.0.0.7", True), ("gpu-7:9464", True), ("metrics.example.com", True), ("", True),
        ("attacker.example", False), ("attacker.example:9464", False), ("localhost.attacker.example", False),
        ("127.0.0.1.attacker.example", False), ("[attacker", False), ("gpu-7@attacker.example", False),
    ],
)  # fmt: skip
def test_only_the_names_of_this_machine_are_answered(host: str, is_ours: bool) -> None:
    assert is_named(host, {"localhost", "gpu-7", "metrics.example.com"}) is is_ours


async def test_a_page_that_points_its_name_at_the_daemon_reads_nothing(tmp_path: Path) -> None:
    async with served(config_of(tmp_path, hosts=["metrics.example.com"])) as server:
        for host, status in {b"attacker.example": 421, b"metrics.example.com": 200, b"GPU-7": 200}.items():
            client = await server.connect()
            assert await client.status(GET.replace(b"localhost", host)) == status


# ── token and TLS ──


async def test_with_a_token_only_probes_are_answered_without_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    async with served(config_of(tmp_path, token_file=str(token))) as server:
        client = await server.connect()
        metrics = GET.replace(b"/healthz", b"/metrics")
        with_token = {b"s3cret": 200, b"s3cre": 401, b"": 401, b"\xff": 401}
        assert await client.status() == 200
        assert await client.status(metrics) == 401
        for given, status in with_token.items():
            raw = metrics.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer " + given + b"\r\n\r\n")
            assert await client.status(raw) == status, given


async def test_a_browser_asks_for_the_token_as_a_password(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret:\n")
    async with served(config_of(tmp_path, token_file=str(tmp_path / "token"))) as server:
        client = await server.connect()
        metrics = GET.replace(b"/healthz", b"/metrics")
        await client.send(metrics)
        assert b'WWW-Authenticate: Bearer, Basic realm="tierd"' in await client.reader.readuntil(b"\r\n\r\n")
        client = await server.connect()
        statuses = {b":s3cret:": 200, b"on-call:s3cret:": 200, b"s3cret:": 401, b"s3cret::": 401, b"\xff:": 401}
        headers = {b"Basic " + base64.b64encode(given): status for given, status in statuses.items()}
        others = {b"basic OnMzY3JldDo=": 200, b"Basic %": 401, b"Basic": 401, b"Digest OnMzY3JldDo=": 401}
        for given, status in (headers | others).items():
            raw = metrics.replace(b"\r\n\r\n", b"\r\nAuthorization: " + given + b"\r\n\r\n")
            assert await client.status(raw) == status, given


def test_a_token_file_that_is_empty_or_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" \n")
    for name, problem in {"token": "it is empty", "absent": "No such file"}.items():
        with pytest.raises(BadConfig, match=problem):
            read_token(str(tmp_path / name))


def test_commands_reach_a_daemon_with_token_and_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    (tmp_path / "token").write_text("s3cret")
    more = f'[listen]\ntoken_file = "token"\ncert_file = "{cert.name}"\nkey_file = "{key.name}"'
    with serving(tmp_path, more=more) as daemon:
        done = daemon.tierd("status", "--json")
        assert done.returncode == 0, done.stderr
        assert msgspec.json.decode(done.stdout)["node"] == "here"
        context = ssl.create_default_context(cafile=str(cert))
        context.check_hostname = False
        url = next(word for word in daemon.log.split() if word.startswith("https://"))
        with urllib.request.urlopen(f"{url}/healthz", context=context) as answer:
            assert answer.read() == b"alive\n"


def make_certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=gpu-7", "-days", "2", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return cert, key


# ── log ──


def lines_of(limit: LogLimit, kind: str, *, numbers: range) -> list[str]:
    """What passes of lines of one statement that differ in a number."""
    return [line for number in numbers for line in passed(limit, "%s: x %d", kind, number)]


def passed(
    limit: LogLimit, template: str, *values: object, level: int = logging.WARNING, name: str = "tierd"
) -> list[str]:
    record = logging.LogRecord(name, level, __file__, 7, template, values, None)
    return [record.getMessage()] if limit.filter(record) else []


def test_lines_of_one_statement_are_limited_and_those_left_out_are_counted() -> None:
    now_s = 0.0
    limit = LogLimit({"wire", "persist"}, now_s=lambda: now_s)
    assert len(lines := lines_of(limit, "wire", numbers=range(LINES_MAX + 900))) == LINES_MAX
    assert "more lines like this are left out" in lines[-1]
    assert lines_of(limit, "persist", numbers=range(1)) == ["persist: x 0"], "another kind is not affected"
    now_s = PERIOD_S
    assert lines_of(limit, "wire", numbers=range(5000, 5002)) == [
        "wire: x 5000 (before it, 900 lines like this were left out)",
        "wire: x 5001",
    ]


@pytest.mark.parametrize("template", ["%s fails", "100 % of s fails"])
def test_a_warning_that_is_repeated_word_for_word_is_one_line_of_each_period(template: str) -> None:
    now_s = 0.0
    limit = LogLimit(now_s=lambda: now_s)
    values = ["cold"] if template.startswith("%s") else []
    line = template.replace("%s", "cold")
    assert passed(limit, template, *values) == [line]
    now_s = PERIOD_S / 2
    assert [passed(limit, template, *values) for _ in range(3)] == [[], [], []]
    assert passed(limit, "another") == ["another"]
    now_s = PERIOD_S + 2.0
    assert passed(limit, template, *values) == [f"{line} (in the 12 s before it, it was left out 3 times)"]
    now_s = 3 * PERIOD_S
    assert passed(limit, template, *values) == [line], "nothing was left out since"


def test_an_event_that_is_no_warning_is_never_left_out_and_a_librarys_is() -> None:
    limit = LogLimit(now_s=lambda: 0.0)
    events = [passed(limit, "reloaded", level=logging.INFO) for _ in range(2)]
    assert events == [["reloaded"], ["reloaded"]]
    found = [passed(limit, "Found credentials", level=logging.INFO, name="botocore.credentials") for _ in range(2)]
    assert found == [["Found credentials"], []]


def test_a_peer_cannot_choose_what_is_counted_apart() -> None:
    limit = LogLimit({"wire"})
    assert sum(len(passed(limit, "%s: x", f"run-{number}")) for number in range(2 * LINES_MAX)) == LINES_MAX
