"""Lightning over tierd: with one callback, `trainer.fit` continues bit for bit where a killed one was.

trainer = Trainer(callbacks=[TierdCallback("gpt-124m", every_steps=50)])
trainer.fit(model, data)

Snapshots hold what Lightning's own checkpoint holds, the generators, and the position in the data: the loader's own
state where it has one (torchdata's StatefulDataLoader); a plain DataLoader repeats the batches of its epoch. Snapshots
are taken between two batches, just before the next one is fetched, when all work on the last one is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher  # pyright: ignore[reportPrivateUsage]
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint

from tierd.errors import Mismatch, Transient, Unsupported
from tierd_client.client import Client, Found
from tierd_client.connection import connect
from tierd_client.log import log
from tierd_client.state import rng
from tierd_client.state.dict_state import DictState
from tierd_client.state.sections import is_stateful

PER_RANK = ("loops", "place")


class Randomness(msgspec.Struct):
    """All generators at one instant: `everyone` as `rng.capture` returns them, `own` those that loaders were given."""

    everyone: dict[str, Any]
    own: list[bytes]


class Place(msgspec.Struct):
    """The position in the data: training has used `given` batches of this epoch, which were all if `is_over`.

    `at_iter`, `at_first`: when the epoch's iterators were made, and when its first batch was fetched.
    """

    given: int
    is_over: bool
    at_iter: Randomness
    at_first: Randomness | None
    now: Randomness


class TierdCallback(Callback):
    """Takes snapshots when `due`, at SIGTERM, and at the end of `fit`; restores the newest when `fit` begins.

    `run` and `options` are those of `tierd_client.connect`; each `fit` connects when its ranks have started. `found`
    describes the restored checkpoint. `trainer.fit(ckpt_path=…)` takes precedence over tierd's checkpoints. SIGTERM
    ends `fit` before the next batch with SystemExit, after a snapshot.

    `fit` raises Unsupported for strategies whose checkpoints are directories and for steps that take a dataloader_iter,
    Mismatch for a run of another kind of training, and the errors of connect and Client.restore.
    """

    def __init__(self, run: str, **options: Any) -> None:
        self.client: Client | None = None
        self.found: Found | None = None
        self._run = run
        self._options = options
        self._trainer: Any = None
        self._values: dict[str, Any] = {}
        self._resumed: Place | None = None
        self._last_step: int | None = None
        self._asked_step: int | None = None
        self._is_due = False
        self._was_delayed = False

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

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.found is not None and checkpoint.get("loops") is not self._values["loops"]:
            log.warning("tierd: ckpt_path is given: training begins there, not at step %d of tierd", self.found.step)
            self.found = self._resumed = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise Unsupported(
                "snapshot a training whose training_step takes a dataloader_iter: it has no instant between batches",
                hint="let training_step take the batch",
            )
        if self.client is not None:
            self.client.start()  # replaces Lightning's handler, which ends each rank at any instruction
        self._asked_step = self._last_step = trainer.global_step
        if self.found is not None:
            self._fill_values()  # frees what was restored, and makes the size of a snapshot known

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._snapshot()
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    def _restore(self, client: Client) -> None:
        """Gives the newest snapshot to Lightning as if it had just read a checkpoint file."""
        self.found = client.restore(DictState(self._values, per_rank=PER_RANK))
        if self.found is None:
            return
        try:
            self._resumed = msgspec.convert(self._values["place"], Place)
            checkpoint = {**self._values["checkpoint"], "state_dict": self._values["model"]}
            checkpoint["loops"] = self._values["loops"]
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise Mismatch(
                f"resume {self._run} at step {self.found.step}: not a snapshot of a Lightning training: {error!r}",
                hint="use another run name for this training",
            ) from error
        # Without a ckpt_path, fit restores this.
        self._trainer._checkpoint_connector._loaded_checkpoint, _ = migrate_checkpoint(checkpoint)

    def _watch(self, loaders: Any) -> WatchedLoader:
        """The training's loaders, at the position of the resumed snapshot if there is one."""
        resumed, self._resumed = self._resumed, None
        mode = "max_size_cycle"
        if isinstance(loaders, CombinedLoader):
            loaders, mode = loaders.iterables, loaders._mode  # pyright: ignore[reportPrivateUsage]
        return WatchedLoader(loaders, mode, self.before_batch, self._trainer.strategy.root_device, resumed)

    def before_batch(self) -> None:
        """Called between two batches. Takes a snapshot when one is due. Raises SIGTERMException to stop."""
        trainer, client = self._trainer, self.client
        if client is None or self._asked_step in (None, trainer.global_step):
            return  # before the first step, or while gradients are accumulated
        self._asked_step = trainer.global_step
        self._is_due = client.due(trainer.global_step) or self._is_due
        loop = trainer.fit_loop.epoch_loop
        # At the end of an epoch or before a validation, a resumed Lightning would log another step number and step a
        # plateau scheduler twice. So the snapshot is delayed by a step, unless the last step was of that kind too.
        is_delayed = loop.batch_progress.current.ready == 0 or loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if client.stopping or (self._is_due and (self._was_delayed or not is_delayed)):
            self._snapshot()
        self._was_delayed = is_delayed
        if client.stopping:
            raise SIGTERMException

    def _snapshot(self) -> None:
        """Takes a snapshot of the last step, unless there is one."""
        trainer, client = self._trainer, self.client
        if client is None or trainer.global_step == self._last_step:
            return
        self._fill_values()
        self._last_step, self._is_due = trainer.global_step, False
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        try:
            client.snapshot(trainer.global_step, DictState(self._values, per_rank=PER_RANK), metrics=metrics)
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
        place = trainer.fit_loop._combined_loader.place(
            loop.batch_progress.current.ready, is_over=loop._num_ready_batches_reached()
        )
        self._values["model"] = checkpoint.pop("state_dict")
        self._values["loops"] = checkpoint.pop("loops")
        self._values["checkpoint"] = checkpoint
        self._values["place"] = msgspec.to_builtins(place, builtin_types=(bytes,))

    def _leave(self) -> None:
        if self._trainer is not None:
            vars(self._trainer.fit_loop._data_source).pop("dataloader", None)
        client, self.client, self._trainer, self._values = self.client, None, None, {}
        if client is not None:
            client.stop()


class WatchedLoader(CombinedLoader):
    """Lightning's combined loader. Calls `before_batch` before each fetch, and resumes at a Place.

    Lightning restores loaders that have a state. The others repeat the batches of their epoch.
    """

    def __init__(
        self,
        iterables: Any,
        mode: Any,
        before_batch: Callable[[], None],
        device: torch.device,
        resumed: Place | None = None,
    ) -> None:
        super().__init__(iterables, mode)
        self._before_batch = before_batch
        self._device = device
        self._resumed = resumed
        self._at_iter: Randomness | None = None
        self._at_first: Randomness | None = None
        self._at_next: Randomness | None = None

    def place(self, given: int, *, is_over: bool) -> Place:
        now = self._randomness()
        return Place(given, is_over, self._at_iter or now, self._at_first, now)

    def __iter__(self) -> WatchedLoader:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._set(resumed.now if resumed.is_over else resumed.at_iter)
        self._at_iter, self._at_first = self._randomness(), None
        super().__iter__()
        if resumed is None:
            return self
        if not resumed.is_over:
            self._at_first = resumed.at_first
            have_states = all(is_stateful(loader) for loader in self.flattened)
            if self._at_first is not None and not have_states:
                self._set(self._at_first)
                for _ in range(resumed.given):
                    super().__next__()
        # The next batch must not depend on numbers that the hooks at the start of training draw.
        self._at_next = self._randomness() if resumed.is_over else resumed.now
        return self

    def __next__(self) -> Any:
        self._before_batch()
        if self._at_next is not None:
            self._set(self._at_next)
            self._at_next = None
        if self._at_first is None:
            self._at_first = self._randomness()
        return super().__next__()

    def _randomness(self) -> Randomness:
        own = [generator.get_state().numpy().tobytes() for generator in self._generators()]
        return Randomness(rng.capture([self._device]), own)

    def _set(self, randomness: Randomness) -> None:
        rng.restore(randomness.everyone, [self._device])
        for generator, state in zip(self._generators(), randomness.own, strict=False):
            generator.set_state(rng.state_tensor(state))

    def _generators(self) -> Iterator[torch.Generator]:
        """The generators that a loader or its sampler was given, each once."""
        seen: set[int] = set()
        for loader in self.flattened:
            for owner in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
                generator = getattr(owner, "generator", None)
                if isinstance(generator, torch.Generator) and id(generator) not in seen:
                    seen.add(id(generator))
                    yield generator
