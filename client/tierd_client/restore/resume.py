"""Decides where a training starts: at the newest checkpoint, a named one, one of another run or a directory, or fresh.

Training never silently starts at step 0. "auto" starts fresh only when every tier was listed and none has a checkpoint
of the run, "require" never. "scratch" starts fresh in the same case, or with force=True, or, if some tiers cannot be
listed and the others have no checkpoint of the run, with $TIERD_RESUME set to "scratch". Rank 0's choice applies to all
ranks: all do the same or raise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack

import msgspec

from tierd.descriptors import open_all
from tierd.errors import BadConfig, Corrupt, Mismatch, NotFound, TargetNotEmpty, TierUnreachable, Unhealthy, Unsupported
from tierd.format import layout, manifest
from tierd.format.ids import RUN_PATTERN
from tierd_client.generation import CONNECT_TIMEOUT_S
from tierd_client.log import log
from tierd_client.ranks import Ranks
from tierd_client.restore.attempts import ReadReplica, restore_replica
from tierd_client.restore.other_nodes import check_nothing_elsewhere, check_scratch_elsewhere, report_newer_here
from tierd_client.restore.replica import Replica, RestoreRequest
from tierd_client.session import DaemonSession

AUTO, SCRATCH, REQUIRE = "auto", "scratch", "require"

_RUN = re.compile(rf"run:({RUN_PATTERN})(?:@(?:([0-9]{{1,12}})|milestone:({layout.MILESTONE_PATTERN})))?")

Resume = str | int | os.PathLike[str]


class ResumePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed `resume` argument. With a step, a path or a run, the mode is "require". `step` and `milestone` are
    of `run`, if that is given."""

    mode: str
    step: int | None = None
    path: str | None = None
    run: str | None = None
    milestone: str | None = None


def agree_on_policy(resume: Resume | None, ranks: Ranks, environ: Mapping[str, str]) -> ResumePolicy:
    """Rank 0's policy, on all ranks. Raises BadConfig, listing the choices."""
    policy = ranks.run_on_all(lambda: parse_resume(resume, environ))
    return msgspec.json.decode(ranks.broadcast(msgspec.json.encode(policy)), type=ResumePolicy)


def parse_resume(resume: Resume | None, environ: Mapping[str, str]) -> ResumePolicy:
    """None stands for $TIERD_RESUME, else "auto". A string of digits is a step, one with a separator is a path, and
    one that begins with `run:` is a run."""
    choice = resume if resume is not None else environ.get("TIERD_RESUME") or AUTO
    match choice:
        case "auto" | "scratch" | "require":
            return ResumePolicy(mode=choice)
        case int() if choice >= 0 and not isinstance(choice, bool):
            return ResumePolicy(mode=REQUIRE, step=choice)
        case str() if choice.isascii() and choice.isdigit():
            return ResumePolicy(mode=REQUIRE, step=int(choice))
        case str() if match := _RUN.fullmatch(choice):
            return ResumePolicy(
                mode=REQUIRE, run=match[1], step=int(match[2]) if match[2] else None, milestone=match[3]
            )
        case os.PathLike():
            return ResumePolicy(mode=REQUIRE, path=_path(os.fsdecode(choice)))
        case str() if os.sep in choice or os.path.isdir(choice):
            return ResumePolicy(mode=REQUIRE, path=_path(choice))
        case _:
            raise BadConfig(
                f"restore with {'resume' if resume is not None else '$TIERD_RESUME'}={choice!r}: expected "
                '"auto", "scratch", "require", a step, or the path of a directory with a checkpoint, '
                'or "run:NAME", "run:NAME@STEP" or "run:NAME@milestone:NAME" for another run'
            )


def _path(given: str) -> str:
    path = os.path.abspath(given)
    try:
        path.encode()  # the ranks and the daemon exchange it as UTF-8
    except UnicodeEncodeError:
        raise BadConfig(
            f"restore with resume={path!r}: the path is not UTF-8", hint="rename the folder, or make a link to it"
        ) from None
    return path


def restore_by_policy(
    session: DaemonSession,
    ranks: Ranks,
    policy: ResumePolicy,
    request: RestoreRequest,
    read: ReadReplica,
    *,
    read_own: ReadReplica,
    force: bool,
) -> Replica | None:
    """Calls `read` with the replica that the policy selects, and returns it, closed. None: training starts fresh.

    With a policy that names another run, `read_own` is called instead if this run has checkpoints.

    Raises BadConfig when `request` has constraints that do not go with the policy, TargetNotEmpty or TierUnreachable
    when the policy is "scratch" and there are or may be checkpoints; else as `restore_replica`.
    """
    if policy.mode == SCRATCH or policy.path is not None:
        if not request.is_any:
            raise BadConfig(
                f"restore with resume={policy.path or policy.mode!r} and with generation, milestone or tier: "
                "those select a checkpoint of the run"
            )
        if policy.path is not None:
            return _restore_directory(policy.path, ranks, read, allow_unhealthy=request.allow_unhealthy)
        ranks.run_on_all(lambda: _check_scratch(session, ranks.rank, force=force))
        return None
    if policy.run is not None:
        return _restore_run(session, ranks, policy.run, request, read, read_own)
    try:
        replica = restore_replica(session, ranks, request, read)
    except NotFound:
        if policy.mode == REQUIRE or not request.is_any:
            raise
        check_nothing_elsewhere(session, ranks)
        return None
    if request.is_any:
        report_newer_here(session, replica.manifest.id)
    return replica


def _restore_run(
    session: DaemonSession, ranks: Ranks, run: str, request: RestoreRequest, read: ReadReplica, read_own: ReadReplica
) -> Replica:
    """Restore the newest checkpoint of this run, or, if it has none, one of the run `run`. So after a kill the same
    command continues this run."""
    if run == session.hello.run:
        raise BadConfig(f"restore {run} with resume='run:{run}': it is this run", hint='"auto", or a step of it')
    own_request = RestoreRequest(allow_unhealthy=request.allow_unhealthy)
    try:
        return restore_replica(session, ranks, own_request, read_own)
    except NotFound:
        check_nothing_elsewhere(session, ranks)
    hello = msgspec.structs.replace(session.hello, run=run, rank=None, generation=None, node=None)
    with ExitStack() as stack:

        def open_reader() -> DaemonSession:
            reader = DaemonSession(session.path, hello, timeout_s=CONNECT_TIMEOUT_S, daemon_uid=session.daemon_uid)
            stack.callback(reader.close)
            reader.start()
            return reader

        replica = restore_replica(ranks.run_on_all(open_reader), ranks, request, read, reports=session)
    log.info("tierd: %s had no checkpoint: it begins at %s", session.hello.run, replica.manifest.id)
    return replica


def _check_scratch(session: DaemonSession, rank: int, *, force: bool) -> None:
    run, newest, unlisted = session.hello.run, session.welcome.newest, session.welcome.unseen
    existing = f"step {newest.step} of generation {newest.generation}" if newest is not None else ""
    if rank != 0:
        existing, unlisted = "" if force else check_scratch_elsewhere(session, rank), []
    if force:
        if existing:
            log.warning("tierd: %s starts from scratch; its older timeline up to %s stays restorable", run, existing)
    elif existing:
        raise TargetNotEmpty(
            f"start {run} from scratch: it has checkpoints, the newest is {existing}",
            hint='resume="auto" continues from there; for a fresh start use another run name, or force=True',
        )
    elif unlisted and session.hello.starts_anew:
        log.warning("tierd: %s starts from scratch; these tiers could not be listed: %s", run, "; ".join(unlisted))
    elif unlisted:
        raise TierUnreachable(
            f"start {run} from scratch: these could not be listed, and may have checkpoints: {'; '.join(unlisted)}",
            hint="if it is a new run, set TIERD_RESUME=scratch in the environment, this once, or use force=True; if it "
            "may have checkpoints there, bring the tier back first; docs/RUNBOOK.md#new-run-refused",
        )


def check_start(session: DaemonSession) -> None:
    """Raises TargetNotEmpty when the run has checkpoints and nothing has said where this training begins."""
    run, newest = session.hello.run, session.welcome.newest
    if newest is not None and not session.hello.starts_anew:
        raise TargetNotEmpty(
            f"take the first snapshot of {run}: it has checkpoints, the newest is step {newest.step} of generation "
            f"{newest.generation}, and restore() was not called",
            hint="call client.restore(state) before the loop; for a fresh start use another run name, or "
            'client.restore(state, resume="scratch", force=True)',
        )


def _restore_directory(path: str, ranks: Ranks, read: ReadReplica, *, allow_unhealthy: bool) -> Replica:
    def read_on_first() -> bytes:
        if ranks.rank != 0:
            return b""
        if not allow_unhealthy and os.path.exists(f"{path}/{layout.UNHEALTHY}"):
            raise Unhealthy(f"restore {path}: it holds NaN or Inf", hint="allow_unhealthy=True restores it anyway")
        return _read_manifest(path)

    first_manifest = ranks.broadcast(ranks.run_on_all(read_on_first))

    def restore() -> Replica:
        if _read_manifest(path) != first_manifest:
            raise Mismatch(f"restore {path}: it holds another checkpoint here than on rank 0", hint="use a shared disk")
        with open_directory(path) as replica:
            try:
                read(replica)
            except Corrupt as error:
                raise Corrupt(error.message, hint="no other replica was tried; the state is half changed") from error
        return replica

    return ranks.run_on_all(restore)


def open_directory(path: str) -> Replica:
    """The checkpoint in a directory that `tierd restore --to` wrote, or in a checkpoint's folder of a tier.

    Raises NotFound when it has no manifest, Corrupt when the manifest or a file cannot be read,
    Unsupported when it is adopted.
    """
    found = manifest.decode(_read_manifest(path), where=f"in {path}")
    if found.is_adopted:
        raise Unsupported(
            f"restore {path}: it is an adopted checkpoint: another program wrote it, and tierd does not read it",
            hint=f"`tierd restore --run {found.run} --step {found.step} --to DIR` gives its folder back",
        )

    def open_file(entry: manifest.FileEntry) -> int:
        try:
            # O_NONBLOCK: opening a pipe must not hang. Its size then differs from the manifest's.
            return os.open(f"{path}/{entry.name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Corrupt(
                f"open {entry.name} in {path}: {error.strerror}, and the manifest names it",
                hint="copy the checkpoint there again",
            ) from error

    return Replica(path, found, open_all(map(open_file, found.files)))


def _read_manifest(path: str) -> bytes:
    try:
        with open(f"{path}/{layout.MANIFEST}", "rb") as file:
            return file.read(manifest.MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise NotFound(
            f"restore {path}: read its {layout.MANIFEST}: {error.strerror}",
            hint="give a directory that `tierd restore --to` wrote, or a checkpoint's folder in a tier",
        ) from error
