"""`tierd verify`: compares every replica with the checksums of its manifest, and repairs damaged ones on request.

By default it causes no egress: a directory is read whole, a bucket is asked for the checksums that it keeps. Without
`--repair` it changes nothing. A replica that the lifecycle deletes meanwhile is not reported. One that disappeared
otherwise is: the daemon knows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Annotated

import msgspec
import typer

from tierd.catalog.decisions import waiting
from tierd.cli import daemon_http, options
from tierd.cli.console import print_note, print_report, print_result, progress_bar, size
from tierd.cli.opened_tiers import PARTIAL, OpenedTiers, exit_code, open_tiers
from tierd.cli.options import check_tier, parse_query, settings_of
from tierd.config.sections import Config
from tierd.errors import BadConfig, Corrupt, Foreign, NewerFormat, NotFound, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import HOT, CheckpointId
from tierd.lifecycle.selection import CheckpointQuery, with_run
from tierd.tiers.store import Progress
from tierd.transfer.repair import Repair, repair_replica
from tierd.transfer.verify import Proof, verify_replica

_PROOFS = {Proof.DEEP: "read whole", Proof.CHECKSUM: "by the bucket's checksums", Proof.SIZE: "size only"}


class Verified(msgspec.Struct, kw_only=True):
    """One replica. `problems`: one sentence each. `how`: what proves it: deep, checksum or size. `repaired`: by file
    name, the tier it was copied from. `refused`: why a file was not repaired. `unread`: why it could not be checked."""

    run: str
    step: int
    generation: int
    tier: str
    size_bytes: int = 0
    how: str | None = None
    is_whole: bool = False
    problems: list[str] = []
    repaired: dict[str, str] = {}
    refused: list[str] = []
    unread: str | None = None


async def verify(
    context: typer.Context,
    run: options.OnlyRun = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="STEP", help="A number, latest, or milestone:NAME; default: all."),
    ] = None,
    generation: options.GenerationNumber = None,
    tier: options.TierName = None,
    place: options.From = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte in buckets too, instead of asking for their checksums.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Replace damaged files by whole ones from another tier.")
    ] = False,
    json: options.Json = False,
) -> int:
    """Compare every replica with its checksums."""
    settings = settings_of(context)
    if repair and place is not None:
        raise BadConfig(
            "--repair copies whole files from other tiers, and --from names one place alone",
            hint="give --config, and --tier for the one to be repaired",
        )
    if repair:
        check_tier(tier, settings.config())
    query = parse_query(run, step or "latest", generation)
    daemon = None if place else daemon_http.find_or_none(settings.config(), is_fresh=True)
    lost = {(replica.tier, replica.id) for replica in daemon.status.lost} if daemon else set()
    replicas: list[Verified] = []
    unread: list[TierdError] = []
    async with open_tiers(settings, place=place, only=None if repair else tier) as tiers:
        checked = {name for name in tiers.by_name if tier in (None, name)}
        tiers.check_reachable()
        unlisted = tiers.catalog.unlisted()
        unreachable = checked & unlisted.keys()
        if unreachable == checked:
            name = min(checked)
            raise TierUnreachable(f"list {name}: {unlisted[name]}")
        lost = {(name, gone) for name, gone in lost if not _is_listed(tiers, name, gone)}
        selected = _matching(query, tiers, checked, lost, is_newest_only=step == "latest")
        if not selected:
            where = f" of {place}" if place else ""
            named_query = replace(query, tier=tier or query.tier)
            raise NotFound(f"verify {named_query}{where}: there is none", hint="`tierd ls` shows what there is")
        with progress_bar("verifying", sum(size_bytes for _, _, size_bytes, _ in selected)) as progress:
            for name, checkpoint, _, why in selected:
                replica = Verified(
                    run=checkpoint.run, step=checkpoint.step, generation=checkpoint.generation, tier=name
                )
                try:
                    is_there = await _check(
                        replica, tiers, checkpoint, why, is_deep=deep, is_repair=repair, progress=progress
                    )
                except Foreign as error:
                    replica.problems, is_there = [error.message], True
                except (NewerFormat, TierUnreachable) as error:
                    replica.unread, is_there = error.message, True
                    unread.append(error)
                if not is_there and (name, checkpoint) in lost:
                    replica.problems = [f"{checkpoint} disappeared from {name}; tierd has not deleted it"]
                    is_there = True
                replicas += [replica] * is_there
        if place is None:
            _note_waiting(tiers, settings.config(), checked)
    print_report(replicas, as_json=json, text=_print)
    if any(not replica.is_whole and replica.unread is None for replica in replicas):
        return Corrupt.exit_code
    return exit_code(unread, of=len(replicas)) or (PARTIAL if unreachable else 0)


def _is_listed(tiers: OpenedTiers, name: str, checkpoint: CheckpointId) -> bool:
    entry = tiers.catalog.get(checkpoint)
    return entry is not None and name in entry.tiers


def _print(replicas: list[Verified]) -> None:
    for replica in replicas:
        for problem in replica.problems:
            print_result(f"damaged: {problem}")
        for name, source in replica.repaired.items():
            print_result(f"repaired: step {replica.step} {name} in {replica.tier}, from {source}")
        for why in replica.refused:
            print_result(f"not repaired: {why}")
        if replica.unread:
            print_note(f"tierd: not verified: {replica.unread}")
    whole = [replica for replica in replicas if replica.is_whole]
    counts = Counter(replica.how for replica in whole)
    proofs = ", ".join(f"{counts[proof.value]} {text}" for proof, text in _PROOFS.items() if counts[proof.value])
    verified_bytes = sum(replica.size_bytes for replica in whole)
    print_result(
        f"{len(whole)} of {len(replicas)} replicas are whole: {size(verified_bytes)} verified"
        + (f" ({proofs})" if counts.keys() - {Proof.DEEP.value} else "")
    )
    for name in sorted({replica.tier for replica in whole if replica.how == Proof.SIZE.value}):
        print_note(f"tierd: {name} keeps no checksums: only files and sizes were compared; --deep reads every byte")


def _note_waiting(tiers: OpenedTiers, config: Config, checked: set[str]) -> None:
    """What a cold tier should have and lacks is no replica, and is verified nowhere."""
    for name, checkpoints in waiting(tiers.catalog, config).items() if tiers.by_name.keys() > {HOT} else ():
        if name in checked and checkpoints:
            count = f"{len(checkpoints)} checkpoint{'s' * (len(checkpoints) > 1)}"
            print_note(f"tierd: {name} lacks {count} of hot that it should have: not copied yet, or deleted there")


def _matching(
    query: CheckpointQuery,
    tiers: OpenedTiers,
    checked: set[str],
    lost: Collection[tuple[str, CheckpointId]],
    *,
    is_newest_only: bool,
) -> list[tuple[str, CheckpointId, int, str]]:
    """(tier, checkpoint, bytes, what the listing found wrong) of every replica to verify, unreadable and lost ones
    last."""
    found = [
        (name, entry.id, entry.manifest.size_bytes, "")
        for entry in tiers.catalog.entries()
        for name in tiers.by_name
        if name in entry.tiers & checked and query.matches(entry.id, entry.all_milestones)
    ]
    found += [
        (name, checkpoint, 0, why)
        for (name, checkpoint), why in tiers.catalog.unreadable().items()
        if name in checked and query.matches(checkpoint)
    ]
    known = {(name, checkpoint) for name, checkpoint, _, _ in found}
    foreign = {
        (name, checkpoint): why  # one for a checkpoint, whose manifest and markers may all be foreign
        for (name, key), why in tiers.catalog.foreign().items()
        if name in checked and (checkpoint := layout.parse_key(key)) and query.matches(checkpoint)
        if (name, checkpoint) not in known
    }
    found += [(name, checkpoint, 0, why) for (name, checkpoint), why in foreign.items()]
    found += [(name, checkpoint, 0, "") for name, checkpoint in lost if name in checked and query.matches(checkpoint)]
    if is_newest_only and found:
        with_run(query, (checkpoint.run for _, checkpoint, _, _ in found))
        newest = max((checkpoint for _, checkpoint, _, _ in found), key=lambda checkpoint: checkpoint.recency)
        found = [replica for replica in found if replica[1] == newest]
    return found


async def _check(
    verified: Verified,
    tiers: OpenedTiers,
    checkpoint: CheckpointId,
    why: str,
    *,
    is_deep: bool,
    is_repair: bool,
    progress: Progress,
) -> bool:
    """False if the replica was deleted meanwhile. `why`: what the listing found wrong already. Raises NewerFormat or
    TierUnreachable if it cannot be checked."""
    tier = tiers.by_name[verified.tier]
    found = await verify_replica(tier, checkpoint, is_deep=is_deep or tier.store.is_local, progress=progress)
    if found is None:
        return False
    verified.size_bytes = found.manifest.size_bytes if found.manifest else 0
    verified.how = found.proof.value if found.manifest else None
    # If it agrees with its own manifest, that manifest differs from another tier's.
    verified.problems = found.sentences or [why] * bool(why)
    verified.is_whole = not verified.problems
    if found.problems and is_repair:
        try:
            repair = await repair_replica(tier, checkpoint, found, list(tiers.by_name.values()))
        except TierUnreachable as error:
            repair = Repair(refused=[error.message])
        verified.repaired, verified.refused, verified.is_whole = repair.repaired, repair.refused, not repair.refused
        if found.manifest is None and repair.manifest is not None:
            verified.size_bytes, verified.how = repair.manifest.size_bytes, Proof.DEEP.value
    return True
