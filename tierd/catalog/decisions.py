"""What the lifecycle decides about the catalog: what to copy and delete, what waits, and where deletion is halted.

Queries for the workers, the HTTP API and the CLI. A run is judged only by the tiers that are known for certain: one
unreadable manifest makes the run's part of that tier unknown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import islice

from tierd.catalog.catalog import Catalog
from tierd.catalog.part_decisions import parts_needed, with_parts
from tierd.config.sections import Config, TierPolicy
from tierd.format.ids import HOT, CheckpointId, Run
from tierd.format.layout import manifest_key
from tierd.lifecycle import policy
from tierd.lifecycle.backlog import give_up
from tierd.lifecycle.forecast import Forecast, RunInTier, forecast, rules_by_tier
from tierd.lifecycle.policy import Action, Decision
from tierd.lifecycle.pressure import hot_deletions_for, room_for_next


class HaltReason(StrEnum):
    UNREADABLE_MANIFEST = "unreadable_manifest"
    DAMAGED_REPLICA = "damaged_replica"
    TIER_UNREACHABLE = "tier_unreachable"
    SHARED_GENERATION = "shared_generation"


@dataclass(frozen=True, slots=True)
class Halt:
    """Why nothing is deleted of `run` in `tier`. `run` None: of any run."""

    reason: HaltReason
    tier: str
    run: Run | None
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def halted(catalog: Catalog) -> list[Halt]:
    """The places where deletion is halted, and why; empty if there is none."""
    halts: list[Halt] = []
    for (tier, checkpoint), why in catalog.unreadable().items():
        is_damaged = checkpoint in catalog.tiers[tier].damaged
        reason = HaltReason.DAMAGED_REPLICA if is_damaged else HaltReason.UNREADABLE_MANIFEST
        halts.append(Halt(reason, tier, checkpoint.run, why))
    halts += [Halt(HaltReason.TIER_UNREACHABLE, tier, None, why) for tier, why in catalog.unlisted().items()]
    shared: dict[tuple[str, Run], str] = {}
    for (tier, checkpoint), why in catalog.shared_generations().items():
        shared.setdefault((tier, checkpoint.run), why)  # one sentence says what to do
    return halts + [Halt(HaltReason.SHARED_GENERATION, tier, run, why) for (tier, run), why in shared.items()]


def decisions(
    catalog: Catalog,
    config: Config,
    *,
    is_hot_full: bool = False,
    with_kept: bool = True,
    only: CheckpointId | None = None,
) -> list[Decision]:
    """What becomes of every checkpoint in every tier, and why, given which tiers are known for its run. `is_hot_full`:
    hot needs room for a new one. `with_kept`: also of the replicas that stay. `only`: of this one."""
    copying = _copying(catalog, config)
    if unknown := [cold.name for cold in config.cold if not catalog.is_copying_known(cold.name)]:
        # Soon after a start, any checkpoint in hot may be half copied.
        in_hot = set(catalog.in_tier(HOT))
        copying |= dict.fromkeys(unknown, in_hot)
    unreadable = _unreadable_tiers(catalog)
    runs = [(run, views) for run, views in catalog.views_by_run() if only is None or run == only.run]
    decided = _explained(catalog, config, runs, copying, unreadable, with_kept=with_kept, only=only)
    shared = {c.run: why for (_, c), why in catalog.shared_generations().items()}
    decided = _with_halts(decided, shared)
    decided = with_parts(catalog, decided, is_hot_full=is_hot_full, only=only)
    left = config.left_to_reap
    decided = [_left_to_reap(decision) if decision.tier in left else decision for decision in decided]
    return decided if with_kept else [decision for decision in decided if decision.action is not Action.KEEP]


def _explained(
    catalog: Catalog,
    config: Config,
    runs: Iterable[tuple[Run, list[policy.CheckpointView]]],
    copying: Mapping[str, Set[CheckpointId]],
    unreadable: Mapping[Run, Set[str]],
    *,
    sees_hot: bool = True,
    with_kept: bool = True,
    only: CheckpointId | None = None,
) -> list[Decision]:
    """`unreadable`: the tiers where something of a run cannot be read. What is decided without what is kept is
    remembered, run by run: status and workers ask for it again and again, and most often one run has changed."""
    decided: list[Decision] = []
    own, rules, usual = config.own_policies, config.lifecycle, _known(catalog, config, sees_hot=sees_hot)
    copied_runs, none = {each.run for copied in copying.values() for each in copied}, dict[str, Set[CheckpointId]]()
    for run, views in runs:
        is_usual = run not in unreadable
        cold, hot_known = usual if is_usual else _known(catalog, config, unreadable[run], sees_hot=sees_hot)
        of_run = none
        if run in copied_runs:
            of_run = {tier: {each for each in copied if each.run == run} for tier, copied in copying.items()}
        explain = partial(policy.explain_run, views, rules, cold=cold, hot_known=hot_known, own=own, copying=of_run)
        if with_kept:
            decided += explain(only=only)
        else:
            inputs = cold, hot_known, of_run, own, rules, views
            decided += catalog.remembered(run, inputs, partial(explain, with_kept=False))
    return decided


def _known(
    catalog: Catalog, config: Config, unreadable: Container[str] = (), *, sees_hot: bool
) -> tuple[dict[str, bool], bool]:
    """Of each cold tier and of hot, whether its contents are known for a run with these tiers `unreadable`."""
    known = {name: each.is_known and name not in unreadable for name, each in catalog.tiers.items()}
    return {cold.name: known[cold.name] for cold in config.cold}, known[HOT] or not sees_hot


def _unreadable_tiers(catalog: Catalog) -> dict[Run, set[str]]:
    """By run, the tiers that have something of it that cannot be read."""
    tiers: defaultdict[Run, set[str]] = defaultdict(set)
    for tier, checkpoint in catalog.unreadable():
        tiers[checkpoint.run].add(tier)
    return tiers


def _with_halts(decided: Iterable[Decision], shared: Mapping[Run, str]) -> list[Decision]:
    """`shared`: why another daemon may write to the cold tiers, by run."""
    return [
        _halted(decision, shared[decision.checkpoint.run])
        if decision.tier != HOT and decision.checkpoint.run in shared
        else decision
        for decision in decided
    ]


def _halted(decision: Decision, why: str) -> Decision:
    """Turn a deletion into KEEP, in tiers to which another daemon may write. Hot's replicas are known: hot goes on."""
    if decision.action not in (Action.EVICT, Action.EXPIRE):
        return decision
    return replace(decision, action=Action.KEEP, reason=f"deletion is halted: {why}")


def _left_to_reap(decision: Decision) -> Decision:
    if decision.action not in (Action.EVICT, Action.EXPIRE):
        return decision
    return replace(decision, reason=f"{decision.reason}; left to `tierd reap`")


def deletions(decided: Iterable[Decision], config: Config) -> list[Decision]:
    """The planned deletions that are this process's own, in order: not those that are left to `tierd reap`."""
    return [deletion for deletion in policy.deletions(decided) if deletion.tier not in config.left_to_reap]


def to_reap(catalog: Catalog, config: Config) -> dict[str, int]:
    """By cold tier where this daemon deletes nothing: how many checkpoints wait there for `tierd reap`. It does not see
    hot, so it keeps in cold also what the policy of hot selects."""
    if not config.left_to_reap:
        return {}
    runs = [(run, _without_hot(views)) for run, views in catalog.views_by_run()]
    decided = _explained(catalog, config, runs, {}, _unreadable_tiers(catalog), sees_hot=False, with_kept=False)
    decided = _with_halts(decided, {c.run: why for (_, c), why in catalog.shared_generations().items()})
    waiting = Counter(deletion.tier for deletion in policy.deletions(decided))
    return {name: waiting[name] for name in config.left_to_reap}


def _without_hot(views: list[policy.CheckpointView]) -> list[policy.CheckpointView]:
    others = [view if HOT not in view.tiers else replace(view, tiers=view.tiers - {HOT}) for view in views]
    return [view for view in others if view.tiers]


def deletions_for_space(
    catalog: Catalog, config: Config, need_bytes: int, *, without: Container[CheckpointId] = ()
) -> list[Decision]:
    """The deletions in hot that free `need_bytes`, or as much as may be freed, beyond what its policy keeps.

    `without`: checkpoints to leave alone.
    """
    if not catalog.tiers[HOT].is_known:
        return []
    halted_runs = _unreadable_runs(catalog, HOT)
    decided = [
        decision
        for decision in decisions(catalog, config, is_hot_full=True)
        if decision.checkpoint.run not in halted_runs and decision.checkpoint not in without
    ]
    return hot_deletions_for(need_bytes, decided, cold=[cold.name for cold in config.cold], sizes=catalog.sizes(HOT))


def pending(catalog: Catalog, config: Config, tier: str) -> list[CheckpointId]:
    """The checkpoints that `tier` should have and lacks, and that can be copied now, in the order of the plan."""
    copies = [copy for copy in _about_copies(catalog, config) if copy.tier == tier]
    entries = [entry for copy in copies if (entry := catalog.get(copy.checkpoint)) is not None]
    milestones = {entry.id for entry in entries if entry.view.milestones}
    runs = {entry.id.run for entry in entries}
    rules = _rules(config, tier)
    newest = [view for run in runs for view in _newest_healthy(catalog, run, max(rules.keep_last, 1))]
    lasting = policy.lasting(newest, rules, among=[entry.view for entry in entries])
    # A person must clear an unreadable replica: to copy it again would end in the same conflict.
    refused = catalog.tiers[tier].unreadable.keys()
    foreign = catalog.tiers[tier].foreign
    ordered = [copy.checkpoint for copy in policy.copies(copies, milestones, lasting)]
    deleted = deleted_elsewhere(catalog, config, tier)
    left_out = {c for c in ordered if c in refused or c in deleted or manifest_key(c) in foreign}
    left_out |= {c for c in ordered if catalog.is_part_sent(tier, c)}
    return _in_order_of_all_nodes(catalog, [c for c in ordered if c not in left_out], milestones)


def _newest_healthy(catalog: Catalog, run: Run, count: int) -> Iterator[policy.CheckpointView]:
    """Those that may be healthy, newest first."""
    views = (entry.view for entry in catalog.entries(run))
    return islice((view for view in views if view.healthy is not False), count)


def _in_order_of_all_nodes(
    catalog: Catalog, ordered: list[CheckpointId], milestones: Container[CheckpointId]
) -> list[CheckpointId]:
    """Parts of checkpoints over several nodes come in an order that depends only on the checkpoints: milestones, then
    by the highest power of two that divides the sequence, then the newest first. A node may copy more slowly than
    checkpoints come. If each node copied its newest, few checkpoints would get all of their parts."""

    def urgency(checkpoint: CheckpointId) -> tuple[bool, int, tuple[int, int]]:
        entry = catalog.get(checkpoint)
        sequence = entry.manifest.sequence if entry is not None else 1
        return checkpoint in milestones, sequence & -sequence, checkpoint.recency

    parts = {c for c in ordered if (entry := catalog.get(c)) is not None and entry.part is not None}
    others = [c for c in ordered if c not in parts]
    return sorted(parts, key=urgency, reverse=True) + others


def waiting(catalog: Catalog, config: Config) -> dict[str, list[CheckpointId]]:
    """The checkpoints that each cold tier should have and lacks, also while it cannot be reached."""
    missing: dict[str, list[CheckpointId]] = {cold.name: [] for cold in config.cold}
    deleted = {cold.name: deleted_elsewhere(catalog, config, cold.name) for cold in config.cold}
    for decision in _about_copies(catalog, config):
        if decision.action in (Action.REPLICATE, Action.WAIT) and decision.checkpoint not in deleted[decision.tier]:
            missing[decision.tier].append(decision.checkpoint)
    return missing


def lost(catalog: Catalog, config: Config, tier: str) -> list[CheckpointId]:
    """The replicas that have disappeared from `tier` although its policy keeps them, newest first.

    The others may have been deleted by another daemon's lifecycle: what its policy kept of the tier before, it keeps of
    what is there now and what is missing. That daemon may count what is in doubt here, so it counts here too.
    """
    return _missing_and_kept(catalog, config, tier, with_doubted=True)


def deleted_elsewhere(catalog: Catalog, config: Config, tier: str) -> set[CheckpointId]:
    """The replicas that have disappeared from `tier` and that its policy keeps only if what is in doubt does not count.
    A daemon that does not doubt it has deleted them, and would delete them again: they are neither lost nor copied
    again. Hot keeps its replicas."""
    if not catalog.tiers[tier].missing or not catalog.doubts():
        return set()
    kept = _missing_and_kept(catalog, config, tier, with_doubted=False)
    return set(kept) - set(lost(catalog, config, tier))


def _missing_and_kept(catalog: Catalog, config: Config, tier: str, *, with_doubted: bool) -> list[CheckpointId]:
    """Those that are missing, are not in doubt, and that the policy keeps, newest first. `with_doubted`: what is in
    doubt counts in the policy."""
    missing = catalog.tiers[tier].missing
    if not missing:
        return []
    # An unreadable checkpoint may be why another daemon's policy has deleted an older one.
    unreadable = _unreadable_runs(catalog, tier)
    runs = {checkpoint.run for checkpoint in missing} - unreadable
    views = {view.id: view for view in catalog.views() if view.id.run in runs}
    doubted = catalog.doubts().keys()
    there = [view for view in views.values() if tier in view.tiers]
    there += [views.get(checkpoint, view) for checkpoint, view in missing.items() if checkpoint.run in runs]
    counted = [view for view in there if with_doubted or view.id not in doubted]
    rules = _rules(config, tier)
    kept = [checkpoint for _, of_run in policy.by_run(counted) for checkpoint in policy.kept(of_run, rules)]
    newest_first = sorted(kept, key=lambda checkpoint: checkpoint.recency, reverse=True)
    return [checkpoint for checkpoint in newest_first if checkpoint in missing and checkpoint not in doubted]


def forecasting(catalog: Catalog, config: Config) -> Callable[[], list[Forecast]]:
    """A function that returns what each run will hold in each tier, and what that will cost. It may take long, and may
    be called in a thread: it does not read the catalog."""
    manifests = [entry.manifest for entry in catalog.entries()]
    views, prices = catalog.views(), {cold.name: cold.price_per_gib_month for cold in config.cold}

    def forecasts() -> list[Forecast]:
        sizes = {manifest.id: manifest.size_bytes for manifest in manifests}
        return forecast(views, sizes, config.lifecycle, cold=prices, own=config.own_policies)

    return forecasts


def held(catalog: Catalog, config: Config) -> list[RunInTier]:
    """What each tier holds of each run."""
    rules = rules_by_tier(config.lifecycle, cold=[cold.name for cold in config.cold], own=config.own_policies)
    rules |= {name: [TierPolicy(keep_every=1)] for name in config.left_to_reap}  # this daemon deletes nothing there
    runs = catalog.views_by_run()
    newest = [catalog.get(views[-1].id) for _, views in runs]
    found: list[RunInTier] = []
    for tier in rules:
        # A copy, because the forecast is computed in a thread.
        sizes = {entry.id: entry.held(tier).size_bytes for entry in newest if entry} | dict(catalog.sizes(tier))
        for _, views in runs:
            found.append(RunInTier(tier=tier, views=views, sizes=sizes, rules=rules[tier]))
    return found


def to_give_up(catalog: Catalog, config: Config, free_bytes: int | None) -> list[Decision]:
    """The replicas to delete from hot although cold tiers should still get them, so that hot has room for the next two
    checkpoints. `free_bytes`: the free space of hot; None: not limited."""
    sizes = catalog.sizes(HOT)
    to_free_bytes = missing_room_bytes(catalog, free_bytes)
    if to_free_bytes <= 0 or not all(catalog.is_copying_known(cold.name) for cold in config.cold):
        return []
    copying = {checkpoint for cold in config.cold if (checkpoint := catalog.copying(cold.name))}
    waits = {
        decision.checkpoint
        for decision in decisions(catalog, config, with_kept=False)
        if decision.action in (Action.REPLICATE, Action.WAIT) and decision.checkpoint not in copying
    }
    waits -= parts_needed(catalog, is_hot_full=True)
    unreadable = _unreadable_runs(catalog, HOT)
    waiting: list[policy.CheckpointView] = []
    for run, views in policy.by_run(view for view in catalog.views() if HOT in view.tiers):
        if catalog.tiers[HOT].is_known and run not in unreadable:
            kept = policy.kept(views, config.lifecycle.hot)
            waiting += [view for view in views if view.id in waits and view.id not in kept]
    return give_up(waiting, sizes, to_free_bytes)


def room_bytes(catalog: Catalog) -> int:
    """The free space that hot needs for the next checkpoints."""
    return room_for_next(catalog.sizes(HOT).values())


def missing_room_bytes(catalog: Catalog, free_bytes: int | None) -> int:
    """How much less than `room_bytes` is free in hot; 0 when that is free or not limited."""
    return 0 if free_bytes is None else max(0, room_bytes(catalog) - free_bytes)


def _unreadable_runs(catalog: Catalog, tier: str) -> set[Run]:
    """The runs of which `tier` has a replica that cannot be read."""
    return {checkpoint.run for checkpoint in catalog.tiers[tier].unreadable}


def _rules(config: Config, tier: str) -> TierPolicy:
    """What `tier` keeps."""
    return config.lifecycle.hot if tier == HOT else config.own_policies.get(tier, config.lifecycle.cold)


def _about_copies(catalog: Catalog, config: Config) -> list[Decision]:
    """The decisions about copies. An unreadable manifest of a run stops its deletions, but no copy."""
    runs, copying = catalog.views_by_run(), _copying(catalog, config)
    return _explained(catalog, config, runs, copying, {}, sees_hot=False, with_kept=False)


def _copying(catalog: Catalog, config: Config) -> dict[str, set[CheckpointId]]:
    """The checkpoints that are being copied to each cold tier."""
    copying = {cold.name: catalog.copying(cold.name) for cold in config.cold}
    return {name: {checkpoint} for name, checkpoint in copying.items() if checkpoint is not None}
