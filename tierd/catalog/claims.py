"""The generations that were seen in the tiers, and what they say about checkpoints that this daemon has not written.

A daemon claims a generation in the cold tiers and in its hot tier before a trainer gets it, and a copy to a cold tier
begins with the claim if that tier lacks it. Pure: no I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from tierd.catalog.entry import Entry, recency
from tierd.format.ids import CheckpointId, Run, generation_limit
from tierd.lifecycle.policy import HOT


class Claims:
    """`written_here`: checkpoints that this daemon has committed, copied or has in memory; changed only here.
    `are_signed`: the tiers are read with a key, so that only what is signed is listed. `on_change`: called when what is
    in doubt may be another than before."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self.written_here: set[CheckpointId] = set()
        self._written: Counter[tuple[Run, int]] = Counter()  # of those: how many, by generation
        self.are_signed = False
        self._highest: dict[Run, dict[str, int]] = {}  # by tier
        self._claimed_here: dict[Run, set[int]] = {}  # in this hot tier
        self._named_generations: dict[Run, dict[str, frozenset[int]]] = {}  # by tier

    def wrote(self, checkpoint: CheckpointId) -> None:
        if checkpoint not in self.written_here:
            self.written_here.add(checkpoint)
            self._written[checkpoint.run, checkpoint.generation] += 1
            self._on_change()

    def forget_written(self, checkpoint: CheckpointId) -> None:
        if checkpoint in self.written_here:
            self.written_here.remove(checkpoint)
            self._written[checkpoint.run, checkpoint.generation] -= 1

    def saw(self, run: Run, generations: Iterable[int], tier: str, *, is_here: bool) -> None:
        """Claims of the run in a tier. `is_here`: it is this hot tier."""
        claimed = {*generations}
        highest, here = self._highest.setdefault(run, {}), self._claimed_here.get(run, set())
        former, highest[tier] = highest.get(tier, 0), max([highest.get(tier, 0), *claimed])
        if is_here:
            self._claimed_here[run] = here | claimed
        if highest[tier] > former or (is_here and not claimed <= here):
            self._on_change()

    def was_claimed_here(self, run: Run, generation: int) -> bool:
        """Whether this hot tier has a claim of the generation."""
        return generation in self._claimed_here.get(run, ())

    def saw_names(self, run: Run, generations: Iterable[int], tier: str) -> None:
        """The generations in names of claims and manifests of the run, signed or not, as the tier lists them now."""
        self._named_generations.setdefault(run, {})[tier] = frozenset(generations)

    def names(self, run: Run, tier: str) -> frozenset[int]:
        """As `saw_names` was told last."""
        return self._named_generations.get(run, {}).get(tier, frozenset())

    def count_everywhere(self) -> None:
        """For a program without a hot tier: the highest claim in any tier counts like one that was made here."""
        for run in self._highest:
            if generation := self._highest_anywhere(run):
                self._claimed_here.setdefault(run, set()).add(generation)

    def generation_limit(self, run: Run, now_s: float) -> int:
        """The highest generation of a run that is accepted from a cold tier. `now_s`: Unix time."""
        return generation_limit(max(self._claimed_here.get(run, ()), default=0), now_s)

    def joined_limit(self, run: Run, newest: int, now_s: float) -> int:
        """The highest generation that a trainer may name. `newest`: the highest one seen. Trainers got theirs from a
        daemon here, which claimed it in hot unless hot was full, so at most one is above `newest`. If hot was lost with
        its claims, any generation up to the limit is accepted, so that running trainers can come back."""
        return newest + 1 if self._claimed_here.get(run) else max(newest, self.generation_limit(run, now_s))

    def forget(self, run: Run) -> None:
        """The claims of a run without checkpoints were deleted."""
        for known in (self._highest, self._claimed_here, self._named_generations):
            known.pop(run, None)

    def next_free(self, run: Run, least: int, now_s: float) -> int:
        """The number to try for a new generation: at least `least`, above the generations in the names of all files up
        to the limit, and not in the name of an existing file. A name proves nothing else: a file may be forged."""
        names = frozenset[int]().union(*self._named_generations.get(run, {}).values())
        limit = generation_limit(0, now_s)  # it does not move with the claims: jumps of a thousand would add up
        number = max([least, *(name + 1 for name in names if name < limit)])
        while number in names:
            number += 1
        return number

    def least_above(self, seen: int, now_s: float) -> int:
        """The least number of a new generation, where trainers say that nodes have seen `seen`. As in `next_free`, what
        they say leads no further than the limit of a run that has no claims here."""
        return 1 + min(seen, generation_limit(0, now_s))

    def lacks(self, tier: str, checkpoint: CheckpointId) -> bool:
        """Whether the tier, as far as it was listed, has no claim of the checkpoint's generation or of a later one."""
        return checkpoint.generation > self._highest.get(checkpoint.run, {}).get(tier, 0)

    def has_claims_here(self, run: Run) -> bool:
        """Without one, nothing of the run is in doubt."""
        return bool(self._claimed_here.get(run))

    def to_judge(self, run: Run, entries: Sequence[Entry], here: Container[tuple[Run, int]]) -> Iterator[Entry]:
        """Those of a run's `entries` (oldest first) that are in doubt or decide whether others are, newest first. Of a
        claimed generation: from its newest down to the first that is in hot or that this daemon has written; none if
        there is no such entry. Of a generation above all claims: all. `here`: the generations with any in hot."""
        highest, end = self._highest_anywhere(run), len(entries)
        while end:
            generation = entries[end - 1].id.generation
            begin = bisect_left(entries, (generation, 0), hi=end, key=recency)
            is_claimed = generation <= highest
            if not is_claimed or (run, generation) in here or self._written[run, generation]:
                for index in range(end - 1, begin - 1, -1):
                    entry = entries[index]
                    yield entry
                    if is_claimed and (HOT in entry.tiers or entry.id in self.written_here):
                        break
            end = begin

    def doubts(self, is_in_hot: Mapping[CheckpointId, bool]) -> dict[CheckpointId, str]:
        """The checkpoints that no daemon with a claim of the run seems to have committed, each with the reason. Empty
        where the tiers are read with a key. Checkpoints of runs that were never claimed here are not judged."""
        if self.are_signed:
            return {}
        doubts = self._not_written_here(is_in_hot)
        for checkpoint, is_hot in is_in_hot.items():
            is_judged = (
                bool(self._claimed_here.get(checkpoint.run)) and not is_hot and checkpoint not in self.written_here
            )
            if is_judged and checkpoint.generation > self._highest_anywhere(checkpoint.run):
                doubts[checkpoint] = f"{checkpoint}: no tier has a claim of generation {checkpoint.generation}"
        return doubts

    def shared_generations(self, is_in_hot: Mapping[CheckpointId, bool]) -> dict[CheckpointId, str]:
        """The checkpoints of the newest generation claimed here that this daemon has not written, each with the reason,
        signed or not: another daemon may hold the same generation."""
        not_written = self._not_written_here(is_in_hot)
        return {c: why for c, why in not_written.items() if c.generation == max(self._claimed_here[c.run])}

    def _not_written_here(self, is_in_hot: Mapping[CheckpointId, bool]) -> dict[CheckpointId, str]:
        """The checkpoints of generations claimed here that are newer than the newest of their generation that is in hot
        or written by this daemon, each with the reason.

        Left out are checkpoints whose step a later generation has reached here. After that, hot may keep an older
        checkpoint of the earlier generation that waits for a cold tier, but not the newest, which after a restart of
        this daemon would seem to be of another node."""
        newest_here: dict[tuple[Run, int], int] = {}
        for checkpoint, is_hot in is_in_hot.items():
            if is_hot or checkpoint in self.written_here:
                timeline = (checkpoint.run, checkpoint.generation)
                newest_here[timeline] = max(checkpoint.step, newest_here.get(timeline, -1))

        def was_passed(checkpoint: CheckpointId) -> bool:
            return any(
                run == checkpoint.run and generation > checkpoint.generation and step >= checkpoint.step
                for (run, generation), step in newest_here.items()
            )

        reasons: dict[CheckpointId, str] = {}
        for checkpoint, is_hot in is_in_hot.items():
            run, generation = checkpoint.run, checkpoint.generation
            if is_hot or checkpoint in self.written_here or generation not in self._claimed_here.get(run, ()):
                continue
            if checkpoint.step > newest_here.get((run, generation), checkpoint.step) and not was_passed(checkpoint):
                reasons[checkpoint] = (
                    f"{checkpoint}: this node claimed generation {generation} and has not written it: another node may "
                    "hold the same generation, or it is forged"
                )
        return reasons

    def _highest_anywhere(self, run: Run) -> int:
        return max(self._highest.get(run, {}).values(), default=0)
