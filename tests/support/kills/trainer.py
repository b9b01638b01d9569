"""A trainer with the real client that takes snapshots until it is killed, and writes down what was acknowledged.

Its state is one buffer whose bytes follow from generation and step. After each start it checks what it restores.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.support.kills import shards

SIZE_BYTES = 20_000
RETRY_S = 0.01
PATIENCE_S = 10.0  # a wait that is longer is tried again: the daemon that was asked may be dead


def take_snapshots(path: str, run: str, notes: str, pause_s: float = 0.0) -> None:
    """Runs in the trainer's process. `path`: the daemon's socket. `notes`: the file to write to. `pause_s`: after each
    snapshot."""
    import tierd_client
    import tierd_client.session
    import torch

    tierd_client.session.RETRY_MIN_S = 0.02
    model = torch.nn.Module()
    model.register_buffer("weight", torch.zeros(SIZE_BYTES, dtype=torch.uint8))
    state = tierd_client.TrainingState(model=model)
    least = max((tuple(note["acknowledged"]) for note in read_notes(Path(notes), "acknowledged")), default=(0, 0))
    while True:
        try:
            client = tierd_client.connect(run, socket=path, slot_wait_s=PATIENCE_S)
            write_note(notes, claimed=client.generation)
            found = client.restore(state)
            break
        except tierd_client.TierdError:
            time.sleep(RETRY_S)
    weight: Any = model.weight
    restored = (found.generation, found.step) if found else (0, 0)
    is_same = bytes(weight.numpy()) == shards.weight(run, *restored, 0, SIZE_BYTES) if found else True
    write_note(notes, restored=restored, least=least, is_same=is_same)
    step = restored[1]
    while True:
        step += 1
        content = shards.weight(run, client.generation, step, 0, SIZE_BYTES)
        weight.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        try:
            client.snapshot(step, state).wait_persisted(PATIENCE_S)
            write_note(notes, acknowledged=(client.generation, step))
            time.sleep(pause_s)
        except tierd_client.TierdError:
            time.sleep(RETRY_S)


def write_note(path: str, **note: object) -> None:
    """One line, by one call of write(2): whole or absent when the process is killed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, json.dumps(note).encode() + b"\n")
    os.close(descriptor)


def read_notes(path: Path, key: str) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [note for line in lines if key in (note := json.loads(line))]
