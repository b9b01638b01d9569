"""What a Lightning training has logged in its epoch so far, and the states of its torchmetrics, as plain values.

Lightning's own checkpoints lack them, so that an epoch that is resumed would log, and step a plateau scheduler by, the
batches after the resume alone.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,  # pyright: ignore[reportPrivateUsage]
    _ResultMetric,  # pyright: ignore[reportPrivateUsage]
    _Sync,  # pyright: ignore[reportPrivateUsage]
)
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from tierd.errors import Mismatch, Unsupported

REDUCTIONS: dict[str, Any] = {
    **{f"torch.{reduction.__name__}": reduction for reduction in (torch.mean, torch.sum, torch.max, torch.min)},
    **{reduction.__name__: reduction for reduction in (sum, max, min)},
}
"""What `self.log(reduce_fx=…)` can be, by the name in a snapshot."""

FIELDS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
CONNECTOR = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx")


def capture(trainer: Any) -> dict[str, Any]:
    """The metrics between two batches of training. Raises Unsupported, naming the metric that has no safe form."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    return {
        "results": {key: _capture_result(key, result) for key, result in loop._results.items()},
        "torchmetrics": {name: _attributes(metric) for name, metric in _torchmetrics(trainer).items()},
        # Metrics that are logged on_step name the batches of all validations so far.
        "validated": dict(loop.val_loop._seen_batches_per_dataloader),
        **{name: _copy(getattr(connector, name)) for name in CONNECTOR},
    }


def restore(trainer: Any, saved: dict[str, Any]) -> None:
    """Restores what `capture` returned. Raises Mismatch when the module lacks a metric of it."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    metrics = _torchmetrics(trainer)
    if missing := saved["torchmetrics"].keys() - metrics.keys():
        raise Mismatch(
            f"resume: the snapshot has the torchmetrics {', '.join(sorted(missing))}, the LightningModule lacks them",
            hint="resume with the metrics that the training began with, or use another run name",
        )
    for name, attributes in saved["torchmetrics"].items():
        for attribute, value in attributes.items():
            setattr(metrics[name], attribute, _on(value, metrics[name].device))
    loop._results.clear()
    for key, result in saved["results"].items():
        loop._results[key] = _result(trainer, result)
    loop.val_loop._seen_batches_per_dataloader.update(saved["validated"])
    for name in CONNECTOR:
        setattr(connector, name, _on(_copy(saved[name]), trainer.strategy.root_device))


def _torchmetrics(trainer: Any) -> dict[str, Metric]:
    """The torchmetrics of the module by name."""
    metrics: dict[str, Metric] = {}
    for name, module in trainer.lightning_module.named_modules():
        if isinstance(module, MetricTracker):
            raise Unsupported(
                f"snapshot {name}: a MetricTracker makes new metrics while training, which a resume cannot find",
                hint="keep the history in a buffer or in the logger",
            )
        if isinstance(module, MetricCollection):
            # Of metrics that share a state, only the first is up to date.
            module._compute_groups_create_state_ref()  # pyright: ignore[reportPrivateUsage]
        elif isinstance(module, Metric):
            metrics[name] = module
    return metrics


def _attributes(metric: Metric) -> dict[str, Any]:
    """The states of a metric, and its other attributes that are tensors or numbers, such as a count or an extreme."""
    return {
        name: _copy(value)
        for name, value in vars(metric).items()
        if name in metric._defaults or _is_plain(value)  # pyright: ignore[reportPrivateUsage]
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def _capture_result(key: str, result: _ResultMetric) -> dict[str, Any]:
    meta = result.meta
    if meta.sync._group is not None:  # pyright: ignore[reportPrivateUsage]
        raise Unsupported(
            f"snapshot the logged {meta.name}: it is reduced over a process group of its own",
            hint="log it without sync_dist_group",
        )
    reduction = next(name for name, function in REDUCTIONS.items() if function is meta.reduce_fx)
    sync = {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "op": meta.sync.op}
    fields = {name: getattr(meta, name) for name in FIELDS}
    return {"meta": fields, "reduction": reduction, "sync": sync, "state": _attributes(result)}


def _result(trainer: Any, saved: dict[str, Any]) -> _ResultMetric:
    sync = saved["sync"]
    meta = _Metadata(**saved["meta"], reduce_fx=REDUCTIONS[saved["reduction"]])
    meta.sync = _Sync(
        fn=trainer.strategy.reduce, _should=sync["should"], rank_zero_only=sync["rank_zero_only"], _op=sync["op"]
    )
    result = _ResultMetric(meta, saved["state"]["is_tensor"])
    for name, value in saved["state"].items():
        setattr(result, name, value)
    if not result.is_tensor:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    return result.to(trainer.strategy.root_device)


def _copy(value: Any) -> Any:
    """New containers with the same tensors: training goes on to fill the old ones."""
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_on(item, device) for item in value]
    return {key: _on(item, device) for key, item in value.items()} if isinstance(value, dict) else value
