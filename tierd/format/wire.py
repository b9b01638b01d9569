"""Messages between client and daemon. Bytes in, messages out; no socket here.

One message is one packet of a SOCK_SEQPACKET Unix socket: msgpack, at most 64 KiB, with at most 253 file
descriptors beside it (SCM_RIGHTS). Whatever is larger travels as a descriptor. The first message names the
protocol version; a peer that speaks another one is refused by name. Spec: docs/FORMAT.md#wire.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tierd.errors import BadRequest
from tierd.format.manifest import CheckpointRef

PROTOCOL_VERSION = 1
MESSAGE_BYTES_MAX = 64 << 10
SLOTS_MIN, SLOTS_MAX = 2, 16  # of one rank: one holds the newest snapshot while another is filled
DESCRIPTORS_MAX = 253  # the kernel's own limit, SCM_MAX_FD
CHUNKS_BYTES_MAX = 48 << 10  # of `Find.chunks`: chunks of 64 MiB are 26 TB, and the rest of the message has its room

REQUESTS = ("stop", "snapshot", "force")  # force: stop at once, with no snapshot
ENDINGS = ("finished", "stopped", "lost", "failed", "halted")  # from the least of news to the gravest


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# ── client to daemon ──────────────────────────────────────────────────────────────────────────────────────


class Hello(_Message, frozen=True, kw_only=True):
    """The first message. `generation` None: a trainer's rank 0 claims a new one; a number: this rank joins or
    re-attaches to it. `rank` None: no trainer, only `Find` and `Request` will follow. `starts_anew`: it has been said
    that this start begins from scratch, whatever may lie in tiers that cannot be listed."""

    protocol: int
    version: str
    run: str
    rank: int | None
    world_size: int
    generation: int | None
    starts_anew: bool = False


class AttachSlot(_Message, frozen=True, kw_only=True):
    """A memfd (the one descriptor) that holds one snapshot; sealed against shrinking."""

    slot: int
    capacity_bytes: int


class Filling(_Message, frozen=True, kw_only=True):
    """The rank begins to stage `step` into the slot."""

    slot: int
    step: int


class Abandon(_Message, frozen=True, kw_only=True):
    """Staging did not finish: the slot is free again."""

    slot: int


class Sealed(_Message, frozen=True, kw_only=True):
    """The slot holds the whole shard of this rank for `step`: its first `size_bytes` bytes."""

    slot: int
    step: int
    size_bytes: int
    created_at: str
    stall_s: float
    metrics: dict[str, float | str]
    milestone: str | None
    parent: CheckpointRef | None
    architecture_hash: str
    versions: dict[str, str]
    resent: bool


class Lost(_Message, frozen=True, kw_only=True):
    """This rank will never seal `step`, which others may have sealed already: the set of it will not become whole.
    The slot is given back by `Abandon`. `kind`, `message` and `hint` are those of the error."""

    step: int
    kind: str
    message: str
    hint: str


class Find(_Message, frozen=True, kw_only=True):
    """Asks for a checkpoint's files as descriptors. `step` None: the newest. `tier` auto, memory, hot or a cold
    tier's name. `exclude` holds "<checkpoint name>@<tier>" of replicas already found bad. `allow_unhealthy`: also one
    whose numbers are not all finite. `chunks` None: all of it. Else only these must have come, and the headers: for
    each file of the manifest, as far as they go, what `pack_indexes` gives."""

    request: int
    step: int | None
    generation: int | None
    milestone: str | None
    tier: str
    exclude: list[str]
    allow_unhealthy: bool = False
    chunks: list[bytes] | None = None


class Ask(_Message, frozen=True, kw_only=True):
    """Where is this checkpoint? Answered by Persisted and Replicated for each tier that has it, else by nothing."""

    step: int
    generation: int


class Report(_Message, frozen=True, kw_only=True):
    """Something the daemon cannot see: outcome is skipped, failed, unpinned, restored or corrupt."""

    outcome: str
    step: int
    tier: str
    seconds: float
    detail: str


class Stepped(_Message, frozen=True, kw_only=True):
    """Rank 0, as often as Welcome asks for it: a step takes so long of late, without what calls of tierd take."""

    seconds: float


class Convene(_Message, frozen=True, kw_only=True):
    """A rank wishes for something: call all ranks of its generation to their meeting of this number."""

    meeting: int


class Request(_Message, frozen=True, kw_only=True):
    """An operator asks the run's trainers for something: a word of REQUESTS. Answered by Agreed or Refused, and who
    has asked hears of the run's snapshots what its ranks hear. `milestone`: the name that the snapshot is to get."""

    request: int
    kind: str
    milestone: str | None


class Answer(_Message, frozen=True, kw_only=True):
    """Rank 0 answers Requested; what is told of the step is in Agreed. `kind` names an error, or is empty."""

    request: int
    step: int
    kind: str = ""
    message: str = ""
    hint: str = ""


class Goodbye(_Message, frozen=True, kw_only=True):
    """The trainer ends in good order. `state` is a word of ENDINGS."""

    state: str = "lost"
    reason: str = ""


# ── daemon to client ──────────────────────────────────────────────────────────────────────────────────────


class KeptSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that outlived its trainer. `is_free` False: it holds the newest snapshot until a newer is sealed."""

    slot: int
    capacity_bytes: int
    is_free: bool


class Welcome(_Message, frozen=True, kw_only=True):
    """The answer to Hello. One descriptor for each of `slots`, in order: the restarted rank adopts them, warm.
    `boot` names this start of the daemon: another one has no memory of what the former held. `newest`: the newest
    checkpoint of the run in any tier, readable or not. `unseen`: the tiers that could not be listed, and why not.
    `report_s`: how often to say Stepped; 0: never."""

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
    newest: CheckpointRef | None = None
    unseen: list[str] = []
    report_s: float = 0.0


class Accepted(_Message, frozen=True, kw_only=True):
    """The snapshot is in the memory tier: it outlives the trainer from here on."""

    slot: int
    step: int


class Released(_Message, frozen=True, kw_only=True):
    """The slot is free again."""

    slot: int


class Persisted(_Message, frozen=True, kw_only=True):
    """The checkpoint is committed in the hot tier: durable."""

    step: int
    generation: int
    seconds: float


class Replicated(_Message, frozen=True, kw_only=True):
    """The checkpoint is committed in a cold tier."""

    step: int
    generation: int
    tier: str


class Failed(_Message, frozen=True, kw_only=True):
    """A stage of a checkpoint went wrong. `is_final` False: it is being retried."""

    step: int
    generation: int
    stage: str
    kind: str
    message: str
    hint: str
    is_final: bool


class Fenced(_Message, frozen=True, kw_only=True):
    """A newer generation has taken over the run. Nothing of the old one is accepted any more."""

    generation: int


class Convened(_Message, frozen=True, kw_only=True):
    """All ranks are called to this meeting. Said again to a rank that attaches later."""

    meeting: int


class Requested(_Message, frozen=True, kw_only=True):
    """An operator's Request, under the daemon's own number: to rank 0, but `force` to every rank."""

    request: int
    kind: str
    milestone: str | None


class Agreed(_Message, frozen=True, kw_only=True):
    """The answer to Request. stop: the ranks stop at this step. snapshot: one of this step is sealed. force: the
    trainers are being interrupted, somewhere after it."""

    request: int
    step: int
    generation: int


class FoundReplica(_Message, frozen=True, kw_only=True, tag="Found"):
    """The answer to Find. Descriptors: first the manifest's bytes, then each of its files, in order. `passed_over`:
    why newer replicas could not be used, a sentence each; a trainer that loses work by it must hear of it. `is_part`:
    of the files only the headers are there, and the chunks that were asked for."""

    request: int
    tier: str
    passed_over: list[str] = []
    is_part: bool = False


class Progress(_Message, frozen=True, kw_only=True):
    """A Find is under way: bytes come from a cold tier."""

    request: int
    done_bytes: int
    total_bytes: int


class Refused(_Message, frozen=True, kw_only=True):
    """The answer to what cannot be done. `request` is 0 for a refused Hello or message."""

    request: int
    kind: str
    message: str
    hint: str


ToDaemon = (
    Hello | AttachSlot | Filling | Abandon | Sealed | Lost | Find | Ask | Report | Stepped | Convene | Request | Answer
    | Goodbye
)  # fmt: skip
ToClient = (
    Welcome | Accepted | Released | Persisted | Replicated | Failed | Fenced | Convened | Requested | Agreed
    | FoundReplica | Progress | Refused
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_to_daemon: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToDaemon | ToClient) -> bytes:
    """Raises BadRequest when the message would pass 64 KiB."""
    raw = _encoder.encode(message)
    if len(raw) > MESSAGE_BYTES_MAX:
        raise BadRequest(
            f"send {type(message).__name__}: {len(raw)} bytes, more than {MESSAGE_BYTES_MAX}",
            hint="are the metrics of the snapshot very many?",
        )
    return raw


def pack_indexes(indexes: Iterable[int]) -> bytes:
    """A set of small numbers: bit `n % 8` of byte `n // 8` is `n`."""
    found = bytearray()
    for index in indexes:
        found.extend(bytes(max(0, index // 8 + 1 - len(found))))
        found[index // 8] |= 1 << index % 8
    return bytes(found)


def unpack_indexes(packed: bytes) -> list[int]:
    return [8 * at + bit for at, byte in enumerate(packed) for bit in range(8) if byte >> bit & 1]


def decode_to_daemon(raw: bytes) -> ToDaemon:
    """Raises BadRequest for anything that is no message of ours."""
    try:  # ValueError: bytes that are no UTF-8
        return _to_daemon.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _not_ours(raw, error) from error


def decode_to_client(raw: bytes) -> ToClient:
    """Raises BadRequest for anything that is no message of ours."""
    try:
        return _to_client.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _not_ours(raw, error) from error


def _not_ours(raw: bytes, error: Exception) -> BadRequest:
    return BadRequest(
        f"read a message of {len(raw)} bytes: {error}", hint="do client and daemon have the same version?"
    )
