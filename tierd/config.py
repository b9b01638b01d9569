"""The configuration: one TOML file into one tree of structs, every default and every limit with its unit.

Looked for in `--config FILE`, else `$TIERD_CONFIG`, else `./tierd.toml`, else defaults with everything under
`./.tierd`. Scalar keys also come as `TIERD_SECTION_KEY`. Unknown keys and contradictions are errors.
Relative paths are relative to the config file. Secrets are never here: S3 credentials come from boto3's chain.
"""

from __future__ import annotations

import math
import os
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from tierd.errors import BadConfig

DEFAULT_FILE = "tierd.toml"
DEFAULT_ROOT = ".tierd"
_SOCKET_PATH_MAX = 107  # sockaddr_un holds 108 bytes with the final NUL
_TIER_WORDS = ("auto", "memory", "hot")
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-class-intro.html
ARCHIVED = ("GLACIER", "DEEP_ARCHIVE")  # a GET is refused until someone has asked for a copy, and hours have passed


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket: str = ".tierd/tierd.sock"
    listen: str = "127.0.0.1:9464"  # host:port of metrics, probes and status; port 0 takes a free one
    node: str = "auto"  # auto: the host's name
    drain_timeout_s: float = 120.0  # on SIGTERM: how long sealed snapshots may take to reach the hot tier
    memory_grace_s: float = 3600.0  # how long slots of a trainer that is gone are kept for its return
    nice: int = 10  # its own priority, 0 to 19, for the processor and with it for the disk; 0: as it was started
    slowdown_max: float = 0.05  # steps may take so much longer while tiers are written; 0: writing is never held back
    write_min_mib_s: float = 32.0  # and no tier is held back to less than that


class SnapshotConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What trainers are told when they connect; arguments of connect() override it."""

    every_steps: int = 100  # due() says yes at each multiple; 0: never by steps
    every_s: float = 0.0  # and whenever so many seconds have passed; 0: never by time
    slots: int = 2  # per rank: N + 1, where N snapshots may be under way while the newest is retained
    slot_wait_s: float = 60.0  # snapshot() waits for a free slot at most so long
    when_busy: Literal["wait", "skip"] = "wait"
    stop_grace_s: float = 25.0  # after a stop: how long the last snapshot may take to be durable; Kubernetes gives 30
    staging: Literal["sync", "overlap"] = (
        "sync"  # snapshot() returns when all is copied, or copies during the next step
    )


class HotConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = ".tierd/hot"


class TierPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoints of a run a tier keeps: the union of what each key asks for."""

    keep_last: int = 3
    keep_every: int = 0  # every n-th checkpoint of the run (sequence divisible by n); 0: none by count
    keep_every_steps: int = 0  # steps divisible by n; 0: none by steps
    keep_hourly: int = 0  # of the last n hours that have one, the newest each, by created_at in UTC; 0: none by time
    keep_daily: int = 0
    keep_weekly: int = 0  # ISO weeks, from Monday
    keep_best: int = 0  # the n best by best_metric, which snapshot(metrics=...) gave; 0: none by metric
    best_metric: str = ""
    best_mode: Literal["min", "max"] = "min"
    milestones: bool = False
    keep_unhealthy: int = 1  # the newest so many unhealthy ones, as evidence; they count for nothing else


class ColdPolicy(TierPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A struct of its own, so that a file which sets only `keep_last` does not lose the milestones."""

    keep_every: int = 10
    milestones: bool = True
    keep_unhealthy: int = 0


class ColdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "cold"
    url: str = "file://.tierd/cold"  # s3://bucket/prefix or file://directory
    region: str = ""
    endpoint_url: str = ""
    ca_bundle: str = ""  # a file of CA certificates for this endpoint; empty: AWS_CA_BUNDLE, else those of the system
    sse: Literal["", "AES256", "aws:kms"] = ""  # encryption that is asked for; empty: the bucket's default
    sse_kms_key_id: str = ""  # with aws:kms; empty: the key of the account
    max_upload_mib_s: float = 0.0  # 0: no cap; SIGHUP makes the daemon read it anew
    storage_class: str = ""  # of a bucket's new objects; empty: not sent, which is STANDARD
    milestone_storage_class: str = ""  # of shards that are a milestone's when they are sent; empty: as storage_class
    price_per_gib_month: float = 0.0  # for `tierd lifecycle --explain`, in any currency; 0: not told
    lifecycle: ColdPolicy | None = None  # in place of lifecycle.cold as a whole


class LifecycleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hot: TierPolicy = TierPolicy()
    cold: ColdPolicy = ColdPolicy()


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    examine: bool = True  # whether every number of a checkpoint's model, optimizer and EMA is checked to be finite
    restore_wait_s: float = 60.0  # how long a restore waits for the verdict on what nobody has examined yet


class ScrubConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every replica is looked at again and again: its sizes, the checksums that a bucket keeps, of some every byte."""

    interval_s: float = 86400.0  # every replica once in so long; 0: never
    deep_share: float = 0.01  # of the replicas, those that are read whole: out of a bucket that is egress
    max_read_mib_s: float = 32.0  # how fast, for each tier; 0: no cap
    repair: bool = True  # damaged files are replaced by whole ones of another tier


class DrillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A random checkpoint of each tier is restored into scratch space, to know that it can be."""

    interval_s: float = 0.0  # each tier once in so long; 0: never. Out of a bucket each one is egress
    scratch: str = ""  # where to, with room for a checkpoint; empty: in hot.path, under a name that is no run's


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on everything that could grow or wait. The defaults serve; change them with a reason."""

    connections_max: int = 1024
    hello_timeout_s: float = 10.0  # a peer that connects and says nothing is dropped
    reconcile_interval_s: float = 10.0  # how often lifecycle looks again with nothing to wake it
    cold_list_interval_s: float = 600.0  # how often a cold tier is listed afresh
    retry_min_s: float = 1.0  # backoff of a failing worker: doubling, with jitter, between these
    retry_max_s: float = 300.0
    request_timeout_s: float = 60.0  # one S3 request with no progress
    parts_in_flight: int = 4  # chunks under way at once in a cold tier: 4 MiB of memory each


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    daemon: DaemonConfig = DaemonConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    hot: HotConfig = HotConfig()
    cold: list[ColdConfig] = []
    lifecycle: LifecycleConfig = LifecycleConfig()
    health: HealthConfig = HealthConfig()
    scrub: ScrubConfig = ScrubConfig()
    drill: DrillConfig = DrillConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def socket_path(self) -> Path:
        return Path(self.daemon.socket)

    @property
    def hot_path(self) -> Path:
        return Path(self.hot.path)

    @property
    def own_policies(self) -> dict[str, TierPolicy]:
        """By name, of the cold tiers that have a lifecycle of their own."""
        return {one.name: one.lifecycle for one in self.cold if one.lifecycle is not None}

    @property
    def drill_path(self) -> Path:
        return Path(self.drill.scratch) if self.drill.scratch else self.hot_path / ".drill"

    @property
    def listen_address(self) -> tuple[str, int]:
        host, _, port = self.daemon.listen.rpartition(":")
        return host.strip("[]"), int(port)


def notify_socket(environ: Mapping[str, str] = os.environ) -> str:
    """Where systemd wants to be told that the daemon is ready (sd_notify(3)); empty when it did not start us."""
    return environ.get("NOTIFY_SOCKET", "")


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where what can be had again may be kept: $XDG_CACHE_HOME/tierd, else ~/.cache/tierd. None without a home."""
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the specification has a relative one ignored
        base = os.path.join(environ.get("HOME", ""), ".cache")
    return Path(base, "tierd") if os.path.isabs(base) else None


def find_file(option: str | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The config file in force: the option, $TIERD_CONFIG, ./tierd.toml, or None for the built-in defaults."""
    named = option or environ.get("TIERD_CONFIG")
    if named:
        path = cwd / named
        if not path.is_file():
            raise BadConfig(f"read config {path}: no such file", hint="check --config or $TIERD_CONFIG")
        return path
    default = cwd / DEFAULT_FILE
    return default if default.is_file() else None


def found_at(option: str | None) -> str:
    """What `load` reads, for a person. Raises BadConfig where the file that is named is not there."""
    path = find_file(option, os.environ, Path.cwd())
    return str(path) if path else "the built-in defaults, with everything under ./.tierd"


def load(option: str | None = None, *, environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> Config:
    """The configuration in force, checked, with absolute paths. Raises BadConfig naming the file and the key."""
    environ = os.environ if environ is None else environ
    cwd = Path.cwd() if cwd is None else cwd
    path = find_file(option, environ, cwd)
    where = str(path) if path else "the built-in defaults"
    tree: dict[str, Any] = {"cold": [{}]}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise BadConfig(f"read config {path}: {error}", hint="deploy/tierd.toml is a commented example") from error
    _apply_environment(tree, environ)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise BadConfig(
            f"read config {where}: {error}", hint="deploy/tierd.toml lists every key with its default"
        ) from error
    return _check(_absolute(config, path.parent if path else cwd, where), where)


def _apply_environment(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    """TIERD_HOT_PATH sets hot.path, TIERD_LIFECYCLE_HOT_KEEP_LAST lifecycle.hot.keep_last, and so on."""
    for keys, kind in _scalars(Config, ()):
        raw = environ.get("TIERD_" + "_".join(keys).upper())
        if raw is None:
            continue
        section: Any = tree
        for key in keys[:-1]:
            section = section.setdefault(key, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            continue  # the file has something else than a table there, which is refused by name in a moment
        try:
            section[keys[-1]] = msgspec.convert(raw, kind, strict=False)
        except msgspec.ValidationError as error:
            name = "TIERD_" + "_".join(keys).upper()
            raise BadConfig(f"read ${name}={raw!r}: {error}", hint=f"it sets {'.'.join(keys)}") from error


def _scalars(struct: Any, above: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for field in msgspec.inspect.type_info(struct).fields:  # pyright: ignore[reportAttributeAccessIssue]
        keys = (*above, field.encode_name)
        if isinstance(field.type, msgspec.inspect.StructType):
            found += _scalars(field.type.cls, keys)
        elif not isinstance(field.type, msgspec.inspect.ListType):
            kinds: dict[type, Any] = {
                msgspec.inspect.StrType: str,
                msgspec.inspect.IntType: int,
                msgspec.inspect.FloatType: float,
                msgspec.inspect.BoolType: bool,
            }
            found.append((keys, kinds.get(type(field.type), str)))
    return found


def _absolute(config: Config, base: Path, where: str) -> Config:
    def absolute(key: str, path: str) -> str:
        if not path:
            raise _refusal(where, key, path, "a path")
        return os.path.normpath(base / path)

    def at(one: ColdConfig) -> ColdConfig:
        if one.ca_bundle:
            one = msgspec.structs.replace(one, ca_bundle=absolute(f"cold.ca_bundle of {one.name}", one.ca_bundle))
        if not one.url.startswith("file://"):
            return one
        path = absolute(f"cold.url of {one.name}", one.url.removeprefix("file://"))
        return msgspec.structs.replace(one, url=f"file://{path}")

    daemon = msgspec.structs.replace(
        config.daemon,
        socket=absolute("daemon.socket", config.daemon.socket),
        node=socket.gethostname() if config.daemon.node == "auto" else config.daemon.node,
    )
    hot = msgspec.structs.replace(config.hot, path=absolute("hot.path", config.hot.path))
    scratch = config.drill.scratch and absolute("drill.scratch", config.drill.scratch)
    drill = msgspec.structs.replace(config.drill, scratch=scratch)
    cold = [at(one) for one in config.cold]
    return msgspec.structs.replace(config, daemon=daemon, hot=hot, cold=cold, drill=drill)


def _check(config: Config, where: str) -> Config:
    _check_numbers(config, where)
    _check_daemon(config.daemon, where)
    if not 2 <= config.snapshot.slots <= 16:
        raise _refusal(where, "snapshot.slots", config.snapshot.slots, "2 to 16")
    if config.scrub.deep_share > 1:
        raise _refusal(where, "scrub.deep_share", config.scrub.deep_share, "0 to 1")
    if config.limits.retry_max_s < config.limits.retry_min_s:
        raise _refusal(where, "limits.retry_max_s", config.limits.retry_max_s, "at least limits.retry_min_s")
    _check_policy(config.lifecycle.hot, where, "lifecycle.hot")
    _check_policy(config.lifecycle.cold, where, "lifecycle.cold")
    for one in config.cold:
        _check_cold(one, where)
        if one.lifecycle is not None:
            _check_policy(one.lifecycle, where, f"cold.lifecycle of {one.name}")
        _check_storage_classes(one, one.lifecycle or config.lifecycle.cold, where)
    _check_apart(config, where)
    return config


def _check_numbers(config: Config, where: str) -> None:
    """Every number is finite and not negative; a limit or a keep_last of 0 would stop the daemon or empty a tier."""
    for keys, value in _values(config, ()):
        key = ".".join(keys)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or value < 0:
            raise _refusal(where, key, value, "0 or more")
        if value == 0 and keys[0] == "limits":
            raise _refusal(where, key, value, "more than 0")
        if value == 0 and keys[-1] == "keep_last":
            raise _refusal(where, key, value, "1 or more")


def _check_policy(policy: TierPolicy, where: str, key: str) -> None:
    """Half of a rule keeps nothing, and nobody would notice before the best one is gone."""
    if policy.keep_best and not policy.best_metric:
        raise _refusal(where, f"{key}: best_metric", "", "the name of a metric when keep_best is set")
    if policy.best_metric and not policy.keep_best:
        raise _refusal(where, f"{key}: keep_best", 0, "1 or more when best_metric is set")


def _check_daemon(daemon: DaemonConfig, where: str) -> None:
    if len(os.fsencode(daemon.socket)) > _SOCKET_PATH_MAX:
        raise BadConfig(
            f"read config {where}: daemon.socket has more than {_SOCKET_PATH_MAX} bytes: {daemon.socket}",
            hint="Unix socket paths are short; use one under /run or /tmp",
        )
    host, _, port = daemon.listen.rpartition(":")
    if not host.strip("[]") or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise _refusal(where, "daemon.listen", daemon.listen, "host:port")
    if daemon.nice > 19:
        raise _refusal(where, "daemon.nice", daemon.nice, "0 to 19")
    if daemon.write_min_mib_s == 0:
        raise _refusal(where, "daemon.write_min_mib_s", daemon.write_min_mib_s, "more than 0")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", daemon.node):
        raise _refusal(where, "daemon.node", daemon.node, "a host name")


def _check_cold(one: ColdConfig, where: str) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", one.name) or one.name in _TIER_WORDS:
        raise _refusal(where, "cold.name", one.name, f"a short word of a-z, 0-9 and -, and none of {_TIER_WORDS}")
    if not one.url.startswith("file:///"):
        parts = urlsplit(one.url)
        # Only a bucket: credentials in a URL would end up in logs.
        is_bucket = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", parts.netloc)
        if parts.scheme != "s3" or not is_bucket or parts.query or parts.fragment:
            raise _refusal(where, f"cold.url of {one.name}", one.url, "s3://bucket/prefix or file://directory")
    if one.endpoint_url:
        endpoint = urlsplit(one.endpoint_url)
        if endpoint.scheme not in ("http", "https") or not endpoint.hostname or "@" in endpoint.netloc:
            raise _refusal(where, f"cold.endpoint_url of {one.name}", one.endpoint_url, "http://host or https://host")
    if one.ca_bundle and not os.path.isfile(one.ca_bundle):
        raise _refusal(where, f"cold.ca_bundle of {one.name}", one.ca_bundle, "a file of CA certificates")
    if one.sse_kms_key_id and one.sse != "aws:kms":
        raise _refusal(where, f"cold.sse of {one.name}", one.sse, "'aws:kms', since sse_kms_key_id is set")


def _check_storage_classes(one: ColdConfig, policy: ColdPolicy, where: str) -> None:
    for name, found in (("storage_class", one.storage_class), ("milestone_storage_class", one.milestone_storage_class)):
        key = f"cold.{name} of {one.name}"
        if found and not one.url.startswith("s3://"):
            raise _refusal(where, key, found, "none: only a bucket has storage classes")
        if found and not re.fullmatch(r"[A-Z][A-Z0-9_-]{0,63}", found):
            raise _refusal(where, key, found, "a storage class as S3 spells it, such as STANDARD_IA or GLACIER_IR")
    if one.storage_class in ARCHIVED:
        expected = "a class that can be read at once: what is archived takes hours to restore, and is billed for months"
        raise _refusal(where, f"cold.storage_class of {one.name}", one.storage_class, expected)
    if one.milestone_storage_class and not policy.milestones:
        key = f"cold.milestone_storage_class of {one.name}"
        raise _refusal(where, key, one.milestone_storage_class, "none where the lifecycle keeps no milestones")


def _check_apart(config: Config, where: str) -> None:
    """Each tier has a place of its own: two names for one place would make one replica look like two."""
    directories = {"hot": config.hot_path}
    buckets: dict[tuple[str, str], str] = {}
    for one in config.cold:
        if [other.name for other in config.cold].count(one.name) > 1:
            raise _refusal(where, "cold.name", one.name, "a name of its own for each cold tier")
        if not one.url.startswith("file://"):
            other = buckets.setdefault((one.url.rstrip("/"), one.endpoint_url), one.name)
            if other != one.name:
                raise _refusal(where, f"cold.url of {one.name}", one.url, f"another place than that of {other}")
            continue
        path = Path(one.url.removeprefix("file://"))
        for other, taken in directories.items():
            if path.is_relative_to(taken) or taken.is_relative_to(path):
                raise _refusal(where, f"cold.url of {one.name}", one.url, f"a directory apart from that of {other}")
        directories[one.name] = path


def _values(struct: msgspec.Struct, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, value in msgspec.structs.asdict(struct).items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, msgspec.Struct):
                yield from _values(one, (*above, name))
            else:
                yield (*above, name), one


def differences(one: Config, other: Config) -> list[str]:
    """The keys that have another value, such as `cold.dr.region`."""
    here, there = dict(_named(one, "")), dict(_named(other, ""))
    return sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))


def _named(struct: msgspec.Struct, above: str) -> Iterator[tuple[str, object]]:
    for name, value in msgspec.structs.asdict(struct).items():
        if isinstance(value, msgspec.Struct):
            yield from _named(value, f"{above}{name}.")
        elif name == "cold" and isinstance(value, list):
            for one in value:
                yield from _named(one, f"{above}{name}.{one.name}.")
        else:
            yield f"{above}{name}", value


def _refusal(where: str, key: str, found: object, expected: str) -> BadConfig:
    return BadConfig(f"read config {where}: {key} is {found!r}, expected {expected}")
