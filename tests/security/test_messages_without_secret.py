"""Every message of the trainers' protocol, from a peer without the secret of the run: none of them is served.

The peers here are connected when the run gets its secret, and their connections are not ended: each message is checked
by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.support.rooms import Rooms, rooms_at
from tests.support.slots import PAGE_BYTES, make_memfd, make_sealed
from tests.support.waiting import DEADLINE_S
from tests.support.wire_peer import Peer
from tierd.access import Access
from tierd.api.packets import open_listener
from tierd.api.trainer import TrainerDoor
from tierd.format import wire
from tierd.format.ids import Run
from tierd.format.peers import PeerAddress
from tierd.format.run_secret import PROOF_CHARS
from tierd.workers.restorer import Restorer

PROOF_A, PROOF_B = "a" * PROOF_CHARS, "b" * PROOF_CHARS
OPEN, CLOSED = Run("open"), Run("closed")
FIND = wire.Find(request=1, step=None, generation=None, milestone=None, tier="auto", exclude=[])
MESSAGES: list[wire.ToDaemon] = [
    wire.AttachSlot(slot=1, capacity_bytes=PAGE_BYTES),
    wire.Filling(slot=0, step=1),
    wire.Abandon(slot=0),
    make_sealed(1, 1, slot=0),
    wire.SnapshotLost(step=1, kind="transient", message="", hint=""),
    FIND,
    wire.FindElsewhere(
        request=1,
        step=7,
        generation=2,
        peer=PeerAddress(address="127.0.0.1:1", token="ab" * 32),
        node_file="node-00002-of-00004.json",
        files=["rank-00003-of-00004.safetensors"],
        chunks=[b"\x05"],
    ),
    wire.Inventory(request=1, step=None, generation=None, milestone=None, lists_cold=False),
    wire.FindNodes(request=1),
    wire.Ask(step=1, generation=1),
    wire.Report(outcome="restored", step=1, tier="hot", seconds=1.0, detail=""),
    wire.Stepped(seconds=1.0),
    wire.Everywhere(step=1),
    wire.Partner(peer=PeerAddress(address="127.0.0.1:1", token="ab"), node_file="node-00000-of-00002.json"),
    wire.Roster(),
    wire.Convene(meeting=1),
    wire.Request(request=1, kind="stop", milestone=None),
    wire.Answer(request=1, step=1),
    wire.Goodbye(state="finished"),
]


async def judge_nothing(checkpoint: object) -> bool | None:
    return None


@dataclass
class Served:
    """A trainers' socket over real rooms. `spawned`: the names of the coroutines that messages have started."""

    path: Path
    rooms: Rooms
    door: TrainerDoor
    restorer: Restorer
    spawned: list[str] = field(default_factory=list[str])


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    spawned: list[str] = []
    async with rooms_at(tmp_path) as rooms, asyncio.TaskGroup() as group:
        await rooms.look()

        def spawn(coroutine: Coroutine[Any, Any, None]) -> object:
            spawned.append(coroutine.__qualname__)
            return group.create_task(coroutine)

        restorer = Restorer(rooms.context, judge_nothing)
        door = TrainerDoor(rooms.context, restorer, spawn=spawn)
        path = tmp_path / "tierd.sock"
        listener = open_listener(str(path), Access())
        serving = group.create_task(door.serve(listener))
        yield Served(path, rooms, door, restorer, spawned)
        serving.cancel()
        listener.close()


def test_every_message_that_may_follow_hello_is_here() -> None:
    assert {type(message) for message in MESSAGES} == {*get_args(wire.ToDaemon)} - {wire.Hello}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
async def test_no_message_is_served_without_the_secret(served: Served, message: wire.ToDaemon) -> None:
    def join() -> Peer:
        peer = Peer(served.path)
        peer.greet(CLOSED)
        peer.attach(0)
        peer.send(wire.Convene(meeting=1))
        peer.hear(wire.Convened)  # the slot is attached
        return peer

    def send(peer: Peer) -> None:
        with peer:
            descriptors = [make_memfd(PAGE_BYTES)] if isinstance(message, wire.AttachSlot | wire.Roster) else []
            peer.send(message, *descriptors)
            assert peer.is_dropped()

    peer = await asyncio.to_thread(join)
    served.door.admission.secrets.bind(CLOSED, PROOF_A, is_start=True)
    spawned = len(served.spawned)
    await asyncio.to_thread(send, peer)
    refused = peer.heard[-1]
    assert isinstance(refused, wire.Refused)
    assert refused.kind == "wrong_secret"
    assert served.spawned[spawned:] == []


@pytest.mark.parametrize(("proof", "is_swept"), [("", False), (PROOF_B, False), (PROOF_A, True)])
async def test_a_report_about_another_run_needs_its_secret(served: Served, proof: str, is_swept: bool) -> None:
    def report() -> None:
        with Peer(served.path) as peer:
            peer.greet(OPEN, proof=proof)
            peer.send(wire.Report(outcome="restored", step=1, tier="hot", seconds=1.0, detail="", run=CLOSED))
            peer.send(wire.Convene(meeting=1))
            peer.hear(wire.Convened)  # the session goes on

    served.door.admission.secrets.bind(CLOSED, PROOF_A, is_start=True)
    await asyncio.to_thread(report)
    assert ("Fetcher.restored" in served.spawned) == is_swept


async def test_an_answer_that_is_ready_after_the_secret_was_bound_is_not_sent(served: Served) -> None:
    """A fetch takes minutes. Meanwhile the run gets a secret."""
    is_found = asyncio.Event()
    find = served.restorer.find

    async def find_slowly(*arguments: Any) -> Any:
        await is_found.wait()
        return await find(*arguments)

    served.restorer.find = find_slowly  # type: ignore[method-assign]

    def persist_and_ask() -> Peer:
        with Peer(served.path) as trainer:
            trainer.greet(CLOSED)
            trainer.attach(0)
            trainer.seal(0, 1, b"weights")
        reader = Peer(served.path)
        reader.greet(CLOSED, rank=None)
        reader.send(FIND)
        return reader

    def end(reader: Peer) -> list[wire.ToClient]:
        with reader, Peer(served.path) as job_a:
            job_a.greet(CLOSED, proof=PROOF_A)
            asyncio.run_coroutine_threadsafe(release(), loop).result()
            assert reader.is_dropped()
            return reader.heard[1:]

    async def release() -> None:
        is_found.set()

    loop = asyncio.get_running_loop()
    reader = await asyncio.to_thread(persist_and_ask)
    heard = await asyncio.to_thread(end, reader)
    assert [type(message) for message in heard] == [wire.Refused]


# ── starts that overlap ──


@dataclass
class Claims:
    """Holds each claim of a generation until `is_released`. `listed`, `claiming`: how many starts have got so far."""

    is_released: asyncio.Event = field(default_factory=asyncio.Event)
    listed: int = 0
    claiming: int = 0

    async def wait(self, *, listed: int, claiming: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (self.listed, self.claiming) != (listed, claiming):
                await asyncio.sleep(0.01)


@pytest.fixture
def claims(served: Served, monkeypatch: pytest.MonkeyPatch) -> Claims:
    admission, claims = served.door.admission, Claims()
    restorer = served.restorer
    claim_next, list_run = admission._claim_next, restorer.list_run  # pyright: ignore[reportPrivateUsage]

    async def claim_slowly(*arguments: Any, **options: Any) -> Any:
        claims.claiming += 1
        await claims.is_released.wait()
        return await claim_next(*arguments, **options)

    async def list_and_count(run: Run) -> dict[str, str]:
        unlisted = await list_run(run)
        claims.listed += 1  # the start goes on, to the lock of its run, in this step of the event loop
        return unlisted

    monkeypatch.setattr(admission, "_claim_next", claim_slowly)
    monkeypatch.setattr(restorer, "list_run", list_and_count)
    return claims


def start(path: Path, proof: str, **fields: int) -> Peer:
    """Sends Hello and does not wait for the answer."""
    peer = Peer(path)
    peer.send(peer.hello(CLOSED, proof=proof, **fields))
    return peer


def refusal(peer: Peer) -> str:
    """The kind; "welcome" where there is none."""
    with peer:
        answer = peer.answer()
        return answer.kind if answer is not None else "welcome"


@pytest.mark.parametrize("proof", ["", PROOF_B])
async def test_a_trainer_without_the_secret_causes_no_listing(served: Served, claims: Claims, proof: str) -> None:
    served.door.admission.secrets.bind(CLOSED, PROOF_A, is_start=True)
    refused = await asyncio.to_thread(start, served.path, proof)
    assert await asyncio.to_thread(refusal, refused) == "wrong_secret"
    assert claims.listed == 0


async def test_a_start_that_waited_while_another_was_bound_claims_no_generation(served: Served, claims: Claims) -> None:
    job_a = await asyncio.to_thread(start, served.path, PROOF_A)
    await claims.wait(listed=1, claiming=1)
    job_b = await asyncio.to_thread(start, served.path, PROOF_B)
    await claims.wait(listed=2, claiming=1)
    claims.is_released.set()
    assert await asyncio.to_thread(refusal, job_b) == "wrong_secret"
    assert await asyncio.to_thread(refusal, job_a) == "welcome"
    assert claims.claiming == 1


@pytest.mark.parametrize("proof", ["", PROOF_B])
async def test_a_start_that_claims_while_another_trainer_binds_the_run_is_refused(
    served: Served, claims: Claims, proof: str
) -> None:
    """The trainer that binds it has named its generation: it lives on after a restart of the daemon."""

    def join() -> Peer:
        peer = start(served.path, PROOF_A, generation=1)
        peer.hear(wire.Welcome)
        return peer

    def is_served(peer: Peer) -> bool:
        with peer:
            peer.send(wire.Convene(meeting=1))
            peer.hear(wire.Convened)
            return not any(isinstance(message, wire.Fenced) for message in peer.heard)

    job_b = await asyncio.to_thread(start, served.path, proof)
    await claims.wait(listed=1, claiming=1)
    job_a = await asyncio.to_thread(join)
    claims.is_released.set()
    assert await asyncio.to_thread(refusal, job_b) == "wrong_secret"
    assert await asyncio.to_thread(is_served, job_a)
