"""Damages replicas: a file of a directory, or an object of our own S3 server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.bucket import Bucket
from tests.support.cli import flip_a_bit, folder_of
from tierd.format import checksum, layout
from tierd.format.manifest import Manifest


def rot(bucket: Bucket, prefix: str, manifest: Manifest, name: str, *, is_noticed: bool) -> str:
    """Flips one bit of an object. Returns its key.

    With `is_noticed` the server keeps the checksum of the damaged bytes, otherwise that of the original ones.
    """
    key = f"{prefix}/{layout.file_key(manifest.id, name)}"
    stored = bucket.objects[key]
    content = bytearray(stored.content)
    content[len(content) // 2] ^= 1
    crc = checksum.crc64nvme(bytes(content)) if is_noticed else stored.crc64nvme
    bucket.objects[key] = replace(stored, content=bytes(content), crc64nvme=crc)
    return key


def flip(root: Path, manifest: Manifest, name: str) -> None:
    flip_a_bit(folder_of(root, manifest) / name)


def lose(root: Path, manifest: Manifest, name: str) -> None:
    (folder_of(root, manifest) / name).unlink()


def cut(root: Path, manifest: Manifest, name: str) -> None:
    with (folder_of(root, manifest) / name).open("r+b") as file:
        file.truncate(100)


WAYS = {"flipped": flip, "missing": lose, "cut short": cut}
