"""A daemon's configuration below one folder, for tests of a single worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tierd.config.sections import ColdConfig, Config, DaemonConfig, HealthConfig, HotConfig, LimitsConfig


def make_config(root: Path, *, cold: tuple[str | ColdConfig, ...] = ("cold",), **sections: Any) -> Config:
    """All directories below `root`, short waits, and no examination for NaN: these shards are plain bytes. `cold`: the
    names of directories, or whole sections."""
    config = Config(
        daemon=DaemonConfig(socket=str(root / "tierd.sock"), listen="127.0.0.1:0", node="here", drain_timeout_s=10.0),
        hot=HotConfig(path=str(root / "hot")),
        cold=[ColdConfig(name=tier, url=f"file://{root / tier}") if isinstance(tier, str) else tier for tier in cold],
        health=HealthConfig(examine=False),
        limits=LimitsConfig(hello_timeout_s=2.0, reconcile_interval_s=0.2, retry_min_s=0.05, retry_max_s=0.2),
    )
    return msgspec.structs.replace(config, **sections)
