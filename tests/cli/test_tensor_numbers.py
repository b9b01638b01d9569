"""Elements of each dtype as numbers, as torch decodes them, and how far two blocks are apart."""

from __future__ import annotations

import pytest
import torch

from tierd.cli.tensor_numbers import Distance

FLOAT8 = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


@pytest.mark.parametrize("name", FLOAT8)
def test_each_float8_is_decoded_as_torch_does(name: str) -> None:
    for bits in range(256):
        number = torch.tensor([bits], dtype=torch.uint8).view(FLOAT8[name]).double()
        distance = Distance()
        distance.add(name, memoryview(b"\0"), memoryview(bytes([bits])))
        is_finite = bool(number.isfinite())
        assert (distance.not_finite, distance.norm_b) == (int(not is_finite), abs(number.item()) if is_finite else 0)


def test_integers_of_64_bits_are_exact() -> None:
    distance = Distance()
    first, second = ((1 << 62) + each for each in (0, 1))
    distance.add("I64", *(memoryview(each.to_bytes(8, "little", signed=True)) for each in (first, second)))
    assert (distance.max_abs, distance.differing) == (1.0, 1)


def test_blocks_add_up() -> None:
    a, b = torch.randn(100), torch.randn(100)
    whole, blocks = Distance(), Distance()
    whole.add("F32", memoryview(a.numpy().tobytes()), memoryview(b.numpy().tobytes()))
    for part in (slice(0, 30), slice(30, 100)):
        blocks.add("F32", memoryview(a[part].numpy().tobytes()), memoryview(b[part].numpy().tobytes()))
    assert (blocks.elements, blocks.max_abs, blocks.max_rel) == (whole.elements, whole.max_abs, whole.max_rel)
    assert blocks.norm_difference == pytest.approx((a.double() - b.double()).norm().item())
