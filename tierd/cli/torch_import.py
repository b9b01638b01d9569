"""Opens a file of `torch.save` for `tierd import`: torch reads it, in a process of its own.

That process maps the file, sends the names and the values, and then the bytes of a tensor when they are asked for. It
never runs code of the file: see `client/tierd_client/torch_import.py`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from tierd.cli.export import check_torch
from tierd.cli.import_template import Template, check_fits, like_of
from tierd.errors import Corrupt, TierdError, from_kind
from tierd.format.import_messages import LENGTH, REPLY_BYTES_MAX, REQUEST, ImportReply, ImportRequest
from tierd.format.shard import DTYPE_BYTES
from tierd.format.whole import whole_in
from tierd.transfer.foreign_file import ForeignFile
from tierd.transfer.imported import ImportedState, architecture_of

FORMAT = "torch"
_READ_BYTES = 1 << 20


@asynccontextmanager
async def open_torch(
    path: Path, step: int, model: str | None, template: Template | None = None
) -> AsyncGenerator[ImportedState, Any]:
    """The state in a file of `torch.save`. `model`: the key of the model's state dict in it. `template`: a checkpoint
    of the same training, which names the parameters of the optimizer. The caller reads it within the block. Raises
    NotFound, Corrupt, Unsupported or BadConfig, and TierdError if the process fails."""
    check_torch(f"import {path}", hint="pip install 'tierd[client]': torch reads its own files")
    with closing(ForeignFile(path)) as file:
        child = await asyncio.create_subprocess_exec(
            # -P: do not import a module named torch from the current directory.
            *(sys.executable, "-P", "-m", "tierd_client.torch_import", f"/proc/self/fd/{file.fd}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=[file.fd],
            limit=_READ_BYTES,
        )
        try:
            torch = _TorchProcess(child, path)
            like = None if template is None else like_of(template, where=str(path))
            reply = await torch.ask(ImportRequest(model=model, like=like))
            tensors = [
                whole_in(str(index), each.name, each.dtype, each.shape, 0, each.torch_dtype)
                for index, each in enumerate(reply.tensors)
            ]
            if template is not None:
                check_fits(reply.tree, tensors, template, where=str(path))
            yield ImportedState(
                format=FORMAT,
                step=step,
                created_at=file.created_at,
                trees=[reply.tree],
                tensors=tensors,
                read=torch.read,
                check_unchanged=file.check_unchanged,
                architecture_hash=architecture_of(tensors) if "model" in reply.tree else "",
                metrics={},
                versions={} if template is None else {"like": str(template.manifest.id)},
            )
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


class _TorchProcess:
    """The process that reads the file. It answers one request after the other."""

    def __init__(self, child: asyncio.subprocess.Process, path: Path) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._child, self._path = child, path
        self._stdin, self._stdout = child.stdin, child.stdout
        self._lock = asyncio.Lock()

    async def ask(self, request: ImportRequest) -> ImportReply:
        """What is in the file. Raises what the process has refused it with."""
        self._stdin.write(request.encode())
        length = bytearray(LENGTH.size)
        await self._fill(memoryview(length))
        (size_bytes,) = LENGTH.unpack(length)
        if size_bytes > REPLY_BYTES_MAX:
            raise Corrupt(f"import {self._path}: its names and values take {size_bytes} bytes")
        raw = bytearray(size_bytes)
        await self._fill(memoryview(raw))
        try:
            reply = ImportReply.decode(raw)
        except ValueError as error:
            raise Corrupt(f"import {self._path}: torch's process sent something else than a reply: {error}") from error
        if reply.error_kind:
            raise from_kind(reply.error_kind, f"import {self._path}: {reply.message}", reply.hint)
        if unknown := next((tensor for tensor in reply.tensors if tensor.dtype not in DTYPE_BYTES), None):
            raise Corrupt(f"import {self._path}: {unknown.name} has the dtype {unknown.dtype}")
        return reply

    async def read(self, index: str, offset: int, buffer: memoryview) -> None:
        async with self._lock:
            self._stdin.write(REQUEST.pack(int(index), offset, len(buffer)))
            await self._fill(buffer)

    async def _fill(self, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            piece = await self._stdout.read(min(_READ_BYTES, len(buffer) - done))
            if not piece:
                raise await self._end()
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    async def _end(self) -> TierdError:
        code = await self._child.wait()
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return TierdError(
            f"import {self._path}: torch's process ended with {how}",
            hint="is there enough memory? was the file written meanwhile?",
        )
