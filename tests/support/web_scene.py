"""A real daemon after a real training, for the tests of the status pages and for the pictures in the docs.

The run has two generations, the second of which began at an earlier checkpoint, a milestone and an unhealthy step, and
two cold tiers.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tierd_client
import torch
from tierd_client.state.training_state import TrainingState

from tests.support.daemon import Daemon
from tests.support.waiting import wait_until

RUN = "gpt-124m"
MILESTONE, UNHEALTHY, LAST = 10, 33, 36  # steps
MORE = """
[[cold]]
name = "region-b"
url = "file://region-b"
[health]
examine = true
[lifecycle.hot]
keep_last = 6
"""


@contextmanager
def trained_run(root: Path, *, step_s: float = 0.0, every: int = 1, **options: Any) -> Generator[Daemon]:
    """The daemon, as soon as everything is copied. `step_s`: how long a step takes at least. `every`: a snapshot of the
    first step and of every so many; the unhealthy and the last one have one in any case. `options`: of the
    daemon."""
    with Daemon(root, more=MORE, **options) as daemon:
        for first, last in ((1, 22), (20, LAST)):
            _train(daemon, first, last, step_s, every)
        wait_until(lambda: _is_copied(daemon), "the last checkpoint in every tier")
        yield daemon


def _train(daemon: Daemon, first: int, last: int, step_s: float, every: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    state = TrainingState(model=model, optimizer=optimizer)
    with tierd_client.connect(run=RUN, socket=daemon.socket) as client:
        if first > 1:
            client.restore(state, resume=first - 1)
        for step in range(first, last + 1):
            inputs = torch.randn(8, 64)
            loss = (model(inputs) - inputs).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept = model.weight[0, 0].item()
            if step == UNHEALTHY:
                with torch.no_grad():
                    model.weight[0, 0] = float("nan")
            milestone = "best" if step == MILESTONE else None
            if (step - first) % every == 0 or step in (UNHEALTHY, last):
                shot = client.snapshot(step, state, metrics={"loss": loss.item()}, milestone=milestone)
                shot.wait_persisted(60)
            with torch.no_grad():
                model.weight[0, 0] = kept
            time.sleep(step_s)


def _is_copied(daemon: Daemon) -> bool:
    (run,) = daemon.status()["runs"]
    return UNHEALTHY in run["unhealthy_steps"] and all(
        newest and newest["step"] == LAST for tier, newest in run["tiers"].items() if tier != "memory"
    )
