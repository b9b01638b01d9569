"""The result of examining a checkpoint: whether its numbers are finite, and a digest of the trained tensors.

The file name of the marker has the verdict, so a listing is enough; its content has the details.
Spec: docs/FORMAT.md#markers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tierd.format.text import counted

TENSORS_LISTED_MAX = 20
MARKER_BYTES_MAX = 64 << 10
EXAMINED = ("model.", "optimizer.", "ema.")  # the sections whose tensors are the weights and what belongs to them
_NOT_EXAMINED = ("scheduler.", "scaler.", "dataloader.", "extra.", "rng.")  # other sections of a TrainingState


def is_examined(name: str, shape: Sequence[int]) -> bool:
    """Whether the numbers of a tensor must be finite. Tensors of a DictState or of DCP have other names than those of a
    TrainingState; they are examined like those of a model, except scalars: a best loss may be infinite, a score NaN."""
    return name.startswith(EXAMINED) or (not name.startswith(_NOT_EXAMINED) and len(shape) > 0)


class NotFinite(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor with NaN or Inf, and how many of each."""

    tensor: str
    nan: int
    inf: int


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """`tensors`: how many tensors are not finite; `not_finite` lists the first of them.

    `digest`: of all trained tensors; empty if it is not known, if a tensor is not finite, or if every learning rate is
    0, so that the weights need not change. Two steps of one generation with the same digest have the same weights.
    """

    healthy: bool
    examined_at: str = ""
    tensors: int = 0
    not_finite: list[NotFinite] = []
    digest: str = ""

    def __str__(self) -> str:
        if self.healthy:
            return "every number is finite"
        shown = ", ".join(f"{each.tensor} ({each.nan} NaN, {each.inf} Inf)" for each in self.not_finite[:3])
        more = f" and {self.tensors - 3} more" if self.tensors > 3 else ""
        return (
            f"{counted(self.tensors, 'tensor is', 'tensors are')} not finite: {shown}{more}"
            if shown
            else "reported by the training, or not finite"
        )
