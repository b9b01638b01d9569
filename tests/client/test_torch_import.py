"""Files of torch.save that were changed by somebody: the reader refuses them with a typed error, and never crashes."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import pytest
import torch
from tierd_client.torch_import import capture, load, serve

from tierd.errors import Corrupt, TierdError, Unsupported
from tierd.format.import_messages import REQUEST


def mutated(raw: bytes, numbers: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(numbers.choice((1, 2, 4))):
        at = numbers.randrange(len(changed))
        match numbers.randrange(3):
            case 0:
                changed[at] = numbers.randrange(256)
            case 1:
                changed[at] ^= 1 << numbers.randrange(8)
            case _:
                changed[at : at + 1] = changed[numbers.randrange(len(changed)) :][: numbers.randrange(6)]
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")
def test_any_change_of_the_pickle_ends_in_a_typed_error_or_in_tensors(tmp_path: Path) -> None:
    """The checksums of the archive are those of the changed bytes, as an attacker would write them."""
    value = {"net": {"w": torch.randn(3, 4), "part": torch.randn(5)[1:4]}, "lr": [0.1, (1, 2)], "step": 5}
    torch.save(value, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    numbers, path, refused = random.Random(7), tmp_path / "changed.pt", set[type[TierdError]]()
    for _ in range(400):
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in entries.items():
                archive.writestr(name, mutated(content, numbers) if name.endswith("data.pkl") else content)
        try:
            _, tensors = capture(load(str(path)), None)
            requests = b"".join(REQUEST.pack(index, 0, 64) for index in range(len(tensors)))
            serve(tensors, io.BytesIO(requests), io.BytesIO())
        except (Corrupt, Unsupported) as error:
            refused.add(type(error))
    assert refused == {Corrupt, Unsupported}
