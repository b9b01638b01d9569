"""Checks the state of torchdata's StatefulDataLoader: refuses a stream that it would not resume correctly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierd.errors import Unsupported


def check_loader_state(path: str, state: Mapping[str, Any]) -> None:
    """Raises Unsupported if workers read a stream that has no state of its own. torchdata 0.11 resumes such a loader
    once, but not again from the state that the resumed loader returns."""
    for worker in state.get("_snapshot", {}).get("_worker_snapshots", {}).values():
        fetcher = worker["fetcher_state"]  # None: a dataset with indexes
        if fetcher is not None and fetcher["dataset_iter_state"] is None and worker["dataset_state"] is None:
            raise Unsupported(
                f"capture {path}: workers read a stream that keeps no position",
                hint="use num_workers=0, or give the IterableDataset state_dict and load_state_dict",
            )


def begin_iterator(loader: Any, state: Mapping[str, Any]) -> None:
    """Makes the iterator of a loader that has loaded `state`.

    It draws a seed from the global generator, so this comes before the generators are restored. A stream without a
    state is read again up to its position, and torchdata 0.11 counts these batches twice.
    """
    try:
        loader.state_dict()
    except StopIteration:  # such a stream, which was read to its end
        loader.next_iter_state = None
        return
    if "_num_yielded" in state:
        loader._iterator._num_yielded = state["_num_yielded"]
