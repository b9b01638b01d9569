"""What reads bytes from outside, and inputs for it: seeds of valid bytes, and mutations of them.

`python -m tests.support.fuzz TARGET --count N --first SEED` runs N inputs in a process with little memory. It prints
the first input that ends in anything but a typed error, or takes longer than a second, and exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from tests.support.cli import make_manifest
from tests.support.slots import make_sealed
from tierd.config import file as config_file
from tierd.errors import TierdError
from tierd.format import audit, layout, tagged, wire
from tierd.format.adopted import TREE_FILE, AdoptedTree, TreeEntry, decode_tree
from tierd.format.announced import Announced, decode_announced
from tierd.format.bitmap import unpack_indexes
from tierd.format.boxes import cover_problem
from tierd.format.claim import Claim, decode_claim
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.format.manifest import Head, encode_marker, file_entry
from tierd.format.manifest import decode as decode_manifest
from tierd.format.node_file import NodeFile, decode_node_file
from tierd.format.shard import FORMAT_VERSION, TensorSpec, parse_header, plan_layout
from tierd.format.signature import Keyring, parse_keys, without_signature
from tierd.format.text import printable, printable_json
from tierd.format.whole import whole_tensors
from tierd.tiers.cache import _decode as decode_cache  # pyright: ignore[reportPrivateUsage]
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.store import ReadableStore, Store, StoredObject, is_key
from tierd.tiers.tier import Tier

CORPUS = Path(__file__).parents[1] / "security" / "corpus"
MEMORY_BYTES = 512 << 20  # of address space beyond what the process has at its start
INPUT_S_MAX = 1.0  # of processor time
ID = checkpoint_id("run", 5, 1)
KEYRING = parse_keys(f"hmac-sha256:{'0' * 64}\n", where="fuzz")
SIGNED_NAME = layout.generation_key(ID.run, ID.generation)
SIGNED = KEYRING.sign(SIGNED_NAME, encode_marker(Claim.new("node", "0" * 32, now_s=1.8e9)))
TREE = AdoptedTree(
    format_version=1,
    name="checkpoint-5",
    is_file=False,
    mode=0o755,
    entries=[
        TreeEntry(path="a", kind="folder", mode=0o700),
        TreeEntry(path="a/b", kind="file", mode=0o644, modified_ns=5, stored_as="00001-b"),
        TreeEntry(path="a/c", kind="link", target="../a/b"),
    ],
)
ADOPTED = make_manifest(ID, [file_entry(name, 9, 4096, [1]) for name in (TREE_FILE, "00001-b")])


# ── the targets ──


def _manifest(raw: bytes) -> object:
    return decode_manifest(raw, where="fuzz", expect=ID)


def _shard(raw: bytes) -> object:
    """The first 8 bytes of a shard are its header's length: right, unless the input is very short."""
    file = len(raw).to_bytes(8, "little") + raw if not raw.startswith(b"!") else raw[1:]
    shard = parse_header(file, len(file) + 96, where="fuzz")
    return whole_tensors({"a": shard, "b": shard})


def _tagged(raw: bytes) -> object:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None  # the header's parser refuses it
    return tagged.decode(value)


def _wire(raw: bytes) -> object:
    for decode in (wire.decode_greeting, wire.decode_to_daemon, wire.decode_to_client):
        with suppress(TierdError):
            message = decode(raw)
            if isinstance(message, wire.Find):
                for packed in message.chunks or ():
                    unpack_indexes(packed)
    return None


class _OneObject:
    """A store whose every object has these bytes, and whose listing has these keys."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        del key
        return self.raw[:size_max]

    async def list(self, prefix: str = "", *, until: str = "") -> list[StoredObject]:
        keys = self.raw.decode(errors="replace").split("\n")
        return [StoredObject(key, index, "", 0.0) for index, key in enumerate(keys) if is_key(key)]


def _marker(raw: bytes) -> object:
    tier = ReadableTier("fuzz", cast(ReadableStore, _OneObject(raw)))
    return str(asyncio.run(tier.diagnosis(ID, is_healthy=True)))


def _claim(raw: bytes) -> object:
    return decode_claim(raw)


def _audit(raw: bytes) -> object:
    """Lines of an audit trail, of which the first may be valid."""
    audit.tail_of(raw, first=1)
    for keyring in (None, KEYRING):
        for event in audit.check([(1, raw)], keyring).events:
            assert event.sentence().isprintable()
    return None


def _node_file(raw: bytes) -> object:
    """And the head of a part that is adopted."""
    with suppress(TierdError):
        decode_announced(raw, where="fuzz", expect=ID)
    return decode_node_file(raw, name="node-00000-of-00002.json", where="fuzz", expect=ID)


def _adopted(raw: bytes) -> object:
    """`adopted.json` from a bucket: no path and no link of what is accepted leads out of the folder."""
    tree = decode_tree(raw, ADOPTED, where="fuzz")
    for entry in tree.entries:
        places = [entry.path] if entry.kind != "link" else [entry.path, f"{entry.path}/../{entry.target}"]
        assert not entry.mode & ~0o777
        assert all(not os.path.normpath(place).startswith(("/", "..")) for place in places)
    return tree


def _signature(raw: bytes) -> object:
    """Nothing but the signed bytes is accepted."""
    assert KEYRING.problem(SIGNED_NAME, raw) or raw == SIGNED
    return without_signature(raw)


def _listing(raw: bytes) -> object:
    listing = asyncio.run(Tier("fuzz", cast(Store, _OneObject(raw))).listing())
    for checkpoint in listing.files:
        assert CheckpointId(*msgspec.structs.astuple(checkpoint)) == checkpoint
        listing.milestones(checkpoint)
        listing.diagnosis(checkpoint)
    return listing


def _names(raw: bytes) -> object:
    text = raw.decode(errors="surrogateescape")
    layout.parse_key(text)
    layout.parse_generation_key(text)
    layout.parse_tier_marker(text)
    assert printable(text).isprintable()
    with suppress(ValueError):
        printable_json(json.dumps(text).encode())
    if is_key(text):
        assert ".." not in text.split("/")
        assert not text.startswith("/")
        assert "\x00" not in text
    return layout.milestone_file(text)


def _cache(raw: bytes) -> object:
    try:
        return decode_cache(raw, {ID: (100, "etag")}, None)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None  # `ManifestCache.read` ignores a cache that is damaged


def _config(raw: bytes) -> object:
    """The first line is a variable of the environment, the rest is the file."""
    line, _, content = raw.partition(b"\n")
    name, _, value = line.decode(errors="surrogateescape").partition("=")
    path = Path(_folder()) / "tierd.toml"
    path.write_bytes(content)
    return config_file.load(str(path), environ={name: value} if name.startswith("TIERD_") else {}, cwd=path.parent)


def _boxes(raw: bytes) -> object:
    """Two bytes for each axis of each box: its offset and its size."""
    axes = 1 + len(raw) % 3
    numbers = list(raw)
    rows = [numbers[at : at + 2 * axes] for at in range(0, len(numbers) - 2 * axes + 1, 2 * axes)]
    boxes = [(tuple(row[:axes]), tuple(row[axes:])) for row in rows]
    return cover_problem(boxes, tuple(numbers[:axes])) if boxes else None


_folders: list[str] = []


def _folder() -> str:
    if not _folders:
        _folders.append(tempfile.mkdtemp(prefix="tierd-fuzz-"))
    return _folders[0]


TARGETS: dict[str, Callable[[bytes], object]] = {
    "manifest": _manifest,
    "shard": _shard,
    "tagged": _tagged,
    "wire": _wire,
    "marker": _marker,
    "claim": _claim,
    "audit": _audit,
    "node_file": _node_file,
    "adopted": _adopted,
    "signature": _signature,
    "listing": _listing,
    "names": _names,
    "cache": _cache,
    "config": _config,
    "boxes": _boxes,
}


def run_one(target: str, raw: bytes) -> None:
    """Raises AssertionError unless the input is taken, or refused with a typed error, within a second."""
    began_s = time.thread_time()
    try:
        TARGETS[target](raw)
    except TierdError as error:
        printable(str(error))
    took_s = time.thread_time() - began_s
    assert took_s < INPUT_S_MAX, f"{target}: {took_s:.1f} s for {len(raw)} bytes"


# ── the inputs ──


def seeds(target: str) -> list[bytes]:
    """Valid inputs, and the corpus: those that were interesting once."""
    kept = [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]
    return [*_valid(target), *kept]


def _valid(target: str) -> list[bytes]:
    entry = file_entry("rank-00000-of-00001.safetensors", 9000, 4096, [1, 2, 3])
    manifest = make_manifest(ID, [entry]).encode()
    match target:
        case "manifest":
            return [manifest]
        case "shard":
            tierd = {"format_version": FORMAT_VERSION, "state": {"a": {"$tuple": [1, {"$float": "nan"}]}}}
            specs = [TensorSpec(name=name, dtype="F32", shape=(3, 4), saved_offsets=(0, 0)) for name in ("w", "v")]
            return [plan_layout(specs, tierd).encode_header(tierd)[8:].rstrip()]
        case "tagged":
            value = [1, 2.5, None, (1, float("inf")), {1: b"x"}, {"a": {3}}, 1 << 80, complex(1, 2)]
            return [json.dumps(tagged.encode(value, "value")).encode()]
        case "wire":
            hello = wire.Hello(protocol=1, version="0", run="run", rank=0, world_size=1, generation=None)
            find = wire.Find(
                request=1, step=None, generation=None, milestone=None, tier="auto", exclude=["x"], chunks=[b"\x01"]
            )
            report = wire.Report(outcome="failed", step=1, tier="", seconds=0.5, detail="x")
            return [wire.encode(message) for message in (hello, find, report, make_sealed(1))]
        case "marker":
            return [b'{"healthy": true, "tensors": 1, "not_finite": [{"tensor": "w", "nan": 1, "inf": 0}]}']
        case "claim":
            return [encode_marker(Claim.new("node", "0" * 36))]
        case "audit":
            return [_audit_line(None), _audit_line(KEYRING)]
        case "node_file":
            head: dict[str, Any] = {name: getattr(make_manifest(ID, [entry]), name) for name in Head.__struct_fields__}
            part = file_entry("rank-00000-of-00002.safetensors", 9000, 4096, [1, 2, 3])
            more: dict[str, Any] = {"claim": "0" * 32, "ranks": [0], "is_healthy": None, "milestone": "best"}
            snapshot: dict[str, Any] = {**head, "world_size": 2, **more}
            adopted: dict[str, Any] = {**head, "world_size": 2, "kind": "adopted"}
            parts = [file_entry(f"part-00000-{name}", 9, 4096, [1]) for name in (TREE_FILE, "00001-b")]
            return [
                NodeFile(**snapshot, files=[part]).encode(),
                NodeFile(**adopted, **more, files=parts).encode(),
                Announced(**adopted, claim="0" * 32).encode(),
            ]
        case "adopted":
            return [TREE.encode()]
        case "signature":
            return [SIGNED, KEYRING.sign_manifest(make_manifest(ID, [entry])).encode()]
        case "listing":
            names = ("manifest.json", "milestone-best.json", "unhealthy.json", entry.name)
            keys = [layout.file_key(ID, name) for name in names]
            return ["\n".join([*keys, "run/generation-0001.json", layout.tier_marker_key("0" * 36)]).encode()]
        case "names":
            return [layout.manifest_key(ID).encode(), b"run/generation-0001.json", "best-é\u202e".encode()]
        case "cache":
            row = [layout.checkpoint_prefix(ID), 100, "etag", msgspec.Raw(manifest)]
            return [msgspec.json.encode([row])]
        case "config":
            shown = (Path(__file__).parents[2] / "deploy" / "tierd.toml").read_bytes()
            small = b'[daemon]\nlisten = "127.0.0.1:0"\n[[cold]]\nname = "dr"\nurl = "s3://bucket/prefix"\n'
            return [b"TIERD_LIMITS_SLOTS_MAX=7\n" + small, b"\n" + shown]
        case _:
            return [bytes([4, 4, 0, 0, 3, 4, 3, 0, 1, 4]), bytes(range(60))]


def _audit_line(keyring: Keyring | None) -> bytes:
    event = audit.Event(
        sequence=1, at="2026-01-02T03:04:05+00:00", action="joined", by="trainer", uid=0, pid=1, node="n", previous=""
    )
    return audit.encode(event, keyring)


TOKENS = [
    *(b"{}", b"[]", b"null", b"NaN", b"-1", b"0", b"1e999", b"true", b'""', b"\x00", b"\xff\xfe", b"\\ud800"),
    *(str(number).encode() for number in (2**31, 2**63, 2**64, 10**30)),
    b"9" * 5000,
    b"[" * 3000,
    b'{"a":' * 2000,
    b"\xdf\xff\xff\xff\xff",
    b"..",
    b"/",
    b"\n",
    b"\x1b[2J",
    b'"$tuple"',
    b'"$deque"',
]


def mutate(numbers: random.Random, seed_inputs: Sequence[bytes]) -> bytes:
    """A seed with one to eight changes, or random bytes."""
    if numbers.random() < 0.05:
        return numbers.randbytes(numbers.randrange(200))
    raw = bytearray(numbers.choice(seed_inputs))
    for _ in range(numbers.randint(1, 8)):
        at = numbers.randrange(len(raw) + 1)
        length = min(numbers.choice((1, 1, 2, 4, 8, 40)), len(raw) - at)
        match numbers.randrange(7):
            case 0 if length:
                raw[at : at + length] = numbers.randbytes(length)
            case 1 if length:
                raw[at] ^= 1 << numbers.randrange(8) if at < len(raw) else 0
            case 2:
                del raw[at : at + length]
            case 3:
                raw[at:at] = raw[at : at + length] * numbers.choice((1, 2, 50))
            case 4:
                raw[at : at + length] = numbers.choice(TOKENS)
            case 5:
                other = numbers.choice(seed_inputs)
                begin = numbers.randrange(len(other) + 1)
                raw[at:at] = other[begin : begin + numbers.randrange(60)]
            case _:
                digits = [at + index for index, byte in enumerate(raw[at : at + 200]) if 48 <= byte < 58]
                if digits:
                    raw[numbers.choice(digits)] = numbers.randrange(48, 58)
    return bytes(raw)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first input")
    options: Any = parser.parse_args(arguments)
    logging.disable()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    seed_inputs = seeds(options.target)
    for raw in seed_inputs:
        run_one(options.target, raw)
    for seed in range(options.first, options.first + options.count):
        raw = mutate(random.Random(seed), seed_inputs)
        try:
            run_one(options.target, raw)
        except Exception as error:
            print(f"{options.target} seed {seed}: {type(error).__name__}: {error}\n{raw[:2000]!r}")
            return 1
    print(f"{options.target}: {options.count} inputs from seed {options.first}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
