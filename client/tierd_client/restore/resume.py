"""Where a training begins: at the newest checkpoint, at one that is named, at one in a directory, or from scratch.

Never silently from step 0: "auto" starts fresh only where every tier was seen and holds nothing of the run, "scratch"
only there or by force, "require" never. Rank 0 says which, and all ranks do the same or raise.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping

import msgspec

from tierd.errors import BadConfig, Corrupt, Mismatch, NotFound, TargetNotEmpty, TierUnreachable, Unhealthy
from tierd.format import layout, manifest
from tierd_client.ranks import Ranks
from tierd_client.restore import replica as replicas
from tierd_client.restore.replica import Replica, RestoreRequest
from tierd_client.session import DaemonSession

log = logging.getLogger("tierd_client")

AUTO, SCRATCH, REQUIRE = "auto", "scratch", "require"

Resume = str | int | os.PathLike[str]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What `resume` says. With a step or a path, the word is "require"."""

    word: str
    step: int | None = None
    path: str | None = None


def agree_on(resume: Resume | None, ranks: Ranks, environ: Mapping[str, str]) -> Policy:
    """Rank 0's policy, on all ranks. Raises BadConfig, listing the choices."""
    mine = ranks.run_on_all(lambda: parse(resume, environ))
    return msgspec.json.decode(ranks.broadcast(msgspec.json.encode(mine)) or b"", type=Policy)


def parse(resume: Resume | None, environ: Mapping[str, str]) -> Policy:
    """`resume` None: $TIERD_RESUME, else "auto". A text of digits is a step, one with a separator is a path."""
    found = resume if resume is not None else environ.get("TIERD_RESUME") or AUTO
    match found:
        case "auto" | "scratch" | "require":
            return Policy(word=found)
        case int() if found >= 0 and not isinstance(found, bool):
            return Policy(word=REQUIRE, step=found)
        case str() if found.isascii() and found.isdigit():
            return Policy(word=REQUIRE, step=int(found))
        case os.PathLike():
            return Policy(word=REQUIRE, path=os.path.abspath(found))
        case str() if os.sep in found or os.path.isdir(found):
            return Policy(word=REQUIRE, path=os.path.abspath(found))
        case _:
            raise BadConfig(
                f"restore with {'resume' if resume is not None else '$TIERD_RESUME'}={found!r}: expected "
                '"auto", "scratch", "require", a step, or the path of a directory with a checkpoint'
            )


def is_told_to_start_anew(environ: Mapping[str, str]) -> bool:
    """Whoever starts the job says so, this once: the word of a script would be said again at each restart."""
    return environ.get("TIERD_RESUME") == SCRATCH


def restore(
    session: DaemonSession,
    ranks: Ranks,
    policy: Policy,
    wanted: RestoreRequest,
    take: Callable[[Replica], None],
    *,
    run: str,
    force: bool,
    on_corrupt: Callable[[Replica, Corrupt], None],
) -> Replica | None:
    """Has `take` read what the policy says, and returns it, closed. None: the training starts fresh."""
    if policy.word == SCRATCH or policy.path is not None:
        if not wanted.is_any:
            raise BadConfig(
                f"restore with resume={policy.path or policy.word!r} and with generation, milestone or tier: "
                "those choose among the checkpoints of the run"
            )
        if policy.path is not None:
            return _restore_directory(policy.path, ranks, take, allow_unhealthy=wanted.allow_unhealthy)
        ranks.run_on_all(lambda: _start_from_scratch(run, session, force=force) if ranks.rank == 0 else None)
        return None
    try:
        return replicas.restore(session, ranks, wanted, take, on_corrupt=on_corrupt)
    except NotFound:
        if policy.word == REQUIRE or not wanted.is_any:
            raise
        return None


def _start_from_scratch(run: str, session: DaemonSession, *, force: bool) -> None:
    newest, unseen = session.welcome.newest, session.welcome.unseen
    found = f"step {newest.step} of generation {newest.generation}" if newest is not None else ""
    if force:
        if found:
            log.warning("tierd: %s starts from scratch; its older timeline up to %s stays restorable", run, found)
    elif found:
        raise TargetNotEmpty(
            f"start {run} from scratch: it has checkpoints, the newest is {found}",
            hint='resume="auto" goes on from there; else take another run name, or say force=True',
        )
    elif unseen and session.hello.starts_anew:
        log.warning("tierd: %s starts from scratch; what may lie there cannot be listed: %s", run, "; ".join(unseen))
    elif unseen:
        raise TierUnreachable(
            f"start {run} from scratch: these could not be listed, and may have checkpoints: {'; '.join(unseen)}",
            hint="bring the tier back, take it out of the config, or say force=True, or TIERD_RESUME=scratch in the "
            "environment",
        )


def _restore_directory(path: str, ranks: Ranks, take: Callable[[Replica], None], *, allow_unhealthy: bool) -> Replica:
    def choose() -> bytes | None:
        if ranks.rank != 0:
            return None
        if not allow_unhealthy and os.path.exists(f"{path}/{layout.UNHEALTHY}"):
            raise Unhealthy(
                f"restore {path}: it holds numbers that are not finite", hint="allow_unhealthy=True restores it even so"
            )
        return _read_manifest(path)

    raw = ranks.broadcast(ranks.run_on_all(choose))

    def load() -> Replica:
        if _read_manifest(path) != raw:
            raise Mismatch(
                f"restore {path}: here lies another checkpoint than rank 0 sees", hint="is it a shared disk?"
            )
        with open_directory(path) as replica:
            try:
                take(replica)
            except Corrupt as error:
                raise Corrupt(
                    error.message, hint="no other replica was asked for; the state is half changed"
                ) from error
        return replica

    return ranks.run_on_all(load)


def open_directory(path: str) -> Replica:
    """The checkpoint in a directory: as `tierd restore --to` leaves it, or its own folder in a tier."""
    found = manifest.decode(_read_manifest(path), where=f"in {path}")
    with contextlib.ExitStack() as opened:
        descriptors: list[int] = []
        for entry in found.files:
            try:
                # Not to be held up by what is no file: its size will tell.
                descriptors.append(os.open(f"{path}/{entry.name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
            except OSError as error:
                raise Corrupt(
                    f"open {entry.name} in {path}: {error.strerror}, and the manifest names it",
                    hint="copy the checkpoint there again",
                ) from error
            opened.callback(os.close, descriptors[-1])
        opened.pop_all()
    return Replica(path, found, descriptors)


def _read_manifest(path: str) -> bytes:
    try:
        with open(f"{path}/{layout.MANIFEST}", "rb") as file:
            return file.read(manifest.MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise NotFound(
            f"restore {path}: read its {layout.MANIFEST}: {error.strerror}",
            hint="give a directory as `tierd restore --to` leaves it, or a checkpoint's folder in a tier",
        ) from error
