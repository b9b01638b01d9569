"""Takes a Lightning training back to a snapshot while `fit` runs; its position in the data stays."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from torchmetrics import Metric

from tierd_client.frameworks import logged_metrics


def go_back(trainer: Any, values: dict[str, Any]) -> None:
    """Called between the hooks of a batch and the validation after it. `values`: of the snapshot, already restored.

    Batches, epochs and random numbers go on; model, optimizers, schedulers, scaler, callbacks, metrics and the number
    of the step are those of the snapshot. A ModelCheckpoint keeps its list of the files that exist.
    """
    connector, loop = trainer._checkpoint_connector, trainer.fit_loop.epoch_loop
    files = {callback.state_key for callback in trainer.callbacks if isinstance(callback, Checkpoint)}
    callbacks: dict[str, Any] = values["checkpoint"].get("callbacks", {})
    connector._loaded_checkpoint = {
        **values["checkpoint"],
        "callbacks": {key: state for key, state in callbacks.items() if key not in files},
        "state_dict": {**values["model"], **values["buffers"]},
        "loops": values["loops"],
    }
    connector.restore_model()
    connector.restore_precision_plugin_state()
    connector.restore_callbacks()
    connector.restore_optimizers_and_schedulers()
    connector._loaded_checkpoint = {}
    saved = values["loops"]["fit_loop"]
    loop.scheduler_progress.load_state_dict(saved["epoch_loop.scheduler_progress"])
    loop.automatic_optimization.optim_progress.load_state_dict(
        saved["epoch_loop.automatic_optimization.optim_progress"]
    )
    loop.manual_optimization.optim_step_progress.load_state_dict(
        saved["epoch_loop.manual_optimization.optim_step_progress"]
    )
    # The snapshot was taken after Lightning had counted its batch. Lightning will count this one.
    loop._batches_that_stepped = saved["epoch_loop.state_dict"]["_batches_that_stepped"] - (
        not loop._should_accumulate()
    )
    logged_metrics.restore(trainer, values["metrics"])
    place = values["place"]
    if place["is_over"] or place["epoch"] != trainer.fit_loop.epoch_progress.current.processed:
        loop._results.reset()  # they are of another epoch
        for module in trainer.lightning_module.modules():
            if isinstance(module, Metric):
                module.reset()
    if not trainer.lightning_module.automatic_optimization:
        for name, parameter in trainer.lightning_module.named_parameters():
            gradient = values["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
