"""How far two tensors are apart, block by block: largest differences and norms. The only file of the CLI with numpy.

Everything is computed in float64, integers of 64 bits in numpy's long double.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]


@dataclass(slots=True)
class Distance:
    """Of the elements that were added. `differing`: elements with other bytes. `max_abs` and `max_rel`: of |b - a| and
    |b - a| / max(|a|, |b|). `norm_a`, `norm_b`, `norm_difference`: Euclidean. Elements that are not finite on either
    side count in `not_finite` and, where their bytes differ, in `differing`, and in nothing else."""

    elements: int = 0
    differing: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    _squares_a: float = 0.0
    _squares_b: float = 0.0
    _squares_difference: float = 0.0

    @property
    def norm_a(self) -> float:
        return math.sqrt(self._squares_a)

    @property
    def norm_b(self) -> float:
        return math.sqrt(self._squares_b)

    @property
    def norm_difference(self) -> float:
        return math.sqrt(self._squares_difference)

    def add(self, dtype: str, first: memoryview, second: memoryview) -> None:
        """Blocks of the same elements of both tensors. `dtype`: of safetensors."""
        item, convert = _DTYPES[dtype]
        bits_a, bits_b = np.frombuffer(first, f"<u{item}"), np.frombuffer(second, f"<u{item}")
        self.elements += len(bits_a)
        self.differing += int(np.count_nonzero(bits_a != bits_b))
        a, b = convert(first), convert(second)
        is_finite = np.isfinite(a) & np.isfinite(b)
        if not is_finite.all():
            self.not_finite += int(np.count_nonzero(~is_finite))
            a, b = a[is_finite], b[is_finite]
        with np.errstate(over="ignore"):  # a norm may be infinite
            self._squares_a += float(np.square(a).sum())
            self._squares_b += float(np.square(b).sum())
            distance = np.abs(b - a)
            self._squares_difference += float(np.square(distance).sum())
        if not distance.any():
            return
        self.max_abs = max(self.max_abs, float(distance.max()))
        largest = np.maximum(np.abs(a), np.abs(b))
        is_apart = distance > 0
        self.max_rel = max(self.max_rel, float((distance[is_apart] / largest[is_apart]).max()))


def _of_numpy(dtype: str, block: memoryview) -> Numbers:
    return np.frombuffer(block, dtype).astype(np.float64)


def _long_integers(dtype: str, block: memoryview) -> Numbers:
    return np.frombuffer(block, dtype).astype(np.longdouble)


def _bfloat16(block: memoryview) -> Numbers:
    """The upper half of a float32."""
    return (np.frombuffer(block, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


def _float8(exponent_bits: int, bias: int, is_fnuz: bool, has_infinity: bool, block: memoryview) -> Numbers:
    """A sign bit, the exponent and the rest as mantissa. https://arxiv.org/abs/2209.05433, and for the fnuz variants
    https://arxiv.org/abs/2206.02915"""
    mantissa_bits = 7 - exponent_bits
    table: list[float] = []
    for bits in range(256):
        exponent, mantissa = bits >> mantissa_bits & (1 << exponent_bits) - 1, bits & (1 << mantissa_bits) - 1
        fraction = mantissa / (1 << mantissa_bits)
        size = math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias)
        if is_fnuz:
            size = math.nan if bits == 0x80 else size
        elif exponent == (1 << exponent_bits) - 1 and (has_infinity or bits & 0x7F == 0x7F):
            size = math.inf if has_infinity and not mantissa else math.nan
        table.append(-size if bits & 0x80 else size)
    return np.array(table)[np.frombuffer(block, "u1")]


_DTYPES: dict[str, tuple[int, Callable[[memoryview], Numbers]]] = {
    "F64": (8, partial(_of_numpy, "<f8")),
    "F32": (4, partial(_of_numpy, "<f4")),
    "F16": (2, partial(_of_numpy, "<f2")),
    "BF16": (2, _bfloat16),
    "C64": (4, partial(_of_numpy, "<f4")),  # real and imaginary part count as elements
    "I64": (8, partial(_long_integers, "<i8")),
    "U64": (8, partial(_long_integers, "<u8")),
    "I32": (4, partial(_of_numpy, "<i4")),
    "U32": (4, partial(_of_numpy, "<u4")),
    "I16": (2, partial(_of_numpy, "<i2")),
    "U16": (2, partial(_of_numpy, "<u2")),
    "I8": (1, partial(_of_numpy, "i1")),
    "U8": (1, partial(_of_numpy, "u1")),
    "BOOL": (1, partial(_of_numpy, "u1")),
    "F8_E5M2": (1, partial(_float8, 5, 15, False, True)),
    "F8_E4M3": (1, partial(_float8, 4, 7, False, False)),
    "F8_E5M2FNUZ": (1, partial(_float8, 5, 16, True, False)),
    "F8_E4M3FNUZ": (1, partial(_float8, 4, 8, True, False)),
}
"""By safetensors dtype: the size of an element, and a function that gives the elements of a block as numbers."""
