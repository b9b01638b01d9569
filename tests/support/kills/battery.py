"""Kills a daemon at one failpoint after another, restarts it each time, and checks the tiers between.

A battery is a list of kills. Each daemon is armed with the next one, recovers from the previous one, and serves the
ranks until it dies. At the end a daemon that is not armed must bring the tiers into the state that the policy wants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.bucket import Bucket
from tests.support.kills.audit import COLD, HOT, Audit, Folder, Place, Policy
from tests.support.kills.daemon import Gone, KilledDaemon
from tests.support.kills.ranks import Ranks
from tests.support.s3 import BUCKET
from tests.support.waiting import wait_until

RUN = "run42"
SIZES = (14_000, 1_500)  # of the two ranks: four chunks, and one
STEPS_MAX = 25  # a failpoint that is not reached in so many steps is never reached
LIMITS = """
cold_list_interval_s = 0.2
[health]
examine = {examine}
"""


@dataclass(frozen=True)
class Kill:
    """`failpoints` as in $TIERD_FAILPOINTS, or `NAME@HIT` for a kill. `anew`: the ranks start anew before."""

    failpoints: str
    anew: bool = False

    @property
    def armed(self) -> str:
        return self.failpoints if "=" in self.failpoints else self.failpoints.replace("@", "=kill@")


class BucketObjects:
    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix

    def files(self) -> dict[str, bytes]:
        """An upload that is not completed counts as a partial file."""
        with self._bucket.lock:
            stored = {key: stored.content for key, stored in self._bucket.objects.items()}
            stored |= {f"{begun.key}.partial": b"" for begun in self._bucket.uploads.values()}
        return {key.removeprefix(self._prefix): content for key, content in stored.items()}


@dataclass
class Battery:
    """One daemon's folder with what is needed to kill it again and again. Make it with `battery`."""

    daemon: KilledDaemon
    ranks: Ranks
    audit: Audit
    killed: int = 0
    before: dict[str, Callable[[], None]] = field(default_factory=dict[str, Callable[[], None]])
    """By the kill's failpoints: what the test does to the files before the daemon starts."""

    def run(self, kills: Sequence[Kill]) -> None:
        """Raises AssertionError at the first broken promise, naming the kill."""
        for kill in kills:
            self.before.get(kill.failpoints, lambda: None)()
            try:
                self.daemon.start_armed(kill.armed)
                self.ranks.connect(self.daemon.socket, anew=kill.anew)
                for _ in range(STEPS_MAX):
                    self.ranks.step()
                raise AssertionError(f"{kill.failpoints} was not reached in {STEPS_MAX} steps")
            except Gone:
                self.daemon.wait_killed()
            self.killed += 1
            self.check(f"kill {self.killed} at {kill.failpoints}")

    def check(self, moment: str) -> None:
        self.audit.observe(moment)
        assert self.audit.problems == []

    def settle(self, *, patience_s: float = 20.0) -> None:
        """A daemon that nobody kills serves two more snapshots, then clears up."""
        self.daemon.start_armed()
        self.ranks.connect(self.daemon.socket)
        for _ in range(2):
            self.ranks.step()
        try:
            wait_until(lambda: not self.audit.unsettled(), timeout_s=patience_s)
        except AssertionError:
            self.audit.problems += self.audit.unsettled()
        self.ranks.disconnect()
        self.daemon.kill()
        self.audit.observe("the end")
        self.audit.check_end()
        assert self.audit.problems == []


@contextmanager
def battery(
    root: Path,
    *,
    bucket: Bucket | None = None,
    directory: bool = False,
    broken: str = "",
    environ: dict[str, str] | None = None,
) -> Generator[Battery]:
    """`bucket`, `directory`: the kind of the cold tier; neither: there is none."""
    policy = Policy(cold_every=5 if bucket or directory else 0)
    places: dict[str, Place] = {HOT: Folder(root / "hot")}
    cold = 'url = "file://cold"' if directory else ""
    if bucket is not None:
        cold = f'url = "s3://{BUCKET}/deep"\nendpoint_url = "{bucket.url}"'
        places[COLD] = BucketObjects(bucket, "deep/")
    elif directory:
        places[COLD] = Folder(root / "cold")
    audit = Audit(RUN, policy, places, SIZES)
    settings = LIMITS.format(examine="false") + policy.lines
    daemon = KilledDaemon(root, cold=cold, more=settings, broken=broken, environ=environ)
    with daemon_killed(daemon), Ranks(audit, is_replicated=bool(cold)) as ranks:
        yield Battery(daemon, ranks, audit)


@contextmanager
def daemon_killed(daemon: KilledDaemon) -> Generator[None]:
    try:
        yield
    finally:
        daemon.kill()


def shuffled(groups: Sequence[Sequence[Kill]], seed: int) -> list[Kill]:
    """The kills of all groups in a random order of the groups: what a group needs stays before it."""
    order = list(groups)
    random.Random(seed).shuffle(order)
    return [kill for group in order for kill in group]
