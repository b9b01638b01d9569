"""Checks the loss of each step. If it is bad, the run stops, or goes back to a healthy checkpoint and skips batches.

Before that, the state is saved as evidence: as a milestone that no restore takes unless it is named.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal, SupportsFloat

from tierd.errors import BadConfig, TierdError, Unhealthy
from tierd.format.manifest import REPORTED_UNHEALTHY
from tierd_client.client import Client
from tierd_client.log import log
from tierd_client.state.training_state import State, TrainingState

LOSSES_LEAST = 10  # a median of fewer is not compared
PERSIST_TIMEOUT_S = 60.0  # for the last snapshot, before the evidence takes its place in memory
_NOT_FINITE, _SPIKE = 2, 1


class LossGuard:
    """`action`: what a bad loss does on all ranks. "halt" ends the process with exit code 17. "rollback" restores the
    newest healthy checkpoint, at most `max_rollbacks` times in this process, and then halts.

    A loss is bad when it is not finite. With `spike` above 1 it is also bad above `spike` times the median of the last
    `window` losses of this rank, once there are 10 of them and the median is positive.

    `keep`: the entries of the state that a rollback leaves as they are. The default is the position of the data loader
    and the random number generators, so training goes on with the batches after the bad one.
    """

    def __init__(
        self,
        client: Client,
        state: State,
        *,
        action: Literal["halt", "rollback"] = "halt",
        spike: float = 0.0,
        window: int = 50,
        max_rollbacks: int = 2,
        keep: Sequence[str] | None = None,
    ) -> None:
        """The same arguments on all ranks. Raises BadConfig for one that is out of range."""
        if action not in ("halt", "rollback"):
            raise BadConfig(f"LossGuard(action={action!r}): expected 'halt' or 'rollback'")
        if not (spike == 0 or 1 < spike < math.inf):
            raise BadConfig(f"LossGuard(spike={spike!r}): expected 0 for none, or a factor above 1")
        if window < LOSSES_LEAST:
            raise BadConfig(f"LossGuard(window={window!r}): expected {LOSSES_LEAST} losses or more")
        if max_rollbacks < 0:
            raise BadConfig(f"LossGuard(max_rollbacks={max_rollbacks!r}): expected 0 or more")
        self.rollbacks = 0
        """How often the run has gone back."""
        self._client = client
        self._state = state
        self._goes_back = action == "rollback"
        self._spike = spike
        self._losses = deque[float](maxlen=window)
        self._max_rollbacks = max_rollbacks
        self._keep = tuple(keep) if keep is not None else _position(state)

    def check(self, step: int, loss: SupportsFloat | None) -> int | None:
        """Call it on all ranks after each step, before its snapshot. `loss`: this rank's, a number or a tensor with one
        element; None if this rank has no loss, as in a pipeline. The ranks exchange one number.

        Returns None if the loss is good. Otherwise returns the earlier step whose state was restored: go on with the
        step after it. Raises Halted, and what `Client.restore` raises when no checkpoint can be read.
        """
        value = None if loss is None else float(loss)
        badness = self._badness(value)
        worst = self._client.maximum([badness])[0]
        if not worst:
            if value is not None:
                self._losses.append(value)
            return None
        reason = f"the loss of step {step} is not finite" if worst == _NOT_FINITE else self._spike_text(step)
        if badness:
            log.error("tierd: %s: it is %g on this rank", reason, value)
        self._save_evidence(step, value)
        if not self._goes_back:
            self._client.halt(reason)
        if self.rollbacks == self._max_rollbacks:
            self._client.halt(f"{reason}, after {self.rollbacks} rollbacks, the most for one process")
        try:
            restored = self._client.restore(self._state, resume="auto", keep=self._keep)
        except Unhealthy:
            restored = None
        if restored is None:
            self._client.halt(f"{reason}, and there is no healthy checkpoint to go back to")
        self.rollbacks += 1
        log.error(
            "tierd: %s: back at step %d, rollback %d of %d", reason, restored.step, self.rollbacks, self._max_rollbacks
        )
        return restored.step

    def _badness(self, loss: float | None) -> int:
        if loss is None:
            return 0
        if not math.isfinite(loss):
            return _NOT_FINITE
        if not self._spike or len(self._losses) < LOSSES_LEAST:
            return 0
        middle = median(self._losses)
        return _SPIKE if middle > 0 and loss > self._spike * middle else 0

    def _spike_text(self, step: int) -> str:
        return f"the loss of step {step} is above {self._spike:g} times the median of the last {self._losses.maxlen}"

    def _save_evidence(self, step: int, loss: float | None) -> None:
        """A failure is logged and not raised, because to stop or to go back matters more."""
        metrics = {REPORTED_UNHEALTHY: 1.0} | ({} if loss is None else {"loss": loss})
        try:
            if self._client.last_step is not None:  # the checkpoint to go back to must not be in memory alone
                self._client.wait_everywhere(PERSIST_TIMEOUT_S)
            name = f"bad-loss-{step}-g{self._client.generation}"
            self._client.snapshot(step, self._state, metrics=metrics, milestone=name)
        except TierdError as error:
            log.error("tierd: no snapshot of step %d, whose loss is bad: %s", step, error)


def _position(state: State) -> tuple[str, ...]:
    """The entries of the state that determine the next batches."""
    return state.position_entries if isinstance(state, TrainingState) else ()
