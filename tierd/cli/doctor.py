"""`tierd doctor`: checks config, directories, daemon and buckets for common mistakes, and says how to fix them.

Run it as the daemon's user, on the daemon's machine: it checks what that user may do. It deletes what it writes: a
probe object in each bucket, and with `--state-gb` a temporary file on each disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd import __version__
from tierd.catalog.identity import Identities
from tierd.cli import daemon_http, options
from tierd.cli.console import now, print_report, print_result
from tierd.cli.forecast_checks import Planned, forecast_advice
from tierd.cli.opened_tiers import open_tiers, open_unlisted
from tierd.cli.options import Settings, check_tier, settings_of
from tierd.cli.peer_checks import check_peers, check_shared_cold
from tierd.cold_tier import exposed
from tierd.config import file as config_file
from tierd.config.sections import ColdConfig, Config, WatchConfig
from tierd.errors import BadConfig, DaemonUnreachable, NotFound, TierdError, TierUnreachable
from tierd.format.ids import HOT
from tierd.keys.key_file import keyring_of
from tierd.lifecycle.watched import is_name, misfit, preset_of
from tierd.local_checks import clock, limits, no_cold, same_disk, sizes, socket
from tierd.tiers.probe import Advice, probe_directory, problem_of
from tierd.tiers.tier_listing import Listing
from tierd.transfer.watched_folder import names

REQUEST_TIMEOUT_S_MAX = 10.0  # a person waits at the terminal
_MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}


async def doctor(
    context: typer.Context,
    only: options.TierName = None,
    state_gb: Annotated[
        float | None,
        typer.Option(
            "--state-gb", metavar="GB", min=1e-6, max=1e9, help="Forecast for a run that saves so much on this node."
        ),
    ] = None,
    every_s: Annotated[
        float,
        typer.Option("--every-s", metavar="SECONDS", min=1.0, max=1e9, help="With --state-gb: how often it saves."),
    ] = 600.0,
    every_steps: Annotated[
        int,
        typer.Option("--every-steps", metavar="N", min=1, max=10**9, help="With --state-gb: how many steps that is."),
    ] = 1,
    json: options.Json = False,
) -> int:
    """Check config, directories, daemon and buckets for mistakes. Deletes what it writes. With --state-gb, also whether
    disks, links and memory suffice for a run before its first step."""
    advice = await _check(settings_of(context), only)
    if state_gb is not None and not any(each.check == "config" and each.verdict == "problem" for each in advice):
        planned = Planned(int(state_gb * 1e9), every_s, every_steps)
        advice += await _forecast(settings_of(context).config(), planned, only)
    print_report(advice, as_json=json, text=_print)
    problems = [each for each in advice if each.verdict == "problem"]
    return problems[0].exit_code if problems else int(any(each.verdict == "warning" for each in advice))


async def _forecast(loaded: Config, planned: Planned, only: str | None) -> list[Advice]:
    status = None
    with suppress(DaemonUnreachable):  # reported by the other checks
        status = daemon_http.find(loaded).status
    advice = await asyncio.to_thread(lambda: list(forecast_advice(loaded, planned, status)))
    return [each for each in advice if only in (None, each.about)]


def _print(advice: list[Advice]) -> None:
    for each in advice:
        print_result(f"{_MARKS[each.verdict]:<8} {each.about:<8} {each.message}")
        if each.hint and each.verdict != "ok":
            print_result(f"{'':<18}hint: {each.hint}")


async def _check(settings: Settings, only: str | None) -> list[Advice]:
    try:
        path, loaded = config_file.find_file(settings.config_file), settings.config()
    except BadConfig as error:
        return [problem_of("config", "config", error)]
    check_tier(only, loaded)
    defaults = f"there is no config file: the built-in defaults apply, and the hot tier is {loaded.hot_path}"
    all_advice = [Advice("config", "config", "ok", f"{path} is valid" if path else defaults)]
    try:
        keyring_of(loaded.security.key_file)
    except BadConfig as error:
        return [*all_advice, problem_of("key", "config", error)]
    if only in (None, HOT):
        all_advice += probe_directory(HOT, loaded.hot_path, is_hot=True)
        async with open_tiers(settings, only=HOT) as tiers:
            all_advice += [*sizes(loaded, tiers.catalog.manifests_in(HOT)), *clock(tiers.catalog.views(), now())]
    places = [advice for advice in await _places(loaded) if only in (None, advice.about)]
    # Skip the other checks of a directory that is not the tier's.
    absent = [advice.about for advice in places if advice.check == "place" and advice.verdict == "problem"]
    colds = [cold for cold in loaded.cold if only in (None, cold.name)]
    colds = [cold for cold in colds if cold.name not in absent or cold.directory is None]
    for of_tier in await asyncio.gather(*(_cold(cold, loaded) for cold in colds)):
        all_advice += of_tier
    all_advice += [advice for advice in exposed(loaded) if only in (None, advice.about)]
    all_advice += places
    if only is None:
        all_advice += no_cold(loaded)
        all_advice += await asyncio.to_thread(lambda: list(map(_watch, loaded.watch)))
        all_advice += [*limits(), socket(loaded), *_daemon(loaded)]
        with suppress(DaemonUnreachable):  # reported above
            status = daemon_http.find(loaded).status
            all_advice += [advice async for advice in check_shared_cold(loaded, status)]
            all_advice += [advice async for advice in check_peers(loaded, status)]
    return all_advice


async def _cold(cold: ColdConfig, loaded: Config) -> list[Advice]:
    if (path := cold.directory) is not None:
        return [*probe_directory(cold.name, path, is_hot=False), *same_disk(cold, loaded)]
    # Imported here, so that boto3 is loaded only if a bucket is configured.
    from tierd.s3.probe import BucketProbe
    from tierd.s3.requests import S3Requests

    timeout_s = min(REQUEST_TIMEOUT_S_MAX, loaded.limits.request_timeout_s)
    requests = S3Requests(cold, msgspec.structs.replace(loaded.limits, request_timeout_s=timeout_s))
    try:
        return await BucketProbe(requests, cold, now).run()
    finally:
        await requests.close()


async def _places(loaded: Config) -> list[Advice]:
    """Whether each tier is the place that it was before, and not the place of another tier."""
    found: list[Advice] = []
    identities, folders = Identities(loaded), dict[tuple[int, int], str]()
    for tier in open_unlisted(loaded):
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S_MAX):
                listing = Listing(identities=await tier.identities())
        except (TierdError, TimeoutError):
            continue  # the other checks of this tier report it
        finally:
            await tier.store.close()
        try:
            await identities.check(tier, listing)
        except TierUnreachable as error:
            found.append(problem_of("place", tier.name, error))
            continue
        root = loaded.directories.get(tier.name)
        if root is not None and root.is_dir():  # also before there is any marker
            status = root.stat()
            if (other := folders.setdefault((status.st_dev, status.st_ino), tier.name)) != tier.name:
                message = f"{root.absolute()} is the same directory as {other}: one replica would count as two"
                found.append(
                    problem_of("place", tier.name, BadConfig(message, hint="give each tier a place of its own"))
                )
    return found


def _watch(watch: WatchConfig) -> Advice:
    """Whether the folder can be read, and whether the preset fits the names. Blocks."""
    preset = preset_of(watch)
    try:
        folders = names(Path(watch.path)).folders
    except NotFound:
        message = f"{watch.path} does not exist yet: the daemon waits for it"
        return Advice("watch", "watch", "note", message, "is the path right? It counts from the folder of the config")
    except TierdError as error:
        return problem_of("watch", "watch", error)
    path = Path(watch.path)
    found = sum(is_name(name, preset, is_folder=is_folder) for name, is_folder in folders.items())
    if found:
        message = f"{path} has {found} checkpoint{'' if found == 1 else 's'} by the names, as {preset.example}"
        return Advice("watch", "watch", "ok", message)
    if is_name(path.name, preset, is_folder=True):
        message = f"{path} is a checkpoint by its name, and no checkpoint is in it"
        return Advice("watch", "watch", "problem", message, f"the path of their folder is {path.parent}")
    if error := misfit(f"watch {path}", folders, preset):
        return problem_of("watch", "watch", error)
    return Advice("watch", "watch", "note", f"{path} has no checkpoint yet, such as {preset.example}")


def _daemon(loaded: Config) -> Iterator[Advice]:
    try:
        status = daemon_http.find(loaded).status
    except DaemonUnreachable as error:
        yield problem_of("daemon", "daemon", error)
        return
    if status.version != __version__:
        message = f"the daemon is version {status.version}, this command is {__version__}"
        hint = "restart the daemon: it drains, and trainers attach again by themselves"
        yield Advice("version", "daemon", "warning", message, hint)
    else:
        yield Advice("daemon", "daemon", "ok", f"version {status.version} answers, pid {status.pid}")
    for tier in status.tiers:
        if not tier.is_known and tier.error:
            message = f"the daemon does not reach {tier.name}: {tier.error}"
            hint = "if the tier can be reached from here: does the daemon use another user or other credentials?"
            yield Advice("reach", "daemon", "problem", message, hint, TierUnreachable.exit_code)
    for reason in status.foreign:
        hint = "docs/RUNBOOK.md#foreign-checkpoints"
        yield Advice("foreign", "daemon", "warning", f"not signed or claimed by this run's daemons: {reason}", hint)
    for reason in status.halted:
        hint = "docs/RUNBOOK.md#halted"
        yield Advice("halted", "daemon", "warning", f"deletion is halted: {reason}", hint)
