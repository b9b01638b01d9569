"""SIGHUP changes upload caps. For every other key that differs, the log says that a restart is needed."""

from __future__ import annotations

import logging

import msgspec

from tierd.config import ColdConfig, Config
from tierd.config_file import differences

log = logging.getLogger("tierd")


def reloaded(config: Config, fresh: Config) -> Config:
    """`config` with the upload caps of `fresh`."""
    caps = {tier.name: tier.max_upload_mib_s for tier in fresh.cold}
    cold: list[ColdConfig] = []
    for tier in config.cold:
        cap = caps.get(tier.name, tier.max_upload_mib_s)
        if cap != tier.max_upload_mib_s:
            log.info("SIGHUP: max_upload_mib_s of %s is now %g, was %g", tier.name, cap, tier.max_upload_mib_s)
        cold.append(msgspec.structs.replace(tier, max_upload_mib_s=cap))
    config_with_caps = msgspec.structs.replace(config, cold=cold)
    others = differences(config_with_caps, fresh)
    if others:
        log.warning("SIGHUP: these keys changed and need a restart: %s", ", ".join(others))
    elif cold == config.cold:
        log.info("SIGHUP: the config has not changed")
    return config_with_caps
