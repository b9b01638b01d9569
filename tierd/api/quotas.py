"""What one peer, and one user, may use of the daemon: messages, log lines, new connections, runs, slots and memory.

A peer that sends too fast is read more slowly, so its own socket fills; it is not disconnected. What would allocate
something beyond a quota is refused with `Full`. All counts are in memory and bounded by what they count.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection

from tierd.config.sections import LimitsConfig
from tierd.errors import Full
from tierd.format.ids import Run
from tierd.memory.tier import MemoryTier

LINES_PER_S, LINES_BURST = 2.0, 50  # of the log, for one connection; a rank logs a few in an hour
CONNECTIONS_PER_S, CONNECTIONS_BURST = 20.0, 1024  # of one user; each logs three lines
CLAIMS_PER_S, CLAIMS_BURST = 0.1, 1000  # of one user and run: its 90 million generations last for 28 years
CLAIMED_MAX = 4096  # users and runs whose claims are counted; the one that claimed least recently is forgotten
EMPTY_RUN_S = 86400.0  # how long a started run counts for its user while it has no checkpoint
USERS_MAX = 1024  # with counts of their own; the least recently seen is forgotten


class Rate:
    """A token bucket: `per_s` in the long run, `burst` at once. `now_s`: a monotonic clock."""

    def __init__(self, per_s: float, burst: float, now_s: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = self._left = float(burst)
        self._now_s = now_s
        self._updated_s = now_s()

    def spend(self) -> float:
        """Takes one, and returns the seconds to wait before the next. Each call adds to the wait."""
        self._update()
        self._left -= 1
        return max(0.0, -self._left / self._per_s)

    def try_spend(self) -> bool:
        """Takes one if there is one."""
        self._update()
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _update(self) -> None:
        now_s = self._now_s()
        self._left = min(self._burst, self._left + (now_s - self._updated_s) * self._per_s)
        self._updated_s = now_s


class _User:
    """`empty_runs`: those that it has joined and that had no checkpoint, with the time of the first join."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.connections = Rate(CONNECTIONS_PER_S, CONNECTIONS_BURST, now_s)
        self.refusals = Rate(LINES_PER_S, LINES_BURST, now_s)
        self.empty_runs: dict[Run, float] = {}


class Quotas:
    """`has_checkpoint`: whether a run has one in any tier. `now_s`: a monotonic clock."""

    def __init__(
        self,
        limits: LimitsConfig,
        memory: MemoryTier,
        *,
        has_checkpoint: Callable[[Run], bool],
        now_s: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._has_checkpoint = has_checkpoint
        self._now_s = now_s
        self._users: dict[int, _User] = {}
        self._claims: dict[tuple[int, Run], Rate] = {}
        self._owners: dict[Run, int] = {}  # the uid that joined a run which is in memory
        self._memory_bytes = _memory_bytes()

    def messages(self) -> Rate:
        """The rate of one new connection."""
        per_s = self._limits.messages_per_s
        return Rate(per_s, 4 * per_s, self._now_s)

    def lines(self) -> Rate:
        """The log lines that messages of one new connection may cause."""
        return Rate(LINES_PER_S, LINES_BURST, self._now_s)

    def connection_wait_s(self, uid: int) -> float:
        """How long a new connection of this user waits before it is read."""
        return self._user(uid).connections.spend()

    def may_record_refusal(self, uid: int) -> bool:
        """Whether a refused connection of this user is recorded: its log would grow as fast as it connects."""
        return self._user(uid).refusals.try_spend()

    def check_run(self, uid: int, run: Run) -> None:
        """Before a rank joins. Raises Full when this user has started too many runs that have no checkpoint."""
        user, now_s = self._user(uid), self._now_s()
        if run in user.empty_runs or self._has_checkpoint(run):
            return
        if len(user.empty_runs) >= self._limits.empty_runs_max:
            user.empty_runs = {
                each: since_s
                for each, since_s in user.empty_runs.items()
                if now_s - since_s < EMPTY_RUN_S and not self._has_checkpoint(each)
            }
        if len(user.empty_runs) >= self._limits.empty_runs_max:
            raise Full(
                f"join run {run}: {len(user.empty_runs)} runs that uid {uid} has started today have no checkpoint",
                hint="does each start use another run name? See limits.empty_runs_max",
            )
        user.empty_runs[run] = now_s

    def check_claim(self, uid: int, run: Run) -> None:
        """Before a generation is claimed, which nobody can use again. Raises Full when this user starts the run too
        often."""
        rate = self._claims.pop((uid, run), None) or Rate(CLAIMS_PER_S, CLAIMS_BURST, self._now_s)
        self._claims[uid, run] = rate
        while len(self._claims) > CLAIMED_MAX:
            del self._claims[next(iter(self._claims))]
        if not rate.try_spend():
            raise Full(
                f"start run {run}: uid {uid} has started it {CLAIMS_BURST} times, and at most one start each "
                f"{1 / CLAIMS_PER_S:.0f} s is taken from now on",
                hint="does the job fail at its start again and again, or does another job use its name? "
                "docs/guides/security.md#how-to-deploy: a secret for each job",
            )

    def joined(self, uid: int, run: Run) -> None:
        """A rank of the run has joined. The run's slots count for the user of its first rank."""
        self._owners = {each: owner for each, owner in self._owners.items() if each in self._runs()}
        self._owners.setdefault(run, uid)

    def check_slot(self, run: Run, rank: int, index: int, capacity_bytes: int) -> None:
        """Before a slot is mapped. Raises Full when the user of this run has too many, or too much memory in them."""
        uid = self._owners.get(run)
        capacities = [
            slot.capacity_bytes
            for each in self._runs()
            if self._owners.get(each) == uid
            for (slot_rank, slot_index), slot in self._memory.slots_of(each).items()
            if (each, slot_rank, slot_index) != (run, rank, index)  # it is replaced, or is the same memory
        ]
        size_max = self._limits.slots_gib_max * (1 << 30) or self._memory_bytes
        if len(capacities) >= self._limits.slots_max:
            raise Full(
                f"attach slot {index} of {run}: uid {uid} has {len(capacities)} slots",
                hint="raise limits.slots_max, or lower snapshot.slots",
            )
        if sum(capacities) + capacity_bytes > size_max:
            raise Full(
                f"attach slot {index} of {run}: {capacity_bytes} bytes beside {sum(capacities)} in other slots of uid "
                f"{uid}, at most {size_max:.0f} in all",
                hint="raise limits.slots_gib_max; 0 is the memory of this machine",
            )

    def _runs(self) -> Collection[Run]:
        return self._memory.runs()

    def _user(self, uid: int) -> _User:
        user = self._users.pop(uid, None) or _User(self._now_s)
        self._users[uid] = user  # moves it to the end: the first one is the least recently seen
        while len(self._users) > USERS_MAX:
            del self._users[next(iter(self._users))]
        return user


def _memory_bytes() -> float:
    """The memory of this machine; inf where it is not known."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return math.inf
