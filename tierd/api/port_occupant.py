"""Who has a port of this machine that a daemon cannot listen on: another tierd, or another program.

It asks for the status, as commands do. The answer may come from anything, so its time and its size are bounded, and it
is only shown.
"""

from __future__ import annotations

import aiohttp
import msgspec

from tierd.errors import UNDECODABLE
from tierd.format.ids import HOT

TIMEOUT_S = 2.0
ANSWER_BYTES_MAX = 16 << 20
OTHER = "another program"
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - a port of all addresses is asked at this one


class _Tier(msgspec.Struct):
    name: str
    url: str


class _Status(msgspec.Struct):
    pid: int
    node: str
    tiers: list[_Tier]


async def port_occupant(host: str, port: int) -> str:
    """The subject of a sentence: "another tierd, pid 7 on node1 with the hot tier /nvme,"."""
    host = _LOCAL.get(host, host)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        for scheme in ("http", "https"):
            try:
                return await _ask(session, f"{scheme}://{address}/api/v1/status")
            except TimeoutError:
                break
            except (aiohttp.ClientError, OSError, ValueError):
                continue  # the other scheme
    return OTHER


async def _ask(session: aiohttp.ClientSession, url: str) -> str:
    answer = bytearray()
    async with session.get(url, allow_redirects=False, ssl=False) as response:
        async for piece in response.content.iter_any():
            answer += piece
            if len(answer) > ANSWER_BYTES_MAX:
                return OTHER
    if response.status == 401 and b"listen.token_file" in answer:
        return "another tierd, which answers only with its listen.token_file,"
    try:
        status = msgspec.json.decode(answer, type=_Status)
    except UNDECODABLE:
        return OTHER
    hot = next((tier.url.removeprefix("file://") for tier in status.tiers if tier.name == HOT), "")
    return f"another tierd, pid {status.pid} on {status.node[:100]} with the hot tier {hot[:1000]},"
