"""What a training loop needs of tierd. `connect` begins a run, `TrainingState` says what its state is.

client = tierd_client.connect(run="gpt-124m")
state = tierd_client.TrainingState(model=model, optimizer=optimizer)
found = client.restore(state)
...
client.snapshot(step, state)
"""

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
    TierdError,
    TierUnreachable,
    Transient,
    Unsupported,
)
from tierd_client.client import Client, Found, connect
from tierd_client.shots import Shot
from tierd_client.state import TrainingState

__all__ = [
    "BadConfig",
    "BadRequest",
    "Client",
    "Corrupt",
    "DaemonUnreachable",
    "Found",
    "Full",
    "Mismatch",
    "NewerFormat",
    "NotFound",
    "Shot",
    "SlotsBusy",
    "Stale",
    "TierUnreachable",
    "TierdError",
    "TrainingState",
    "Transient",
    "Unsupported",
    "__version__",
    "connect",
]
