"""torchtitan over tierd: a checkpoint manager for its Trainer, so that the same command continues a killed run exactly.

config.checkpoint = TierdCheckpointer.Config(enable=True, run="llama3-8b", interval=500)

Snapshots hold what torchtitan's own checkpoints hold, and the random number generators of each rank. They are taken at
the interval, when `Client.due` says so, at a stop request, and at the last step. tierd's lifecycle deletes them.
"""

# pyright: basic, reportMissingImports=false
# torchtitan is not among the packages that the checks install.

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchtitan.components.checkpointer import DATALOADER, MODEL, CheckpointManager

from tierd.errors import BadConfig, Transient
from tierd_client.client import Client, Found
from tierd_client.connection import connect
from tierd_client.frameworks.dcp import TierdReader, TierdWriter
from tierd_client.log import log
from tierd_client.state import rng

RANDOMNESS = "rng"


class TierdCheckpointer(CheckpointManager):
    """torchtitan's checkpoint manager, with tierd in place of the checkpoint folder.

    `load` continues at the newest checkpoint of the run. Where tierd has none, torchtitan's own rules apply: a
    checkpoint in `folder`, else `initial_load_path`, else a fresh start. `save` returns when the snapshot is in the
    memory tier, in every `async_mode`. The snapshot of the last step is whole, and `save` returns when it is durable:
    the same command started again trains no further. A stop request ends `train` after a snapshot.

    `client` is the connection, and `found` the checkpoint that was loaded from tierd. Raises BadConfig for options that
    tierd cannot honour, and the errors of connect. `load` raises those of TierdReader.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, with two more. The defaults of two others differ from torchtitan's."""

        run: str = ""
        """The name of the run in tierd."""

        socket: str | None = None
        """The daemon's socket. Default $TIERD_SOCKET, then ./.tierd/tierd.sock."""

        keep_latest_k: int = 0
        """Must be 0: tierd's lifecycle decides what is kept."""

        last_save_model_only: bool = False
        """Applies only to the export of `last_save_in_hf`: tierd's last checkpoint has the whole state."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.keep_latest_k:
                raise BadConfig(
                    f"checkpoint.keep_latest_k={self.keep_latest_k}: tierd's lifecycle deletes checkpoints",
                    hint="leave it at 0, and set keep_last in [lifecycle.hot] and [lifecycle.cold] of tierd.toml",
                )
            if not self.last_save_in_hf and (self.last_save_model_only or self.export_dtype != "float32"):
                raise BadConfig(
                    "checkpoint.last_save_model_only or export_dtype without last_save_in_hf: tierd's last checkpoint "
                    "is whole and exact",
                    hint="leave them out; `tierd export` writes the model alone",
                )

    client: Client
    found: Found | None

    def __init__(self, config: Any, **parts: Any) -> None:
        """`parts`: what torchtitan's Trainer passes to its checkpoint manager. All ranks connect here."""
        super().__init__(config, **parts)
        if not self.enable:
            return
        if not config.run:
            raise BadConfig("checkpoint.run is empty", hint="name the run: every start with this name continues it")
        self.found = None
        self.client = connect(config.run, socket=config.socket)

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        self.client.start()
        reader = TierdReader(self.client, step=None if step == -1 else step)
        newest = reader.find()
        if newest is None:
            return super()._load(step)
        states = self._states_to_load(newest == 0)  # step 0 is a seed checkpoint, of which torchtitan takes the model
        randomness = Randomness()
        if newest and f"{RANDOMNESS}.{randomness.key}" in reader.read_metadata().state_dict_metadata:
            states[RANDOMNESS] = randomness
        elif newest:
            log.warning("tierd: step %d has no generators of rank %d: they keep their seed", newest, randomness.rank)
        load(states, storage_reader=reader)
        self.states[MODEL].load_state_dict(states)
        if DATALOADER in states and states[DATALOADER] is not None:
            # torchdata's loader draws a seed from the global generator when it makes its iterator. state_dict() makes
            # the iterator now, before the generators are restored.
            states[DATALOADER].state_dict()
        randomness.restore()
        self.found = reader.found
        log.info("tierd: torchtitan continues after step %d", newest)
        return True

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.load_only:
            return False
        is_due = self.client.due(curr_step)
        is_stopping = self.client.stopping
        if not (is_due or is_stopping or self._should_save(curr_step, last_step)):
            return False
        if last_step and self.last_save_in_hf:
            self._save_last_step(curr_step)  # first: a run that is killed here trains to its last step again
        is_saved = self._snapshot(curr_step, must_last=last_step or is_stopping)
        if is_stopping and not last_step:
            self.client.stop()
            raise SystemExit(0)  # the decorator of Trainer.train returns at this; the launcher then closes all
        return is_saved

    def _snapshot(self, step: int, *, must_last: bool) -> bool:
        """Whether a snapshot was taken. `must_last`: raise where none can be taken, and wait until it is durable."""
        states = {**self._flattened_model_states_sd(), RANDOMNESS: Randomness()}
        try:
            save(states, storage_writer=TierdWriter(self.client, step, wait_persisted=must_last))
        except CheckpointException as error:
            causes = [cause for cause, *_ in error.failures.values()]
            if must_last or not all(isinstance(cause, Transient) for cause in causes):
                raise
            log.warning("tierd: no snapshot of step %d: %s", step, causes[0])
            return False
        return True

    def _maybe_wait_for_staging(self) -> None:
        self.client.wait_staged()

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "client"):  # not when connect raised
            error = sys.exc_info()[1]  # torchtitan closes while it handles what ended the training
            if error is None:
                self.client.close()
            else:
                self.client.stop(error)


class Randomness:
    """The generators of this rank, as a Stateful of DCP. Loading only keeps the state until `restore`."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.key = f"rank-{self.rank:05d}"
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        # Each rank has a key of its own: DCP keeps one of the objects that have the same name on several ranks. One
        # value, not a dict: DCP would look for each of its entries, and their number depends on the GPUs in use.
        return {self.key: msgspec.msgpack.encode(rng.capture())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = msgspec.msgpack.decode(state_dict[self.key])

    def restore(self) -> None:
        if self._loaded is not None:
            rng.restore(self._loaded)
