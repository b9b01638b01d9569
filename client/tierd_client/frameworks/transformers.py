"""A callback that snapshots Hugging Face Trainer, and the point from which it resumes exactly.

callback = TierdCallback(run="gpt2", every_steps=100)
trainer = Trainer(..., callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.resume_point(trainer))

The snapshot of step k is taken when step k+1 begins: by then all logs and evaluations of step k are done. Trainer has
then read the batches of step k+1, so a resumed one reads them too before the generators are restored. The last one is
taken after the last step; a finished training that is started again repeats only what train() does after that.
Trainer's own checkpoints are not needed: save_strategy="no" is enough.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections import ChainMap
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from tierd.errors import BadRequest, TierdError, Transient, Unsupported
from tierd_client.client import Client, Found
from tierd_client.connection import connect
from tierd_client.frameworks.trainer_progress import KEY, SavedProgress, TrainerProgress
from tierd_client.log import log
from tierd_client.loss_guard import LossGuard, LossRule
from tierd_client.restore.resume import Resume, parse_resume
from tierd_client.snapshot.handle import Shot
from tierd_client.state import rng
from tierd_client.state.training_state import TrainingState

REFERENCE = "trainer.ref_model"  # key in `extra`
STATE_FILE = "trainer_state.json"  # from which Trainer reads its progress
LAST_WAIT_S = 60.0  # for the last snapshot to be durable


class TierdCallback(TrainerCallback):
    """Takes snapshots of a Trainer when they are due, at SIGTERM and at the end, and provides the point to resume from.

    `options` are those of `tierd_client.connect`, `extra` is that of TrainingState: further state. `guard`: what a bad
    loss is and does. It looks at what training_step returns, once for each step: Trainer's logs hide a loss that is not
    finite (logging_nan_inf_filter). After a rollback, the batches since the restored snapshot are not trained on again:
    without max_steps, training ends with fewer steps.

    Raises BadRequest when `extra` has the key "trainer".
    """

    def __init__(
        self, run: str, *, extra: dict[str, Any] | None = None, guard: LossRule | None = None, **options: Any
    ) -> None:
        if extra is not None and KEY in extra:
            raise BadRequest(f"TierdCallback(extra=…): the key {KEY!r} is taken", hint="give it another name")
        self.stopped = False
        """Whether training ended early because the process was asked to stop."""
        self._run = run
        self._extra: dict[str, Any] = {} if extra is None else extra
        self._options = options
        self._rule = guard
        self._guard: LossGuard | None = None
        self._losses: list[torch.Tensor] = []  # of the batches since the last step
        self._client: Client | None = None
        self._trainer: Trainer | None = None
        self._found: Found | None = None
        self._selection: dict[str, Any] = {}
        self._undo = contextlib.ExitStack()  # of what was changed for the time of train()

    def resume_point(self, trainer: Trainer, *, resume: Resume | None = None, **selection: Any) -> str | None:
        """The argument for trainer.train(resume_from_checkpoint=…): None when the run has no checkpoint yet.

        The arguments are those of Client.restore, and it raises as that does; Unsupported for a Trainer that cannot
        be resumed exactly. The returned folder holds only Trainer's progress. Everything else is restored when training
        begins. When the training is finished, train() returns its result again and trains no more.
        """
        _check_supported(trainer)
        self._leave()
        self._trainer = trainer
        self._client = connect(self._run, **self._options)
        self._replace("_inner_training_loop", self._ending_with(cast("Any", trainer)._inner_training_loop))
        position = SavedProgress()
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
        folder = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="tierd-"))
        TrainerState(**position.saved["state"]).save_to_json(os.path.join(folder, STATE_FILE))
        # Trainer would look for the model's weights in the folder; on_train_begin restores them.
        self._replace("_load_from_checkpoint", lambda *_, **__: None)
        self._replace("_init_training_state", partial(_init_training_state, trainer, position.saved))
        return folder

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
        self._progress = TrainerProgress(trainer)
        ours: dict[str, Any] = {KEY: self._progress}
        if getattr(args, "sync_ref_model", False):  # TRL: the reference model follows the model
            ours[REFERENCE] = cast("Any", trainer).ref_model
        optimizer: Any = trainer.optimizer
        self._state = TrainingState(
            model=cast("torch.nn.Module", trainer.model),
            optimizer=getattr(optimizer, "optimizer", optimizer),  # without Accelerate's wrapper
            scheduler=cast("Any", trainer.lr_scheduler),
            scaler=trainer.accelerator.scaler,
            extra=cast("dict[str, Any]", ChainMap(self._extra, ours)),
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
            self._generators = rng.capture([args.device])
            if args.eval_on_start:  # an evaluation that was done before the first step
                args.eval_on_start = False
                self._undo.callback(setattr, args, "eval_on_start", True)
        self._progress.watch(train_dataloader)
        self._replace("_finalize_training", self._finalize_training)
        self._guard = None
        if self._rule is not None:
            self._guard, self._losses = LossGuard(client, self._state, **asdict(self._rule), keep=("rng",)), []
            self._replace("training_step", partial(self._training_step, trainer.training_step))
        self.stopped = False
        client.start()  # catches SIGTERM from here on

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._progress.begin_epoch()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The previous step is done and logged, and the batches of this one were read, but nothing was computed."""
        self._restore_last()
        if self._progress.is_accumulating:
            return  # gradients are not saved: wait for the next step
        client = self._connected()
        if self._is_due or client.stopping:
            self._snapshot(state.global_step, is_last=client.stopping)
        if client.stopping:
            # Trainer checks this only after the next batch. That batch is not in the snapshot, and is repeated.
            self.stopped = control.should_training_stop = True

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._progress.trained(is_step=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._progress.trained(is_step=True)
        if self._guard is not None and self._goes_back(self._guard, state, control):
            return
        self._is_due |= self._connected().due(state.global_step)
        if self.stopped:
            control.should_evaluate = False  # there may be only seconds left

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.stopped:
            control.should_evaluate = False
        if not control.should_training_stop or float(state.epoch).is_integer():
            self._progress.end_epoch()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self._metrics.update(numbers)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        try:
            if self._shot is not None:
                self._shot.wait_persisted(LAST_WAIT_S)
        except TierdError as error:  # train() must still return: the caller wants the model that is in memory
            log.error("tierd: the last snapshot of %s: %s", self._run, error)
        self._leave()

    def _training_step(self, train: Any, *arguments: Any, **more: Any) -> torch.Tensor:
        """Replaces Trainer's method: takes the loss before Trainer filters it."""
        loss = train(*arguments, **more)
        self._losses.append(loss.detach())
        return loss

    def _goes_back(self, guard: LossGuard, state: TrainerState, control: TrainerControl) -> bool:
        """Whether the loss of this step was bad: then all is that of an earlier step, except the position in the data.
        Nothing of the bad step has been logged yet."""
        # Trainer has divided each by their number.
        loss, self._losses = (sum(self._losses) if self._losses else None), []
        step = state.global_step
        with self._progress.going_back():
            back = guard.check(step, loss)
        if back is None:
            return False
        self._last_step, self._is_due, self._metrics = back, False, {}
        control.should_log = control.should_evaluate = control.should_save = False
        if step >= state.max_steps:  # Trainer wanted to stop because of the number of the step
            control.should_training_stop = False
        return True

    def _ending_with(self, train: Any) -> Any:
        """Wraps Trainer's loop, to tell the client of an error that ends it: Trainer calls no callback then."""

        @functools.wraps(train)
        def loop(*arguments: Any, **more: Any) -> Any:
            try:
                return train(*arguments, **more)
            except BaseException as error:
                # With auto_find_batch_size, Trainer catches this one and calls again.
                is_caught = isinstance(error, Exception) and should_reduce_batch_size(error)
                if not (is_caught and cast("Trainer", self._trainer).args.auto_find_batch_size):
                    self._leave(error)
                raise

        return loop

    def _restore_last(self) -> None:
        """Restores, before the first step, what has changed since the start of train()."""
        if self._generators is not None:
            rng.restore(self._generators, [cast("Trainer", self._trainer).args.device])
            self._generators = None
            self._progress.restore_last()

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """Replaces Trainer's method, which computes the mean loss and loads the best model."""
        trainer: Any = self._trainer
        self._restore_last()
        if not self.stopped:
            self._progress.is_finished = True
            self._snapshot(trainer.state.global_step, is_last=True)
        # Trainer divides the steps of all starts by this duration.
        start_time -= self._progress.earlier_s
        return type(trainer)._finalize_training(trainer, trial, num_train_samples, start_time)

    def _replace(self, name: str, method: Any) -> None:
        """Replaces a method of this one Trainer until the end of train()."""
        attributes = vars(self._trainer)
        attributes[name] = method
        self._undo.callback(attributes.pop, name, None)

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

    def _leave(self, error: BaseException | None = None) -> None:
        """`error`: what ended the training."""
        client, self._client = self._client, None
        try:
            if client is not None:
                client.stop(error)
        finally:
            self._undo.close()
            self._trainer = self._found = self._guard = None


def _check_supported(trainer: Any) -> None:
    """Raises Unsupported for a Trainer that cannot be resumed exactly."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise Unsupported(
            "resume a Trainer that shards its state by DeepSpeed or FSDP",
            hint="DDP works; for FSDP2 write the loop with tierd_client.TrainingState",
        )
    if trainer.args.ignore_data_skip:
        raise Unsupported(
            "resume a Trainer with ignore_data_skip: it would read the data of the epoch from the start",
            hint="remove ignore_data_skip=True from the TrainingArguments",
        )
    if trainer.args.dataloader_num_workers > 1 and not trainer.args.dataloader_in_order:
        raise Unsupported(
            "resume a Trainer with dataloader_in_order=False: the order of its batches depends on the workers' speed",
            hint="remove dataloader_in_order=False from the TrainingArguments",
        )
    if hasattr(trainer, "_buffered_inputs"):
        raise Unsupported(
            f"resume a {type(trainer).__name__}: the completions that it generates for several steps are not saved",
            hint="TRL's trainers that learn from a dataset, such as SFTTrainer and DPOTrainer, work",
        )
    if not hasattr(trainer, "_finalize_training"):
        raise Unsupported("resume a Trainer: this transformers is too old", hint="install transformers 5.3 or later")


def _init_training_state(
    trainer: Any, saved: dict[str, Any], max_steps: int, steps_per_epoch: int, epochs: int, *others: Any
) -> tuple[int, int]:
    """In place of Trainer's method: the epoch to begin at and the number of its batches that were trained on.

    Trainer would compute them from the step, as if every epoch had the same length.
    """
    type(trainer)._init_training_state(trainer, max_steps, steps_per_epoch, epochs, *others)
    stays_finished = saved["finished"] and max_steps <= saved["state"]["max_steps"]
    if stays_finished or trainer.state.global_step >= max_steps:
        return epochs, 0  # train no more: there is no such epoch
    epoch, batches = saved["position"]
    return epoch, batches
