"""Which checkpoint is meant by --run, --step and --generation, among all that the tiers hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tierd.catalog import MEMORY, Catalog
from tierd.errors import BadConfig, NotFound
from tierd.format.ids import CheckpointId, Run, check_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for. Both `step` and `milestone` None: the newest."""

    run: Run | None = None
    step: int | None = None
    milestone: str | None = None
    generation: int | None = None

    def fits(self, checkpoint: CheckpointId, milestones: frozenset[str] = frozenset()) -> bool:
        return (
            self.run in (None, checkpoint.run)
            and self.step in (None, checkpoint.step)
            and self.generation in (None, checkpoint.generation)
            and (self.milestone is None or self.milestone in milestones)
        )

    def __str__(self) -> str:
        what = (
            f"step {self.step}"
            if self.step is not None
            else f"milestone {self.milestone}"
            if self.milestone
            else "any step"
        )
        return what + (f" of generation {self.generation}" if self.generation is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that could be meant. `tiers` in the order in which they are tried."""

    id: CheckpointId
    milestones: frozenset[str]
    tiers: tuple[str, ...]
    is_healthy: bool | None = None


def wanted(run: str | None, step: str, generation: int | None) -> Wanted:
    """`step` is a number, `latest`, or `milestone:NAME`. Raises BadConfig for anything else."""
    number, milestone = None, None
    if step.startswith("milestone:"):
        milestone = step.removeprefix("milestone:")
    elif step.isascii() and step.isdigit():
        number = int(step)
    elif step != "latest":
        raise BadConfig(f"--step {step!r} is no step", hint="give a number, latest, or milestone:NAME")
    return Wanted(run=None if run is None else check_run(run), step=number, milestone=milestone, generation=generation)


def candidates(
    catalog: Catalog, in_memory: Mapping[CheckpointId, Mapping[str, Any]] = MappingProxyType({})
) -> list[Candidate]:
    """`in_memory`: the rows of what the memory tier holds."""
    held = set(in_memory)
    listed = {entry.manifest.id: entry for entry in catalog.entries()}
    order = [MEMORY, *catalog.tiers]
    found: list[Candidate] = []
    for checkpoint in held | listed.keys():
        entry = listed.get(checkpoint)
        tiers = (entry.tiers if entry else set[str]()) | ({MEMORY} if checkpoint in held else set[str]())
        milestones = entry.all_milestones if entry else frozenset[str]()
        is_healthy = entry.healthy if entry else None
        if is_healthy is None and checkpoint in held:
            is_healthy = in_memory[checkpoint].get("healthy")
        in_order = tuple(sorted(tiers, key=order.index))
        found.append(Candidate(id=checkpoint, milestones=milestones, tiers=in_order, is_healthy=is_healthy))
    return found


def choose(wish: Wanted, among: Iterable[Candidate], where: str) -> Candidate:
    """The newest that fits. Raises NotFound, or BadConfig when the run is left open and there are several."""
    among = list(among)
    run = wish.run or only_run({one.id.run for one in among}, where)
    of_run = [one for one in among if one.id.run == run]
    fits = [one for one in of_run if wish.fits(one.id, one.milestones)]
    if fits:
        return max(fits, key=lambda one: one.id.recency)
    raise NotFound(f"find {wish} of run {run} in {where}: there is none", hint=_instead(wish, of_run, among))


def only_run(runs: Iterable[Run], where: str) -> Run:
    names = sorted(runs)
    if not names:
        raise NotFound(f"find a checkpoint in {where}: it holds none", hint="`tierd status` says what each tier holds")
    if len(names) > 1:
        shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
        raise BadConfig(f"{len(names)} runs in {where}, and --run is not given", hint=f"--run takes one of {shown}")
    return names[0]


def _instead(wish: Wanted, of_run: list[Candidate], among: list[Candidate]) -> str:
    if not of_run:
        runs = sorted({one.id.run for one in among})
        return f"runs there: {', '.join(runs[:20])}" if runs else "`tierd status` says what each tier holds"
    if wish.milestone is not None:
        names = sorted({name for one in of_run for name in one.milestones})
        return f"milestones of the run: {', '.join(names[:20])}" if names else "the run has no milestone"
    newest = sorted(of_run, key=lambda one: one.id.recency, reverse=True)[:8]
    shown = ", ".join(f"{one.id.step} (generation {one.id.generation})" for one in newest)
    return f"the newest steps of the run: {shown}"
