"""Datasets whose samples draw random numbers, as augmentation does, and files of numbered documents."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Augmented(Dataset[torch.Tensor]):
    """Sample i is (i, a number from each global generator)."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


class Journal(Augmented):
    """Records the index of each sample that any process reads."""

    def __init__(self, length: int, path: Path) -> None:
        super().__init__(length)
        self._path = path

    def __getitem__(self, index: int) -> torch.Tensor:
        with self._path.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)

    def read(self) -> list[int]:
        return [int(line) for line in self._path.read_text().split()]


def noisy(documents: list[Any]) -> tuple[list[Any], list[float]]:
    """A collate function that draws random numbers."""
    return documents, [random.random(), np.random.random(), torch.rand(()).item()]


def write_documents(folder: Path, counts: list[int]) -> list[str]:
    """A .jsonl file with each count of documents. Document n of all has the id n; documents differ in length."""
    numbers = iter(range(sum(counts)))
    paths: list[str] = []
    for name, count in enumerate(counts):
        path = folder / f"{name:03d}.jsonl"
        path.write_text(
            "".join(json.dumps({"id": n, "text": "x" * (n % 7)}) + "\n" for n in itertools.islice(numbers, count))
        )
        paths.append(str(path))
    return paths
