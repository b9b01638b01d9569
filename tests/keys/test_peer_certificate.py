"""The certificate of a daemon: another one at each start, on no disk, and readers know it by its fingerprint."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from tierd.errors import BadConfig
from tierd.keys.peer_certificate import fingerprint_of, make_certificate, unverified


async def test_a_client_sees_the_certificate_with_that_fingerprint() -> None:
    context, fingerprint = await asyncio.to_thread(make_certificate)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2], ssl=unverified())
        session = writer.get_extra_info("ssl_object")
        assert fingerprint_of(session.getpeercert(binary_form=True)) == fingerprint
        assert session.version() == "TLSv1.3"
        writer.close()


def test_each_start_makes_another_certificate_and_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    assert make_certificate()[1] != make_certificate()[1]
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_without_the_package_cryptography_a_daemon_with_tls_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(BadConfig, match=r"peers\.tls: the package cryptography is not installed") as refused:
        make_certificate()
    assert "pip install" in refused.value.hint
