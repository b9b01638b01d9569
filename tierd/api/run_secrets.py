"""Which runs have a secret: bound by the first trainer that joins with one, and required of every later peer.

The digests are in files of mode 0600 in the hot directory, and in the memory of the daemon, which reads the files only
at its start: a hot disk that is lost under a running daemon opens no run.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

import msgspec

import tierd
from tierd.api.session import NO_RANK, TrainerSession
from tierd.errors import UNDECODABLE, BadRequest, TierdError, WrongSecret
from tierd.format import layout
from tierd.format.ids import Run, is_run
from tierd.format.run_secret import PROOF_CHARS, VARIABLE, digest_of, is_proof
from tierd.tiers.directory import DirectoryStore

log = logging.getLogger("tierd")

TIMEOUT_S = 5.0  # of a call to these small files
_BYTES_MAX = 4096
_SALT_BYTES = 16


class _Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a file. `digest`: see `digest_of`."""

    run: Run
    salt: bytes
    digest: bytes
    bound_by: str
    format_version: int = 1


class RunSecrets:
    """`hot`: the hot directory."""

    def __init__(self, hot: Path) -> None:
        self._folder = hot / layout.RUN_SECRETS
        self._bound: dict[Run, _Bound] = {}
        self._unreadable: dict[Run, str] = {}  # a file that cannot be read, with the reason: its run is closed
        self._unsaved: set[Run] = set()

    async def load(self) -> None:
        """Reads the files, before the daemon accepts peers. Raises TierUnreachable when the folder cannot be read."""
        async with DirectoryStore(self._folder, timeout_s=TIMEOUT_S) as store:
            await store.sweep_partials()
            keys = [listed.key for listed in await store.list() if is_run(listed.key.removesuffix(".json"))]
            contents = await store.get_many(keys, size_max=_BYTES_MAX) if keys else []
        for key, content in zip(keys, contents, strict=True):
            run = Run(key.removesuffix(".json"))
            try:
                if isinstance(content, TierdError):
                    raise content
                self._bound[run] = msgspec.json.decode(content, type=_Bound)
            except (TierdError, *UNDECODABLE) as error:
                self._unreadable[run] = f"{self._folder / key}: {error}"
                log.error("read the secret of %s: %s", run, self._unreadable[run])

    def bind(self, run: Run, proof: str, *, is_start: bool) -> bool:
        """A trainer has joined, after `check_proof`: the first one with a secret binds it. Returns whether it has.

        `is_start`: the run is started again, and `save` writes its file again, as the hot disk may be another one.
        Synchronous, so that the caller can check, accept and bind in one step of the event loop.
        """
        is_first = bool(proof) and run not in self._bound
        if is_first:
            salt = secrets.token_bytes(_SALT_BYTES)
            digest = digest_of(run, proof, salt)
            self._bound[run] = _Bound(run=run, salt=salt, digest=digest, bound_by=tierd.__version__)
        if is_first or (is_start and run in self._bound):
            self._unsaved.add(run)
        return is_first

    def check(self, session: TrainerSession) -> None:
        """Before a peer joins, and before each message of it. Raises WrongSecret when its run has another secret.

        Root may make requests of any run beside a daemon of another user. Where the daemon is root's, the jobs may be
        root's too.
        """
        is_operator_of_root = session.rank == NO_RANK and session.connection.peer_uid == 0 and os.geteuid() != 0
        if not is_operator_of_root:
            self.check_proof(session.run, session.proof)

    def check_proof(self, run: Run, proof: str) -> None:
        """Raises WrongSecret when the run has another secret, BadRequest for what is no proof."""
        if proof and len(proof) != PROOF_CHARS:
            raise BadRequest(f"join run {run}: its proof has {len(proof)} characters, not {PROOF_CHARS}")
        if run in self._unreadable:
            raise WrongSecret(
                f"use run {run}: its secret cannot be checked: {self._unreadable[run]}",
                hint="repair or delete the file, and start the daemon again; docs/RUNBOOK.md#wrong-secret",
            )
        bound = self._bound.get(run)
        if bound is not None and not is_proof(run, proof, bound.salt, bound.digest):
            found = f"the one in {VARIABLE} is another" if proof else f"{VARIABLE} is not set"
            raise WrongSecret(
                f"use run {run}: it has a secret, and {found}",
                hint=f"set {VARIABLE} to the secret of the job that began the run, or choose another run name; "
                "docs/RUNBOOK.md#wrong-secret",
            )

    async def save(self, run: Run) -> None:
        """Write what `bind` has changed, where hot can be written."""
        if run not in self._unsaved:
            return
        try:
            async with DirectoryStore(self._folder, timeout_s=TIMEOUT_S) as store:
                await store.put_bytes(f"{run}.json", msgspec.json.encode(self._bound[run]) + b"\n")
            self._unsaved.discard(run)
        except TierdError as error:  # a full hot disk stops no trainer: this process knows it, and the next join writes
            log.warning("write down the secret of %s: %s; a restart of this daemon would forget it", run, error)
