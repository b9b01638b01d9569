"""Replays the first steps after a restore, and finds out whether they are the same each time, bit for bit.

If they are not, a resumed run is not the run that was interrupted: something that the steps use is not in the state, or
an operation is not deterministic.
"""

from __future__ import annotations

import json
import re
import struct
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsFloat

import torch

from tierd.errors import BadConfig, BadRequest, NotFound
from tierd.format import checksum
from tierd.format.text import listed
from tierd_client.client import Client
from tierd_client.state.tensors import as_bytes
from tierd_client.state.training_state import Captured, State
from tierd_client.step_times import as_step

_NOT_DETERMINISTIC = re.compile(r"(\S+)[^,]*? does not have a deterministic implementation")

Steps = Callable[[], Iterator[SupportsFloat | None]]
Digests = dict[str, int | str]
Taken = list[tuple[float | None, Digests]]  # the loss of each step and the state after it; first the restored state


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What `replay_check` has found. `step`: of the checkpoint; `steps`: how many steps after it were compared.

    `is_exact`: they were the same on all ranks. The rest is of this rank. `differs_at`: the first step that differed;
    None if none did. `losses`: of that step in both replays, or of the last one. `entries`: the entries of the state
    that differed after it, by name. `operations`: those that PyTorch says are not deterministic here.
    `is_exact_if_deterministic`: with deterministic algorithms the replays were the same; None if not tried."""

    step: int
    steps: int
    is_exact: bool
    differs_at: int | None
    losses: tuple[float | None, float | None]
    entries: list[str]
    operations: list[str]
    is_exact_if_deterministic: bool | None

    def __str__(self) -> str:
        last = self.step + self.steps
        if self.is_exact:
            return f"steps {self.step + 1} to {last} are the same, bit for bit, in two replays from step {self.step}"
        if self.differs_at is None:
            return f"steps {self.step + 1} to {last} are the same on this rank, and differ on another one"
        shown = listed(self.entries) or "none"
        first, second = self.losses
        where = "right after the restore" if self.differs_at == self.step else f"after step {self.differs_at}"
        return (
            f"two replays from step {self.step} differ {where}: losses {first!r} and {second!r}; entries of the state "
            f"that differ: {shown}. {self.reason}"
        )

    @property
    def reason(self) -> str:
        """Why they differ, as far as that is known; empty if they do not."""
        if self.is_exact:
            return ""
        if self.operations:
            return f"Not deterministic here: {', '.join(self.operations)}"
        if self.is_exact_if_deterministic:
            return "With torch.use_deterministic_algorithms(True) they are the same: an operation is not deterministic"
        return (
            "They also differ with deterministic algorithms: the steps use something that is not in the state, such as "
            "a counter, a buffer of losses, a generator of random numbers or a position in the data"
        )


def replay_check(client: Client, state: State, train: Steps, *, steps: int = 3) -> Replay:
    """Restores the newest checkpoint of the run and trains `steps` steps, twice, and compares the losses and all of the
    state. If they differ, it does so twice more with deterministic algorithms, to find the reason.

    `train`: called after each restore, it trains and yields the loss of each step, or None where this rank has none. It
    must take no snapshot. Call this on all ranks, in a process that does not go on to train: `state` is restored at the
    end, and what is not in it has changed. Every step reads the whole state once.

    Raises BadConfig for a bad argument, BadRequest where `train` takes a snapshot or yields no number, NotFound where
    the run has no checkpoint, and what `Client.restore` raises.
    """
    steps = _count(steps)
    found = client.restore(state, resume="require")
    if found is None:
        raise NotFound("replay the first steps after a restore: the run has no checkpoint")

    def replay() -> Taken:
        client.restore(state, resume=found.step, generation=found.generation)
        taken: Taken = [(None, _digests(state.capture(client.rank, client.world_size)))]
        for _, loss in zip(range(steps), train(), strict=False):
            taken.append((_number(loss), _digests(state.capture(client.rank, client.world_size))))
        return taken

    with _refusing_snapshots(client):
        first, second = replay(), replay()
    if client.maximum([steps + 1 - len(first)])[0]:
        raise BadConfig(f"replay_check: `train` ended after {len(first) - 1} of {steps} steps on a rank")
    at = _first_difference(first, second)
    is_exact = not client.maximum([int(at is not None)])[0]
    operations: list[str] = []
    is_exact_if_deterministic = None
    if not is_exact:
        with _refusing_snapshots(client), _deterministic(operations):
            differs = _first_difference(replay(), replay()) is not None
        is_exact_if_deterministic = not client.maximum([int(differs)])[0]
    client.restore(state, resume=found.step, generation=found.generation)
    index = steps if at is None else at
    (loss, digests), (other_loss, other_digests) = first[index], second[index]
    return Replay(
        step=found.step,
        steps=steps,
        is_exact=is_exact,
        differs_at=None if at is None else found.step + at,
        losses=(loss, other_loss),
        entries=sorted(
            name for name in digests.keys() | other_digests.keys() if digests.get(name) != other_digests.get(name)
        ),
        operations=sorted(set(operations)),
        is_exact_if_deterministic=is_exact_if_deterministic,
    )


def _count(steps: int) -> int:
    """Raises BadConfig unless it is a whole number from 1."""
    with suppress(BadRequest):
        if (count := as_step(steps)) >= 1:
            return count
    raise BadConfig(f"replay_check(steps={steps!r}): expected a whole number, 1 or more")


def _number(loss: SupportsFloat | None) -> float | None:
    """Raises BadRequest for a loss that is no number."""
    try:
        return None if loss is None else float(loss)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadRequest(
            f"replay_check: `train` yielded a {type(loss).__name__} that is not a single number: {error}",
            hint="yield a number, a tensor with one element, or None",
        ) from error


@contextmanager
def _refusing_snapshots(client: Client) -> Generator[None, None, None]:
    """A snapshot of a replay would be the newest checkpoint of the run, and a restart would begin there."""

    def refuse(step: int, *_: object, **__: object) -> NoReturn:
        raise BadRequest(
            f"replay_check: `train` takes a snapshot of step {step}", hint="leave snapshots out of the replayed steps"
        )

    vars(client)["snapshot"] = refuse
    try:
        yield
    finally:
        del vars(client)["snapshot"]


def _first_difference(first: Taken, second: Taken) -> int | None:
    for index, ((loss, digests), (other_loss, other_digests)) in enumerate(zip(first, second, strict=False)):
        if _bits(loss) != _bits(other_loss) or digests != other_digests:
            return index
    return None if len(first) == len(second) else min(len(first), len(second)) - 1


def _bits(loss: float | None) -> bytes:
    return b"" if loss is None else struct.pack("d", loss)  # NaN equals itself, 0.0 is not -0.0


def _digests(captured: Captured) -> Digests:
    """A checksum of each tensor, and each other value as text, by name."""
    digests: Digests = {}
    for tensor in captured.tensors:
        local = tensor.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digests[tensor.key] = checksum.crc64nvme(as_bytes(local).numpy().data)
    for section, tree in captured.tree.items():
        digests |= dict(_leaves(tree["value"], section))
    return digests


def _leaves(value: Any, name: str) -> Generator[tuple[str, str], None, None]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _leaves(inner, f"{name}.{key}")
    else:
        yield name, json.dumps(value, sort_keys=True)


@contextmanager
def _deterministic(operations: list[str]) -> Generator[None, None, None]:
    """Deterministic algorithms where PyTorch has them. Appends the operations that have none."""
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
    operations += [match[1] for each in caught if (match := _NOT_DETERMINISTIC.search(str(each.message)))]
