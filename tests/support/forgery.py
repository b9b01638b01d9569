"""What a writer to a bucket can make: other content with the same checksum."""

from __future__ import annotations

from tierd.format import checksum

# Offsets: of the byte that is changed, and of the eight that restore the checksum. At the end a shard has tensors.
CHANGED, ADJUSTED = -200, -100


def changed_with_the_same_crc(content: bytes) -> bytes:
    """Other bytes of the same length and CRC64NVME. CRCs are linear: each bit of eight further bytes has a fixed effect
    on the checksum, and Gaussian elimination finds those bits whose effects cancel the change."""
    forged = bytearray(content)
    forged[CHANGED] ^= 1
    difference = checksum.crc64nvme(bytes(forged)) ^ checksum.crc64nvme(content)
    basis: list[tuple[int, int]] = []  # (effect on the checksum, bits of the eight bytes), reduced
    for bit in range(64):
        effect, bits = _effect(forged, bit), 1 << bit
        for other, others in basis:
            if effect ^ other < effect:
                effect, bits = effect ^ other, bits ^ others
        if effect:
            basis.append((effect, bits))
            basis.sort(reverse=True)
    chosen = 0
    for effect, bits in basis:
        if difference ^ effect < difference:
            difference, chosen = difference ^ effect, chosen ^ bits
    for bit in range(64):
        if chosen >> bit & 1:
            forged[ADJUSTED + bit // 8] ^= 1 << bit % 8
    assert checksum.crc64nvme(bytes(forged)) == checksum.crc64nvme(content)
    return bytes(forged)


def _effect(content: bytearray, bit: int) -> int:
    changed = bytearray(content)
    changed[ADJUSTED + bit // 8] ^= 1 << bit % 8
    return checksum.crc64nvme(bytes(changed)) ^ checksum.crc64nvme(bytes(content))
