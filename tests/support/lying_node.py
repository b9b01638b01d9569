"""A server in place of another node's daemon, which answers what a test says, and not what a part holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from tierd.format import layout
from tierd.format.checksum import CHUNK_BYTES, chunk_ranges, crc64nvme
from tierd.format.ids import CheckpointId, Rank
from tierd.format.manifest import FileEntry, Head, file_entry
from tierd.format.node_file import NodeFile
from tierd.format.peers import PeerAddress

CLAIM = "ab" * 16
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LyingNode:
    """`answers`: by the name of a file: its bytes, or a function that answers. `requested`: the names, in order."""

    def __init__(self, answers: Mapping[str, bytes | Answer]) -> None:
        self.answers = dict(answers)
        self.requested: list[str] = []
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self.server = TestServer(app)

    @property
    def peer(self) -> PeerAddress:
        return PeerAddress(address=f"127.0.0.1:{self.server.port}", token="0" * 64)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.path.rpartition("/")[2]
        self.requested.append(name)
        answer = self.answers.get(name)
        if answer is None:
            return web.Response(status=404)
        if callable(answer):
            return await answer(request)
        if "Range" not in request.headers:
            return web.Response(body=answer)
        return web.Response(status=206, body=answer[request.http_range])


@asynccontextmanager
async def lying_node(answers: Mapping[str, bytes | Answer]) -> AsyncIterator[LyingNode]:
    node = LyingNode(answers)
    await node.server.start_server()
    try:
        yield node
    finally:
        await node.server.close()


def entry_of(name: str, content: bytes, chunk_bytes: int = CHUNK_BYTES) -> FileEntry:
    ranges = chunk_ranges(len(content), chunk_bytes)
    sums = [crc64nvme(content[offset : offset + length]) for offset, length in ranges]
    return file_entry(name, len(content), chunk_bytes, sums)


def claimed_entry(name: str, size_bytes: int, chunk_bytes: int = CHUNK_BYTES, sums: int = 1) -> FileEntry:
    """Of a file of this size that nobody has; `sums`: the checksum of each chunk."""
    return file_entry(name, size_bytes, chunk_bytes, [sums] * -(-size_bytes // chunk_bytes))


def node_file(checkpoint: CheckpointId, files: Mapping[int, FileEntry], world_size: int, **changes: Any) -> NodeFile:
    """Of these ranks."""
    head = Head(
        format_version=1,
        run=checkpoint.run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        sequence=5,
        parent=None,
        world_size=world_size,
        created_at="2026-11-01T00:00:00+00:00",
        kind="snapshot",
        metrics={},
        architecture_hash="ab" * 32,
        versions={},
    )
    fields: dict[str, Any] = {name: getattr(head, name) for name in head.__struct_fields__}
    fields |= {"claim": CLAIM, "ranks": sorted(files), "is_healthy": None, "milestone": ""}
    fields |= {"files": [files[rank] for rank in sorted(files)]}
    return NodeFile(**fields | changes)


def shard_name(rank: int, world_size: int) -> str:
    return layout.shard_name(Rank(rank), world_size)
