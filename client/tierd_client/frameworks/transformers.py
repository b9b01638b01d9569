"""Hugging Face Trainer, started and resumed by the same command, exactly:

callback = TierdCallback(run="gpt2", every_steps=100)
trainer = Trainer(..., callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.resume_point(trainer))

The snapshot of step k is taken when step k+1 begins: by then all logs and evaluations of step k are done. Trainer
reads the batches of step k+1 before that, so a resumed one does too, and the generators come back after it.
Needs transformers 5. Trainer's own checkpoints are left alone: save_strategy="no" is enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import tempfile
from collections import ChainMap
from typing import Any, cast

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from tierd.errors import BadRequest, Mismatch, TierdError, Transient, Unsupported
from tierd.format.tagged import Json
from tierd_client.client import Client, Found, connect
from tierd_client.frameworks.read_ahead import ReadAhead
from tierd_client.restore.resume import Resume, parse_resume
from tierd_client.snapshot.handle import Shot
from tierd_client.state import rng
from tierd_client.state.rank_local import RankLocal
from tierd_client.state.restore_plan import Available, RestorePlan
from tierd_client.state.training_state import TrainingState

logger = logging.getLogger("tierd_client")

STATE_FILE = "trainer_state.json"  # where Trainer looks for how far it was
KEY = "trainer"  # of what Trainer knows, in `extra`
LAST_WAIT_S = 60.0  # for the last snapshot to be durable


class TierdCallback(TrainerCallback):
    """Snapshots of a Trainer when they are due, at SIGTERM and at the end; and the point that it resumes from.

    `options` are those of `tierd_client.connect`. `extra` is that of TrainingState: more that belongs to the state.
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
        self._again: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def resume_point(
        self,
        trainer: Trainer,
        *,
        resume: Resume | None = None,
        **which: Any,
    ) -> str | None:
        """What trainer.train(resume_from_checkpoint=…) wants: None where the run has no checkpoint yet.

        The arguments are those of Client.restore, and it raises as that does.
        The folder holds only how far Trainer was. The rest is restored when Trainer has built what it goes into.
        """
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise Unsupported(
                "resume a Trainer that shards its state by DeepSpeed or FSDP",
                hint="DDP works; for FSDP2 write the loop with tierd_client.TrainingState",
            )
        self._leave()
        self._trainer = trainer
        self._client = connect(self._run, **self._options)
        position = _Position()
        self._found = self._client.restore(position, resume=resume, **which)
        if self._found is None:
            return None
        # The very same once more, for all the rest: by its path, or as what it has turned out to be.
        path = parse_resume(resume, os.environ).path
        self._again = {"resume": path} if path else {"resume": self._found.step, "generation": self._found.generation}
        self._folder = tempfile.TemporaryDirectory(prefix="tierd-")
        saved = TrainerState(**position.saved["state"])
        saved.save_to_json(os.path.join(self._folder.name, STATE_FILE))
        # Trainer would look for the model's weights in the folder; they come with the rest, in on_train_begin.
        vars(trainer)["_load_from_checkpoint"] = _load_nothing
        return self._folder.name

    # ── what Trainer calls ──

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, client = self._trainer, self._client
        if trainer is None or client is None:
            raise BadRequest(
                f"train {self._run}: the callback was not asked where to resume",
                hint="trainer.train(resume_from_checkpoint=callback.resume_point(trainer))",
            )
        vars(trainer).pop("_load_from_checkpoint", None)
        self._progress = _Progress(trainer)
        self._state = self._training_state(trainer)
        self._generators: dict[str, Any] | None = None
        self._taken = 0  # the last step that has a snapshot
        self._is_due = False
        self._metrics: dict[str, float] = {}
        self._shot: Shot | None = None
        if self._found is not None:
            if state.global_step != self._found.step:
                raise BadRequest(
                    f"train {self._run} from step {state.global_step}: its resume point is step {self._found.step}",
                    hint="trainer.train(resume_from_checkpoint=callback.resume_point(trainer))",
                )
            # Healthy or not was decided when it was chosen.
            self._found = client.restore(self._state, **self._again, allow_unhealthy=True)
            self._taken = state.global_step
            self._generators = rng.capture([trainer.args.device])
        loader: Any = kwargs["train_dataloader"]
        if not isinstance(loader.dataset, torch.utils.data.IterableDataset):  # of which Trainer reads all batches again
            self._progress.ahead.watch(getattr(loader, "base_dataloader", loader))
        self.stopped = False
        client.__enter__()  # SIGTERM is seen from here on

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._progress.ahead.keep(0)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The step before is over and logged, the batches of this one are read, nothing of it is computed."""
        if self._generators is not None:
            rng.restore(self._generators, [args.device])
            self._generators = None
            self._progress.restore_callbacks()
        client = self._joined()
        if self._is_due or client.stopping:
            self._snapshot(state.global_step, is_last=client.stopping)
        if client.stopping:
            # Trainer looks at this after the next batch only: its work is not in the snapshot, and is done again.
            self.stopped = control.should_training_stop = True

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._progress.ahead.trained()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._progress.ahead.trained()
        self._is_due = self._joined().due(state.global_step)
        if self.stopped:
            control.should_evaluate = False  # who was asked to stop has seconds left

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.stopped:
            control.should_evaluate = False
        elif control.should_training_stop and args.load_best_model_at_end:
            self._snapshot(state.global_step, is_last=True)  # at the end of the training the model will be another

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self._metrics.update(numbers)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.stopped and not args.load_best_model_at_end:
            self._snapshot(state.global_step, is_last=True)
        try:
            if self._shot is not None:
                self._shot.wait_persisted(LAST_WAIT_S)
        except TierdError as error:  # the trained model is in memory: whoever called train() wants it back
            logger.error("tierd: the last snapshot of %s: %s", self._run, error)
        self._leave()

    # ── ours ──

    def _training_state(self, trainer: Trainer) -> TrainingState:
        optimizer: Any = trainer.optimizer
        more = {KEY: self._progress}
        return TrainingState(
            model=cast("torch.nn.Module", trainer.model),
            optimizer=getattr(optimizer, "optimizer", optimizer),  # out of Accelerate's wrapper
            scheduler=cast("Any", trainer.lr_scheduler),
            scaler=trainer.accelerator.scaler,
            extra=cast("dict[str, Any]", ChainMap(self._extra, more)),
        )

    def _snapshot(self, step: int, *, is_last: bool = False) -> None:
        self._is_due = False
        if step <= self._taken:
            return
        try:
            try:
                self._take(step)
            except Transient:
                if not is_last or self._shot is None:
                    raise
                with contextlib.suppress(TierdError):  # nothing comes after it: it is worth the wait for a slot
                    self._shot.wait_persisted(LAST_WAIT_S)
                self._take(step)
        except Transient as error:  # no daemon, or no free slot: training matters more
            logger.warning("tierd: no snapshot of step %d of %s: %s", step, self._run, error)

    def _take(self, step: int) -> None:
        self._shot = self._joined().snapshot(step, self._state, metrics=self._metrics)
        self._taken = step

    def _joined(self) -> Client:
        assert self._client is not None, "on_train_begin comes first"
        return self._client

    def _leave(self) -> None:
        if self._client is not None:
            self._client.__exit__(None, None, None)
        if self._folder is not None:
            self._folder.cleanup()
        self._client = self._trainer = self._folder = self._found = None


def _load_nothing(*args: object, **kwargs: object) -> None:
    """In the place of Trainer._load_from_checkpoint."""


class _Progress:
    """What Trainer knows of how far it is, beside the objects that a TrainingState takes as they are."""

    def __init__(self, trainer: Any) -> None:
        self.ahead = ReadAhead([trainer.args.device])
        self._trainer = trainer
        self._callbacks: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        # Made anew, TrainerState asks the callbacks for their states as they are now.
        state = dataclasses.replace(trainer.state, stateful_callbacks=[*self._exportable(), trainer.control])
        return {
            "state": {field.name: getattr(state, field.name) for field in dataclasses.fields(state)},
            "loss": trainer._tr_loss.item(),
            "last_logged": trainer._globalstep_last_logged,
            "flos": trainer.current_flos,
            "ahead": self.ahead.states(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Trainer has taken `state` from its file by now."""
        trainer = self._trainer
        trainer._tr_loss.fill_(saved["loss"])
        # The sum of this call of train(), of which the steps before it are no part.
        trainer._total_loss_scalar = -saved["loss"]
        trainer._globalstep_last_logged = saved["last_logged"]
        trainer.current_flos = saved["flos"]
        self._callbacks = saved["state"]["stateful_callbacks"]
        self.ahead.repeat(saved["ahead"])

    def restore_callbacks(self) -> None:
        """Trainer does it only where restore_callback_states_from_checkpoint is set."""
        waiting = {name: one if isinstance(one, list) else [one] for name, one in self._callbacks.items()}
        for callback in self._exportable():
            states: list[Any] = waiting.get(type(callback).__name__, [])
            for name, value in (states.pop(0)["attributes"] if states else {}).items():
                setattr(callback, name, value)

    def _exportable(self) -> list[ExportableState]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


class _Position(TrainingState):
    """Of a checkpoint only what Trainer knew: it wants that before it builds what the rest goes into."""

    def __init__(self) -> None:
        super().__init__(model=torch.nn.Module(), rng=False)
        self.saved: dict[str, Any] = {}

    @property
    def is_stepped(self) -> bool:
        return False  # nobody takes snapshots of this

    def plan_restore(self, tree: Json, available: Available, rank_local: RankLocal | None = None) -> RestorePlan:
        plan = RestorePlan(available, torch.device("cpu"))
        section = tree.get(f"extra.{KEY}") if isinstance(tree, dict) else None
        if not isinstance(section, dict) or "value" not in section:
            raise Mismatch(
                "resume a Trainer: the checkpoint was not taken from one",
                hint="give TierdCallback another run",
            )
        saved = plan.decode(section["value"])
        plan.on_finish(lambda: self.saved.update(saved))
        return plan
