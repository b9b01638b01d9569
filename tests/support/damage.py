"""Replicas that are damaged: what a test does to a file of a directory, or to an object of our own S3 server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.bucket import Bucket
from tests.support.cli import flip_a_bit, folder_of
from tierd.format import checksum, layout
from tierd.format.manifest import Manifest


def rot(bucket: Bucket, prefix: str, manifest: Manifest, name: str, *, is_noticed: bool) -> str:
    """One bit of an object flips. `is_noticed`: the checksum that the server keeps is of the damaged bytes; else it
    still says what was sent. Returns the object's key."""
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
