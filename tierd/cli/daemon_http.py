"""The running daemon as the CLI sees it: one GET over its HTTP page, with a short deadline.

Found at the address in the lock file of its hot directory, else at `daemon.listen`. An answer counts only when it
comes from the daemon of this very hot directory, so two daemons on one machine are never taken for each other.
"""

from __future__ import annotations

import contextlib
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tierd.config import Config
from tierd.errors import DaemonUnreachable, NotFound, TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId, checkpoint_id

TIMEOUT_S = 3.0
_ANSWER_BYTES_MAX = 256 << 20  # 10,000 checkpoints are some 5 MB
_HINT = "start it with `tierd serve`; `tierd ls` and `tierd restore` work without it"


class Held(msgspec.Struct, kw_only=True):
    """The newest checkpoint of a run in one tier."""

    step: int
    generation: int
    created_at: str
    age_s: float | None = None


class RunStatus(msgspec.Struct, kw_only=True):
    run: str
    generation: int
    world_size: int | None = None
    ranks_attached: int | None = None
    state: str | None = None
    reason: str = ""
    tiers: dict[str, Held | None] = {}
    unhealthy_steps: list[int] = []


class TierStatus(msgspec.Struct, kw_only=True):
    name: str
    url: str
    is_known: bool
    error: str | None = None
    checkpoints: int = 0
    used_bytes: int | None = None
    free_bytes: int | None = None


class Queue(msgspec.Struct, kw_only=True):
    tier: str
    checkpoints: int
    oldest_age_s: float | None = None


class Failure(msgspec.Struct, kw_only=True):
    at: str
    stage: str
    message: str
    run: str | None = None
    step: int | None = None
    kind: str = ""
    hint: str = ""


class Status(msgspec.Struct, kw_only=True):
    """What /api/v1/status and `tierd status --json` say. `pid` None: no daemon runs, the tiers were looked at."""

    version: str
    node: str
    pid: int | None
    uptime_s: float | None
    is_ready: bool
    halted: list[str] = []
    runs: list[RunStatus] = []
    tiers: list[TierStatus] = []
    queues: list[Queue] = []
    slots: dict[str, int] = {}
    failures: list[Failure] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    address: str
    status: Status
    status_json: Any

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `tierd ls --json`, the memory tier among them."""
        return msgspec.json.decode(_get(self.address, "/api/v1/checkpoints"), type=list[dict[str, Any]])

    def checkpoint(self, checkpoint: CheckpointId) -> dict[str, Any]:
        """What `tierd show --json` prints. Raises NotFound."""
        raw = _get(self.address, f"/api/v1/checkpoints/{checkpoint.run}/{checkpoint.name}")
        return msgspec.json.decode(raw, type=dict[str, Any])

    def in_memory(self) -> dict[CheckpointId, dict[str, Any]]:
        """The rows of what the memory tier holds."""
        rows = (row for row in self.rows() if "memory" in row["tiers"])
        return {checkpoint_id(row["run"], row["step"], row["generation"]): row for row in rows}


def find(config: Config) -> Daemon:
    """The daemon of this hot directory. Raises DaemonUnreachable, saying what was found in its place."""
    address = _address(config)
    raw = _get(address, "/api/v1/status")
    try:
        status, status_json = msgspec.json.decode(raw, type=Status), msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise DaemonUnreachable(
            f"ask the daemon at {address}: what answers there is no tierd of this version ({error})", hint=_HINT
        ) from error
    hot = next((tier.url for tier in status.tiers if tier.name == "hot"), "")
    if Path(hot.removeprefix("file://")).resolve() != config.hot_path.resolve():
        raise DaemonUnreachable(
            f"ask the daemon of {config.hot_path} at {address}: the one that answers has {hot or 'no hot tier'}",
            hint="is --config the daemon's own? Give each daemon a daemon.listen of its own",
        )
    return Daemon(address=address, status=status, status_json=status_json)


def find_or_none(config: Config) -> Daemon | None:
    try:
        return find(config)
    except DaemonUnreachable:
        return None


def _address(config: Config) -> str:
    """Where the daemon said it listens, which differs from the config when that asks for port 0."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        holder = msgspec.json.decode((config.hot_path / layout.LOCK).read_bytes(), type=dict[str, Any])
        if isinstance(said := holder.get("listen"), str):
            return said
    if config.listen_address[1] == 0:
        raise DaemonUnreachable(f"ask the daemon of {config.hot_path}: none has ever run there", hint=_HINT)
    return config.daemon.listen


def _get(address: str, path: str) -> bytes:
    # No proxy: an http_proxy meant for the world would be asked about our own loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}{path}", timeout=TIMEOUT_S) as response:
            return response.read(_ANSWER_BYTES_MAX)
    except urllib.error.HTTPError as error:
        raise _refusal(address, path, error) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DaemonUnreachable(f"ask the daemon at {address}: {reason}", hint=_HINT) from error


def _refusal(address: str, path: str, error: urllib.error.HTTPError) -> TierdError:
    kind = NotFound if error.code == 404 else DaemonUnreachable
    return kind(f"ask the daemon at {address} for {path}: HTTP {error.code} {error.reason}", hint=_HINT)
