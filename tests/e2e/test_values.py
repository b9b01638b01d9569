"""Values of the user's classes with a real daemon: what cannot be restored is an error, and no replica is blamed."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch

from tests.support.daemon import Daemon
from tierd.errors import Mismatch, TierdError


class Parts(enum.Flag):
    A = 1
    B = 2
    C = 4


class Box:
    def __init__(self, content: int) -> None:
        self.content = content


def state_of(extra: dict[str, Any], decode: Any = lambda name, content: Box(content)) -> tierd_client.TrainingState:
    return tierd_client.TrainingState(
        model=torch.nn.Linear(2, 2),
        extra=extra,
        rng=False,
        encode=lambda value: ("box", value.content) if isinstance(value, Box) else None,
        decode=decode,
    )


def test_value_that_cannot_be_restored_is_an_error_and_leads_to_no_older_checkpoint(tmp_path: Path) -> None:
    """Corrupt would report the newest replica as damaged and restore step 1."""
    fewer = enum.Flag("Parts", "A B")

    def refuse(name: str, content: int) -> Box:
        raise tierd_client.Corrupt(f"the user's code refuses {content}")

    with Daemon(tmp_path, cold="") as daemon:
        with tierd_client.connect("run", socket=daemon.socket) as client:
            extra: dict[str, Any] = {"parts": Parts.A, "box": Box(1)}
            state = state_of(extra)
            client.restore(state)
            client.snapshot(1, state).wait_persisted()
            extra |= {"parts": Parts.A | Parts.C, "box": Box(2)}
            client.snapshot(2, state).wait_persisted()
        with tierd_client.connect("run", socket=daemon.socket) as client:
            with pytest.raises(Mismatch, match=r"Parts\.5, which is no member now"):
                client.restore(state_of({"parts": fewer.A, "box": Box(0)}))  # type: ignore[attr-defined]
            with pytest.raises(TierdError, match=r"restore extra\.box: decode= raised Corrupt") as caught:
                client.restore(state_of({"parts": Parts.A, "box": Box(0)}, refuse))
            assert type(caught.value) is TierdError
            found = client.restore(state_of({"parts": Parts.A, "box": Box(0)}))
            assert found is not None
            assert found.step == 2
