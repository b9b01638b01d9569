"""The states of a run: `running` while a rank is connected, then how its trainers ended."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """The values are in messages, reports and the file of attached runs. The outcomes are in order of severity."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    LOST = "lost"
    FAILED = "failed"
    HALTED = "halted"


OUTCOMES = tuple(state for state in RunState if state is not RunState.RUNNING)
ENDED_WELL = (RunState.FINISHED, RunState.STOPPED)
ENDED_BADLY = (RunState.LOST, RunState.FAILED, RunState.HALTED)  # a person is expected to do something
BROKE_OFF = (RunState.LOST, RunState.FAILED)  # not because anybody, or the loop, decided so
