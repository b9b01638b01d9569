"""Before the first copy of a generation to a cold tier: claims it there, or confirms that the claim is still there.

fenced: two starts on two nodes can hold one generation when one of them could not reach the tier, or when both claimed
at once and the server ignores If-None-Match. The start whose claim is in the tier writes there; the trainers of the
other start are fenced.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NoReturn

import msgspec

from tierd.context import DaemonContext
from tierd.errors import Stale, TierdError, TierUnreachable
from tierd.format.claim import Claim
from tierd.format.ids import CheckpointId, Generation, Run
from tierd.tiers.tier import Tier


async def confirm_claim(context: DaemonContext, cold: Tier, checkpoint: CheckpointId) -> None:
    """Returns when the start that claimed the checkpoint's generation in hot has claimed it in `cold`, too. A
    generation that was not claimed in this hot tier gets the claim that another tier has: without one, other daemons
    would take the checkpoint for forged. Requests are made once per generation.

    Raises Stale when another start has claimed it there, and fences the trainers here; hot keeps what it has."""
    run, generation = checkpoint.run, checkpoint.generation
    if cold.claimed.get(run) == generation:
        return
    claim = None
    with suppress(TierUnreachable):  # a broken hot disk must not stop what is written from memory
        claim = await context.hot.claim(run, generation)
    if claim is None or not claim.claim:  # claimed by another node, by an older version, or while hot was full
        if context.catalog.claims.lacks(cold.name, checkpoint):
            await context.claim(cold, run, generation, claim or await _claim_elsewhere(context, run, generation))
    elif not await context.claim(cold, run, generation, claim):
        other = await cold.claim(run, generation)
        # A start of this hot tier that claimed it in cold alone was killed before any trainer had the generation.
        is_of_other = other is not None and not other.is_of_same_start(claim) and not other.is_of_same_hot(claim)
        if other is not None and is_of_other and not _was_put_back(context, other, claim):
            _fence(context, cold, checkpoint)
    cold.claimed[run] = generation  # also if the file of that name is not a claim: it fences nobody


def _was_put_back(context: DaemonContext, other: Claim, claim: Claim) -> bool:
    """Whether the other claim is of a former run of that name, which had expired: a claim stays signed. Without a key
    its time may be forged as well as the rest, and a start that is fenced in error loses less than two that write."""
    is_signed = context.keyring is not None
    return is_signed and other.had_expired(claim, context.config.limits.empty_run_grace_s)


async def _claim_elsewhere(context: DaemonContext, run: Run, generation: Generation) -> Claim:
    for tier in context.cold.values():
        with suppress(TierdError):
            if (claim := await tier.claim(run, generation)) is not None:
                return claim
    claim = context.new_claim()
    if context.catalog.claims.was_claimed_here(run, generation):
        return claim  # hot's cannot be read at the moment; when it can, this one is known as one of this hot tier
    return msgspec.structs.replace(claim, hot="")


def _fence(context: DaemonContext, cold: Tier, checkpoint: CheckpointId) -> NoReturn:
    run, generation = checkpoint.run, checkpoint.generation
    context.fence(run, generation, by=generation + 1)
    raise Stale(
        f"copy {checkpoint} to {cold.name}: another start has claimed generation {generation} of {run} there, "
        "at the same time or while this node could not reach it",
        hint="two trainers use one run name; those of this node are told to end; docs/RUNBOOK.md#fenced",
    )
