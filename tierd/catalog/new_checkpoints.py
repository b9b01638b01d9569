"""What other processes have committed of one run in the hot tier since it was listed: daemons that watch, and commands.

The names of the folders show what is new. To list the whole run before each adoption would make a history of n
checkpoints cost n² readings of folders.
"""

from __future__ import annotations

import os
from pathlib import Path

from tierd.catalog.catalog import Catalog
from tierd.catalog.identity import Identities
from tierd.catalog.listing import refresh_run
from tierd.format import layout
from tierd.format.ids import Run, parse_name
from tierd.tiers.pool import ThreadPool
from tierd.tiers.tier import Tier
from tierd.tiers.tree import translated

ONE_BY_ONE_MAX = 16  # more are listed together


async def refresh_new(
    catalog: Catalog, hot: Tier, run: Run, identities: Identities, *, folder: Path, pool: ThreadPool
) -> None:
    """`folder`: of the run in `hot`. `pool`: for calls to it. Raises as `refresh_run`."""
    await identities.check(hot)
    known = {entry.id.name for entry in catalog.entries(run) if hot.name in entry.tiers}
    with translated(f"list {folder}"):
        names = await pool.query(os.listdir, folder)
    new = [checkpoint for name in names if name not in known and (checkpoint := parse_name(run, name)) is not None]
    if len(new) > ONE_BY_ONE_MAX:
        return await refresh_run(catalog, hot, run, identities)
    for checkpoint in new:
        await refresh_run(catalog, hot, run, identities, prefix=layout.checkpoint_prefix(checkpoint))
