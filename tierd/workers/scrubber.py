"""Looks through one tier, slowly and for ever: every replica once in an interval, a sample of them byte by byte.

A damaged one counts as no replica from then on (so that nothing is deleted on the strength of it), is told, and is
mended from another tier where that has the files whole. Remembers nothing on disk: after a restart a round begins anew,
in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierd.catalog import Catalog
from tierd.config import LimitsConfig, ScrubConfig
from tierd.errors import Corrupt, NewerFormat
from tierd.format.ids import CheckpointId
from tierd.incidents import Incidents
from tierd.metrics import Metrics
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.tier import Tier
from tierd.transfer.repair import repair_replica
from tierd.transfer.verify import Verification, verify_replica

_HINT = "`tierd verify --deep --repair` says more; docs/RUNBOOK.md#damaged-replica"


@dataclass(slots=True)
class _Known:
    """Of a replica that was looked at: when to do so again if it is unreadable then, and whether by reading it;
    whether what is wrong with it has been told."""

    again_at_s: float
    is_deep: bool
    is_told: bool = False


class Scrubber:
    name = "scrub"
    is_urgent = False

    def __init__(
        self,
        catalog: Catalog,
        tier: Tier,
        tiers: Mapping[str, Tier],
        config: ScrubConfig,
        limits: LimitsConfig,
        *,
        metrics: Metrics,
        incidents: Incidents,
        on_mended: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        """`on_mended`: the tier is worth another look. `now_s`: a clock that never goes back."""
        self.interval_s = limits.reconcile_interval_s
        self._catalog = catalog
        self._tier = tier
        self._tiers = tiers
        self._config = config
        self._retry_s = limits.retry_max_s
        self._metrics = metrics
        self._incidents = incidents
        self._on_mended = on_mended
        self._now_s = now_s
        self._bandwidth = Bandwidth(config.max_read_mib_s)
        self._left: list[CheckpointId] = []  # of this round, in random order
        self._count = 0  # of this round
        self._round_began_s = float("-inf")
        self._known: dict[CheckpointId, _Known] = {}  # the unreadable ones that could not be mended

    async def run_once(self) -> bool:
        """Mends what is known to be damaged, then looks at what is due: spread evenly over the interval."""
        if not self._catalog.tiers[self._tier.name].is_known:
            return True
        unreadable = self._catalog.tiers[self._tier.name].unreadable
        self._known = {one: known for one, known in self._known.items() if one in unreadable}
        for checkpoint in list(unreadable):
            known = self._known.get(checkpoint) or _Known(self._now_s(), is_deep=self._tier.store.is_local)
            if self._now_s() >= known.again_at_s:
                await self._look(checkpoint, is_deep=known.is_deep)
        while checkpoint := self._due():
            await self._look(checkpoint, is_deep=random.random() < self._config.deep_share)
        return True

    def _due(self) -> CheckpointId | None:
        since_s = self._now_s() - self._round_began_s
        if not self._left and since_s >= self._config.interval_s:
            self._left = [manifest.id for manifest in self._catalog.held(self._tier.name)]
            if not self._left:
                return None
            random.shuffle(self._left)
            self._count, self._round_began_s, since_s = len(self._left), self._now_s(), 0.0
        done = self._count - len(self._left)
        is_due = self._left and since_s * self._count >= done * self._config.interval_s
        return self._left.pop() if is_due else None

    async def _look(self, checkpoint: CheckpointId, *, is_deep: bool) -> None:
        former = self._known.get(checkpoint)
        # Soon, unless it is known below to be no use.
        known = _Known(self._now_s() + self._retry_s, is_deep, former is not None and former.is_told)
        self._known[checkpoint] = known
        try:
            found = await verify_replica(
                self._tier,
                checkpoint,
                is_deep=is_deep,
                bandwidth=self._bandwidth,
                progress=self._read if is_deep else None,
            )
        except NewerFormat:
            known.again_at_s = self._now_s() + self._config.interval_s
            return
        if found is None:
            return
        self._metrics.scrubbed_checkpoints_total.labels(tier=self._tier.name, proof=found.proof.value).inc()
        if found.problems:
            await self._answer(checkpoint, found, known)
        elif checkpoint in self._catalog.tiers[self._tier.name].damaged:
            self._mended(checkpoint)  # by someone else
        else:
            known.again_at_s = self._now_s() + self._config.interval_s

    def _read(self, size_bytes: int) -> None:
        self._metrics.bytes_total.labels(tier=self._tier.name, direction="read").inc(size_bytes)

    async def _answer(self, checkpoint: CheckpointId, found: Verification, known: _Known) -> None:
        """Told once, marked where no listing shows it, and mended if that may be done."""
        if checkpoint not in self._catalog.tiers[self._tier.name].unreadable:
            self._catalog.damaged(checkpoint, self._tier.name, found.sentences[0])
        if not known.is_told:
            self._metrics.verify_failures_total.labels(tier=self._tier.name).inc(len(found.problems))
            self._incidents.record(self.name, Corrupt("; ".join(found.sentences[:3]), hint=_HINT), checkpoint)
            known.is_told = True
        if not self._config.repair:
            known.again_at_s = self._now_s() + self._config.interval_s
            return
        repair = await repair_replica(self._tier, checkpoint, found, list(self._tiers.values()))
        self._metrics.repaired_files_total.labels(tier=self._tier.name).inc(len(repair.repaired))
        if not repair.refused:
            self._mended(checkpoint)
            return
        self._incidents.record(self.name, Corrupt("; ".join(repair.refused[:3]), hint=_HINT), checkpoint)
        if not repair.is_for_later:
            known.again_at_s = self._now_s() + self._config.interval_s

    def _mended(self, checkpoint: CheckpointId) -> None:
        """It counts again from the next look at the tier on, which sees its markers too."""
        self._catalog.mended(checkpoint, self._tier.name)
        self._known.pop(checkpoint, None)
        self._on_mended()
