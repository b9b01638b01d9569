"""Nodes that adopt together while something differs between them: the tiers they reach, their clocks, their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.framework_saves import save_dcp_on, save_deepspeed_on
from tests.workers.test_announcements import SPREAD_S, made, shift
from tierd.errors import TierUnreachable
from tierd.tiers.tier import Tier


async def test_a_node_takes_the_newest_head_of_all_cold_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with made(tmp_path, 2, preset="deepspeed", cold=("cold", "dr")) as nodes:
        home, other = nodes.nodes
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look(home)
        shift(save_deepspeed_on(nodes.outs, 10), SPREAD_S + 30)  # the training has gone back
        nodes.ahead_s += SPREAD_S + 30
        listing = Tier.listing

        async def fails(tier: Tier, *arguments: Any, **keys: Any) -> object:
            if tier.name == "cold":
                raise TierUnreachable("list cold: no answer")
            return await listing(tier, *arguments, **keys)

        with monkeypatch.context() as broken:
            broken.setattr(Tier, "listing", fails)
            await nodes.look(home)
        assert home.parts[10][:2] == (2, 2)
        await nodes.look(other)
        assert other.parts == home.parts, "the head in the first tier is of the save before"


async def test_a_node_whose_clock_is_behind_adopts_what_was_saved_while_its_daemon_was_down(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        home, other = nodes.nodes
        save_deepspeed_on(nodes.outs, 10)
        shift([other.out / "global_step10"], -30)
        await nodes.look()
        await other.watcher.close()
        shift(save_deepspeed_on(nodes.outs, 20), 20)
        shift([other.out / "global_step20"], -30)  # before step 10 by the clock of node 0
        nodes.ahead_s += 20
        other.restart()
        await nodes.look(home)
        await nodes.look(other)
        assert {step: part[:2] for step, part in other.parts.items()} == {10: (1, 1), 20: (1, 2)}


async def test_of_dcp_a_save_that_was_killed_neither_delays_the_end_of_a_daemon_nor_counts_as_behind(
    tmp_path: Path,
) -> None:
    async with made(tmp_path, 2, preset="dcp") as nodes:
        other = nodes.nodes[1]
        folders = save_dcp_on(nodes.outs, 5)
        (folders[0] / ".metadata").unlink()
        await nodes.look()
        assert other.watcher.unfinished(0.0) == ["step-5"], "node 0 may announce it in a moment"
        shift(save_dcp_on(nodes.outs, 10), SPREAD_S + 30)
        nodes.ahead_s += SPREAD_S + 30
        await nodes.look()
        await nodes.look()
        assert list(other.parts) == [10]
        assert "step-5: node 0 has not announced step 5 yet" in other.waiting
        assert other.watcher.unfinished(0.0) == []
        assert other.watcher.report().pending == 0
