"""The progress of a Hugging Face Trainer: its state besides the objects that a TrainingState takes.

Trainer keeps part of it outside TrainerState: the sum of the losses, the position in the data, TRL's counters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from transformers.trainer_callback import ExportableState

from tierd.errors import BadConfig, Mismatch
from tierd_client.frameworks.read_ahead import ReadAhead
from tierd_client.frameworks.worker_generators import WorkerGenerators
from tierd_client.state import rng
from tierd_client.state.restore_filter import EXACT, RestoreFilter
from tierd_client.state.restore_plan import RestorePlan
from tierd_client.state.stored_state import StoredState
from tierd_client.state.training_state import TrainingState

KEY = "trainer"  # of Trainer's progress, in `extra`
NUMBERS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",  # where train() begins to average the loss; later transformers only
    "current_flos",
    "_total_train_tokens",  # of TRL
)
STEP_FIELDS = ("global_step", "num_input_tokens_seen", "total_flos", "log_history")
"""The fields of TrainerState that a rollback restores. The epoch goes on, and the best checkpoint still exists."""
METRICS = ("_metrics", "_stored_metrics")  # of TRL: {mode: {name: the values since the last log}}


class TrainerProgress:
    """`load_state_dict` restores all but TrainerState, which Trainer reads from a file.

    What changes between the start of train() and the first step is restored by `restore_last`.
    """

    def __init__(self, trainer: Any) -> None:
        self.is_finished = False
        """Whether train() came to its end, by its steps or because a callback stopped it."""
        self.is_accumulating = False
        """Whether there are gradients of batches that no optimizer step has used."""
        self.earlier_s = 0.0
        """The duration of earlier starts up to the snapshot."""
        self._trainer = trainer
        self._began = time.monotonic()
        self._epoch = 0
        self._batches = 0
        self._epoch_generators: dict[str, Any] | None = None
        self._saved: dict[str, Any] = {}
        self._ahead = ReadAhead([trainer.args.device])
        self._workers: WorkerGenerators | None = None
        self._draws = False  # whether a worker has ever drawn random numbers
        self._reads = 1  # of the loader, for one batch of this rank
        self._goes_back = False
        self._skipped = 0  # batches of the current epoch that were trained on before this start

    def watch(self, dataloader: Any) -> None:
        """Prepares to save the generators that `dataloader` of Trainer draws from, and to continue the saved position.

        Raises Mismatch when another number of workers would read other batches or draw other numbers.
        """
        args = self._trainer.args
        loader = getattr(dataloader, "base_dataloader", dataloader)
        is_stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        is_dispatched = isinstance(dataloader, DataLoaderDispatcher)
        if is_dispatched and not dataloader.split_batches:
            self._reads = args.world_size  # the first rank reads for all ranks
        if self._saved and self._saved["num_workers"] != args.dataloader_num_workers:
            if is_stream or self._saved["draws"] or any(self._saved["ahead"]):
                raise Mismatch(
                    f"resume with {args.dataloader_num_workers} workers of the loader: it had "
                    f"{self._saved['num_workers']}, and would read or draw something else",
                    hint=f"set dataloader_num_workers={self._saved['num_workers']}",
                )
        elif self._saved:
            self._ahead.repeat(self._saved["ahead"], after=self._batches * self._reads if is_stream else 0)
        if loader.num_workers == 0:
            self._ahead.watch(loader, has_dataset=not is_stream)
        elif not is_stream and not (is_dispatched and args.process_index > 0):
            self._workers = WorkerGenerators(loader, read_ahead=args.gradient_accumulation_steps + 1)
            if len(self._saved.get("workers", [])) == loader.num_workers:  # with another number they draw nothing
                self._workers.repeat(self._saved["workers"])

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        # A new TrainerState asks the callbacks for their current states.
        state = dataclasses.replace(trainer.state, stateful_callbacks=[*self._exportable(), trainer.control])
        saved = {
            "state": {field.name: getattr(state, field.name) for field in dataclasses.fields(state)},
            "loss": trainer._tr_loss.item(),
            "numbers": {name: getattr(trainer, name) for name in NUMBERS if hasattr(trainer, name)},
            "ahead": self._ahead.states(),
            "num_workers": trainer.args.dataloader_num_workers,
            "workers": self._worker_states(),
            "draws": self._draws,
            "position": (self._epoch, self._batches),
            "epoch_generators": self._epoch_generators,
            "finished": self.is_finished,
            "training": trainer.model.training,
            "seconds": self.earlier_s + time.monotonic() - self._began,
        }
        for attribute in METRICS:
            by_mode = getattr(trainer, attribute, {})
            saved[attribute] = {
                mode: {name: list(values) for name, values in metrics.items()} for mode, metrics in by_mode.items()
            }
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer._tr_loss.fill_(saved["loss"])
        for name, number in saved["numbers"].items():
            setattr(trainer, name, number)
        for attribute in METRICS:
            for mode, metrics in saved[attribute].items():
                getattr(trainer, attribute)[mode].update(metrics)
        if self._goes_back:
            for name in STEP_FIELDS:
                setattr(trainer.state, name, saved["state"][name])
            self._restore_callbacks(saved)
            return
        self._saved = saved
        self._epoch, self._batches = saved["position"]
        self._skipped = self._batches
        self._epoch_generators = saved["epoch_generators"]
        self.earlier_s = saved["seconds"]
        self._draws = saved["draws"]

    @contextlib.contextmanager
    def going_back(self) -> Generator[None]:
        """Within it, a restore is that of an earlier step of this same train(): the position in the data stays."""
        self._goes_back = True
        try:
            yield
        finally:
            self._goes_back = False

    def begin_epoch(self) -> None:
        """A sampler and the workers of a loader take their seeds from the generators at the start of an epoch."""
        devices = [self._trainer.args.device]
        if self._epoch_generators is None:
            self._epoch_generators = rng.capture(devices)
        else:
            rng.restore(self._epoch_generators, devices)  # the epoch that was interrupted
        self._ahead.keep(0)
        if self._workers is not None:
            self._workers.begin_epoch()

    def trained(self, *, is_step: bool) -> None:
        """A batch was trained on; with `is_step` the optimizer used the gradients."""
        self._batches += 1
        self.is_accumulating = not is_step
        self._ahead.trained(self._reads)

    def end_epoch(self) -> None:
        self._epoch, self._batches, self._epoch_generators = self._epoch + 1, 0, None
        self._skipped = 0

    def _worker_states(self) -> list[bytes]:
        if self._workers is None:
            return []
        self._draws |= self._workers.have_drawn()
        # At the start of an epoch the generators of this process seed the workers.
        return self._workers.states((self._batches - self._skipped) * self._reads) if self._batches else []

    def restore_last(self) -> None:
        """Restores what Trainer or a callback has changed between the start of train() and the first step.

        Trainer itself restores callbacks only with restore_callback_states_from_checkpoint.
        """
        self._trainer.model_wrapped.train(self._saved["training"])  # TRL's logs depend on it
        if self._workers is not None:
            self._workers.repeat([])  # those of the next epoch begin anew
        self._restore_callbacks(self._saved)

    def _restore_callbacks(self, saved_progress: dict[str, Any]) -> None:
        callbacks = saved_progress["state"]["stateful_callbacks"]
        saved = {name: states if isinstance(states, list) else [states] for name, states in callbacks.items()}
        for callback in self._exportable():
            states: list[Any] = saved.get(type(callback).__name__, [])
            for name, value in (states.pop(0)["attributes"] if states else {}).items():
                setattr(callback, name, value)

    def _exportable(self) -> list[ExportableState]:
        return [
            callback for callback in self._trainer.callback_handler.callbacks if isinstance(callback, ExportableState)
        ]


class SavedProgress(TrainingState):
    """Reads only Trainer's progress from a checkpoint: Trainer needs it before it builds the model's other state."""

    def __init__(self) -> None:
        super().__init__(model=torch.nn.Module(), rng=False)
        self.saved: dict[str, Any] = {}

    @property
    def is_stepped(self) -> bool:
        return False  # no snapshot is taken of this state

    def plan_restore(self, stored: StoredState, *, is_dry: bool = False, filter: RestoreFilter = EXACT) -> RestorePlan:
        if not filter.is_exact:
            raise BadConfig(
                "resume a Trainer with only, rename, strict, cast or keep: it is resumed whole",
                hint="load weights into the model before the Trainer is made: `tierd export` writes them",
            )
        plan = RestorePlan(stored.available, torch.device("cpu"))
        section = stored.tree.get(f"extra.{KEY}") if isinstance(stored.tree, dict) else None
        if not isinstance(section, dict) or "value" not in section:
            raise Mismatch(
                "resume a Trainer: the checkpoint was not taken from one", hint="give TierdCallback another run"
            )
        self.saved = plan.decode(section["value"])
        return plan
