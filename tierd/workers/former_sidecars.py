"""Completes the cold tiers with former versions of sidecar files, and with files that are gone, from another tier.

A cold tier that did not answer when they were written lacks them. Where it has another file under the same name and
version, both stay there: readers find each by its digests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tierd.context import DaemonContext
from tierd.errors import TierdError
from tierd.format.sidecar import Segment, chain
from tierd.transfer.sidecar_output import prefix_digests, verified_segments


class FormerSidecars:
    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        # File, version, source and target, of what another version in the target begins with: to see it reads all.
        self._known: set[tuple[str, int, str, str]] = set()

    async def complete(
        self, stored: Mapping[str, Sequence[Segment]], followed: Mapping[str, int]
    ) -> dict[str, TierdError]:
        """`stored`: the segments of the run by tier. `followed`: the version of each file that is followed, which is
        left out; 0 leaves out all of a file. Returns what is wrong, by what was copied."""
        problems: dict[str, TierdError] = {}
        versions = {(each.file, each.version) for segments in stored.values() for each in segments}
        for file, version in sorted(each for each in versions if followed.get(each[0]) not in (0, each[1])):
            of_file = {tier: [each for each in segments if each.file == file] for tier, segments in stored.items()}
            for target in stored.keys() & self._context.cold.keys():
                for source in stored.keys() - {target}:
                    try:
                        await self._complete(file, version, source, target, of_file)
                    except TierdError as error:
                        problems[f"{file} version {version} in {target}"] = error
        return problems

    async def _complete(
        self, file: str, version: int, source: str, target: str, of_file: Mapping[str, Sequence[Segment]]
    ) -> None:
        path = chain([each for each in of_file[source] if each.version == version])
        there = {(each.end, each.after) for each in of_file[target] if each.version == version}
        if not path or (path[-1].end, path[-1].after) in there or (file, version, source, target) in self._known:
            return
        if await self._is_in(target, path[-1], of_file[target]):
            self._known.add((file, version, source, target))
            return
        async for segment, raw, _ in verified_segments(self._context.tiers[source], path):
            if segment not in of_file[target]:
                await self._context.tiers[target].store.put_bytes(segment.key, raw, if_absent=True)

    async def _is_in(self, target: str, last: Segment, segments: Collection[Segment]) -> bool:
        """Whether a version in the target begins with the file up to the end of `last`."""
        for version in sorted({each.version for each in segments}):
            path = chain([each for each in segments if each.version == version])
            if path and path[-1].end >= last.end:
                digests = await prefix_digests(self._context.tiers[target], path, [last.end])
                if digests.get(last.end) == last.after:
                    return True
        return False
