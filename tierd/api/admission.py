"""Admits a peer to the trainers' socket: checks its user and protocol, claims a generation, hands back its slots.

harmless input: a peer of another user is refused. fenced: a trainer of a newer generation closes the sessions of the
older one. A slot is handed to a new process only when the process that had it mapped is certainly dead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from weakref import WeakSet, WeakValueDictionary

import msgspec

import tierd
from tierd.access import access_of
from tierd.api.node_ranks import check_node_ranks, confirm_node_claim, needs_cold_tier
from tierd.api.packets import PacketConnection
from tierd.api.quotas import Quotas
from tierd.api.run_secrets import RunSecrets
from tierd.api.session import NO_RANK, SlotWriter, TrainerSession, refused
from tierd.audit import Who
from tierd.catalog.listing import next_sequence
from tierd.context import DaemonContext
from tierd.descriptors import close_all, open_all
from tierd.errors import BadRequest, Full, Stale, TierdError, TierUnreachable, WrongSecret, text_of
from tierd.failpoints import failpoint
from tierd.format import wire
from tierd.format.audit import EventKind
from tierd.format.claim import Claim
from tierd.format.ids import GENERATION_SEEN_MAX, HOT, WORLD_SIZE_MAX, Generation, Rank, Run, check_run
from tierd.format.node_file import ranks_text
from tierd.format.text import printable
from tierd.memory.slot import MappedSlot, SlotState
from tierd.tiers.tier import Tier
from tierd.workers.restorer import Restorer

log = logging.getLogger("tierd")

UNSEEN_MAX, UNSEEN_CHARS = 8, 1000  # bounds of the tiers named in one Welcome
CLAIM_ATTEMPTS_MAX = 64  # tried in turn when other daemons take each number first
COLD_CLAIM_TIMEOUT_S = 20.0  # a tier that takes longer is left out, as one that cannot be listed


class Admission:
    """`sessions`: the sessions of all trainers that are connected now; admitting a rank adds to it."""

    def __init__(
        self,
        context: DaemonContext,
        restorer: Restorer,
        sessions: dict[tuple[Run, Rank], TrainerSession],
        quotas: Quotas,
    ) -> None:
        self._context = context
        self._memory = context.memory
        self._catalog = context.catalog
        self._restorer = restorer
        self._sessions = sessions
        self._quotas = quotas
        self.secrets = RunSecrets(context.config.hot_path)
        self._peers: WeakSet[TrainerSession] = WeakSet()  # `sessions`, and those of peers that are not trainers
        self._writers: dict[tuple[Run, Rank], SlotWriter] = {}  # the process that may have a rank's slots mapped
        # One lock for each run: a slow claim delays no other run.
        self._claiming: WeakValueDictionary[Run, asyncio.Lock] = WeakValueDictionary()
        self._boot = uuid.uuid4().hex

    async def admit(self, connection: PacketConnection) -> tuple[TrainerSession, dict[int, MappedSlot]]:
        """The session of a peer that has sent Hello, and the slots that it may adopt. Raises BadRequest, Stale,
        WrongSecret, TierUnreachable, or ConnectionResetError when it has gone."""
        if not self._may_connect(connection):
            raise BadRequest(
                f"greet process {connection.peer_pid}: it runs as uid {connection.peer_uid}, "
                f"the daemon as {os.geteuid()}",
                hint="run both as the same user, or put the trainer's user into the group security.trainer_group",
            )
        hello = await self._receive_hello(connection)
        run = check_run(hello.run)
        if hello.rank is None:
            session = self._session(connection, hello, run, NO_RANK, Generation(0), {})
            self.secrets.check(session)
            self._peers.add(session)
            return session, {}
        return await self._enter(connection, hello, run, Rank(hello.rank))

    def _may_connect(self, connection: PacketConnection) -> bool:
        security = self._context.config.security
        group = access_of(security.trainer_group).group if security.trainer_group else None
        return connection.peer_uid in (0, os.geteuid()) or connection.is_in_group(group)

    def welcome(self, session: TrainerSession, slots: dict[int, MappedSlot]) -> None:
        """Queue the answer to Hello, with the descriptors of the slots."""
        failpoint("slot.adopt")
        config, node = self._context.config, self._memory.node(session.run)
        choice = self._context.cadences.choice(session.run, self._context.monotonic_s())
        welcome = wire.Welcome(
            protocol=session.protocol,
            version=tierd.__version__,
            node=config.daemon.node,
            boot=self._boot,
            generation=session.generation,
            slots=[
                wire.KeptSlot(slot=index, capacity_bytes=slot.capacity_bytes, is_free=slot.state is SlotState.FREE)
                for index, slot in slots.items()
            ],
            every_steps=config.snapshot.every_steps if choice is None else 0,
            every_s=config.snapshot.every_s if choice is None else choice.every_s,
            cadence="" if choice is None else "auto",
            slots_per_rank=config.snapshot.slots,
            slot_wait_s=config.snapshot.slot_wait_s,
            when_busy=config.snapshot.when_busy,
            staging=config.snapshot.staging,
            stop_grace_s=config.snapshot.stop_grace_s,
            newest=self._restorer.newest(session.run),
            unseen=[f"{tier} ({why})"[:UNSEEN_CHARS] for tier, why in session.unlisted.items()][:UNSEEN_MAX],
            checks_secrets=True,
            report_s=self._context.throttle.report_s if session.speaks_for_node else 0.0,
            seen=self._seen(session.run),
            claim=node.claim if node is not None else "",
            base=node.base if node is not None else 0,
            peer=self._context.peer_key.of(session.run),
            domain=config.peers.domain,
            lifecycle=config.lifecycle_digest,
        )
        session.post(welcome, open_all(os.dup(slot.fd) for slot in slots.values()))

    def _seen(self, run: Run) -> int:
        """The highest generation of the run that is known here."""
        return max(self._catalog.generation_max(run), self._memory.generation(run))

    async def _base(self, run: Run) -> int:
        """The sequence of the newest checkpoint of the run."""
        context = self._context
        cold, in_memory = context.cold.values(), context.memory.sequence_max
        return await next_sequence(self._catalog, cold, run, context.identities, in_memory=in_memory) - 1

    def forget_writers(self, run: Run) -> None:
        """Closes the pidfds of a run's former trainers, after its slots were given back."""
        for key in [key for key in self._writers if key[0] == run and key not in self._sessions]:
            self._writers.pop(key).close()

    def left(self, session: TrainerSession) -> None:
        """A rank has left. Its process matters only while there are slots that it may have mapped."""
        if not self._memory.slots(session.run, session.rank):
            self._writers.pop((session.run, session.rank)).close()

    async def _receive_hello(self, connection: PacketConnection) -> wire.Hello:
        try:
            async with asyncio.timeout(self._context.config.limits.hello_timeout_s):
                raw, descriptors = await connection.receive()
        except TimeoutError:
            raise BadRequest("wait for Hello: the peer sent nothing") from None
        close_all(descriptors)
        if not raw:
            raise ConnectionResetError
        _check_protocol(raw)
        hello = wire.decode_to_daemon(raw)
        if not isinstance(hello, wire.Hello):
            raise BadRequest(f"wait for Hello: the peer sent {type(hello).__name__}")
        return hello

    async def _enter(
        self, connection: PacketConnection, hello: wire.Hello, run: Run, rank: Rank
    ) -> tuple[TrainerSession, dict[int, MappedSlot]]:
        """The session of a trainer's rank, and the slots that it may adopt."""
        if not 0 <= rank < hello.world_size <= WORLD_SIZE_MAX:
            raise BadRequest(f"greet {run}: rank {rank} of world size {hello.world_size}")
        self._quotas.check_run(connection.peer_uid, run)
        self.secrets.check_proof(run, hello.proof)
        node = hello.node
        if node is not None:
            check_node_ranks(node, rank, hello.world_size, f"join run {run}")
        if hello.generation is None:
            generation, unlisted, claim = await self._claim(connection, run, rank, hello)
            if node is not None:
                node = msgspec.structs.replace(node, claim=claim.claim, base=await self._base(run))
            who = Who("trainer", connection.peer_uid, connection.peer_pid)
            self._context.audit.record(EventKind.CLAIMED, run=run, generation=generation, who=who)
        else:
            generation, unlisted = Generation(hello.generation), self._catalog.unlisted()
            if node is not None and self._memory.node(run) != node:
                await confirm_node_claim(self._context, run, generation, node.claim)
        newest = self._seen(run)
        limit = self._catalog.claims.joined_limit(run, newest, self._context.now().timestamp())
        if not 1 <= generation <= limit:
            raise BadRequest(f"join run {run} as generation {generation}: not between 1 and {limit}")
        if generation < newest:
            raise Stale.by(newest, f"join run {run}", generation)
        session = self._session(connection, hello, run, rank, generation, unlisted)
        # No await from here on: of two first trainers one binds, and a Hello that is refused binds nothing.
        self.secrets.check(session)  # again: another trainer may have bound one since
        previous = self._memory.generation(run)
        self._memory.enter(run, generation, rank, hello.world_size, node)
        if self.secrets.bind(run, hello.proof, is_start=hello.generation is None):
            self._end_unproven(session)
        self._quotas.joined(connection.peer_uid, run)
        self._catalog.saw_generation(run, generation)
        if previous and generation > previous:
            self._fence(run, generation, connection.peer_pid, continues=hello.continues)
        key = (run, rank)
        if key in self._sessions:
            self._sessions[key].finish()
        self._sessions[key] = session
        self._peers.add(session)
        slots = self._take_over_slots(session, connection.peer_pid, is_same_generation=generation == previous)
        reason = f"rank {rank} of {hello.world_size}"
        self._context.audit.record(EventKind.JOINED, run=run, generation=generation, reason=reason, who=session.peer)
        return session, slots

    def _end_unproven(self, binding: TrainerSession) -> None:
        """The run has just got its secret: end the sessions of peers without it, and give up all slots that the run
        had, because only peers without it can have attached them."""
        run, ended = binding.run, 0
        for session in [peer for peer in self._peers if peer.run == run]:
            try:
                self.secrets.check(session)
            except WrongSecret as error:
                session.post(refused(0, error))
                session.finish()
                ended += 1
        slots = self._memory.detach_run(run)
        self.forget_writers(run)
        reason = f"it has a secret from now on; given up: {ended} connections and {slots} slots of peers without it"
        generation, who = binding.generation, binding.peer
        self._context.audit.record(EventKind.BOUND, run=run, generation=generation, reason=reason, who=who)

    def _session(
        self,
        connection: PacketConnection,
        hello: wire.Hello,
        run: Run,
        rank: Rank,
        generation: Generation,
        unlisted: Mapping[str, str],
    ) -> TrainerSession:
        lines = self._quotas.lines()
        return TrainerSession(connection, run, rank, generation, unlisted, lines=lines, hello=hello)

    async def _claim(
        self, connection: PacketConnection, run: Run, rank: Rank, hello: wire.Hello
    ) -> tuple[Generation, dict[str, str], Claim]:
        """(a new generation, durably claimed: no daemon with this hot directory or these cold tiers issues it again;
        why a tier could not be listed, by tier; the claim). Raises ConnectionResetError when the trainer has gone: the
        next start may have its generation already, and would be fenced by a dead one."""
        if rank != 0:
            raise BadRequest(
                f"claim a generation of {run} as rank {rank}: only rank 0 does",
                hint="rank 0 connects first and gives its generation to the others",
            )
        if hello.node is not None and not self._context.cold:
            raise needs_cold_tier(run)
        unlisted = await self._restorer.list_run(run)
        generation_min = self._catalog.claims.least_above(hello.above, self._context.now().timestamp())
        if unlisted and not self._catalog.generation_max(run) and not self._memory.generation(run):
            if not hello.starts_anew:
                reasons = "; ".join(f"{tier} ({why})" for tier, why in unlisted.items())
                raise TierUnreachable(
                    f"start {run}: nothing is known of it here, and these could not be listed: {reasons}",
                    hint="if it is a new run, start it once with TIERD_RESUME=scratch in the trainer's environment; "
                    "if it may have checkpoints there, bring the tier back first; docs/RUNBOOK.md#new-run-refused",
                )
            # Minutes since 1970 are more than any count of starts. So this generation is newer than those in the tiers
            # that could not be listed.
            generation_min = max(generation_min, int(self._context.now().timestamp() / 60))
        async with self._claiming.setdefault(run, asyncio.Lock()):
            self.secrets.check_proof(run, hello.proof)  # again: the start before this one may have bound one
            if connection.has_ended():
                raise ConnectionResetError
            self._quotas.check_claim(connection.peer_uid, run)
            generation_min = max(generation_min, self._seen(run) + 1)
            tiers = [tier for name, tier in self._context.cold.items() if name not in unlisted]
            claim = self._context.new_claim()
            generation = await self._claim_next(tiers, run, generation_min, claim, spans_nodes=hello.node is not None)
            self._catalog.saw_generation(run, generation)
            self._catalog.claims.saw(run, [generation], HOT, is_here=True)  # also if hot had no space for it
        failpoint("run.claimed")
        return generation, unlisted, claim

    async def _claim_next(
        self, cold: Sequence[Tier], run: Run, generation_min: int, claim: Claim, *, spans_nodes: bool
    ) -> Generation:
        """The first number from `generation_min` on that could be claimed. Numbers in the names of listed files are not
        tried, because a file may be forged."""
        now_s = self._context.now().timestamp()
        for _ in range(CLAIM_ATTEMPTS_MAX):
            number = self._catalog.claims.next_free(run, generation_min, now_s)
            if number > GENERATION_SEEN_MAX:  # no listing would believe it
                break
            if await self._claim_in(cold, run, Generation(number), claim, spans_nodes=spans_nodes):
                return Generation(number)
            generation_min = number + 1
        raise TierUnreachable(
            f"claim a generation of {run}: every number up to {generation_min - 1} is taken",
            hint="someone writes claims into a tier; docs/RUNBOOK.md#foreign-checkpoints; start the run again",
        )

    async def _claim_in(
        self, cold: Sequence[Tier], run: Run, generation: Generation, claim: Claim, *, spans_nodes: bool
    ) -> bool:
        """Claim a generation in the cold tiers and in hot. False when another daemon has it in one of them. Hot comes
        last: a claim there says that the generation is of this node.

        Raises Full or TierUnreachable when hot cannot take the claim and no cold tier has it, and TierUnreachable when
        the other nodes of the run could not find it in any cold tier."""
        failpoint("run.claim")
        claimed: list[Tier] = []
        for tier in cold:
            try:
                async with asyncio.timeout(COLD_CLAIM_TIMEOUT_S):
                    if not await self._context.claim(tier, run, generation, claim):
                        return False
                claimed.append(tier)
            except (TierdError, TimeoutError) as error:
                # The claim is made before the first checkpoint of the generation is copied there.
                log.warning("claim generation %d of %s in %s: %s", generation, run, tier.name, text_of(error))
        if spans_nodes and not claimed:
            raise TierUnreachable(
                f"claim generation {generation} of {run}, whose ranks span several nodes: no cold tier could take it",
                hint="the nodes share the run through a cold tier; start again when one can be reached",
            )
        try:
            return await self._context.claim(self._context.hot, run, generation, claim)
        except (Full, TierUnreachable) as error:
            if not claimed:
                raise
            with suppress(TierUnreachable):
                # An attempt that failed, and was reported as failed, may have left a claim there.
                former = await self._context.hot.claim(run, generation)
                if former is not None and not former.is_of_same_start(claim):
                    return False
            log.warning("claim generation %d of %s in hot: %s", generation, run, error)
            # A later start of this hot tier does not find the claim in hot. It must not take it for one of a start that
            # was killed before a trainer had the generation.
            for tier in claimed:
                await tier.replace_claim(run, generation, msgspec.structs.replace(claim, hot=""))
            return True

    def _fence(self, run: Run, generation: Generation, pid: int, *, continues: int) -> None:
        """End the sessions of older generations. `pid`: of the trainer that begins this one, 0 where it is not visible,
        as in another container. It is reported unless this trainer begins anew itself, as a restore after a snapshot
        does. `continues`: as of Hello."""
        replaced = [key for key, each in self._sessions.items() if each.run == run and each.generation < generation]
        is_renewal = pid > 0 and pid in [self._sessions[key].connection.peer_pid for key in replaced]
        is_renewal |= all(self._sessions[key].generation == continues for key in replaced)
        for key in replaced:
            session = self._sessions.pop(key)
            session.post(wire.Fenced(generation=generation))
            session.finish()
        if replaced and not is_renewal:
            self._context.metrics.fenced_total.inc()
            ranks = ranks_text(sorted(rank for _, rank in replaced))
            message = f"end the trainers of {run}, ranks {ranks}: generation {generation} has taken over while they ran"
            hint = "one of two jobs should not run: docs/RUNBOOK.md#fenced"
            self._context.incidents.record("wire", Stale(message, hint=hint))

    def _take_over_slots(self, session: TrainerSession, pid: int, *, is_same_generation: bool) -> dict[int, MappedSlot]:
        """The rank's slots that the process `pid` may adopt, and from now on the process that has them mapped."""
        run, rank = session.run, session.rank
        writer, former = SlotWriter.open(pid), self._writers.get((run, rank))
        is_same_process = former is not None and former.pid == writer.pid and not former.is_dead
        slots = {}
        if not (is_same_generation and is_same_process):  # else it only lost its connection and has them mapped
            slots = self._memory.slots(run, rank)
            if slots and not (former is not None and former.is_dead):
                if not is_same_process:
                    log.warning("%s rank %d: its former trainer may still live; it gets new slots", run, rank)
                self._memory.detach(run, rank)
                slots = {}
        if former is not None:
            former.close()
        self._writers[run, rank] = writer
        return slots


def _check_protocol(raw: bytes) -> None:
    """Raises BadRequest for the Hello of a client whose protocol this daemon does not speak."""
    try:
        greeting = wire.decode_greeting(raw)
    except BadRequest:
        return  # not a Hello: decoding the whole message says what it is
    if greeting.protocol not in wire.PROTOCOLS_SPOKEN:
        spoken = " and ".join(map(str, wire.PROTOCOLS_SPOKEN))
        version = printable(greeting.version, 80)
        raise BadRequest(
            f"greet a client (tierd {version}): it speaks protocol {greeting.protocol}, this daemon "
            f"(tierd {tierd.__version__}) speaks {spoken}",
            hint=f"start the trainer again with tierd {tierd.__version__}, or the daemon with tierd {version}",
        )
