"""The API for training loops. `connect` begins or continues a run, `TrainingState` names the state to snapshot.

client = tierd_client.connect(run="gpt-124m")
state = tierd_client.TrainingState(model=model, optimizer=optimizer)
found = client.restore(state)
...
client.snapshot(step, state)
"""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ImportError("tierd_client needs torch (hint: pip install 'tierd[client]')", name="torch")

from tierd import __version__
from tierd.errors import (
    BadConfig,
    BadRequest,
    Corrupt,
    DaemonUnreachable,
    Full,
    Mismatch,
    NewerFormat,
    NotFound,
    SlotsBusy,
    Stale,
    TargetNotEmpty,
    TierdError,
    TierUnreachable,
    Torn,
    Transient,
    Unhealthy,
    Unsupported,
    WrongSecret,
    WrongUser,
)
from tierd_client.client import Client, Found
from tierd_client.connection import connect
from tierd_client.loaders.documents import DocumentLoader
from tierd_client.loaders.loader import ResumableLoader
from tierd_client.loaders.sampler import ResumableSampler
from tierd_client.loss_guard import LossGuard, LossRule
from tierd_client.replay import Replay, replay_check
from tierd_client.snapshot.handle import Shot
from tierd_client.state.dict_state import DictState
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.training_state import TrainingState
from tierd_client.stopping.outcome import Halted

__all__ = [
    "BadConfig",
    "BadRequest",
    "Client",
    "Corrupt",
    "DaemonUnreachable",
    "DictState",
    "DocumentLoader",
    "Found",
    "Full",
    "Halted",
    "LossGuard",
    "LossRule",
    "Mismatch",
    "NewerFormat",
    "NotFound",
    "Replay",
    "RestoreReport",
    "ResumableLoader",
    "ResumableSampler",
    "Shot",
    "SlotsBusy",
    "Stale",
    "TargetNotEmpty",
    "TierUnreachable",
    "TierdError",
    "Torn",
    "TrainingState",
    "Transient",
    "Unhealthy",
    "Unsupported",
    "WrongSecret",
    "WrongUser",
    "__version__",
    "connect",
    "replay_check",
]
