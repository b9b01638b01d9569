"""Deletes the claims of runs that were started and never had a checkpoint: a script that fails at once leaves one each.

halt, not guess: a run expires only when every tier has just been listed below its name, holds nothing but claims, and
the newest of them is older than `limits.empty_run_grace_s` in every tier. A run with trainers here stays, and so does
one that another node has claimed: that node may have checkpoints of it which no shared tier keeps.
"""

from __future__ import annotations

from tierd.context import DaemonContext
from tierd.format import layout
from tierd.format.audit import EventKind
from tierd.format.ids import HOT, Run
from tierd.tiers.tier import Tier

RUNS_AT_ONCE = 100  # in one pass: each costs a listing of every tier


class RunExpirer:
    name = "reap"
    interval_s = 3600.0
    is_urgent = False

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._catalog = context.catalog

    async def run_once(self) -> bool:
        """Raises TierUnreachable when a tier cannot be listed; what was deleted before is consistent."""
        if self._catalog.unlisted() or not self._context.config.limits.empty_run_grace_s:
            return True
        for run in self._empty_runs()[:RUNS_AT_ONCE]:
            claims = {name: await self._old_claims(tier, run) for name, tier in self._context.tiers.items()}
            if any(keys is None for keys in claims.values()) or run in self._context.memory.runs():
                continue
            if any(keys and not self._context.tiers[name].deletes for name, keys in claims.items()):
                continue  # a claim that stays in one tier keeps the run known
            own = set(claims[HOT] or ())  # each start here claims in hot, too
            if any(not own.issuperset(keys or ()) for keys in claims.values()):
                continue
            for name, keys in claims.items():
                await self._context.tiers[name].store.delete(keys or [])
            self._catalog.forget_run(run)
            reason = "its claims: it has no checkpoint, and its last start is long ago"
            self._context.audit.record(EventKind.EXPIRED, run=run, reason=reason)
        return True

    def _empty_runs(self) -> list[Run]:
        """The runs of which nothing but generations is known."""
        used = {checkpoint.run for _, checkpoint in self._catalog.unreadable()} | set(self._context.memory.runs())
        for knowledge in self._catalog.tiers.values():
            used |= {checkpoint.run for checkpoint in (*knowledge.partial, *knowledge.missing)}
        unused = (run for run in self._catalog.runs() if run not in used)
        return [run for run in unused if self._catalog.newest_entry(run) is None]

    async def _old_claims(self, tier: Tier, run: Run) -> list[str] | None:
        """The keys of the run's claims, the highest last. None: it has other files, or a claim that may be in use."""
        await self._context.identities.check(tier)
        limit_s = self._context.now().timestamp() - self._context.config.limits.empty_run_grace_s
        objects = await tier.store.list(f"{run}/")
        if any(layout.parse_generation_key(each.key) is None or each.written_at_s > limit_s for each in objects):
            return None
        return sorted((each.key for each in objects), key=lambda key: (len(key), key))
