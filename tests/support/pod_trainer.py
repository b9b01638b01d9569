"""What the trainer of a pod does as a user of its own. That user can import few modules, so these are apart."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.trainer import Training

SECRET = "a secret of the run, long enough"


def train_and_restore(path: str, daemon_uid: int) -> tuple[str, bool]:
    """(the tier of the restore, whether it was exact)"""
    os.environ["TIERD_RUN_SECRET"] = SECRET
    training = Training()
    training.connect(path, daemon_uid=daemon_uid, rank=0, world_size=1)
    training.train(2)
    training.durable()
    training.client.close()
    other = Training(seed=2)
    other.connect(path, daemon_uid=daemon_uid, rank=0, world_size=1)
    found = other.restore(tier="hot")
    assert found is not None
    other.client.close()
    return found.tier, other.digest() == training.digest()


def environ_of_process(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()
