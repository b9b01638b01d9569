"""Which version of its key a sidecar file goes on in, where two daemons copy different files of one run and name.

A version is of one file. A daemon that finds segments of another file in its own leaves it, and copies its file whole
into another version. So nothing is lost, however the two begin, and whichever of them is killed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from tierd.context import DaemonContext
from tierd.errors import Corrupt, Foreign, NotFound, TierdError
from tierd.format.sidecar import VERSION_MAX, Segment, chain
from tierd.transfer.sidecar_copy import FileState, of_other_files
from tierd.transfer.sidecar_output import read_segment

SPREAD = 8  # versions, of which two daemons that leave one each choose one


class SidecarVersions:
    def __init__(self, context: DaemonContext, rng: random.Random) -> None:
        self._context, self._random = context, rng
        self._unsigned: set[str] = set()  # the keys of segments of other files that count for nothing

    async def is_shared(self, of_version: Mapping[str, Sequence[Segment]], state: FileState) -> bool:
        """Whether a tier has segments of another file in a version. With a key, what it has not signed is none. Raises
        TierUnreachable."""
        for name, segments in of_version.items():
            for each in of_other_files(segments, state):
                if self._context.tiers[name].keyring is None or await self._is_signed(name, each):
                    return True
        return False

    async def is_beginning(self, of_version: Mapping[str, Sequence[Segment]], state: FileState) -> bool:
        """Whether the tiers with other segments have all of the file, and more: it may be an old view of it, on storage
        that machines share. What cannot be read now does not speak against it."""
        for name, segments in of_version.items():
            others = of_other_files(segments, state)
            last = next((each for each in chain(segments) if each.end > state.settled and not each.is_tail), None)
            if not others:
                continue
            if last is None or min(each.end for each in others) <= state.settled:
                return False
            try:
                _, content, _ = await read_segment(self._context.tiers[name], last)
            except (Corrupt, Foreign):
                return False
            except TierdError:
                continue
            digest = state.hashes[last.begin].copy()
            digest.update(content[: state.settled - last.begin])
            if digest.hexdigest() != state.digest(state.settled):
                return False
        return True

    async def _is_signed(self, tier: str, segment: Segment) -> bool:
        if segment.key in self._unsigned:
            return False
        try:
            await read_segment(self._context.tiers[tier], segment)
        except NotFound:  # merged since it was listed
            return False
        except (Corrupt, Foreign):
            self._unsigned.add(segment.key)
            return False
        return True

    async def next_version(
        self, version: int, newest: int, later: Mapping[str, Sequence[Segment]], state: FileState, *, is_shared: bool
    ) -> int:
        """Where a file goes on that leaves `version`, and why: `is_shared`, or its past has changed. `later`: the
        segments of the `newest` version, which another daemon that follows the same file may have begun just now.
        Raises Corrupt if no key can hold the next version: a listing would not show it."""
        if newest > version and not await self.is_shared(later, state):
            return newest
        # The daemon of the other file leaves the version too, maybe at this moment.
        number = max(newest, version) + (self._random.randint(1, SPREAD) if is_shared else 1)
        if number > VERSION_MAX:
            raise Corrupt(
                f"copy {state.path}: a tier has version {max(newest, version)} of it, and no number comes after that",
                hint="tierd did not write that version; see what it is with `tierd sidecars`, and delete its objects",
            )
        return number
