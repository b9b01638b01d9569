"""Messages: round trips, golden bytes and forged bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.slots import make_sealed
from tierd.errors import BadRequest, from_kind
from tierd.format import wire
from tierd.format.bitmap import pack_indexes, unpack_indexes
from tierd.format.ids import checkpoint_id
from tierd.format.node_messages import HeldCheckpoint
from tierd.format.peers import PeerAddress
from tierd.format.run_state import RunState

TO_DAEMON: list[wire.ToDaemon] = [
    wire.Hello(protocol=1, version="0.1.0", run="run42", rank=None, world_size=1, generation=None),
    wire.AttachSlot(slot=1, capacity_bytes=1 << 40),
    wire.Filling(slot=1, step=7),
    wire.Abandon(slot=1),
    make_sealed(7, parent=checkpoint_id("run41", 3, 1), metrics={"loss": float("inf"), "n": "nan"}),
    wire.SnapshotLost(step=7, kind="torn", message="m", hint="h"),
    wire.Find(request=1, step=None, generation=2, milestone="best", tier="auto", exclude=["000000000007-g0001@hot"]),
    wire.Find(request=1, step=7, generation=2, milestone=None, tier="cold", exclude=[], chunks=[b"", b"\x01"]),
    wire.Find(request=1, step=7, generation=2, milestone=None, tier="hot", exclude=[], is_node_part=True),
    wire.FindElsewhere(
        request=1,
        step=7,
        generation=2,
        peer=PeerAddress(address="10.0.0.7:9465", token="ab" * 32),
        node_file="node-00002-of-00004.json",
        files=["rank-00003-of-00004.safetensors"],
        chunks=[b"\x05"],
    ),
    wire.Inventory(request=1, step=None, generation=None, milestone="best", lists_cold=True),
    wire.FindNodes(request=1),
    wire.Ask(step=7, generation=1),
    wire.Ask(step=7, generation=1, needs_slot=True, is_last=True),
    wire.Report(outcome="restored", step=7, tier="hot", seconds=0.5, detail=""),
    wire.Stepped(seconds=0.25),
    wire.Everywhere(step=7),
    wire.Partner(peer=PeerAddress(address="10.0.0.2:9465", token="ab"), node_file="node-00002-of-00004.json"),
    wire.Roster(),
    wire.Convene(meeting=3),
    wire.Request(request=1, kind="snapshot", milestone="best"),
    wire.Answer(request=1, step=7, kind="slots_busy", message="m", hint="h"),
    wire.Goodbye(state=RunState.HALTED, reason="loss is nan"),
]
TO_CLIENT: list[wire.ToClient] = [
    wire.Welcome(
        protocol=1,
        version="0.1.0",
        node="here",
        boot="b",
        generation=3,
        slots=[wire.KeptSlot(slot=0, capacity_bytes=4096, is_free=False)],
        every_steps=100,
        every_s=0.0,
        slots_per_rank=2,
        slot_wait_s=60.0,
        when_busy="wait",
    ),
    wire.Accepted(slot=0, step=7),
    wire.Released(slot=0),
    wire.Persisted(step=7, generation=1, seconds=0.25),
    wire.Replicated(step=7, generation=1, tier="cold"),
    wire.Copied(step=7, generation=1),
    wire.Failed(step=7, generation=1, stage="persist", kind="full", message="m", hint="h", is_final=True),
    wire.Fenced(generation=4),
    wire.Convened(meeting=3),
    wire.Requested(request=9, kind="force", milestone=None),
    wire.Agreed(request=1, step=7, generation=3),
    wire.FoundReplica(request=1, tier="memory"),
    wire.FoundReplica(request=1, tier="cold", is_part=True),
    wire.Held(
        request=1,
        checkpoints=[
            HeldCheckpoint(step=7, generation=1, world_size=4, part_in=["hot"], ranks=[2, 3], head_digest="ab"),
            HeldCheckpoint(step=5, generation=1, world_size=4, whole_in=["cold"], healthy=False),
        ],
        unlisted=["dr: no answer"],
    ),
    wire.Progress(request=1, done_bytes=5, total_bytes=10),
    wire.Refused(request=1, kind="not_found", message="m", hint="h"),
]


def test_every_decoded_message_equals_the_encoded_one() -> None:
    assert [wire.decode_to_daemon(wire.encode(message)) for message in TO_DAEMON] == TO_DAEMON
    assert [wire.decode_to_client(wire.encode(message)) for message in TO_CLIENT] == TO_CLIENT
    assert {type(message) for message in TO_DAEMON} == set(wire.ToDaemon.__args__)  # type: ignore[attr-defined]
    assert {type(message) for message in TO_CLIENT} == set(wire.ToClient.__args__)  # type: ignore[attr-defined]


def test_encoded_messages_equal_the_golden_bytes() -> None:
    """A running trainer may have another version of the client, so these bytes must not change."""
    assert wire.encode(wire.Filling(slot=1, step=7)) == b"\x83\xa4type\xa7Filling\xa4slot\x01\xa4step\x07"
    assert msgspec.msgpack.decode(wire.encode(wire.Fenced(generation=4))) == {"type": "Fenced", "generation": 4}
    lost = wire.SnapshotLost(step=7, kind="k", message="m", hint="h")
    assert wire.encode(lost).startswith(b"\x85\xa4type\xa4Lost\xa4step\x07")
    goodbye = wire.Goodbye(state=RunState.STOPPED)
    assert wire.encode(goodbye) == b"\x83\xa4type\xa7Goodbye\xa5state\xa7stopped\xa6reason\xa0"


def test_an_unknown_field_of_a_message_is_ignored() -> None:
    raw = msgspec.msgpack.encode({"type": "Filling", "slot": 1, "step": 7, "added_later": [1, 2]})
    assert wire.decode_to_daemon(raw) == wire.Filling(slot=1, step=7)


@pytest.mark.parametrize("message", [message for message in TO_DAEMON if not isinstance(message, wire.Goodbye)])
def test_a_message_to_the_daemon_is_not_a_message_to_the_client(message: wire.ToDaemon) -> None:
    with pytest.raises(BadRequest):
        wire.decode_to_client(wire.encode(message))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 10,
        b"\x83\xa4type\xa7Filling",
        b"\x83\xa4type\xa7Filling\xa4slot\x01\xa4step\xa7x",
        b"\x82\xa4type\xa7Goodbye\xa5state\xa4well",  # not a state
        b"\x81\xa4type\xa2\xff\xfe",  # not UTF-8
        b"\x83\xa4type\xa7Filling\xa4slot\xcf" + b"\xff" * 8 + b"\xa4step\xca\x7f\xc0\x00\x00",
        b"\x91" * 60000,  # nested too deeply
        b"\xdf\xff\xff\xff\xff",  # a map of four billion entries
        b"\xc9\xff\xff\xff\xff\x01",
    ],
)
def test_bytes_that_are_not_a_message_are_a_bad_request(raw: bytes) -> None:
    for decode in (wire.decode_to_daemon, wire.decode_to_client):
        with pytest.raises(BadRequest):
            decode(raw)


@settings(max_examples=500, deadline=None, database=None)
@given(st.binary(max_size=200))
def test_random_bytes_give_a_message_or_a_bad_request(raw: bytes) -> None:
    for decode in (wire.decode_to_daemon, wire.decode_to_client):
        try:
            decode(raw)
        except BadRequest:
            pass


def test_a_message_above_the_size_limit_is_not_encoded() -> None:
    with pytest.raises(BadRequest, match="more than 65536"):
        wire.encode(make_sealed(7, metrics={f"metric {number}": 1.0 for number in range(10_000)}))


@given(st.sets(st.integers(0, 3000)))
def test_unpacked_indexes_equal_the_packed_ones(indexes: set[int]) -> None:
    packed = pack_indexes(indexes)
    assert unpack_indexes(packed) == sorted(indexes)
    assert len(packed) == (max(indexes) // 8 + 1 if indexes else 0)


def test_a_find_with_the_most_chunks_and_files_fits_one_message() -> None:
    chunks = [bytes(wire.CHUNKS_BYTES_MAX // (wire.DESCRIPTORS_MAX - 1))] * (wire.DESCRIPTORS_MAX - 1)
    exclude = [f"{step:012d}-g0001@cold" for step in range(100)]
    find = wire.Find(request=1, step=7, generation=1, milestone=None, tier="cold", exclude=exclude, chunks=chunks)
    assert wire.decode_to_daemon(wire.encode(find)) == find
    assert pack_indexes([0, 9]) == b"\x01\x02"


def test_an_error_is_rebuilt_from_its_kind() -> None:
    error = BadRequest("m", hint="h")
    rebuilt = from_kind(error.kind, error.message, error.hint)
    assert (type(rebuilt), str(rebuilt)) == (BadRequest, str(error))
    assert from_kind("of a later version", "m", "").kind == "tierd_error"
