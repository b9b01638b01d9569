"""Verifies the copies of other nodes' parts, every byte, once per interval.

It begins with the copies that an earlier daemon has left. A damaged copy is set aside: nothing reads it any more. The
copier fetches that part again if its node still has it and the checkpoint is one of the newest. The damaged files stay
until then, or until no restart needs the checkpoint, so that a person can look at them. A copy that the disk could not
read is read once more, in the next pass, before it is set aside: if its node is lost, there is no other copy.
"""

from __future__ import annotations

from tierd.context import DaemonContext
from tierd.errors import Corrupt, Foreign, NewerFormat, NotFound
from tierd.format.ids import CheckpointId
from tierd.format.node_file import NodeFile
from tierd.tiers.part_copies import PartCopies
from tierd.tiers.rate_limit import Bandwidth
from tierd.transfer.verify import Proof, verify_files
from tierd.workers.part_copier import PEERS

_HINT = "if its checkpoint is one of the newest and its node has the part, it is copied again; docs/RUNBOOK.md#peers"


class CopyScrubber:
    name = "scrub"
    is_urgent = False

    def __init__(self, context: DaemonContext, copies: PartCopies) -> None:
        config, metrics = context.config.scrub, context.metrics
        self.interval_s = context.config.limits.reconcile_interval_s
        self._context = context
        self._copies = copies
        self._period_s = config.interval_s
        self._bandwidth = Bandwidth(config.max_read_mib_s)
        self._due_s: dict[CheckpointId, float] = {}
        self._is_first_pass = True
        self._had_read_error: set[CheckpointId] = set()  # at the last look
        self._failures = metrics.verify_failures_total.labels(tier=PEERS)
        self._scrubbed = metrics.scrubbed_checkpoints_total.labels(tier=PEERS, proof=Proof.DEEP.value)

    async def run_once(self) -> bool:
        copies = {part.id: part for run in self._copies.runs() for part in self._copies.of_run(run)}
        now_s = self._context.monotonic_s()
        # What this daemon has copied was verified on its way.
        new_due_s = now_s if self._is_first_pass else now_s + self._period_s
        self._is_first_pass = False
        self._due_s = {copy: self._due_s.get(copy, new_due_s) for copy in copies}
        for checkpoint, part in copies.items():
            if self._due_s[checkpoint] <= now_s and self._copies.get(checkpoint) is part:
                is_decided = await self._verify(checkpoint, part)
                self._due_s[checkpoint] = self._context.monotonic_s() + (self._period_s if is_decided else 0.0)
        return True

    async def _verify(self, checkpoint: CheckpointId, part: NodeFile) -> bool:
        """False: it is to be read again soon. Raises TierUnreachable."""
        verification = await verify_files(self._copies.tier, part, bandwidth=self._bandwidth)
        problems = verification.sentences
        try:
            if (await self._copies.tier.read_manifest(part.key))[0] != part:
                problems = [f"{part.name} has changed since this daemon copied it or first read it", *problems]
        except (Corrupt, Foreign, NewerFormat, NotFound) as error:
            problems = [error.message, *problems]
        if self._copies.get(checkpoint) is not part:
            return True  # deleted meanwhile
        self._scrubbed.inc()
        if verification.has_read_error and checkpoint not in self._had_read_error:
            self._had_read_error.add(checkpoint)
            return False
        self._had_read_error.discard(checkpoint)
        if problems:
            self._copies.set_aside(part)
            self._failures.inc(len(problems))
            error = Corrupt(f"scrub the copy of {part.name}: {'; '.join(problems[:3])}", hint=_HINT)
            self._context.incidents.record(self.name, error, checkpoint)
        return True
