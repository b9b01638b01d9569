"""Checks the loss of each step. If it is bad, the run stops, or goes back to a healthy checkpoint and skips batches.

Before that, the state is saved as evidence: as a milestone that no restore takes unless it is named.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal, SupportsFloat

import torch

from tierd.errors import BadConfig, BadRequest, Corrupt, NotFound, TierdError, Unhealthy
from tierd.format.health import EXAMINED, is_examined
from tierd.format.manifest import REPORTED_UNHEALTHY
from tierd.format.text import listed
from tierd_client.client import Client, Found
from tierd_client.log import log
from tierd_client.restore.replica import Replica, RestoreRequest
from tierd_client.state.restore_filter import Patterns, RestoreFilter
from tierd_client.state.tensors import CapturedTensor
from tierd_client.state.training_state import State, TrainingState

LOSSES_LEAST = 10  # a median of fewer is not compared
PERSIST_TIMEOUT_S = 60.0  # for the last snapshot, before the evidence takes its place in memory
_NO_NUMBER, _NOT_FINITE, _SPIKE = 3, 2, 1


@dataclass(frozen=True, slots=True)
class LossRule:
    """When a loss is bad, and what happens then. For `LossGuard` and for the callbacks of frameworks.

    A loss is bad when it is not finite. With `spike` above 1 it is also bad above `spike` times the median of the last
    `window` losses of this rank, once there are 10 of them and the median is positive.

    `action`: what a bad loss does on all ranks. "halt" ends the process with exit code 17. "rollback" restores the
    newest healthy checkpoint, at most `max_rollbacks` times in this process, and then halts.

    Raises BadConfig for a value that is out of range.
    """

    action: Literal["halt", "rollback"] = "halt"
    spike: float = 0.0
    window: int = 50
    max_rollbacks: int = 2

    def __post_init__(self) -> None:
        if self.action not in ("halt", "rollback"):
            raise BadConfig(f"LossRule(action={self.action!r}): expected 'halt' or 'rollback'")
        if not _is_number(self.spike) or not (self.spike == 0 or 1 < self.spike < math.inf):
            raise BadConfig(f"LossRule(spike={self.spike!r}): expected 0 for none, or a factor above 1")
        if not _is_whole(self.window) or self.window < LOSSES_LEAST:
            raise BadConfig(f"LossRule(window={self.window!r}): expected {LOSSES_LEAST} losses or more")
        if not _is_whole(self.max_rollbacks) or self.max_rollbacks < 0:
            raise BadConfig(f"LossRule(max_rollbacks={self.max_rollbacks!r}): expected 0 or more")


class LossGuard:
    """Applies a `LossRule`, of which `action`, `spike`, `window` and `max_rollbacks` are the fields.

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
        keep: Patterns | None = None,
    ) -> None:
        """The same arguments on all ranks. Raises BadConfig for one that is out of range."""
        self.rollbacks = 0
        """How often the run has gone back."""
        self.rule = LossRule(action, spike, window, max_rollbacks)
        self._client = client
        self._state = state
        self._losses = deque[float](maxlen=window)
        self._keep_is_checked = not keep
        keep = _position(state) if keep is None else keep
        self._filter = RestoreFilter.parse(only=None, rename=None, strict=True, cast=False, keep=keep)

    def check(self, step: int, loss: SupportsFloat | None) -> int | None:
        """Call it on all ranks after each step, before its snapshot. `loss`: this rank's, a number or a tensor with one
        element, not scaled by a GradScaler; None if this rank has no loss, as in a pipeline. The ranks exchange one
        number.

        Returns None if the loss is good. Otherwise returns the earlier step whose state was restored: go on with the
        step after it. Raises Halted, BadRequest on all ranks when the loss of one is no number or the step has a
        snapshot, BadConfig for a `keep` that stands for nothing in the state, and what `Client.restore` raises when no
        checkpoint can be read.
        """
        if not self._keep_is_checked:
            self._check_keep()
        value, error = None, None
        try:
            value = _number(loss)
        except (TypeError, ValueError, OverflowError, RuntimeError) as caught:
            # Of one rank: the others must not wait for it.
            error = caught
        badness = _NO_NUMBER if error is not None else self._badness(value)
        worst = self._client.maximum([badness])[0]
        last = self._client.last_step
        if last is not None and step <= last:
            raise BadRequest(
                f"check the loss of step {step}: a snapshot of step {last} was taken before",
                hint="call check(step, loss) before snapshot(step, ...): a bad step must have no ordinary snapshot",
            )
        if worst == _NO_NUMBER:
            where = "on this rank" if error is not None else "on another rank"
            raise BadRequest(
                f"check the loss of step {step}: {where} it is not a single number{f': {error}' if error else ''}",
                hint="give a number, a tensor with one element, or None",
            ) from error
        if not worst:
            if value is not None:
                self._losses.append(value)
            return None
        reason = f"the loss of step {step} is not finite" if worst == _NOT_FINITE else self._spike_text(step)
        if badness:
            log.error("tierd: %s: it is %g on this rank", reason, value)
        # As of now: the evidence is of this generation too.
        generation = self._client.generation if last is not None else None
        self._save_evidence(step, value)
        if self.rule.action == "halt":
            self._client.halt(reason)
        if self.rollbacks == self.rule.max_rollbacks:
            self._client.halt(f"{reason}, after {self.rollbacks} rollbacks, the most for one process")
        restored = self._go_back(generation)
        if restored is None:
            self._client.halt(f"{reason}, and there is no healthy checkpoint to go back to")
        self.rollbacks += 1
        log.error(
            "tierd: %s: back at step %d, rollback %d of %d",
            reason,
            restored.step,
            self.rollbacks,
            self.rule.max_rollbacks,
        )
        return restored.step

    def _check_keep(self) -> None:
        """Raises BadConfig where a name of `keep` is in no section of the state, on any rank. A rollback would find it
        when it is needed. What is below a section may come later, as the state of an optimizer."""
        captured = self._state.capture(self._client.rank, self._client.world_size)
        sections = {tensor.name.partition(".")[0] for tensor in captured.tensors} | captured.tree.keys()
        patterns = self._filter.keep
        found = [pattern.partition(".")[0] in sections or "*" in pattern for pattern in patterns]
        anywhere = self._client.maximum([int(each) for each in found]) if found else []
        if wrong := [pattern for pattern, each in zip(patterns, anywhere, strict=True) if not each]:
            raise BadConfig(
                f"LossGuard(keep=…): {listed(list(map(repr, wrong)))} is in no section of the state",
                hint=f"its sections are {', '.join(sorted(sections))}",
            )
        self._keep_is_checked = True

    def _go_back(self, generation: int | None) -> Found | None:
        """Restores the newest healthy checkpoint of `generation`, or else that at which it began, or one before.

        Not the newest of the run: after a start from a chosen step, that one is of the timeline that was left.
        """
        parent = self._client.parent
        if generation is not None:
            try:
                return self._restore(None, generation)
            except (NotFound, Unhealthy, Corrupt) as error:
                log.error("tierd: generation %d has no checkpoint to go back to: %s", generation, error)
        if parent is None:
            return None
        try:
            return self._restore(parent.step, parent.generation)
        except (NotFound, Unhealthy, Corrupt) as error:
            log.error("tierd: the checkpoint at which this start began is of no use: %s", error)
        try:
            return self._restore(None, parent.generation, step_max=parent.step)
        except (NotFound, Unhealthy, Corrupt):
            return None

    def _restore(self, step: int | None, generation: int, *, step_max: int | None = None) -> Found:
        request = RestoreRequest(step=step, generation=generation)
        return self._client.read(request, partial(self._read, step_max=step_max))

    def _read(self, replica: Replica, *, step_max: int | None) -> None:
        """Raises Unhealthy for a checkpoint that nobody has examined yet: the loss of its step was good, and then the
        optimizer has spoiled the weights. Raises NotFound, so that an older one is tried, for a step above
        `step_max`."""
        client, manifest = self._client, replica.manifest
        if step_max is not None and manifest.step > step_max:
            raise NotFound(f"go back to step {step_max} or before: {manifest.id} is of a timeline that was left")
        replica.read_into_state(self._state, client.rank, client.world_size, self._filter)
        captured = self._state.capture(client.rank, client.world_size)
        spoiled = next((tensor.name for tensor in captured.tensors if _is_spoiled(tensor)), None)
        if spoiled is not None:
            error = Unhealthy(f"go back to {manifest.id} from {replica.tier}: {spoiled} is not finite")
            log.error("tierd: %s", error.message)
            raise error

    def _badness(self, loss: float | None) -> int:
        if loss is None:
            return 0
        if not math.isfinite(loss):
            return _NOT_FINITE
        if not self.rule.spike or len(self._losses) < LOSSES_LEAST:
            return 0
        middle = median(self._losses)
        return _SPIKE if middle > 0 and loss > self.rule.spike * middle else 0

    def _spike_text(self, step: int) -> str:
        return (
            f"the loss of step {step} is above {self.rule.spike:g} times the median of the last {self._losses.maxlen}"
        )

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


def _is_whole(value: object) -> bool:
    return isinstance(value, int)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _is_spoiled(captured: CapturedTensor) -> bool:
    """As the daemon examines it: a buffer, or a tensor that a DictState names, may be a mask of infinities."""
    tensor = captured.tensor
    if not is_examined(captured.name, captured.shape) or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # torch has no isnan for float8
    may_be_infinite = captured.is_buffer or not captured.name.startswith(EXAMINED)
    return bool(tensor.isnan().any() if may_be_infinite else not tensor.isfinite().all())


def _number(loss: SupportsFloat | None) -> float | None:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss) if loss is not None else None


def _position(state: State) -> tuple[str, ...]:
    """The entries of the state that determine the next batches."""
    return state.position_entries if isinstance(state, TrainingState) else ()
