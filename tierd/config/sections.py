"""The configuration as one tree of structs: every key with its default, its unit and its bounds.

file.py reads it from a TOML file and the environment. It never holds secrets: boto3 finds S3 credentials.
"""

from __future__ import annotations

import hashlib
import ipaddress
import sys
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from tierd.access import Access, access_of
from tierd.format.ids import HOT, WORLD_SIZE_MAX
from tierd.format.manifest import MANIFEST_BYTES_MAX
from tierd.format.wire import SLOTS_MAX, SLOTS_MIN

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-class-intro.html
ARCHIVED = ("GLACIER", "DEEP_ARCHIVE")  # a GET fails until a restore was requested, which takes hours

# The upper bound only excludes inf.
Number = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket: str = ".tierd/tierd.sock"
    listen: str = "127.0.0.1:9464"  # host:port of metrics, probes and status page; port 0: any free port
    node: str = "auto"  # auto: the host name
    log_format: Literal["text", "json"] = "text"  # of the log on stderr: one line, or one JSON object, for each event
    drain_timeout_s: Number = 120.0  # on SIGTERM: the time for sealed snapshots to become durable
    # after that: the time for what cold tiers should have to get there, where the disk is lost with the job; 0: none
    drain_cold_s: Number = 0.0
    memory_grace_s: Number = 3600.0  # how long slots are kept for the restart of a trainer that failed or was killed
    traces: bool = False  # spans for OpenTelemetry; needs opentelemetry-api
    uid: Annotated[int, msgspec.Meta(ge=-1)] = -1  # the user that it runs as; -1: any
    # CPU and disk priority of the daemon, 0 to 19; 0: as it was started
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 10
    slowdown_max: Number = 0.05  # maximum fractional slowdown of a step by writes; 0: no write throttle
    write_min_mib_s: Positive = 32.0  # the throttle never goes below this rate


class SnapshotConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults for trainers, sent when they connect; arguments of connect() override them."""

    # fixed: as every_steps and every_s say; auto: by measured stalls and the MTBF, and these two must be left out
    cadence: Literal["fixed", "auto"] = "fixed"
    mtbf_s: Number = 0.0  # with auto: mean time between failures of the whole job; 0: a day, corrected by failures seen
    stall_share_max: Fraction = 0.01  # with auto: the share of the time that stalls may take; 0: no cap
    every_steps: Count = 100  # due() is true at every multiple; 0: never by steps
    every_s: Number = 0.0  # due() is also true when so many seconds have passed; 0: never by time
    # per rank: N + 1, for N snapshots in progress while the newest is retained
    slots: Annotated[int, msgspec.Meta(ge=SLOTS_MIN, le=SLOTS_MAX)] = 2
    slot_wait_s: Number = 60.0  # the longest wait of snapshot() for a free slot
    when_busy: Literal["wait", "skip"] = "wait"
    stop_grace_s: Number = 25.0  # after a stop: the time for the last snapshot to become durable; Kubernetes gives 30
    # sync: snapshot() returns when the state is copied; overlap: it is copied during the next step
    staging: Literal["sync", "overlap"] = "sync"


class HotConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = ".tierd/hot"


class TierPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoints of a run a tier keeps: those that at least one key selects."""

    keep_last: PositiveCount = 3
    keep_every: Count = 0  # every n-th checkpoint of the run (sequence divisible by n); 0: off
    keep_every_steps: Count = 0  # steps divisible by n; 0: off
    # the newest checkpoint of each of the last n hours that have one, by created_at in UTC; 0: off
    keep_hourly: Count = 0
    keep_daily: Count = 0
    keep_weekly: Count = 0  # ISO weeks, from Monday
    # the newest of a generation that no later one has passed yet, of the n that got furthest; 0: off
    keep_generations: Count = 2
    keep_best: Count = 0  # the n best by best_metric, a metric of snapshot(metrics=...); 0: off
    best_metric: str = ""
    best_mode: Literal["min", "max"] = "min"
    milestones: bool = False
    keep_unhealthy: Count = 1  # the n newest unhealthy checkpoints, for debugging; no other key counts them


class ColdPolicy(TierPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A separate struct with other defaults: a file that sets only `keep_last` still keeps the milestones."""

    keep_every: Count = 10
    milestones: bool = True
    keep_unhealthy: Count = 0


def directory_of(url: str) -> Path | None:
    """The directory of a tier; None: the tier is a bucket."""
    return Path(url.removeprefix("file://")) if url.startswith("file://") else None


class ColdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "cold"
    url: str = "file://.tierd/cold"  # s3://bucket/prefix or file://directory
    region: str = ""
    endpoint_url: str = ""
    allow_plain_http: bool = False  # else an http:// endpoint must be on this machine: requests carry credentials
    ca_bundle: str = ""  # a file of CA certificates for this endpoint; empty: AWS_CA_BUNDLE, else the system's
    sse: Literal["", "AES256", "aws:kms"] = ""  # server-side encryption to request; empty: the bucket's default
    sse_kms_key_id: str = ""  # with aws:kms; empty: the account's key
    max_upload_mib_s: Number = 0.0  # 0: no cap; SIGHUP reloads it
    storage_class: str = ""  # of new objects in a bucket; empty: the bucket's default, STANDARD
    milestone_storage_class: str = ""  # of the shards of milestones; empty: as storage_class
    price_per_gib_month: Number = 0.0  # for `tierd lifecycle --explain`, in any currency; 0: unknown
    deletes: bool = True  # false: the daemon deletes nothing there, and `tierd reap` does with another credential
    lifecycle: ColdPolicy | None = None  # replaces lifecycle.cold for this tier

    @property
    def directory(self) -> Path | None:
        return directory_of(self.url)


def is_exposed_endpoint(url: str) -> bool:
    """Whether requests to this endpoint cross a network without encryption: plain HTTP, not to this machine."""
    endpoint = urlsplit(url)
    if endpoint.scheme != "http":
        return False
    host = (endpoint.hostname or "").rstrip(".")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost" and not host.endswith(".localhost")


class LifecycleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hot: TierPolicy = TierPolicy()
    cold: ColdPolicy = ColdPolicy()


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    examine: bool = True  # check that all numbers of model, optimizer and EMA are finite
    restore_wait_s: Number = 60.0  # how long a restore waits for a checkpoint to be examined


class ScrubConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Periodic verification of every replica: file sizes, checksums stored by a bucket, all bytes of a sample."""

    interval_s: Number = 86400.0  # every replica is verified once per interval; 0: never
    deep_share: Fraction = 0.01  # the share of replicas that are read completely; from a bucket this is egress
    max_read_mib_s: Number = 32.0  # per tier; 0: no cap
    repair: bool = True  # replace damaged files by verified ones of another tier


class DrillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Periodic test restore of a random checkpoint of each tier into scratch space."""

    interval_s: Number = 0.0  # each tier once per interval; 0: never. From a bucket each drill is egress
    scratch: str = ""  # a directory with room for a checkpoint; empty: .drill in hot.path


class ListenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may ask the HTTP listener at daemon.listen."""

    hosts: list[str] = []  # names of this machine in a request, besides localhost, daemon.node and IP addresses
    token_file: str = ""  # a file with a token that requests must have; empty: none
    cert_file: str = ""  # a TLS certificate with its chain, PEM; empty: plain HTTP
    key_file: str = ""  # its private key; empty: in cert_file


class PeersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For runs over several nodes: what the daemons of other nodes may read here, and where copies are kept."""

    # host:port where this daemon serves its parts of checkpoints; port 0: any free port; empty: nowhere
    listen: str = ""
    # the host name or address that other nodes use; empty: that of listen, or daemon.node for 0.0.0.0
    advertise: str = ""
    domain: str = ""  # what may fail together with this node, such as a rack; empty: as $SLURM_TOPOLOGY_ADDR says
    # encrypts what nodes read from each other, with a certificate that the daemon makes at its start; on all nodes
    tls: bool = False


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    group: str = ""  # who may read the tiers and connect besides the user: the name of a group; empty: nobody
    # who may join runs besides the user, and not read the tiers: the name or number of a group; empty: nobody
    trainer_group: str = ""
    # the keys that sign manifests and markers, made by `tierd key new PATH`; TIERD_KEY_FILE; empty: nothing is signed
    key_file: str = ""


class WatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder in which a framework writes checkpoints, which the daemon adopts when they are complete."""

    path: str = ""  # it may be made later
    run: str = ""  # the run that they become checkpoints of; of one watch only
    # which framework writes there, as lifecycle/watched.py knows it; empty: as `pattern` says
    preset: Literal[
        "",
        "hf-trainer",
        "lightning",
        "accelerate",
        "dcp",
        "torchtitan",
        "deepspeed",
        "gpt-simple",
        "step-bin",
    ] = ""
    pattern: str = ""  # a glob with {step} where the number is, and a slash at the end for folders
    marker: str = ""  # the file in a checkpoint that is written last; empty: as the preset says
    renamed: bool = False  # with a pattern: the program renames a checkpoint into place when it is complete
    # remove: each but the newest is deleted there when all tiers that keep it have it
    source: Literal["keep", "remove"] = "keep"
    quiet_s: Positive = 10.0  # for so long, a complete checkpoint must not have changed
    # more than 1: so many nodes write their own files of one checkpoint, each into a folder of its own
    nodes: Annotated[int, msgspec.Meta(ge=1, le=WORLD_SIZE_MAX)] = 1
    # with nodes: which one this is, from 0, the node of rank 0; -1: as $SLURM_NODEID says
    node: Annotated[int, msgspec.Meta(ge=-1)] = -1


class SidecarsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files that a run writes beside its checkpoints, such as a history of the loss."""

    path: str = ""  # the folder with the files; it may be made later
    run: str = ""  # the run that they belong to
    keep: list[str] = []  # globs of files that only grow: they are copied into every tier while they grow, for ever
    reset: list[str] = []  # globs of files of one phase of the run: `tierd pivot` archives them and deletes them there


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on everything that could grow or wait."""

    connections_max: PositiveCount = 1024
    http_connections_max: PositiveCount = 128  # and never more than a sixteenth of the descriptors
    hello_timeout_s: Positive = 10.0  # a peer that connects and sends nothing is dropped
    messages_per_s: PositiveCount = 500  # of one connection; what is sent faster is read later
    slots_max: PositiveCount = 1024  # of all runs of one user
    slots_gib_max: Number = 0.0  # memory of all slots of one user; 0: the memory of this machine
    empty_runs_max: PositiveCount = 1000  # runs that one user has started within a day and that have no checkpoint
    empty_run_grace_s: Number = 604800.0  # then the claims of a run without a checkpoint are deleted; 0: never
    # how long hot keeps parts of a run over several nodes that has no trainer here and is as new in cold; 0: for ever
    left_run_grace_s: Number = 604800.0
    manifest_mib_max: Annotated[int, msgspec.Meta(ge=1, le=MANIFEST_BYTES_MAX >> 20)] = 16  # a larger one is not read
    manifests_mib_max: PositiveCount = 128  # all known manifests together; the largest beyond it are not read
    reconcile_interval_s: Positive = 10.0  # how often the lifecycle is planned again without a reason to wake it
    cold_list_interval_s: Positive = 600.0  # how often a cold tier is listed again
    cold_look_interval_s: Number = 30.0  # how often one file there is looked at, between listings; 0: never
    retry_min_s: Positive = 1.0  # backoff of a failing worker: doubles from retry_min_s to retry_max_s, with jitter
    retry_max_s: Positive = 300.0
    request_timeout_s: Positive = 60.0  # for one S3 request without progress; twice that for a call to a directory
    parts_in_flight: PositiveCount = 4  # concurrent chunks per cold tier: 4 MiB of memory each

    @property
    def directory_timeout_s(self) -> float:
        """The deadline of one call to a directory."""
        return 2 * self.request_timeout_s


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
    listen: ListenConfig = ListenConfig()
    peers: PeersConfig = PeersConfig()
    security: SecurityConfig = SecurityConfig()
    watch: list[WatchConfig] = []
    sidecars: SidecarsConfig = SidecarsConfig()

    @property
    def access(self) -> Access:
        """Who may access the files and folders that the daemon writes."""
        return access_of(self.security.group)

    @property
    def socket_access(self) -> Access:
        """Who may access the trainers' socket and its folder."""
        return access_of(self.security.trainer_group) if self.security.trainer_group else self.access

    @property
    def socket_path(self) -> Path:
        return Path(self.daemon.socket)

    @property
    def daemon_uid(self) -> int | None:
        """The user that the daemon runs as: the configured one, else the owner of the hot directory; None: unknown."""
        try:
            return self.daemon.uid if self.daemon.uid >= 0 else self.hot_path.stat().st_uid
        except OSError:
            return None

    @property
    def hot_path(self) -> Path:
        return Path(self.hot.path)

    @property
    def directories(self) -> dict[str, Path]:
        """The directories of the tiers that are not buckets, by name; hot first."""
        return {HOT: self.hot_path} | {cold.name: path for cold in self.cold if (path := cold.directory) is not None}

    @property
    def own_policies(self) -> dict[str, TierPolicy]:
        """The policies of the cold tiers that have one of their own, by name."""
        return {cold.name: cold.lifecycle for cold in self.cold if cold.lifecycle is not None}

    @property
    def left_to_reap(self) -> frozenset[str]:
        """The cold tiers where this daemon deletes nothing."""
        return frozenset(cold.name for cold in self.cold if not cold.deletes)

    @property
    def drill_path(self) -> Path:
        return Path(self.drill.scratch) if self.drill.scratch else self.hot_path / ".drill"

    @property
    def listen_address(self) -> tuple[str, int]:
        return split_address(self.daemon.listen)

    @property
    def lifecycle_digest(self) -> str:
        """Two nodes with the same digest delete and copy by the same rules."""
        rules = self.lifecycle, [(cold.name, cold.lifecycle, cold.deletes) for cold in self.cold]
        return hashlib.sha256(msgspec.json.encode(rules)).hexdigest()[:16]

    @property
    def peers_host(self) -> str:
        """The host name or address under which other nodes reach this daemon."""
        host = split_address(self.peers.listen)[0]
        is_any = host in ("0.0.0.0", "::")  # noqa: S104
        return self.peers.advertise or (self.daemon.node if is_any else host)


def split_address(listen: str) -> tuple[str, int]:
    """(host, port) of host:port."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)
