"""Values in extra with a real daemon: restored, exported, or refused with an error that blames no replica."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.daemon import Daemon
from tests.support.state import assert_same
from tests.support.trainer import Trainer, Training, together
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


class Table(torch.nn.Module):
    """A plain parameter, and a table that the ranks share out."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.full((2,), 3.0))
        self.rows = torch.nn.Parameter(distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]))


def arrange(training: Training, rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    training.extra = {"table": Table(init_device_mesh("cpu", (2,)))}
    torch.manual_seed(0)
    training.state = tierd_client.TrainingState(model=torch.nn.Linear(1, 1), extra=training.extra, rng=False)


@pytest.mark.long
def test_table_of_two_ranks_in_a_module_in_extra_is_exported_whole(tmp_path: Path) -> None:
    with Daemon(tmp_path, cold="") as daemon:
        with Trainer() as first, Trainer() as second:
            for rank, trainer in enumerate((first, second)):
                trainer.begin("apply", arrange, rank, str(tmp_path / "rendezvous"))
            for trainer in (first, second):
                trainer.end()
            together([first, second], "connect", daemon.socket)
            together([first, second], "durable")
        exported = daemon.tierd("export", "--format", "torch", "--to", str(tmp_path / "out.pt"))
        assert exported.returncode == 0, exported.stderr
    tables = torch.load(tmp_path / "out.pt", weights_only=True)["extra"]["table"]
    expected = {"bias": torch.full((2,), 3.0), "rows": torch.arange(8.0).view(4, 2)}
    assert_same(tables, [expected, expected])


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
