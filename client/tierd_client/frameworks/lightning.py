"""Lightning over tierd: with one callback, `trainer.fit` continues bit for bit where a killed one was.

trainer = Trainer(callbacks=[TierdCallback("gpt-124m", every_steps=50)])
trainer.fit(model, data)

Snapshots hold what Lightning's own checkpoint holds, the epoch's metrics, the generators, and the position in the data:
the loader's own state where it has one (torchdata's StatefulDataLoader); a plain DataLoader repeats the batches of its
epoch. Snapshots are taken between two batches, just before the next one is fetched, when all work on the last one is
done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher  # pyright: ignore[reportPrivateUsage]
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint

from tierd.errors import Mismatch, Transient, Unsupported
from tierd_client.client import Client, Found
from tierd_client.connection import connect
from tierd_client.frameworks import logged_metrics
from tierd_client.frameworks.lightning_rollback import go_back
from tierd_client.frameworks.watched_loader import LoaderPosition, WatchedLoader
from tierd_client.log import log
from tierd_client.loss_guard import LossGuard, LossRule
from tierd_client.state.dict_state import DictState
from tierd_client.state.restore_filter import EXACT, RestoreFilter
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.stored_state import StoredState
from tierd_client.state.training_state import Captured

PER_RANK = ("loops", "place", "metrics", "buffers", "gradients")


class LightningState(DictState):
    """A snapshot's values. `broadcast`: the tensors of which rank 0's values count, such as the buffers under DDP."""

    def __init__(self, values: dict[str, Any], broadcast: Collection[torch.Tensor] = ()) -> None:
        super().__init__(values, per_rank=PER_RANK)
        self._broadcast = {id(tensor) for tensor in broadcast}

    def capture(self, rank: int, world_size: int) -> Captured:
        captured = super().capture(rank, world_size)
        tensors = [
            msgspec.structs.replace(tensor, is_buffer=True) if id(tensor.tensor) in self._broadcast else tensor
            for tensor in captured.tensors
        ]
        return Captured(tensors, captured.tree)


class _PresentState(LightningState):
    """For the guard. A capture takes the training as it is at that moment; after a restore, what was restored, until
    `go_back` has applied it."""

    def __init__(self, callback: TierdCallback) -> None:
        super().__init__(callback._values)  # pyright: ignore[reportPrivateUsage]
        self._callback = callback
        self.is_restored = False

    def capture(self, rank: int, world_size: int) -> Captured:
        if not self.is_restored:
            self._callback._fill_values()  # pyright: ignore[reportPrivateUsage]
        return self._callback._state().capture(rank, world_size)  # pyright: ignore[reportPrivateUsage]

    def plan_restore(self, stored: StoredState, *, is_dry: bool = False, filter: RestoreFilter = EXACT) -> RestorePlan:
        self.is_restored = True
        return super().plan_restore(stored, is_dry=is_dry, filter=filter)


class TierdCallback(Callback):
    """Takes snapshots when `due`, at SIGTERM, and at the end of `fit`; restores the newest when `fit` begins.

    `run` and `options` are those of `tierd_client.connect`; each `fit` connects when its ranks have started. `found`
    describes the restored checkpoint. `trainer.fit(ckpt_path=…)` takes precedence over tierd's checkpoints. SIGTERM
    ends `fit` before the next batch with SystemExit, after a snapshot.

    `guard`: what a bad loss is and does. It looks at what training_step returns, once for each optimizer step, before
    validation, logs and snapshots of that step: of accumulated batches at their mean. After a rollback, the batches
    since the restored snapshot are not trained on again: an epoch has fewer steps.

    `fit` raises Unsupported for strategies whose checkpoints are directories and for steps that take a dataloader_iter,
    Mismatch for a run of another kind of training or on another number of ranks, and the errors of connect and
    Client.restore.
    """

    def __init__(self, run: str, *, guard: LossRule | None = None, **options: Any) -> None:
        self.client: Client | None = None
        self.found: Found | None = None
        self._run = run
        self._options = options
        self._rule = guard
        self._guard: LossGuard | None = None
        self._losses: list[torch.Tensor] = []  # since the last step
        self._trainer: Any = None
        self._values: dict[str, Any] = {}
        self._resumed: LoaderPosition | None = None
        self._metrics: dict[str, Any] | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._last_step: int | None = None
        self._asked_step: int | None = None
        self._checked_step: int | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.strategy.restore_checkpoint_after_setup:
            raise Unsupported(
                f"snapshot a training by {type(trainer.strategy).__name__}: its checkpoints are directories",
                hint="save its state with torch.distributed.checkpoint: tierd_client.frameworks.dcp",
            )
        self._trainer, self._values, self._asked_step = trainer, {}, None
        self.client = connect(self._run, **self._options)
        self._restore(self.client)
        source = trainer.fit_loop._data_source
        make_loaders = source.dataloader
        source.dataloader = lambda: self._watch(make_loaders())
        loop = trainer.fit_loop.epoch_loop
        begin = loop.on_run_start

        def on_run_start(data_fetcher: Any) -> None:
            begin(data_fetcher)
            if vars(loop).pop("on_run_start", None) is not None:
                self._resume()

        loop.on_run_start = on_run_start
        if self._rule is not None:
            self._present = _PresentState(self)
            self._guard = LossGuard(self.client, self._present, **asdict(self._rule), keep=())
            end = loop.on_advance_end

            def on_advance_end(data_fetcher: Any) -> None:
                self._check_loss()  # after all hooks of the batch, before validation
                end(data_fetcher)

            loop.on_advance_end = on_advance_end

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.found is not None and checkpoint.get("loops") is not self._values["loops"]:
            log.warning("tierd: ckpt_path is given: training begins there, not at step %d of tierd", self.found.step)
            self.found = self._resumed = self._metrics = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise Unsupported(
                "snapshot a training whose training_step takes a dataloader_iter: it has no instant between batches",
                hint="let training_step take the batch",
            )
        if self.client is not None:
            self.client.start()  # replaces Lightning's handler, which ends each rank at any instruction
        self._asked_step = self._last_step = self._checked_step = trainer.global_step
        if self.found is not None:
            self._fill_values()  # frees what was restored, and makes the size of a snapshot known

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss: Any = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._guard is not None and isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())

    def _check_loss(self) -> None:
        """Called after each batch. Stops or goes back when the loss of the last step is bad."""
        trainer, guard = self._trainer, self._guard
        if guard is None or trainer.global_step == self._checked_step:
            return  # gradients are accumulated
        loss = sum(self._losses) if self._losses else None  # Lightning has divided them by their number
        if loss is not None and not trainer.lightning_module.automatic_optimization:
            loss = loss / len(self._losses)
        self._losses = []
        back = guard.check(trainer.global_step, loss)
        if back is not None:
            go_back(trainer, self._values)
            self._present.is_restored = False
            self._asked_step = self._last_step = back
        self._checked_step = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._snapshot()
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    def _restore(self, client: Client) -> None:
        """Gives the newest snapshot to Lightning as if it had just read a checkpoint file."""
        self.found = client.restore(LightningState(self._values))
        self._resumed = self._metrics = None
        if self.found is None:
            return
        try:
            self._resumed = msgspec.convert(self._values["place"], LoaderPosition)
            checkpoint = {
                **self._values["checkpoint"],
                "state_dict": {**self._values["model"], **self._values["buffers"]},
            }
            checkpoint["loops"] = self._values["loops"]
            self._metrics = self._values["metrics"]
            self._buffers, self._gradients = self._values["buffers"], self._values["gradients"]
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise Mismatch(
                f"resume {self._run} at step {self.found.step}: not a snapshot of a Lightning training: {error!r}",
                hint="use another run name for this training",
            ) from error
        if self._resumed.world_size != self._trainer.world_size:
            raise Mismatch(
                f"resume {self._run} at step {self.found.step}: the snapshot is of {self._resumed.world_size} ranks, "
                f"this training has {self._trainer.world_size}",
                hint="resume on the same number of ranks: Lightning distributes the batches of an epoch among them",
            )
        # Without a ckpt_path, fit restores this.
        self._trainer._checkpoint_connector._loaded_checkpoint, _ = migrate_checkpoint(checkpoint)

    def _watch(self, loaders: Any) -> WatchedLoader:
        """The training's loaders, at the position of the resumed snapshot if there is one."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:  # a training that is finished goes no further than this
            self._trainer.should_stop = resumed.should_stop
            self._restore_metrics()
            for name, value in self._trainer.lightning_module.state_dict().items():
                if name in self._buffers:
                    value.copy_(self._buffers[name])  # again: DDP has given rank 0's to all ranks
            self._buffers = {}
            if hasattr(self._trainer.strategy.model, "require_forward_param_sync"):
                self._trainer.strategy.model.require_forward_param_sync = resumed.broadcasts_next
        mode = "max_size_cycle"
        if isinstance(loaders, CombinedLoader):
            loaders, mode = loaders.iterables, loaders._mode  # pyright: ignore[reportPrivateUsage]
        return WatchedLoader(loaders, mode, self.before_batch, self._trainer.strategy.root_device, resumed)

    def _resume(self) -> None:
        """Called just before the first batch, after all hooks that Lightning calls at the start of training."""
        trainer = self._trainer
        if self._metrics is None:
            return
        # Lightning expects a checkpoint from within a step. From one between two batches, it would validate again, log
        # another step number, and not step a plateau scheduler at the end of the epoch.
        trainer.fit_loop.epoch_loop.restarting = False
        trainer.fit_loop._restarting = False
        self._restore_metrics()  # again: the hooks have logged, as at the start of a training
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                callback.on_train_epoch_start(trainer)  # Lightning calls it only where an epoch begins
        for name, parameter in trainer.lightning_module.named_parameters():
            if name in self._gradients:
                parameter.grad = self._gradients[name].to(parameter.device)
        self._metrics, self._gradients = None, {}

    def _restore_metrics(self) -> None:
        if self._metrics is not None:
            logged_metrics.restore(self._trainer, self._metrics)

    def before_batch(self) -> None:
        """Called between two batches. Takes a snapshot when one is due. Raises SIGTERMException to stop."""
        trainer, client = self._trainer, self.client
        if client is None or self._asked_step in (None, trainer.global_step):
            return  # before the first step, or while gradients are accumulated
        self._asked_step = trainer.global_step
        if client.due(trainer.global_step) or client.stopping:
            self._snapshot()
        if client.stopping:
            raise SIGTERMException

    def _snapshot(self) -> None:
        """Takes a snapshot of the last step, unless there is one."""
        trainer, client = self._trainer, self.client
        if client is None or trainer.global_step == self._last_step:
            return
        self._fill_values()
        self._last_step = trainer.global_step
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        try:
            client.snapshot(trainer.global_step, self._state(), metrics=metrics)
        except Transient as error:
            log.warning("tierd: no snapshot of step %d: %s", trainer.global_step, error)

    def _fill_values(self) -> None:
        """Sets the values of a snapshot to the training's present state."""
        trainer = self._trainer
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for owner in (trainer.lightning_module, trainer.datamodule):
            if owner is not None:  # constructor arguments: the script passes them again, and they may be any object
                for name in ("NAME", "KEY", "TYPE"):
                    checkpoint.pop(getattr(owner, f"CHECKPOINT_HYPER_PARAMS_{name}"), None)
        loop = trainer.fit_loop.epoch_loop
        loader: WatchedLoader = trainer.fit_loop._combined_loader
        given = loop.batch_progress.current.ready
        at_iter, at_first, at_ahead, now = loader.randomness(given)
        place = LoaderPosition(
            trainer.world_size,
            trainer.fit_loop.epoch_progress.current.processed,
            given,
            loop._num_ready_batches_reached(),
            trainer.should_stop,
            getattr(trainer.strategy.model, "require_forward_param_sync", False),
            at_iter,
            at_first,
            at_ahead,
            now,
        )
        if at_ahead is not None and loader.states_ahead:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loader.states_ahead
        module = trainer.lightning_module
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        model = checkpoint.pop("state_dict")
        is_apart = trainer.world_size > 1 and not self._broadcasts_buffers
        self._values["model"] = {name: value for name, value in model.items() if name in names or not is_apart}
        self._values["buffers"] = {name: value for name, value in model.items() if name not in names and is_apart}
        self._values["loops"] = checkpoint.pop("loops")
        self._values["checkpoint"] = checkpoint
        self._values["place"] = msgspec.to_builtins(place, builtin_types=(bytes,))
        self._values["metrics"] = logged_metrics.capture(trainer)
        # With manual optimization, the module decides over how many batches it accumulates gradients.
        gradients = {
            name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None
        }
        self._values["gradients"] = {} if module.automatic_optimization else gradients

    @property
    def _broadcasts_buffers(self) -> bool:
        """Whether DDP gives rank 0's buffers to all ranks before each step. Lightning prevents it when manual."""
        is_automatic = self._trainer.lightning_module.automatic_optimization
        return is_automatic and getattr(self._trainer.strategy.model, "broadcast_buffers", False)

    def _state(self) -> LightningState:
        names = {name for name, _ in self._trainer.lightning_module.named_parameters(remove_duplicate=False)}
        model: dict[str, Any] = self._values["model"]
        return LightningState(self._values, [value for name, value in model.items() if name not in names])

    def _leave(self, error: BaseException | None = None) -> None:
        """`error`: what ended the training."""
        if self._trainer is not None:
            vars(self._trainer.fit_loop._data_source).pop("dataloader", None)
            vars(self._trainer.fit_loop.epoch_loop).pop("on_run_start", None)
            vars(self._trainer.fit_loop.epoch_loop).pop("on_advance_end", None)
        self._guard, self._losses = None, []
        client, self.client, self._trainer, self._values = self.client, None, None, {}
        if client is not None:
            client.stop(error)
