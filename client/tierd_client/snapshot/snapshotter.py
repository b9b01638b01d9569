"""Takes one rank's snapshots: capture the state, divide it among the ranks, take a slot, stage.

Each of these happens on all ranks, or raises on all.
"""

from __future__ import annotations

import platform
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
import torch

import tierd
from tierd.cgroup import memory_limit
from tierd.errors import BadRequest, SlotsBusy, TierdError, Transient, from_kind
from tierd.format import layout, manifest, wire
from tierd.format.ids import HOT, CheckpointId, checkpoint_id
from tierd.format.peers import NodeAddress
from tierd.format.shard import FORMAT_VERSION
from tierd_client.generation import Generation
from tierd_client.log import log
from tierd_client.partners import find_partner, send_roster
from tierd_client.ranks import Ranks
from tierd_client.snapshot.everywhere import EverywherePersisted
from tierd_client.snapshot.handle import ASK_INTERVAL_S, Shot
from tierd_client.snapshot.memory_check import check_memory
from tierd_client.snapshot.overlap import Overlap
from tierd_client.snapshot.staging import Stager, Staging
from tierd_client.state.completeness import check_restorable
from tierd_client.state.ownership import HeldTensor, ReplicaComparison, has_stages, keys_written
from tierd_client.state.training_state import Capturable, Captured, State, TrainingState, architecture_of
from tierd_client.step_times import StepTimes

T = TypeVar("T")

COPIED_POLL_S = 0.05
METRICS_BYTES_MAX = 32 << 10  # half of a message to the daemon
VERSIONS = {"tierd": tierd.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


class Snapshotter:
    """Takes the snapshots of one rank, keeps their handles, and passes the daemon's messages to them as a Listener."""

    def __init__(self, generation: Generation, ranks: Ranks, step_times: StepTimes) -> None:
        self.overlap = Overlap(generation, step_times)
        self._generation = generation
        self._ranks = ranks
        self._stager = Stager()
        self._shots: weakref.WeakValueDictionary[tuple[int, int], Shot] = weakref.WeakValueDictionary()
        self.everywhere = EverywherePersisted()
        self._last: tuple[int, int] | None = None  # (generation, step)
        self._numbered = 0, 0  # over several nodes: (generation, number of its last snapshot), on rank 0
        self._partner: wire.Partner | None = None  # what the daemon was told
        self._nodes: list[NodeAddress] = []  # the same: all nodes of the generation
        self._partner_of: tuple[int, str] | None = None  # `_attached_to` when the nodes last told their addresses
        self.milestone: str | None = None  # the name of the last snapshot
        self._prepared: int | None = None  # the generation for which `prepare` has tried to make slots
        self._has_slots: int | None = None  # the generation that has slots for tensors of the present sizes
        self._owned: set[str] = set()  # keys of tensors that this rank writes
        self._assigned_for: tuple[list[str], list[int]] | None = None
        self._has_stages = False
        self._comparison = ReplicaComparison([[]], 0)
        self._checked_tensors = -1

    @property
    def last_step(self) -> int | None:
        """The newest step that has a snapshot of the present generation."""
        return self._last[1] if self._last is not None and self._last[0] == self._generation.number else None

    def prepare(self, state: State) -> None:
        """Make the slots before they are needed, so that their pages are faulted in before the first snapshot.

        Does nothing before the first optimizer step, when the optimizer has no moments and the size is not known. An
        error is only logged: `take` raises it again.
        """
        number = self._generation.number
        if self._prepared == number or self._ranks.maximum([not state.is_stepped])[0]:
            return
        self._prepared = number
        try:
            own, _ = self._capture_on_all(lambda: (state.capture(self._ranks.rank, self._ranks.world_size), None))
            self._make_slots(own)
        except Exception as error:  # of any kind: the state is the user's, with code of its own
            log.warning("tierd: make the slots ready: %s: %s", type(error).__name__, error)

    def take(
        self,
        step: int,
        state: Capturable,
        *,
        metrics: Mapping[str, float],
        milestone: str | None,
        parent: CheckpointId | None,
        last_wait_s: float | None = None,
    ) -> Shot:
        """Returns when training may go on; `stall_s` of the handle is how long it could not. `last_wait_s`: it is the
        last snapshot of a run that stops, and may wait so long for a slot.

        Raises SlotsBusy or DaemonUnreachable when no slot is free in time, Unsupported for state with no safe form.
        """
        started_s = time.perf_counter()
        shot = Shot(
            step,
            self._generation.number,
            _before_wait=self.overlap.before_wait,
            _ask=self._ask,
            _why_waiting=self._why_waiting,
        )
        self._shots[step, shot.generation] = shot
        own, (plain, architecture) = self._capture_on_all(
            lambda: self._capture(step, state, metrics, milestone), milestone
        )
        self._make_slots(own)
        index = self._ranks.run_on_all(lambda: self._take_slot(step, last_wait_s))
        sealed = wire.Sealed(
            slot=index,
            step=step,
            size_bytes=0,  # known when it is staged
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            stall_s=0.0,
            metrics=plain,
            milestone=self.milestone,
            parent=parent,
            architecture_hash=architecture,
            versions=VERSIONS,
            resent=False,
        )
        staging, sealed = self._stage_on_all(lambda: self._stage(index, own, step, state), sealed)
        self._last = shot.generation, step
        if self._generation.node is not None:
            self.milestone = sealed.milestone
            self.everywhere.taken(shot.generation, step)
        shot.stall_s = time.perf_counter() - started_s
        self.overlap.begin(shot, staging, sealed)
        if staging.deferred:
            shot.stall_s = time.perf_counter() - started_s
        return shot

    def _stage_on_all(self, stage: Callable[[], Staging], own: wire.Sealed) -> tuple[Staging, wire.Sealed]:
        """All ranks. Over several nodes, the message has all that rank 0's has about the whole checkpoint, its number
        too: each node writes that into its part, and the parts must agree."""
        if self._generation.node is None:
            staging = self._ranks.run_on_all(stage)
            return staging, msgspec.structs.replace(own, size_bytes=staging.layout.size_bytes)
        generation, number = self._numbered
        number = number + 1 if generation == self._generation.number else 1
        content = wire.encode(msgspec.structs.replace(own, number=number)) if self._ranks.rank == 0 else b""
        staging, raw = self._ranks.run_and_broadcast(stage, content)
        self._numbered = self._generation.number, number
        first = wire.decode_to_daemon(raw)
        assert isinstance(first, wire.Sealed)
        return staging, msgspec.structs.replace(first, slot=own.slot, size_bytes=staging.layout.size_bytes)

    def _capture(
        self, step: int, state: Capturable, metrics: Mapping[str, float], milestone: str | None
    ) -> tuple[Captured, tuple[dict[str, float | str], str]]:
        """The state, the metrics and the hash of the model, after a check that this step can be taken."""
        self._generation.check_open()
        self.overlap.finish()
        self._generation.pool.reclaim()  # an interrupt may have come before the client did it
        checkpoint_id(self._generation.run, step, self._generation.number)  # raises where a part is out of range
        if self.last_step is not None and step <= self.last_step:
            raise BadRequest(
                f"snapshot step {step} of {self._generation.run}: step {self.last_step} was taken before it",
                hint="to go back, restore that step first: it begins a new generation",
            )
        if milestone is not None:
            layout.milestone_file(milestone)
        captured = state.capture(self._ranks.rank, self._ranks.world_size)
        if len(captured.tensors) != self._checked_tensors:  # the first snapshot, or tensors were added
            check_restorable(state, captured)
            self._checked_tensors = len(captured.tensors)
        return captured, (plain_metrics(metrics), architecture_of(captured))

    def _capture_on_all(
        self, capture: Callable[[], tuple[Captured, T]], milestone: str | None = None
    ) -> tuple[Captured, T]:
        """All ranks. Captures, compares replicas, and returns this rank's part and the second value of `capture`.
        Assigns shared tensors to ranks again if a key or a size has changed on a rank. `milestone`: as this rank has
        it; `self.milestone` becomes the common one."""
        self.milestone = milestone
        node_values: list[int] = []
        if self._generation.node is not None:
            has_restarted, is_named = self._partner_of != self._attached_to, milestone is not None
            node_values = [has_restarted, is_named, *self.everywhere.missing()]

        def capture_and_compare() -> tuple[tuple[Captured, T, tuple[list[str], list[int]]], list[int]]:
            captured, second = capture()
            # While keys and sizes stay the same on all ranks, so do the owner of each key and the size of the slots.
            # Two lists, not one of tuples: the garbage collector would visit 100,000 of them during the stall.
            tensors = captured.tensors
            keys_and_sizes = [each.key for each in tensors], [each.tensor.nbytes for each in tensors]
            has_changed = keys_and_sizes != self._assigned_for
            samples = self._comparison.samples(None if has_changed else tensors)
            return (captured, second, keys_and_sizes), [has_changed, *node_values, *samples]

        (captured, second, keys_and_sizes), (some_changed, *maxima) = self._ranks.run_and_maximum(
            capture_and_compare, if_failed=[False, *node_values, *self._comparison.samples(None)]
        )
        if self._ranks.world_size == 1:
            if some_changed:
                self._assigned_for, self._has_slots = keys_and_sizes, None
            return captured, second
        if node_values:
            has_restarted, is_named, *missing = maxima[: len(node_values)]
            del maxima[: len(node_values)]
            if has_restarted:
                self._find_partner()
            if is_named:
                self.milestone = self._common_milestone(milestone)
            self._tell_everywhere(missing)
        if some_changed:
            gathered = self._ranks.gather(msgspec.json.encode(captured.held_tensors()))
            by_rank = [msgspec.json.decode(raw, type=list[HeldTensor]) for raw in gathered]
            node = self._generation.node
            self._owned = keys_written(by_rank, self._ranks.rank, node.ranks if node is not None else ())
            self._assigned_for, self._has_slots = keys_and_sizes, None
            self._has_stages = has_stages(by_rank)
            self._comparison = ReplicaComparison(by_rank, self._ranks.rank)
        else:
            self._comparison.check(maxima)
        if self._has_stages and "model" in captured.tree:  # not in a tree of DCP's, whose names may begin so too
            captured.tree["model"]["is_part"] = True
        own = [tensor for tensor in captured.tensors if tensor.key in self._owned]
        return Captured(own, captured.tree), second

    def _common_milestone(self, own: str | None) -> str | None:
        """All ranks. The name that the lowest rank has which has one: an operator may have asked on any node."""
        names = self._ranks.gather((own or "").encode())
        return next((name.decode() for name in names if name), None)

    def wait_everywhere(self, shot: Shot, timeout_s: float) -> None:
        """All ranks. Until the snapshot is durable on every node, and copied to another. Raises on all ranks as
        `wait_persisted`."""
        deadline_s = time.monotonic() + timeout_s
        self._ranks.run_on_all(lambda: shot.wait_persisted(timeout_s))
        if self._generation.node is not None:
            self.everywhere.persisted(shot.generation, shot.step)  # also if the message was heard by a former session
            is_waiting = True
            while is_waiting:
                is_safe = self._ranks.run_on_all(lambda: self._wait_copied(shot, deadline_s))
                is_waiting, has_restarted = self._ranks.maximum([not is_safe, self._partner_of != self._attached_to])
                if has_restarted:  # a daemon, since the last snapshot: partners do not know its address
                    self._find_partner()
            self._tell_everywhere(self._ranks.maximum(self.everywhere.missing()))

    def _wait_copied(self, shot: Shot, deadline_s: float) -> bool:
        """Whether it is copied, after ASK_INTERVAL_S at most."""
        asked_s = time.monotonic()
        self._ask(shot)
        while shot.generation == self._generation.number and not self.everywhere.is_settled(shot.step):
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise self._generation.why_waiting() or Transient(
                    f"wait for step {shot.step} on every node: {self.everywhere.awaited(shot.step)}",
                    hint="docs/RUNBOOK.md#peers",
                )
            if now_s > asked_s + ASK_INTERVAL_S:
                return False
            time.sleep(COPIED_POLL_S)
        return True

    @property
    def _attached_to(self) -> tuple[int, str]:
        """The generation, and the start of the daemon."""
        return self._generation.number, self._generation.session.welcome.boot

    def _find_partner(self) -> None:
        """All ranks: at the first snapshot of a generation, and after a daemon has restarted, which then has another
        address and knows nothing of its partner."""
        generation, attached_to = self._generation, self._attached_to
        assert generation.node is not None
        self._partner_of = attached_to
        partner, nodes = find_partner(self._ranks, generation.node, generation.session.welcome)
        self._partner, self._nodes = (partner, nodes) if generation.is_lowest_of_node else (None, [])
        self._tell_nodes()
        self.everywhere.keeps_copies = self._partner is not None

    def _tell_nodes(self) -> None:
        """Send the partner and the roster to the daemon. Only the lowest rank of a node has them."""
        if self._nodes:
            send_roster(self._generation.session, self._nodes)
        if self._partner is not None:
            self._generation.session.send(self._partner)

    def _tell_everywhere(self, maxima: Sequence[int]) -> None:
        """`maxima`: over all ranks, of what `EverywherePersisted.missing` returns."""
        step = self.everywhere.agree(maxima)
        if step is not None and self._generation.is_lowest_of_node:
            self._generation.session.send(wire.Everywhere(step=step))

    def _make_slots(self, captured: Captured) -> None:
        """All ranks. Does nothing while the slots are large enough. Raises Full when a memory limit is too low."""
        generation = self._generation
        if self._has_slots == generation.number:
            return
        count = generation.settings.slots_per_rank
        metadata = {"format_version": FORMAT_VERSION, "state": captured.tree}
        size_bytes = self._ranks.run_on_all(lambda: self._stager.plan(captured, metadata).size_bytes)
        node = generation.node.ranks[0] if generation.node is not None else 0
        check_memory(self._ranks, generation.pool.missing_bytes(count, size_bytes), memory_limit(), node=node)
        self._ranks.run_on_all(lambda: generation.pool.make(count, size_bytes))
        self._has_slots = generation.number

    def _take_slot(self, step: int, last_wait_s: float | None) -> int:
        pool, settings = self._generation.pool, self._generation.settings
        wait_s = settings.slot_wait_s if settings.when_busy == "wait" else 0.0
        if last_wait_s is not None:
            wait_s = last_wait_s
        index = pool.take(step, wait_s, is_last=last_wait_s is not None)
        if index is not None:
            session = self._generation.session
            if session.refusal is not None:
                log.error("tierd: step %d stays in this process: %s", step, session.unreachable("it is not connected"))
            return index
        raise self._generation.why_waiting() or SlotsBusy(
            f"snapshot step {step} of {self._generation.run}: no slot free{f' after {wait_s:g} s' if wait_s else ''}",
            hint="snapshots come faster than the hot tier persists them: take fewer, or give more slots",
        )

    def _stage(self, index: int, captured: Captured, step: int, state: Capturable) -> Staging:
        generation = self._generation
        metadata = {
            "format_version": FORMAT_VERSION,
            "run": generation.run,
            "step": step,
            "generation": generation.number,
            "rank": self._ranks.rank,
            "world_size": self._ranks.world_size,
            "state": captured.tree,
        }
        deferrable: dict[str, torch.Tensor] = {}
        if generation.settings.staging == "overlap" and isinstance(state, TrainingState):  # no other has optimizers
            deferrable = self.overlap.deferrable(captured, state.optimizers)
        slot = generation.pool.slot(index)
        try:
            staging = self._stager.begin(captured, slot, metadata, deferrable)
            if not staging.deferred:
                staging.finish()
        except RuntimeError as error:  # from torch: a GPU that has failed, or has no memory left
            raise TierdError(f"snapshot step {step} of {generation.run}: copy the state: {error}") from error
        if slot.refusal:
            generation.pool.report_unpinned(index, step)
        return staging

    def _why_waiting(self, shot: Shot) -> TierdError | None:
        return self.overlap.why_unsealed(shot) or self._generation.why_waiting()

    def _ask(self, shot: Shot) -> None:
        self._generation.check_open()
        ask = wire.Ask(step=shot.step, generation=shot.generation, is_last=shot.is_last)
        self._generation.session.send(ask)

    # ── the session's thread ──

    def on_message(self, message: wire.ToClient) -> None:
        if not isinstance(message, wire.Persisted | wire.Replicated | wire.Copied | wire.Failed):
            return
        self.everywhere.on_message(message)
        if isinstance(message, wire.Copied):
            return
        shot = self._shots.get((message.step, message.generation))
        if isinstance(message, wire.Failed):
            error = from_kind(message.kind, message.message, message.hint)
            log.warning("tierd: step %d, %s: %s", message.step, message.stage, error)
            if shot is not None:
                shot.failed(error, is_final=message.is_final)
        elif shot is not None:
            shot.reached(message.tier if isinstance(message, wire.Replicated) else HOT)

    def on_attach(self) -> None:
        """A daemon that has restarted does not know its partner. A handle that is being waited for repeats its own
        request."""
        self._tell_nodes()


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Metrics as a manifest holds them. Raises BadRequest for a value that is not a number, or for too many to send."""
    try:
        plain = manifest.plain_metrics(
            {
                str(name): float(value.detach() if isinstance(value, torch.Tensor) else value)
                for name, value in metrics.items()
            }
        )
        size_bytes = len(msgspec.msgpack.encode(plain))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadRequest(
            f"snapshot with metrics {', '.join(map(repr, metrics))}: {error}", hint="metrics are numbers"
        ) from error
    if size_bytes > METRICS_BYTES_MAX:
        raise BadRequest(
            f"snapshot with {len(plain)} metrics: {size_bytes} bytes, more than {METRICS_BYTES_MAX}", hint="send fewer"
        )
    return plain
