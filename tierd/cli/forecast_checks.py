"""The forecast of `tierd doctor --state-gb`: whether disks, links and memory suffice for a run that has not begun."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierd.config.sections import ColdConfig, Config
from tierd.format.ids import HOT
from tierd.format.text import duration, size
from tierd.lifecycle.forecast import FULL_SOON_S, GIB, MONTH_S, Forecast, needs
from tierd.lifecycle.pressure import room_for_next
from tierd.local_checks import memlock
from tierd.status.report import StatusReport
from tierd.tiers.probe import Advice, free_bytes_at, nearest_existing, write_rate

MEASURED_BYTES = 64 << 20  # less takes mostly latency, and shows no rate
ROOM_TO_MEASURE = 8  # times MEASURED_BYTES: a disk with less free space is not filled further


@dataclass(frozen=True, slots=True)
class Planned:
    """A run that saves `state_bytes` on this node every `interval_s`, which is every `steps` steps."""

    state_bytes: int
    interval_s: float
    steps: int


def forecast_advice(config: Config, planned: Planned, status: StatusReport | None) -> Iterator[Advice]:
    """`status`: of the daemon, which has measured its links; None: none answers."""
    cold = {each.name: each.price_per_gib_month for each in config.cold}
    forecasts = needs(
        config.lifecycle,
        cold=cold,
        own=config.own_policies,
        checkpoint_bytes=planned.state_bytes,
        interval_s=planned.interval_s,
        steps=planned.steps,
    )
    by_tier = {forecast.tier: forecast for forecast in forecasts}
    yield _space(HOT, config.hot_path, by_tier[HOT], planned, room_bytes=room_for_next([planned.state_bytes]))
    yield _disk_rate(HOT, config.hot_path, planned)
    for tier in config.cold:
        path = tier.directory
        yield _space(tier.name, path, by_tier[tier.name], planned)
        if path is not None:
            yield _disk_rate(tier.name, path, planned)
        yield from _link(tier, planned, status)
    yield from memlock(config, planned.state_bytes)


def _space(about: str, path: Path | None, need: Forecast, planned: Planned, *, room_bytes: int = 0) -> Advice:
    steady_bytes = (need.steady_gib or 0.0) * GIB + room_bytes
    growth_bytes = (need.growth_gib or 0.0) * GIB
    message = f"a state of {size(planned.state_bytes)} every {duration(planned.interval_s)} needs {size(steady_bytes)}"
    if growth_bytes:
        message += f", and {size(growth_bytes)} more each month, which is kept for good"
    if need.steady_cost is not None:
        message += f"; it costs {need.steady_cost:.3g} a month, and each month {need.growth_cost or 0.0:.3g} more"
    if path is None:
        return Advice("forecast", about, "ok", message)
    free_bytes = free_bytes_at(path)
    message += f"; {size(free_bytes)} are free"
    hint = "keep fewer ([lifecycle]), save less often, or use a larger disk; docs/RUNBOOK.md#disk-full"
    if steady_bytes > free_bytes:
        return Advice("forecast", about, "warning", message, hint)
    if growth_bytes and (full_s := (free_bytes - steady_bytes) / growth_bytes * MONTH_S) < FULL_SOON_S:
        return Advice("forecast", about, "warning", f"{message}: full in {duration(full_s)}", hint)
    return Advice("forecast", about, "ok", message)


def _disk_rate(about: str, path: Path, planned: Planned) -> Advice:
    existing = nearest_existing(path)
    if free_bytes_at(path) < ROOM_TO_MEASURE * MEASURED_BYTES:
        return Advice("write rate", about, "note", f"{existing} is too full to be measured")
    try:
        bytes_per_s = write_rate(existing, MEASURED_BYTES)
    except OSError as error:
        return Advice("write rate", about, "note", f"{existing} could not be measured: {error.strerror}")
    takes_s = planned.state_bytes / bytes_per_s
    message = f"{existing} takes {size(bytes_per_s)}/s (64 MiB measured): {duration(takes_s)} for each save"
    return _rated("write rate", about, message, takes_s, planned)


def _link(tier: ColdConfig, planned: Planned, status: StatusReport | None) -> Iterator[Advice]:
    """The cap of the config, and what the daemon has measured."""
    if tier.max_upload_mib_s:
        takes_s = planned.state_bytes / (tier.max_upload_mib_s * (1 << 20))
        message = f"max_upload_mib_s = {tier.max_upload_mib_s:g} allows a copy in {duration(takes_s)}"
        yield _rated("upload cap", tier.name, message, takes_s, planned)
    reports = [] if status is None else [each for each in status.tiers if each.name == tier.name]
    copies = [] if status is None else [each for each in status.queues if each.tier == tier.name]
    for report, queue in zip(reports, copies, strict=False):
        if queue.copy_s and report.used_bytes and report.checkpoints:
            copied_bytes = report.used_bytes / report.checkpoints
            if copied_bytes < MEASURED_BYTES:
                message = f"the daemon's copies, of {size(copied_bytes)}, are too small to show the rate"
                yield Advice("upload rate", tier.name, "note", message)
                return
            bytes_per_s = copied_bytes / queue.copy_s
            takes_s = planned.state_bytes / bytes_per_s
            message = f"the daemon's copies went at {size(bytes_per_s)}/s: {duration(takes_s)} for each save"
            yield _rated("upload rate", tier.name, message, takes_s, planned)
            return
    if tier.directory is None:
        needed = f"{size(planned.state_bytes / planned.interval_s)}/s"
        message = f"to copy every save, the link must carry {needed}; no copy has shown its rate yet"
        yield Advice("upload rate", tier.name, "note", message)


def _rated(check: str, about: str, message: str, takes_s: float, planned: Planned) -> Advice:
    if takes_s <= planned.interval_s:
        return Advice(check, about, "ok", message)
    message += f", and a save is due every {duration(planned.interval_s)}: some are replaced before they arrive"
    return Advice(check, about, "warning", message, "save less often; docs/RUNBOOK.md#cold-too-slow")
