"""What `tierd doctor` checks of a node that other nodes read from: its own address, its partner, and their settings."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress

from msgspec import UNSET

from tierd.config.sections import Config, split_address
from tierd.errors import PeerUnreachable
from tierd.keys.peer_certificate import fingerprint_of, unverified
from tierd.status.report import StatusReport
from tierd.tiers.probe import Advice

CONNECT_TIMEOUT_S = 3.0


async def check_peers(config: Config, status: StatusReport) -> AsyncIterator[Advice]:
    """`status`: of the daemon on this node. Yields nothing where `peers.listen` is not set."""
    if not config.peers.listen:
        return
    yield await _check_own(config, status)
    for run in status.runs:
        partner = None if run.nodes is UNSET else run.nodes.partner
        if partner is None:
            continue
        address = partner.address
        if config.peers.tls and not partner.fingerprint:
            message = f"nothing is copied from the node at {address}: peers.tls is set here, and not there"
            hint = "set peers.tls to the same on all nodes of the run: docs/RUNBOOK.md#peers"
            yield Advice("partner", "peers", "problem", message, hint, PeerUnreachable.exit_code)
        elif why := await _refuses(address, partner.fingerprint):
            message = f"the node at {address}, whose parts of {run.run} are copied here, accepts no connection: {why}"
            hint = f"is its daemon running, and may this node open {address}? docs/RUNBOOK.md#peers"
            yield Advice("partner", "peers", "problem", message, hint, PeerUnreachable.exit_code)
        else:
            with_tls = " with TLS" if partner.fingerprint else ""
            message = f"the node at {address}, whose parts of {run.run} are copied here, accepts connections{with_tls}"
            yield Advice("partner", "peers", "ok", message)
        if not partner.has_same_lifecycle:
            message = f"the lifecycle of the node at {address} differs from the one in this config"
            hint = (
                "give all nodes the same [lifecycle]; in cold tiers that of the node of rank 0 counts. After a reload, "
                "the nodes tell each other at the next start of the trainers"
            )
            yield Advice("lifecycle", "peers", "warning", message, hint)


async def _check_own(config: Config, status: StatusReport) -> Advice:
    address = status.peer_address
    if not address:
        message = f"the daemon does not serve parts at {config.peers.listen}: its config was another one at its start"
        return Advice("address", "peers", "warning", message, "restart the daemon")
    if why := await _refuses(address, status.peer_fingerprint):
        message = f"other nodes are told to read from {address}, which accepts no connection here: {why}"
        hint = "set peers.advertise to a name or address of this node that other nodes can reach"
        return Advice("address", "peers", "problem", message, hint, PeerUnreachable.exit_code)
    with suppress(ValueError):
        if ipaddress.ip_address(split_address(address)[0]).is_loopback:
            message = f"other nodes are told to read from {address}, which is each node itself"
            hint = "set peers.listen to 0.0.0.0:9465, or peers.advertise to the address that other nodes use"
            return Advice("address", "peers", "warning", message, hint)
    if config.peers.tls != bool(status.peer_fingerprint):
        message = f"the daemon serves parts {'without' if config.peers.tls else 'with'} TLS: peers.tls was changed"
        return Advice("address", "peers", "warning", message, "restart the daemon")
    with_tls = " with TLS" if status.peer_fingerprint else ""
    return Advice("address", "peers", "ok", f"other nodes read the parts of this one from {address}{with_tls}")


async def _refuses(address: str, fingerprint: str) -> str:
    """Why no connection can be opened, with TLS if there is a fingerprint; empty if one can."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port, ssl=unverified() if fingerprint else None)
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:.0f} s"
    except ssl.SSLError as error:
        return f"no TLS handshake: {error}"
    except OSError as error:
        return error.strerror or str(error)
    if fingerprint:
        found = fingerprint_of(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        if found != fingerprint:
            writer.close()
            return f"its certificate is sha256:{found}, and sha256:{fingerprint} was told"
    writer.close()
    with suppress(OSError, TimeoutError):  # with TLS it waits until the other one has answered
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await writer.wait_closed()
    return ""
