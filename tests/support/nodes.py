"""Several nodes on one machine: a daemon each, with a folder of its own, and ranks that connect to their daemon."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import tierd_client

from tests.support.daemon import Daemon
from tests.support.processes import run_tierd
from tests.support.trainer import Trainer, Training, errors_of, joined


def node(root: Path, name: str, *, cold: Path | None, **options: Any) -> Daemon:
    """A daemon that is not started yet. `cold`: the directory of its cold tier."""
    daemon = Daemon(root / name, cold=f'url = "file://{cold}"' if cold is not None else "", **options)
    daemon.run_with(run_watchful)
    return daemon


def run_watchful(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """The `tierd` command, which looks several times a second for what the other nodes have sent to a cold tier."""
    from tierd.workers import committer

    committer.HOME_S = committer.LOOK_MAX_S = 0.2
    committer.Committer.interval_s = 0.1
    run_tierd(arguments, environ, log)


@contextmanager
def nodes(root: Path, *names: str, **options: Any) -> Generator[list[Daemon]]:
    """Daemons that share a cold tier."""
    with ExitStack() as stack:
        daemons = [node(root, name, cold=root / "cold", **options) for name in names or ("a", "b")]
        yield [stack.enter_context(daemon) for daemon in daemons]


def begin_on(daemons: Sequence[Daemon], trainers: Sequence[Trainer], name: str, *arguments: Any, **more: Any) -> None:
    """Starts a call that takes the socket of the rank's daemon; the ranks are divided evenly, in order."""
    for rank, trainer in enumerate(trainers):
        trainer.begin(name, daemons[rank * len(daemons) // len(trainers)].socket, *arguments, **more)


def connect_on(daemons: Sequence[Daemon], trainers: Sequence[Trainer], **options: Any) -> list[int]:
    """The generation, by rank."""
    begin_on(daemons, trainers, "connect", **options)
    return [trainer.end() for trainer in trainers]


def refusals_on(daemons: Sequence[Daemon], trainers: Sequence[Trainer]) -> list[tierd_client.TierdError]:
    """The errors of `connect`, by rank."""
    begin_on(daemons, trainers, "connect")
    return errors_of(trainers)


@contextmanager
def connected(daemons: Sequence[Daemon], world_size: int, **options: Any) -> Generator[list[Trainer]]:
    """Ranks of one run that are connected, each to the daemon of its node, and killed at the end."""
    with joined(daemons[0].root, world_size) as trainers:
        connect_on(daemons, trainers, **options)
        yield trainers


# ── these run in a trainer ──


def hello_of(training: Training) -> Any:
    """What the rank has told its daemon."""
    return training.client._generation.session.hello


def sealed_of(training: Training) -> Any:
    """The message about the newest snapshot."""
    sealed = [pooled.sealed for pooled in training.client._generation.pool._slots.values() if pooled.sealed]
    return max(sealed, key=lambda message: message.step)
