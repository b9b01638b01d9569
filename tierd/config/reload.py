"""SIGHUP changes the lifecycle and the upload caps; the log names other keys that differ and need a restart."""

from __future__ import annotations

import logging

import msgspec

from tierd.config.file import differences
from tierd.config.sections import ColdConfig, Config

log = logging.getLogger("tierd")


def reloaded(config: Config, fresh: Config) -> Config:
    """`config` with the lifecycle and the upload caps of `fresh`."""
    tiers = {tier.name: tier for tier in fresh.cold}

    def with_fresh_keys(tier: ColdConfig) -> ColdConfig:
        other = tiers.get(tier.name, tier)
        return msgspec.structs.replace(tier, lifecycle=other.lifecycle, max_upload_mib_s=other.max_upload_mib_s)

    after = msgspec.structs.replace(config, lifecycle=fresh.lifecycle, cold=list(map(with_fresh_keys, config.cold)))
    changed = differences(config, after)
    for key, (old, new) in changed.items():
        log.info("SIGHUP: %s is now %s, was %s", key, new, old)
    if others := differences(after, fresh):
        log.warning("SIGHUP: these keys changed and need a restart: %s", ", ".join(others))
    elif not changed:
        log.info("SIGHUP: the config has not changed")
    return after
