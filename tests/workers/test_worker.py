"""The loop of every worker: wake, interval, backoff. The clock of the event loop jumps to the next timer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence

import pytest

from tierd.config.sections import LimitsConfig
from tierd.errors import Transient
from tierd.workers.worker import Wake, run_forever

LIMITS = LimitsConfig(retry_min_s=1.0, retry_max_s=8.0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._jumped_s = 0.0

    def time(self) -> float:
        return super().time() + self._jumped_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._jumped_s += max(0.0, self._scheduled[0]._when - self.time())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Task:
    """A worker whose passes have the outcomes of a script; all later passes succeed."""

    name = "list"

    def __init__(
        self, script: Sequence[bool | BaseException], *, interval_s: float = 100.0, is_urgent: bool = False
    ) -> None:
        self.interval_s = interval_s
        self.is_urgent = is_urgent
        self.passes_s: list[float] = []
        self.passed = asyncio.Event()
        self._script = list(script)

    async def run_once(self) -> bool:
        self.passes_s.append(asyncio.get_running_loop().time())
        self.passed.set()
        outcome = self._script.pop(0) if self._script else True
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.passes_s)]


def run(
    worker: Callable[[], Task], passes: int, *, on_pass: Callable[[Wake], None] = lambda wake: None
) -> tuple[Task, list[Exception]]:
    """Run the loop for a number of passes; `on_pass` is called after each."""
    errors: list[Exception] = []

    async def main() -> Task:
        task, wake = worker(), Wake()
        loop = asyncio.ensure_future(run_forever(task, wake, LIMITS, lambda _, error: errors.append(error)))
        while len(task.passes_s) < passes:
            task.passed.clear()
            await task.passed.wait()
            on_pass(wake)
        loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop
        return task

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main()), errors


def test_a_worker_waits_for_its_interval_between_passes() -> None:
    worker, errors = run(lambda: Task([]), 4)
    assert worker.gaps_s == pytest.approx([100.0] * 3, abs=0.5)
    assert errors == []


def test_a_wake_ends_the_wait_even_if_it_came_during_the_pass() -> None:
    worker, _ = run(lambda: Task([]), 4, on_pass=lambda wake: [wake.set() for _ in range(5)] and None)
    assert max(worker.gaps_s) < 1.0


def test_a_failing_worker_backs_off_exponentially_and_recovers_at_once() -> None:
    outcomes: list[bool | Exception] = [Transient("x"), False, OSError("y"), Transient("x"), Transient("x"), True]
    worker, errors = run(lambda: Task(outcomes), 7)
    for gap, ceiling in zip(worker.gaps_s, [1.0, 2.0, 4.0, 8.0, 8.0], strict=False):
        assert ceiling * 0.5 <= gap <= ceiling + 0.2
    assert worker.gaps_s[5] == pytest.approx(100.0, abs=0.5)
    assert [type(error) for error in errors] == [Transient, OSError, Transient, Transient]


def test_a_wake_does_not_shorten_the_backoff() -> None:
    worker, _ = run(lambda: Task([False] * 3), 4, on_pass=Wake.set)
    assert worker.gaps_s[2] >= 2.0


def test_a_wake_shortens_the_backoff_of_an_urgent_worker_to_retry_min_s() -> None:
    worker, _ = run(lambda: Task([False] * 5, is_urgent=True), 6, on_pass=Wake.set)
    assert worker.gaps_s == pytest.approx([LIMITS.retry_min_s] * 5, abs=0.2)


@pytest.mark.parametrize("is_urgent", [False, True])
def test_a_retry_that_a_person_asks_for_ends_the_backoff_and_begins_it_anew(is_urgent: bool) -> None:
    def on_pass(wake: Wake) -> None:
        if next(passes) == 4:  # the backoff is at its maximum
            wake.set_retry()

    passes = itertools.count(1)
    worker, _ = run(lambda: Task([False] * 9, is_urgent=is_urgent), 6, on_pass=on_pass)
    assert worker.gaps_s[2] >= 2.0
    assert worker.gaps_s[3] < 0.2
    assert worker.gaps_s[4] <= LIMITS.retry_min_s * (2 if is_urgent else 1) + 0.2


def test_a_cancellation_within_a_pass_is_recorded_and_the_worker_continues() -> None:
    """A call in a thread may raise the CancelledError of another task, which would end the loop silently."""
    task, errors = run(lambda: Task([asyncio.CancelledError(), True]), 3)
    assert len(task.passes_s) == 3
    assert [str(error) for error in errors] == ["a pass of list was cancelled from within"]
