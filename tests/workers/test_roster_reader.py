"""The nodes of a run are asked only as long as the trainers' list of them may be right."""

from __future__ import annotations

from pathlib import Path

from tests.support.rooms import RUN, rooms_at
from tierd.context import RunRoster
from tierd.format import wire
from tierd.format.ids import Generation, Rank
from tierd.format.peers import NodeAddress
from tierd.workers.roster_reader import RosterReader

NODE = wire.NodeRanks(ranks=[0], lowest=[0, 1], claim="ab" * 16, base=0)


async def test_the_nodes_of_a_start_that_goes_on_elsewhere_are_not_asked(tmp_path: Path) -> None:
    """Its trainers left long ago. A node of it may have been replaced, which is no failure of the run."""
    async with rooms_at(tmp_path) as rooms:
        reader = RosterReader(rooms.context, lambda run: None)
        rooms.seal(1, [b"state"], node=NODE, world_size=2, number=1)
        await rooms.persister().run_once()
        nodes = [NodeAddress(ranks=[0]), NodeAddress(ranks=[1])]
        rooms.context.rosters[RUN] = RunRoster(Generation(1), nodes, [0])
        assert [node.ranks for node in await reader.read(RUN) or []] == [[0], [1]]
        rooms.memory.leave(RUN, Rank(0), now_s=0.0)
        rooms.memory.forget_departed(now_s=1e12, grace_s=0.0)
        assert len(await reader.read(RUN) or []) == 2
        rooms.catalog.saw_generation(RUN, 2)  # another node has claimed it
        assert await reader.read(RUN) is None
