"""Lightning over tierd: with one callback, `trainer.fit` continues bit for bit where a killed one was.

trainer = Trainer(callbacks=[TierdCallback("gpt-124m", every_steps=50)])
trainer.fit(model, data)

Snapshots hold what Lightning's own checkpoint holds, the epoch's metrics, the generators, and the position in the data:
the loader's own state where it has one (torchdata's StatefulDataLoader); a plain DataLoader repeats the batches of its
epoch. Snapshots are taken between two batches, just before the next one is fetched, when all work on the last one is
done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher  # pyright: ignore[reportPrivateUsage]
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint

from tierd.errors import Mismatch, Transient, Unsupported
from tierd_client.client import Client, Found
from tierd_client.connection import connect
from tierd_client.frameworks import logged_metrics
from tierd_client.log import log
from tierd_client.state import rng
from tierd_client.state.dict_state import DictState
from tierd_client.state.sections import is_stateful
from tierd_client.state.training_state import Captured

PER_RANK = ("loops", "place", "metrics", "gradients")


class Randomness(msgspec.Struct):
    """All generators at one instant: `everyone` as `rng.capture` returns them, `own` those that loaders were given."""

    everyone: dict[str, Any]
    own: list[bytes]


class Place(msgspec.Struct):
    """The position in the data: training has used `given` batches of this epoch, which were all if `is_over`.

    `at_iter`, `at_first`: when the epoch's iterators were made, and when its first batch was fetched. `at_ahead`: when
    a batch was fetched that training has not used yet. `should_stop`: training ends here, for example early.
    """

    world_size: int
    given: int
    is_over: bool
    should_stop: bool
    at_iter: Randomness
    at_first: Randomness | None
    at_ahead: Randomness | None
    now: Randomness


class LightningState(DictState):
    """A snapshot's values. `broadcast`: the tensors for which rank 0's values count, as for the buffers under DDP."""

    def __init__(self, values: dict[str, Any], broadcast: Collection[str] = ()) -> None:
        super().__init__(values, per_rank=PER_RANK)
        self._broadcast = frozenset(broadcast)

    def capture(self, rank: int, world_size: int) -> Captured:
        captured = super().capture(rank, world_size)
        tensors = [
            msgspec.structs.replace(tensor, is_buffer=True) if tensor.name in self._broadcast else tensor
            for tensor in captured.tensors
        ]
        return Captured(tensors, captured.tree)


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
        self._metrics: dict[str, Any] | None = None
        self._gradients: dict[str, torch.Tensor] = {}
        self._last_step: int | None = None
        self._asked_step: int | None = None

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
        self.found = client.restore(LightningState(self._values))
        self._resumed = self._metrics = None
        if self.found is None:
            return
        try:
            self._resumed = msgspec.convert(self._values["place"], Place)
            checkpoint = {**self._values["checkpoint"], "state_dict": self._values["model"]}
            checkpoint["loops"] = self._values["loops"]
            self._metrics = self._values["metrics"]
            self._gradients = self._values.get("gradients", {})
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise Mismatch(
                f"resume {self._run} at step {self.found.step}: not a snapshot of a Lightning training: {error!r}",
                hint="use another run name for this training",
            ) from error
        if self._resumed.world_size != self._trainer.world_size:
            raise Mismatch(
                f"resume {self._run} at step {self.found.step} on {self._trainer.world_size} ranks: "
                f"{self._resumed.world_size} ranks trained it, and the batches of an epoch are distributed otherwise now",
                hint="resume on the same number of ranks",
            )
        # Without a ckpt_path, fit restores this.
        self._trainer._checkpoint_connector._loaded_checkpoint, _ = migrate_checkpoint(checkpoint)

    def _watch(self, loaders: Any) -> WatchedLoader:
        """The training's loaders, at the position of the resumed snapshot if there is one."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:  # a training that is finished goes no further than this
            self._trainer.should_stop = resumed.should_stop
            self._restore_metrics()
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
        place = Place(
            trainer.world_size,
            given,
            loop._num_ready_batches_reached(),
            trainer.should_stop,
            at_iter,
            at_first,
            at_ahead,
            now,
        )
        if at_ahead is not None and loader.states_ahead:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loader.states_ahead
        self._values["model"] = checkpoint.pop("state_dict")
        self._values["loops"] = checkpoint.pop("loops")
        self._values["checkpoint"] = checkpoint
        self._values["place"] = msgspec.to_builtins(place, builtin_types=(bytes,))
        self._values["metrics"] = logged_metrics.capture(trainer)
        module = trainer.lightning_module
        if not module.automatic_optimization:  # the module decides how many batches it accumulates gradients over
            gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
            self._values["gradients"] = {name: grad for name, grad in gradients.items() if grad is not None}

    def _state(self) -> LightningState:
        trainer = self._trainer
        if not getattr(trainer.strategy.model, "broadcast_buffers", False):
            return LightningState(self._values)
        parameters = {name for name, _ in trainer.lightning_module.named_parameters(remove_duplicate=False)}
        return LightningState(self._values, [f"model.{name}" for name in self._values["model"].keys() - parameters])

    def _leave(self) -> None:
        if self._trainer is not None:
            vars(self._trainer.fit_loop._data_source).pop("dataloader", None)
            vars(self._trainer.fit_loop.epoch_loop).pop("on_run_start", None)
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
        self._at_last: Randomness | None = None
        self._at_next: list[Randomness] = []
        self._fetched = 0
        self._fetches_ahead = False
        self.states_ahead: list[dict[str, Any]] = []
        """The states of the loaders before the last batch was fetched, where Lightning fetches one ahead."""

    def randomness(self, given: int) -> tuple[Randomness, Randomness | None, Randomness | None, Randomness]:
        """`at_iter`, `at_first`, `at_ahead` and `now` of the Place after `given` batches."""
        now = self._randomness()
        return self._at_iter or now, self._at_first, self._at_last if self._fetched > given else None, now

    def __iter__(self) -> WatchedLoader:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._set(resumed.now if resumed.is_over else resumed.at_iter)
        self._at_iter, self._at_first, self._fetched = self._randomness(), None, 0
        super().__iter__()
        self._fetches_ahead = sized_len(self) is None  # Lightning then fetches ahead, to know which batch is the last
        if resumed is None:
            return self
        if not resumed.is_over:
            self._at_first = resumed.at_first
            have_states = all(is_stateful(loader) for loader in self.flattened)
            if self._at_first is not None and not have_states:
                self._set(self._at_first)
                for _ in range(resumed.given):
                    super().__next__()
            self._fetched = resumed.given
        # The next batches must not depend on numbers that the hooks at the start of training draw.
        now = self._randomness() if resumed.is_over else resumed.now
        self._at_next = [now] if resumed.at_ahead is None else [resumed.at_ahead, now]
        return self

    def __next__(self) -> Any:
        self._before_batch()
        is_resumed = bool(self._at_next)
        if is_resumed:
            self._set(self._at_next.pop(0))
        if self._at_first is None:
            self._at_first = self._randomness()
        if self._fetches_ahead:
            self._at_last, self.states_ahead = self._randomness(), self._state_dicts()
        batch = super().__next__()
        self._fetched += 1
        if is_resumed and not self._at_next and self._fetches_ahead:
            self._at_next = [self._randomness()]
        return batch

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
