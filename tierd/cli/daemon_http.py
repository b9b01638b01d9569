"""Asks the running daemon over HTTP, with a short deadline.

Its address is in the lock file of its hot directory; otherwise it is `daemon.listen`. An answer counts only if it comes
from the daemon of this hot directory, so that two daemons on one machine are never confused.
"""

from __future__ import annotations

import http.client
import queue
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tierd.cli.console import print_note
from tierd.config.sections import Config
from tierd.errors import UNDECODABLE, DaemonUnreachable, NotFound, TierdError
from tierd.format.ids import HOT, MEMORY, CheckpointId
from tierd.status.checkpoint_report import CheckpointReport, CheckpointRow
from tierd.status.report import LOOK_S, HolderReport, StatusReport
from tierd.tiers.lock import locked_by, read_holder

TIMEOUT_S = 3.0
TOTAL_FACTOR = 5.0  # times the timeout: for an answer in many pieces
_ANSWER_BYTES_MAX = 256 << 20  # 10,000 checkpoints are some 5 MB
_HINT = "start it with `tierd serve`; `tierd ls` and `tierd restore` work without it"
_HUNG = "do not start another one: `tierd status` says what to type; `tierd ls` and `tierd restore` work without it"
_NOT_TIERD = (
    "another program may use that port: set daemon.listen to a free one; `tierd ls` and `tierd restore` need no daemon"
)
_HTTP_HINTS = {401: "listen.token_file must be the file that the daemon uses"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDaemon:
    config: Config
    address: str
    status: StatusReport

    def rows(self) -> list[CheckpointRow]:
        """The rows of `tierd ls`, including the memory tier."""
        return _get(self.config, self.address, "/api/v1/checkpoints", list[CheckpointRow])

    def checkpoint(self, checkpoint: CheckpointId) -> CheckpointReport:
        """What `tierd show` prints. Raises NotFound."""
        path = f"/api/v1/checkpoints/{checkpoint.run}/{checkpoint.name}"
        return _get(self.config, self.address, path, CheckpointReport, absent=NotFound)

    def health_in_memory(self) -> dict[CheckpointId, bool | None]:
        """The checkpoints of the memory tier, and whether each is healthy."""
        return {row.id: row.healthy for row in self.rows() if MEMORY in row.tiers}


def find(config: Config, *, is_fresh: bool = False, with_nodes: bool = False) -> RunningDaemon:
    """The daemon of this hot directory. Raises DaemonUnreachable, which says what answered instead.

    `is_fresh`: it lists its tiers first, for LOOK_S at most. `with_nodes`: it asks the other nodes of its runs, within
    about 2 s."""
    address = _address(config)
    path, timeout_s = ("/api/v1/status?nodes=1", 2 * TIMEOUT_S) if with_nodes else ("/api/v1/status", TIMEOUT_S)
    status = _get(config, address, path, StatusReport, timeout_s=timeout_s)
    if is_fresh:
        status = _get(config, address, "/api/v1/status?fresh=1", StatusReport, timeout_s=LOOK_S + TIMEOUT_S)
    hot = next((tier.url for tier in status.tiers if tier.name == HOT), "")
    if Path(hot.removeprefix("file://")).resolve() != config.hot_path.resolve():
        raise DaemonUnreachable(
            f"ask the daemon of {config.hot_path} at {address}: what answers there has {hot or 'no hot tier'}",
            hint="is --config the daemon's own? Give each daemon a daemon.listen of its own",
        )
    return RunningDaemon(config=config, address=address, status=status)


def holder(config: Config) -> HolderReport | None:
    """The daemon that runs on this machine with this hot directory, also if it does not answer."""
    found = locked_by(config.hot_path)
    return None if found is None else HolderReport(pid=found[0], state=found[1])


def is_absent(error: DaemonUnreachable) -> bool:
    """Whether nothing listens where the daemon would. Any other error leaves open whether it runs."""
    cause = error.__cause__
    return cause is None or isinstance(getattr(cause, "reason", cause), ConnectionRefusedError)


def find_or_none(config: Config, *, is_fresh: bool = False) -> RunningDaemon | None:
    """None where no daemon answers. If one may run all the same, a note says so: what only it knows is left out."""
    try:
        return find(config, is_fresh=is_fresh)
    except DaemonUnreachable as error:
        if not is_absent(error):
            print_note(f"tierd: what only the daemon knows, such as the memory tier, is left out: {error.message}")
        return None


def _address(config: Config) -> str:
    """The address where the daemon listens. With port 0 in the config, only the lock file has the port."""
    if address := read_holder(config.hot_path).listen:
        return address
    if config.listen_address[1] == 0:
        raise DaemonUnreachable(f"ask the daemon of {config.hot_path}: none has ever run there", hint=_HINT)
    return config.daemon.listen


def _get(
    config: Config,
    address: str,
    path: str,
    kind: type[T],
    *,
    timeout_s: float = TIMEOUT_S,
    absent: type[TierdError] = DaemonUnreachable,
) -> T:
    """`absent`: the error for HTTP 404. Another program that listens there answers that, too."""
    try:
        # No proxy: http_proxy is for other hosts, not for the loopback.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if cert_file := config.listen.cert_file:
            handlers.append(urllib.request.HTTPSHandler(context=_trusting(cert_file)))
        scheme = "https" if cert_file else "http"
        request = urllib.request.Request(f"{scheme}://{address}{path}")  # noqa: S310 - one of two schemes
        if config.listen.token_file:
            request.add_header("Authorization", f"Bearer {Path(config.listen.token_file).read_text().strip()}")
        opener = urllib.request.build_opener(*handlers)
        raw = _within(TOTAL_FACTOR * timeout_s, lambda: _read(opener, request, timeout_s))
    except urllib.error.HTTPError as error:
        refusal = absent if error.code == 404 else DaemonUnreachable
        message = f"ask the daemon at {address} for {path}: HTTP {error.code} {error.reason}"
        raise refusal(message, hint=_HTTP_HINTS.get(error.code, _NOT_TIERD)) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if (running := holder(config)) is not None:
            message = f"ask the daemon at {address}: {reason}, although its process {running.pid} holds the lock"
            raise DaemonUnreachable(message, hint=_HUNG) from error
        raise DaemonUnreachable(f"ask the daemon at {address}: {reason}", hint=_HINT) from error
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNDECODABLE as error:
        raise DaemonUnreachable(
            f"ask the daemon at {address}: what answers is not a tierd of this version ({error})", hint=_HINT
        ) from error


def _read(opener: urllib.request.OpenerDirector, request: urllib.request.Request, timeout_s: float) -> bytes:
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return response.read(_ANSWER_BYTES_MAX)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise


def _within(seconds: float, read: Callable[[], bytes]) -> bytes:
    """What `read` returns or raises; TimeoutError after these seconds. The timeout of a socket is for each piece, and
    what listens there may send one byte at a time."""
    answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def put_answer() -> None:
        try:
            answers.put(read())
        except Exception as error:  # of any kind: it is raised below
            answers.put(error)

    threading.Thread(target=put_answer, name="tierd-http", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no whole answer within {seconds:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _trusting(cert_file: str) -> ssl.SSLContext:
    """Trusts the daemon's own certificate alone, whatever address it is reached at."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert_file)
    return context
