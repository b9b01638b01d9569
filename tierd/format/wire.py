"""Messages between client and daemon, and their encoding. No sockets.

One message is one packet of a SOCK_SEQPACKET Unix socket: msgpack, at most 64 KiB, with at most 253 file descriptors
(SCM_RIGHTS). Larger content is sent as a descriptor. The first message has the protocol version; a daemon refuses a
client whose version it does not speak. What concerns other nodes is in node_messages.py. Spec: docs/FORMAT.md#wire.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from tierd.errors import UNDECODABLE, BadRequest
from tierd.format.ids import CheckpointId
from tierd.format.node_messages import (
    Copied,
    Everywhere,
    FindElsewhere,
    FindNodes,
    Held,
    Inventory,
    NodeRanks,
    Partner,
    Roster,
)
from tierd.format.peers import PeerAddress
from tierd.format.run_state import RunState

PROTOCOL_VERSION = 1
PROTOCOLS_SPOKEN = range(max(1, PROTOCOL_VERSION - 1), PROTOCOL_VERSION + 1)  # by a daemon: its own, the previous one
MESSAGE_BYTES_MAX = 64 << 10
SLOTS_MIN, SLOTS_MAX = 2, 16  # of one rank: one holds the newest snapshot while another is filled
TEXT_CHARS_MAX, REASON_CHARS_MAX = 4096, 1000  # of an error or a detail, and of why a run ended: one message has both
DESCRIPTORS_MAX = 253  # the kernel's own limit, SCM_MAX_FD
CHUNKS_BYTES_MAX = 48 << 10  # of `Find.chunks`: enough for 26 TB in chunks of 64 MiB, and leaves room for the rest

REQUESTS = ("stop", "snapshot", "force")  # force: stop at once, without a snapshot


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# ── client to daemon ──────────────────────────────────────────────────────────────────────────────────────


class Hello(_Message, frozen=True, kw_only=True):
    """The first message. `generation` None: rank 0 claims a new one; a number: this rank joins it or reconnects.
    `rank` None: not a trainer; only `Find`, `FindElsewhere`, `FindNodes`, `Inventory` and `Request` may follow.
    `starts_anew`: start from scratch even if a tier that cannot be listed may contain checkpoints of the run. `proof`:
    of the run's secret, see run_secret.py; empty: the job has none. `above`: another node knows this generation, so a
    new one must be higher. `node` None: all ranks are on one node. `continues`: the one it had so far, or 0."""

    protocol: int
    version: str
    run: str
    rank: int | None
    world_size: int
    generation: int | None
    starts_anew: bool = False
    proof: str = ""
    above: int = 0
    node: NodeRanks | None = None
    continues: int = 0

    def __repr__(self) -> str:
        # Without the proof, which opens the run: no log and no traceback shows it.
        fields = {name: getattr(self, name) for name in self.__struct_fields__} | {"proof": "..." * bool(self.proof)}
        return f"Hello({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag="Hello"):
    """The fields of Hello that every version has: a daemon reads them before it decodes the rest."""

    protocol: int
    version: str


class AttachSlot(_Message, frozen=True, kw_only=True):
    """Attaches a memfd (the one descriptor) that can hold one snapshot. It must be sealed against shrinking."""

    slot: int
    capacity_bytes: int


class Filling(_Message, frozen=True, kw_only=True):
    """The rank starts to stage `step` into the slot."""

    slot: int
    step: int


class Abandon(_Message, frozen=True, kw_only=True):
    """Staging did not finish: the slot is free again."""

    slot: int


class Sealed(_Message, frozen=True, kw_only=True):
    """The first `size_bytes` bytes of the slot are this rank's complete shard of `step`. `number`: of the snapshot
    within its generation, where the run spans several nodes: they must give the checkpoint the same sequence."""

    slot: int
    step: int
    size_bytes: int
    created_at: str
    stall_s: float
    metrics: dict[str, float | str]
    milestone: str | None
    parent: CheckpointId | None
    architecture_hash: str
    versions: dict[str, str]
    resent: bool
    number: int = 0


class SnapshotLost(_Message, frozen=True, kw_only=True, tag="Lost"):
    """This rank will never seal `step`, so the step's set will never be complete. Other ranks may have sealed it.
    `Abandon` frees the slot. `kind`, `message` and `hint` are those of the error."""

    step: int
    kind: str
    message: str
    hint: str


class Find(_Message, frozen=True, kw_only=True):
    """Requests a checkpoint's files as descriptors. `step` None: the newest. `tier`: auto, memory, hot or a cold
    tier's name. `exclude`: "<checkpoint name>@<tier>" of replicas found bad. `allow_unhealthy`: also a checkpoint with
    NaN or Inf. `chunks` None: all content. Otherwise only the headers and these chunks must be valid: one
    bitmap of bitmap.py for each file of the manifest; files after the end of the list need only their headers.
    `is_node_part`: the part of this node, which is in memory or in hot, of the checkpoint with this step and
    generation; its node file is handed over in place of the manifest. `is_copy`: the copy of another node's part."""

    request: int
    step: int | None
    generation: int | None
    milestone: str | None
    tier: str
    exclude: list[str]
    allow_unhealthy: bool = False
    chunks: list[bytes] | None = None
    is_node_part: bool = False
    is_copy: bool = False


class Ask(_Message, frozen=True, kw_only=True):
    """Asks which tiers have this checkpoint. Answered by Accepted if this rank's part is in memory, and by Persisted or
    Replicated for each other tier; no answer if none has. `needs_slot`: the rank waits for a free slot. `is_last`: the
    run stops, and waits for this checkpoint or, with `needs_slot`, for a slot for its last one."""

    step: int
    generation: int
    needs_slot: bool = False
    is_last: bool = False


class Report(_Message, frozen=True, kw_only=True):
    """An event that the daemon cannot see. `outcome`: skipped, failed, unpinned, restored or corrupt. `run`: that of
    the checkpoint that was restored or is corrupt, if it is another than the session's."""

    outcome: str
    step: int
    tier: str
    seconds: float
    detail: str
    run: str = ""


class Stepped(_Message, frozen=True, kw_only=True):
    """Sent by the lowest rank of a node once per `Welcome.report_s`: the median step time, without calls of tierd."""

    seconds: float


class Convene(_Message, frozen=True, kw_only=True):
    """A rank has a request: call the ranks of its generation on this node to the meeting with this number. `is_forced`:
    there is no meeting; the ranks of another node are being interrupted, and the daemon interrupts these, too."""

    meeting: int
    is_forced: bool = False


class Request(_Message, frozen=True, kw_only=True):
    """An operator's request to the run's trainers. `kind`: one of REQUESTS. Answered by Agreed or Refused; the operator
    then receives the messages about the run's snapshots too. `milestone`: a name for the snapshot."""

    request: int
    kind: str
    milestone: str | None


class Answer(_Message, frozen=True, kw_only=True):
    """Rank 0's answer to Requested. `kind` empty: agreed, for `step` see Agreed; otherwise the kind of an error."""

    request: int
    step: int
    kind: str = ""
    message: str = ""
    hint: str = ""


class Goodbye(_Message, frozen=True, kw_only=True):
    """The trainer leaves. `state`: any but RUNNING."""

    state: RunState = RunState.LOST
    reason: str = ""


# ── daemon to client ──────────────────────────────────────────────────────────────────────────────────────


class KeptSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot of the rank's former process. `is_free` False: it holds the newest snapshot until a newer is sealed."""

    slot: int
    capacity_bytes: int
    is_free: bool


class Welcome(_Message, frozen=True, kw_only=True):
    """The answer to Hello. One descriptor for each of `slots`, in order: the restarted rank adopts them. `protocol`:
    that of the client. `boot` is of this start of the daemon. `newest`: the newest checkpoint of the run in any tier.
    `unseen`: the tiers that could not be listed, with the reason. `report_s`: how often to send Stepped, in seconds;
    0: never. `checks_secrets`: the daemon knows `proof`. `seen`: the highest generation of the run that the daemon
    knows; None from a daemon that supports one node only. `claim` and `base`: see NodeRanks; for rank 0 of a
    run over several nodes. `peer`: as of Held. `domain`: what may fail together with this node, such as a rack;
    empty: unknown. `lifecycle`: a digest of the lifecycle, which should be the same on all nodes; empty: unknown.
    `cadence` auto: `every_s` is the first interval, and Persisted has the next ones."""

    protocol: int
    version: str
    node: str
    boot: str
    generation: int
    slots: list[KeptSlot]
    every_steps: int
    every_s: float
    slots_per_rank: int
    slot_wait_s: float
    when_busy: str
    staging: str = "sync"
    stop_grace_s: float = 25.0
    newest: CheckpointId | None = None
    unseen: list[str] = []
    report_s: float = 0.0
    checks_secrets: bool = False
    seen: int | None = None
    claim: str = ""
    base: int = 0
    peer: PeerAddress | None = None
    domain: str = ""
    lifecycle: str = ""
    cadence: str = ""


class Accepted(_Message, frozen=True, kw_only=True):
    """The snapshot is in the memory tier: it survives the trainer now."""

    slot: int
    step: int


class Released(_Message, frozen=True, kw_only=True):
    """The slot is free again."""

    slot: int


class Persisted(_Message, frozen=True, kw_only=True):
    """The checkpoint is committed in hot: durable. `every_s`: the next interval of the cadence auto; 0: as before.
    `is_healthy`: of a part; None: it is being examined, and the message follows again with the verdict."""

    step: int
    generation: int
    seconds: float
    every_s: float = 0.0
    is_healthy: bool | None = True


class Replicated(_Message, frozen=True, kw_only=True):
    """The checkpoint is committed in a cold tier."""

    step: int
    generation: int
    tier: str


class Failed(_Message, frozen=True, kw_only=True):
    """A stage of a checkpoint failed. `is_final` False: it is being retried."""

    step: int
    generation: int
    stage: str
    kind: str
    message: str
    hint: str
    is_final: bool


class Fenced(_Message, frozen=True, kw_only=True):
    """A newer generation has taken over the run. Nothing from the old one is accepted any more."""

    generation: int


class Convened(_Message, frozen=True, kw_only=True):
    """All ranks are called to this meeting. Sent again to a rank that connects later, unless `is_forced`."""

    meeting: int
    is_forced: bool = False


class Requested(_Message, frozen=True, kw_only=True):
    """An operator's Request with the daemon's own number: to rank 0; `force` to every rank."""

    request: int
    kind: str
    milestone: str | None


class Agreed(_Message, frozen=True, kw_only=True):
    """The answer to Request. stop: the ranks stop at this step. snapshot: that of this step is sealed. force: the
    trainers are being interrupted, at some point after it."""

    request: int
    step: int
    generation: int


class FoundReplica(_Message, frozen=True, kw_only=True, tag="Found"):
    """The answer to Find. Descriptors: first the manifest's bytes, then each of its files, in order. `passed_over`:
    why newer replicas could not be used, one sentence each, because the trainer may lose work. `is_part`: only the
    headers and the requested chunks of the files are valid."""

    request: int
    tier: str
    passed_over: list[str] = []
    is_part: bool = False


class Progress(_Message, frozen=True, kw_only=True):
    """A Find is in progress: bytes are being fetched from a cold tier."""

    request: int
    done_bytes: int
    total_bytes: int


class Refused(_Message, frozen=True, kw_only=True):
    """The answer to a request that cannot be fulfilled. `request` is 0 for a refused Hello or message."""

    request: int
    kind: str
    message: str
    hint: str


ToDaemon = (
    Hello | AttachSlot | Filling | Abandon | Sealed | SnapshotLost | Find | Inventory | FindElsewhere | FindNodes | Ask
    | Report | Stepped | Everywhere | Partner | Roster | Convene | Request | Answer | Goodbye
)  # fmt: skip
ToClient = (
    Welcome | Accepted | Released | Persisted | Replicated | Copied | Failed | Fenced | Convened | Requested | Agreed
    | FoundReplica | Held | Progress | Refused
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToDaemon | ToClient) -> bytes:
    """Raises BadRequest when the message would pass 64 KiB."""
    raw = _encoder.encode(message)
    if len(raw) > MESSAGE_BYTES_MAX:
        raise BadRequest(
            f"send {type(message).__name__}: {len(raw)} bytes, more than {MESSAGE_BYTES_MAX}",
            hint="does the snapshot have very many metrics?",
        )
    return raw


def _decode(decoder: msgspec.msgpack.Decoder[Any], raw: bytes) -> Any:
    try:
        return decoder.decode(raw)
    except UNDECODABLE as error:
        hint = "do client and daemon have the same version?"
        raise BadRequest(f"read a message of {len(raw)} bytes: {error}", hint=hint) from error


decode_greeting: Callable[[bytes], Greeting] = functools.partial(_decode, msgspec.msgpack.Decoder(Greeting))
"""Raises BadRequest for bytes that are not a Hello of any version."""

decode_to_daemon: Callable[[bytes], ToDaemon] = functools.partial(_decode, msgspec.msgpack.Decoder(ToDaemon))
"""Raises BadRequest for bytes that are not a message to the daemon."""

decode_to_client: Callable[[bytes], ToClient] = functools.partial(_decode, msgspec.msgpack.Decoder(ToClient))
"""Raises BadRequest for bytes that are not a message to the client."""
