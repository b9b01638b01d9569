"""Reads the configuration: one TOML file and the environment into a checked `Config` with absolute paths.

The file is `--config FILE`, else `$TIERD_CONFIG`, else `./tierd.toml`; without one, the defaults keep everything under
`./.tierd`. `TIERD_SECTION_KEY` overrides a scalar key. Unknown keys and contradictions are errors. Relative paths are
relative to the config file.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin
from urllib.parse import SplitResult, urlsplit

import msgspec

from tierd.access import access_of, others_can_write
from tierd.config import environment as config_environment
from tierd.config.sections import (
    ARCHIVED,
    ColdConfig,
    ColdPolicy,
    Config,
    SnapshotConfig,
    is_exposed_endpoint,
)
from tierd.config.watches import watch_mistakes
from tierd.errors import BadConfig
from tierd.format.ids import HOT, is_run
from tierd.format.run_secret import VARIABLE, proof_of
from tierd.systemd import Systemd

DEFAULT_FILE = "tierd.toml"
_SOCKET_PATH_MAX = 107  # sockaddr_un holds 108 bytes with the final NUL
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
_TIER_WORDS = ("auto", "memory", "hot", "peers", "served")

_Mistake = tuple[str, object, str]  # (key, its value, what is expected)


def systemd(environ: Mapping[str, str] = os.environ) -> Systemd:
    """As systemd describes itself to a service in the environment: sd_notify(3), sd_watchdog_enabled(3)."""
    watchdog_us = environ.get("WATCHDOG_USEC", "")
    is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdecimal() and is_ours else 0.0
    return Systemd(notify_socket=environ.get("NOTIFY_SOCKET", ""), watchdog_s=watchdog_s)


def run_proof(environ: Mapping[str, str] = os.environ) -> str:
    """What commands send to prove that they know a run's secret; empty without one. Raises BadConfig as `proof_of`."""
    return proof_of(environ.get(VARIABLE, ""))


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for caches: $XDG_CACHE_HOME/tierd, else ~/.cache/tierd. None without a home directory."""
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says to ignore a relative path
        base = os.path.join(environ.get("HOME", ""), ".cache")
    return Path(base, "tierd") if os.path.isabs(base) else None


def find_file(option: str | None, *, environ: Mapping[str, str] = os.environ, cwd: Path | None = None) -> Path | None:
    """The config file in force: the option, $TIERD_CONFIG, ./tierd.toml, or None for the built-in defaults. Raises
    BadConfig when a named file does not exist."""
    cwd = cwd or Path.cwd()
    if named := option or environ.get("TIERD_CONFIG"):
        path = cwd / named
        if not path.is_file():
            raise BadConfig(f"read config {path}: no such file", hint="check --config or $TIERD_CONFIG")
        return path
    default = cwd / DEFAULT_FILE
    return default if default.is_file() else None


def load(option: str | None = None, *, environ: Mapping[str, str] = os.environ, cwd: Path | None = None) -> Config:
    """The configuration in force, checked, with absolute paths. Raises BadConfig naming the file and the key."""
    path = find_file(option, environ=environ, cwd=cwd)
    where = str(path) if path else "the built-in defaults"
    tree: dict[str, Any] = {"cold": [{}]}
    if path is not None:
        try:
            tree = tomllib.loads(_read_own(path))
        except (ValueError, RecursionError, OSError) as error:  # also of what is not UTF-8
            raise BadConfig(f"read config {path}: {error}", hint="deploy/tierd.toml is a commented example") from error
    config_environment.apply(tree, environ)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise BadConfig(
            f"read config {where}: {_explained(error, tree)}", hint="deploy/tierd.toml lists every key with its default"
        ) from error
    config = _absolute(config, path.parent if path else cwd or Path.cwd(), where)
    if len(os.fsencode(config.daemon.socket)) > _SOCKET_PATH_MAX:
        raise BadConfig(
            f"read config {where}: daemon.socket has more than {_SOCKET_PATH_MAX} bytes: {config.daemon.socket}",
            hint="Unix socket paths are short; use one under /run or /tmp",
        )
    for mistake in _mistakes(config):
        raise _refusal(where, *mistake)
    return config


def source_of(option: str | None = None, *, environ: Mapping[str, str] = os.environ, cwd: Path | None = None) -> str:
    """Names what `load` reads: the file, and the variables that override its keys."""
    path = find_file(option, environ=environ, cwd=cwd)
    variables = ", ".join(config_environment.overriding(environ))
    return f"{path or 'built-in defaults, no file'}{f', overridden by {variables}' if variables else ''}"


def check_user(config: Config) -> None:
    """Raises BadConfig if this process cannot be the daemon of this config: it is another user, or not in the group."""
    uid, groups = os.geteuid(), (os.getegid(), *os.getgroups())
    if config.daemon.uid not in (-1, uid):
        raise BadConfig(
            f"serve as uid {uid}: daemon.uid is {config.daemon.uid}, and commands of other users would refuse it",
            hint="start it as that user, or leave daemon.uid out",
        )
    if uid == 0 and config.daemon_uid not in (None, 0):
        raise BadConfig(
            f"serve as uid 0: {config.hot_path} belongs to uid {config.daemon_uid}, which could not use root's files",
            hint=f"start it as that user (systemctl start tierd, or sudo -u '#{config.daemon_uid}' tierd serve); "
            "if root is meant, set daemon.uid = 0",
        )
    for key, name in (("group", config.security.group), ("trainer_group", config.security.trainer_group)):
        if name and uid != 0 and access_of(name).group not in groups:
            raise BadConfig(
                f"serve as uid {uid}: this user is not in the group {name} of security.{key}",
                hint=f"usermod -a -G {name} USER, and start the daemon again",
            )


def _read_own(path: Path) -> str:
    """The text of a config file. Raises BadConfig if another user could have written it: it says where checkpoints and
    credentials go."""
    with path.open(encoding="utf-8") as file:
        stat_result = os.fstat(file.fileno())
        if stat_result.st_uid not in (0, os.geteuid()):
            raise BadConfig(
                f"read config {path}: it belongs to uid {stat_result.st_uid}, not to this user or root",
                hint="name a config of your own with --config or $TIERD_CONFIG",
            )
        if others_can_write(stat_result):
            mode = f"{stat.S_IMODE(stat_result.st_mode):04o}"
            raise BadConfig(
                f"read config {path}: other users can change it, its mode is {mode}", hint=f"chmod go-w {path}"
            )
        return file.read()


def _explained(error: msgspec.ValidationError, tree: Any) -> str:
    """msgspec's message with the key and the value that it refuses: "daemon.nice is 20, expected `int` <= 19"."""
    problem, _, path = str(error).partition(" - at `$.")
    path = path.removesuffix("`")
    value: Any = tree
    kind: Any = Config
    for key, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        value = value[key or int(index)]
        kind = _type_of(kind, key) if key else get_args(kind)[0]
    if unknown := re.fullmatch("Object contains unknown field `(.*)`", problem):
        known = [field.encode_name for field in msgspec.structs.fields(kind)]
        closest = get_close_matches(unknown[1], known, 1)
        meant = f"; did you mean {closest[0]}?" if closest else ""
        return f"there is no key {path}{'.' if path else ''}{unknown[1]}{meant}"
    if problem.startswith("Invalid enum value"):
        return f"{path} is {value!r}, expected {' or '.join(map(repr, get_args(kind)))}"
    return f"{path} is {value!r}, e{problem[1:]}" if path and problem.startswith("Expected") else str(error)


def _type_of(struct: Any, key: str) -> Any:
    """The type of a key of a section, without None."""
    kind = next(field.type for field in msgspec.structs.fields(struct) if field.encode_name == key)
    sections = [each for each in get_args(kind) if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    return sections[0] if sections and get_origin(kind) is not list else kind


def _absolute(config: Config, base: Path, where: str) -> Config:
    def absolute(key: str, path: str) -> str:
        if not path:
            raise _refusal(where, key, path, "a path")
        if path.startswith("~"):
            raise _refusal(where, key, path, "a path in full: ~ is not expanded")
        return os.path.normpath(base / path)

    cold: list[ColdConfig] = []
    for tier in config.cold:
        url, ca_bundle = tier.url, tier.ca_bundle
        if url.startswith("file://"):
            url = "file://" + absolute(f"cold.url of {tier.name}", url.removeprefix("file://"))
        if ca_bundle:
            ca_bundle = absolute(f"cold.ca_bundle of {tier.name}", ca_bundle)
        cold.append(msgspec.structs.replace(tier, url=url, ca_bundle=ca_bundle))
    daemon = msgspec.structs.replace(
        config.daemon,
        socket=absolute("daemon.socket", config.daemon.socket),
        node=socket.gethostname() if config.daemon.node == "auto" else config.daemon.node,
    )
    hot = msgspec.structs.replace(config.hot, path=absolute("hot.path", config.hot.path))
    scratch = config.drill.scratch and absolute("drill.scratch", config.drill.scratch)
    drill = msgspec.structs.replace(config.drill, scratch=scratch)
    files = {name: getattr(config.listen, name) for name in ("token_file", "cert_file", "key_file")}
    files = {name: absolute(f"listen.{name}", path) for name, path in files.items() if path}
    listen = msgspec.structs.replace(config.listen, **files, hosts=[host.lower() for host in config.listen.hosts])
    key_file = config.security.key_file
    security = msgspec.structs.replace(
        config.security, key_file=absolute("security.key_file", key_file) if key_file else ""
    )
    watch = [msgspec.structs.replace(each, path=absolute("watch.path", each.path)) for each in config.watch]
    followed = config.sidecars.path and absolute("sidecars.path", config.sidecars.path)
    sidecars = msgspec.structs.replace(config.sidecars, path=followed)
    return msgspec.structs.replace(
        config,
        daemon=daemon,
        hot=hot,
        cold=cold,
        drill=drill,
        listen=listen,
        security=security,
        watch=watch,
        sidecars=sidecars,
    )


def _mistakes(config: Config) -> Iterator[_Mistake]:
    daemon = config.daemon
    for key, address in (("daemon.listen", daemon.listen), ("peers.listen", config.peers.listen or "localhost:0")):
        host, _, port = address.rpartition(":")
        if not host.strip("[]") or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
            yield key, address, "host:port, with a port up to 65535"
    if config.peers.advertise and not is_host(config.peers.advertise):
        yield "peers.advertise", config.peers.advertise, "a host name or an IP address, without a port"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", daemon.node):
        yield "daemon.node", daemon.node, "a host name"
    for key, group in (("group", config.security.group), ("trainer_group", config.security.trainer_group)):
        try:
            access_of(group)
        except KeyError:
            yield f"security.{key}", group, "the name of a group of this machine"
    snapshot = config.snapshot
    if snapshot.cadence == "auto" and snapshot.every_s:
        yield "snapshot.every_s", snapshot.every_s, "nothing when snapshot.cadence is 'auto'"
    if snapshot.cadence == "auto" and snapshot.every_steps not in (0, SnapshotConfig().every_steps):
        yield "snapshot.every_steps", snapshot.every_steps, "nothing when snapshot.cadence is 'auto'"
    for host in config.listen.hosts:
        if not _HOST_NAME.fullmatch(host):
            yield "listen.hosts", host, "a host name without a port"
    if config.listen.key_file and not config.listen.cert_file:
        yield "listen.cert_file", "", "the certificate of listen.key_file"
    if config.limits.retry_max_s < config.limits.retry_min_s:
        yield "limits.retry_max_s", config.limits.retry_max_s, "at least limits.retry_min_s"
    policies = {"lifecycle.hot": config.lifecycle.hot, "lifecycle.cold": config.lifecycle.cold}
    policies |= {f"cold.lifecycle of {name}": policy for name, policy in config.own_policies.items()}
    for key, policy in policies.items():
        # One without the other would keep nothing.
        if policy.keep_best and not policy.best_metric:
            yield f"{key}: best_metric", "", "the name of a metric when keep_best is set"
        if policy.best_metric and not policy.keep_best:
            yield f"{key}: keep_best", 0, "1 or more when best_metric is set"
    for cold in config.cold:
        yield from _mistakes_of_cold(cold, cold.lifecycle or config.lifecycle.cold)
    yield from _shared_places(config)
    yield from _mistakes_of_watches(config)
    yield from _mistakes_of_sidecars(config)


def is_host(text: str) -> bool:
    """Whether it is a host name or an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST_NAME.fullmatch(text.lower()) is not None and all(0 < len(one) < 64 for one in text.split("."))
    return True


def _mistakes_of_cold(cold: ColdConfig, policy: ColdPolicy) -> Iterator[_Mistake]:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", cold.name) or cold.name in _TIER_WORDS:
        yield "cold.name", cold.name, f"a short word of a-z, 0-9 and -, and none of {_TIER_WORDS}"
    if not cold.url.startswith("file:///"):
        parts = _split_url(cold.url)
        # Only a bucket name: credentials in a URL would end up in logs.
        is_bucket = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", parts.netloc)
        if parts.scheme != "s3" or not is_bucket or parts.query or parts.fragment:
            yield f"cold.url of {cold.name}", cold.url, "s3://bucket/prefix or file://directory"
    if cold.endpoint_url:
        endpoint = _split_url(cold.endpoint_url)
        if endpoint.scheme not in ("http", "https") or not endpoint.hostname or "@" in endpoint.netloc:
            yield f"cold.endpoint_url of {cold.name}", cold.endpoint_url, "http://host or https://host"
        elif is_exposed_endpoint(cold.endpoint_url) and not cold.allow_plain_http:
            expected = "https://, because requests carry credentials; allow_plain_http = true accepts plain HTTP"
            yield f"cold.endpoint_url of {cold.name}", cold.endpoint_url, expected
    if cold.ca_bundle and not os.path.isfile(cold.ca_bundle):
        yield f"cold.ca_bundle of {cold.name}", cold.ca_bundle, "a file of CA certificates"
    if cold.sse_kms_key_id and cold.sse != "aws:kms":
        yield f"cold.sse of {cold.name}", cold.sse, "'aws:kms', since sse_kms_key_id is set"
    for name in ("storage_class", "milestone_storage_class"):
        key, storage_class = f"cold.{name} of {cold.name}", getattr(cold, name)
        if storage_class and not cold.url.startswith("s3://"):
            yield key, storage_class, "empty: only a bucket has storage classes"
        if storage_class and not re.fullmatch(r"[A-Z][A-Z0-9_-]{0,63}", storage_class):
            yield key, storage_class, "a storage class as S3 spells it, such as STANDARD_IA or GLACIER_IR"
    if cold.storage_class in ARCHIVED:
        expected = "a class that can be read at once: an archived object takes hours to restore"
        yield f"cold.storage_class of {cold.name}", cold.storage_class, expected
    if cold.milestone_storage_class and not policy.milestones:
        key = f"cold.milestone_storage_class of {cold.name}"
        yield key, cold.milestone_storage_class, "empty: the lifecycle of this tier keeps no milestones"


def _mistakes_of_watches(config: Config) -> Iterator[_Mistake]:
    roots = [root for root in config.directories.values() if root.is_absolute()]
    paths: set[str] = set()
    for number, watch in enumerate(config.watch):
        key, path = f"watch of {watch.path}", os.path.realpath(watch.path)
        if path in paths:
            yield "watch.path", watch.path, "another place than that of another watch"
        paths.add(path)
        if any(Path(path).is_relative_to(root.resolve()) for root in roots):
            yield "watch.path", watch.path, "a folder outside of the tiers"
        if not is_run(watch.run):
            yield f"{key}: run", watch.run, "a name of letters, digits, '.', '_' and '-'"
        if watch.run in [other.run for other in config.watch[:number]]:
            yield f"{key}: run", watch.run, "another run than that of another watch"
        for field, value, expected in watch_mistakes(watch):
            yield f"{key}: {field}", value, expected
        if watch.nodes > 1 and not config.cold:
            yield f"{key}: nodes", watch.nodes, "a cold tier that all nodes share: their parts meet there"


def _mistakes_of_sidecars(config: Config) -> Iterator[_Mistake]:
    sidecars = config.sidecars
    patterns = {"sidecars.keep": sidecars.keep, "sidecars.reset": sidecars.reset}
    if any(patterns.values()) and not sidecars.path:
        yield "sidecars.path", "", "the folder with the files of sidecars.keep and sidecars.reset"
    if (any(patterns.values()) or sidecars.path) and not is_run(sidecars.run):
        yield "sidecars.run", sidecars.run, "a name of letters, digits, '.', '_' and '-'"
    if sidecars.path and not any(patterns.values()):
        yield "sidecars.keep", [], "one glob or more, here or in sidecars.reset"
    for key, globs in patterns.items():
        for pattern in globs:
            if not pattern or "/" in pattern:
                yield key, pattern, "a glob of names in sidecars.path, without a slash"


def _split_url(url: str) -> SplitResult:
    """The parts of a URL; all are empty where it is none."""
    try:
        return urlsplit(url)
    except ValueError:  # such as of brackets around what is no IPv6 address
        return SplitResult("", "", "", "", "")


def _shared_places(config: Config) -> Iterator[_Mistake]:
    """Report tiers that share a place: one replica there would be counted twice."""
    directories = {HOT: config.hot_path}
    buckets: dict[tuple[str, str], str] = {}
    for cold in config.cold:
        if [other.name for other in config.cold].count(cold.name) > 1:
            yield "cold.name", cold.name, "a different name for each cold tier"
        if (path := cold.directory) is None:
            other = buckets.setdefault((cold.url.rstrip("/"), cold.endpoint_url), cold.name)
            if other != cold.name:
                yield f"cold.url of {cold.name}", cold.url, f"another place than that of {other}"
            continue
        for other, taken in directories.items():
            if path.is_relative_to(taken) or taken.is_relative_to(path):
                yield f"cold.url of {cold.name}", cold.url, f"a directory apart from that of {other}"
        directories[cold.name] = path


def differences(before: Config, after: Config) -> dict[str, tuple[object, object]]:
    """The two values of each key whose values differ, such as `cold.dr.region`; "not set" for one that is in a section
    of the other config alone."""
    old, new = dict(_named(before, "")), dict(_named(after, ""))
    both = {key: (old.get(key, "not set"), new.get(key, "not set")) for key in sorted(old.keys() | new.keys())}
    return {key: (value, other) for key, (value, other) in both.items() if value != other}


def _named(struct: msgspec.Struct, above: str) -> Iterator[tuple[str, object]]:
    for name, value in msgspec.structs.asdict(struct).items():
        if isinstance(value, msgspec.Struct):
            yield from _named(value, f"{above}{name}.")
        elif name == "cold" and isinstance(value, list):
            for cold in value:
                yield from _named(cold, f"{above}{name}.{cold.name}.")
        else:
            yield f"{above}{name}", value


def _refusal(where: str, key: str, found: object, expected: str) -> BadConfig:
    return BadConfig(f"read config {where}: {key} is {found!r}, expected {expected}")
