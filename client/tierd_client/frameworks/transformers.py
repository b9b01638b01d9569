"""A callback that snapshots Hugging Face Trainer, and the point from which it resumes exactly.

callback = TierdCallback(run="gpt2", every_steps=100)
trainer = Trainer(..., callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.resume_point(trainer))

The snapshot of step k is taken when step k+1 begins: by then all logs and evaluations of step k are done. Trainer has
then read the batches of step k+1, so a resumed one reads them too before the generators are restored.
Needs transformers 5. Trainer's own checkpoints are not needed: save_strategy="no" is enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections import ChainMap
from typing import Any, cast

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from tierd.errors import BadConfig, BadRequest, Mismatch, TierdError, Transient, Unsupported
from tierd.format.tagged import Json
from tierd_client.client import Client, Found
from tierd_client.connection import connect
from tierd_client.frameworks.read_ahead import ReadAhead
from tierd_client.log import log
from tierd_client.restore.resume import Resume, parse_resume
from tierd_client.snapshot.handle import Shot
from tierd_client.state import rng
from tierd_client.state.rank_local import RankLocal
from tierd_client.state.restore_filter import EXACT, RestoreFilter
from tierd_client.state.restore_plan import Available, RestorePlan
from tierd_client.state.training_state import TrainingState

STATE_FILE = "trainer_state.json"  # from which Trainer reads its progress
KEY = "trainer"  # of Trainer's progress, in `extra`
LAST_WAIT_S = 60.0  # for the last snapshot to be durable


class TierdCallback(TrainerCallback):
    """Takes snapshots of a Trainer when they are due, at SIGTERM and at the end, and provides the point to resume from.

    `options` are those of `tierd_client.connect`, `extra` is that of TrainingState: further state.
    Raises BadRequest when `extra` has the key "trainer".
    """

    def __init__(self, run: str, *, extra: dict[str, Any] | None = None, **options: Any) -> None:
        if extra is not None and KEY in extra:
            raise BadRequest(f"TierdCallback(extra=…): the key {KEY!r} is taken", hint="give it another name")
        self.stopped = False
        """Whether training ended early because the process was asked to stop."""
        self._run = run
        self._extra: dict[str, Any] = {} if extra is None else extra
        self._options = options
        self._client: Client | None = None
        self._trainer: Trainer | None = None
        self._found: Found | None = None
        self._selection: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def resume_point(self, trainer: Trainer, *, resume: Resume | None = None, **selection: Any) -> str | None:
        """The argument for trainer.train(resume_from_checkpoint=…): None when the run has no checkpoint yet.

        The arguments are those of Client.restore, and it raises as that does; Unsupported for DeepSpeed and FSDP.
        The returned folder holds only Trainer's progress. Everything else is restored when training begins.
        """
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise Unsupported(
                "resume a Trainer that shards its state by DeepSpeed or FSDP",
                hint="DDP works; for FSDP2 write the loop with tierd_client.TrainingState",
            )
        self._leave()
        self._trainer = trainer
        self._client = connect(self._run, **self._options)
        position = _SavedProgress()
        self._found = self._client.restore(position, resume=resume, **selection)
        if self._found is None:
            return None
        # on_train_begin restores the same checkpoint again, by its path or its step. Its health was decided here.
        path = parse_resume(resume, os.environ).path
        step, run = self._found.step, self._found.run
        self._selection = (
            {"resume": path}
            if path
            else {"resume": step if run == self._run else f"run:{run}@{step}", "generation": self._found.generation}
        )
        self._folder = tempfile.TemporaryDirectory(prefix="tierd-")
        TrainerState(**position.saved["state"]).save_to_json(os.path.join(self._folder.name, STATE_FILE))
        # Trainer would look for the model's weights in the folder; on_train_begin restores them.
        vars(trainer)["_load_from_checkpoint"] = lambda *_, **__: None
        return self._folder.name

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        trainer, client = self._trainer, self._client
        if trainer is None or client is None:
            raise BadRequest(
                f"train {self._run}: callback.resume_point was not called",
                hint="trainer.train(resume_from_checkpoint=callback.resume_point(trainer))",
            )
        vars(trainer).pop("_load_from_checkpoint", None)
        self._progress = _Progress(trainer)
        optimizer: Any = trainer.optimizer
        self._state = TrainingState(
            model=cast("torch.nn.Module", trainer.model),
            optimizer=getattr(optimizer, "optimizer", optimizer),  # without Accelerate's wrapper
            scheduler=cast("Any", trainer.lr_scheduler),
            scaler=trainer.accelerator.scaler,
            extra=cast("dict[str, Any]", ChainMap(self._extra, {KEY: self._progress})),
        )
        self._generators: dict[str, Any] | None = None
        self._last_step = 0  # that has a snapshot
        self._is_due = False
        self._metrics: dict[str, float] = {}
        self._shot: Shot | None = None
        if self._found is not None:
            if state.global_step != self._found.step:
                raise BadRequest(
                    f"train {self._run} from step {state.global_step}: its resume point is step {self._found.step}",
                    hint="trainer.train(resume_from_checkpoint=callback.resume_point(trainer))",
                )
            self._found = client.restore(self._state, **self._selection, allow_unhealthy=True)
            self._last_step = state.global_step
            self._generators = rng.capture([trainer.args.device])
        if not isinstance(train_dataloader.dataset, torch.utils.data.IterableDataset):  # Trainer repeats those itself
            self._progress.ahead.watch(getattr(train_dataloader, "base_dataloader", train_dataloader))
        self.stopped = False
        client.start()  # catches SIGTERM from here on

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._progress.ahead.keep(0)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The previous step is done and logged, and the batches of this one were read, but nothing was computed."""
        if self._generators is not None:
            rng.restore(self._generators, [args.device])
            self._generators = None
            self._progress.restore_callbacks()
        client = self._connected()
        if self._is_due or client.stopping:
            self._snapshot(state.global_step, is_last=client.stopping)
        if client.stopping:
            # Trainer checks this only after the next batch. That batch is not in the snapshot, and is repeated.
            self.stopped = control.should_training_stop = True

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._progress.ahead.trained()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._progress.ahead.trained()
        self._is_due = self._connected().due(state.global_step)
        if self.stopped:
            control.should_evaluate = False  # there may be only seconds left

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.stopped:
            control.should_evaluate = False
        elif control.should_training_stop and args.load_best_model_at_end:
            self._snapshot(state.global_step, is_last=True)  # before Trainer loads the best model

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self._metrics.update(numbers)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self.stopped and not args.load_best_model_at_end:
            self._snapshot(state.global_step, is_last=True)
        try:
            if self._shot is not None:
                self._shot.wait_persisted(LAST_WAIT_S)
        except TierdError as error:  # train() must still return: the caller wants the model that is in memory
            log.error("tierd: the last snapshot of %s: %s", self._run, error)
        self._leave()

    def _snapshot(self, step: int, *, is_last: bool = False) -> None:
        self._is_due = False
        if step <= self._last_step:
            return
        client = self._connected()
        try:
            try:
                self._shot = client.snapshot(step, self._state, metrics=self._metrics)
            except Transient:
                if not is_last or self._shot is None:
                    raise
                with contextlib.suppress(TierdError):  # no later snapshot will come: wait until a slot is free
                    self._shot.wait_persisted(LAST_WAIT_S)
                self._shot = client.snapshot(step, self._state, metrics=self._metrics)
            self._last_step = step
        except Transient as error:  # no daemon, or no free slot: training goes on
            log.warning("tierd: no snapshot of step %d of %s: %s", step, self._run, error)

    def _connected(self) -> Client:
        assert self._client is not None, "on_train_begin comes first"
        return self._client

    def _leave(self) -> None:
        if self._client is not None:
            self._client.stop()
        if self._folder is not None:
            self._folder.cleanup()
        self._client = self._trainer = self._folder = self._found = None


class _Progress:
    """Trainer's progress: its state besides the objects that a TrainingState takes."""

    def __init__(self, trainer: Any) -> None:
        self.ahead = ReadAhead([trainer.args.device])
        self._trainer = trainer
        self._callbacks: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        # A new TrainerState asks the callbacks for their current states.
        state = dataclasses.replace(trainer.state, stateful_callbacks=[*self._exportable(), trainer.control])
        return {
            "state": {field.name: getattr(state, field.name) for field in dataclasses.fields(state)},
            "loss": trainer._tr_loss.item(),
            "last_logged": trainer._globalstep_last_logged,
            "flos": trainer.current_flos,
            "ahead": self.ahead.states(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Everything but "state", which Trainer has read from its file."""
        trainer = self._trainer
        trainer._tr_loss.fill_(saved["loss"])
        trainer._total_loss_scalar = -saved["loss"]  # train() returns the mean loss of the steps of this call only
        trainer._globalstep_last_logged = saved["last_logged"]
        trainer.current_flos = saved["flos"]
        self._callbacks = saved["state"]["stateful_callbacks"]
        self.ahead.repeat(saved["ahead"])

    def restore_callbacks(self) -> None:
        """Trainer itself does this only with restore_callback_states_from_checkpoint."""
        saved = {name: states if isinstance(states, list) else [states] for name, states in self._callbacks.items()}
        for callback in self._exportable():
            states: list[Any] = saved.get(type(callback).__name__, [])
            for name, value in (states.pop(0)["attributes"] if states else {}).items():
                setattr(callback, name, value)

    def _exportable(self) -> list[ExportableState]:
        return [
            callback for callback in self._trainer.callback_handler.callbacks if isinstance(callback, ExportableState)
        ]


class _SavedProgress(TrainingState):
    """Reads only Trainer's progress from a checkpoint: Trainer needs it before it builds the model's other state."""

    def __init__(self) -> None:
        super().__init__(model=torch.nn.Module(), rng=False)
        self.saved: dict[str, Any] = {}

    @property
    def is_stepped(self) -> bool:
        return False  # no snapshot is taken of this state

    def plan_restore(
        self,
        tree: Json,
        available: Available,
        rank_local: RankLocal | None = None,
        *,
        is_dry: bool = False,
        filter: RestoreFilter = EXACT,
    ) -> RestorePlan:
        if not filter.is_exact:
            raise BadConfig(
                "resume a Trainer with only, rename, strict, cast or keep: it is resumed whole",
                hint="load weights into the model before the Trainer is made: `tierd export` writes them",
            )
        plan = RestorePlan(available, torch.device("cpu"))
        section = tree.get(f"extra.{KEY}") if isinstance(tree, dict) else None
        if not isinstance(section, dict) or "value" not in section:
            raise Mismatch(
                "resume a Trainer: the checkpoint was not taken from one", hint="give TierdCallback another run"
            )
        self.saved = plan.decode(section["value"])
        return plan
