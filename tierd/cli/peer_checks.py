"""What `tierd doctor` checks on one of several nodes.

The address where other nodes read its parts, the settings and the clock of its partner, and whether its cold tiers are
those of the other nodes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime

from msgspec import UNSET

from tierd.cli.console import now
from tierd.cli.opened_tiers import open_unlisted
from tierd.config.sections import Config, split_address
from tierd.errors import BadConfig, PeerUnreachable, TierdError
from tierd.format.claim import Claim
from tierd.format.ids import Generation, Run
from tierd.format.text import duration
from tierd.keys.peer_certificate import fingerprint_of, unverified
from tierd.status.node_reports import SKEW_S
from tierd.status.report import RunReport, StatusReport
from tierd.tiers.probe import Advice
from tierd.tiers.tier import Tier

CONNECT_TIMEOUT_S = 3.0
CLAIM_TIMEOUT_S = 10.0


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
        else:
            async for advice in _check_partner(run.run, address, partner.fingerprint):
                yield advice
        if not partner.has_same_lifecycle:
            message = f"the lifecycle of the node at {address} differs from the one in this config"
            hint = (
                "give all nodes the same [lifecycle]; in cold tiers that of the node of rank 0 counts. After a reload, "
                "the nodes tell each other at the next start of the trainers"
            )
            yield Advice("lifecycle", "peers", "warning", message, hint)


async def _check_partner(run: str, address: str, fingerprint: str) -> AsyncIterator[Advice]:
    contact = await _contact(address, fingerprint)
    if contact.refusal:
        message = f"the node at {address}, whose parts of {run} are copied here, cannot be read: "
        hint = f"is its daemon running, and may this node open {address}? docs/RUNBOOK.md#peers"
        yield Advice("partner", "peers", "problem", message + contact.refusal, hint, PeerUnreachable.exit_code)
        return
    with_tls = " with TLS" if fingerprint else ""
    message = f"the node at {address}, whose parts of {run} are copied here, accepts connections{with_tls}"
    yield Advice("partner", "peers", "ok", message)
    ahead_s = contact.ahead_s
    if ahead_s is not None and abs(ahead_s) > SKEW_S:
        direction = "ahead of" if ahead_s > 0 else "behind"
        message = f"the clock of the node at {address} is {duration(abs(ahead_s))} {direction} the one here"
        hint = "synchronize the clocks of both, ages and rules by time depend on them: chronyc tracking"
        yield Advice("clock", "peers", "warning", message, hint)


async def _check_own(config: Config, status: StatusReport) -> Advice:
    address = status.peer_address
    if not address:
        message = f"the daemon does not serve parts at {config.peers.listen}: its config was another one at its start"
        return Advice("address", "peers", "warning", message, "restart the daemon")
    if why := (await _contact(address, status.peer_fingerprint)).refusal:
        message = f"other nodes are told to read from {address}, which cannot be read from here: {why}"
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


@dataclass(frozen=True, slots=True)
class _Contact:
    """`refusal`: why the node cannot be read, with TLS if there is a fingerprint; empty if it answers. `ahead_s`: how
    much the clock there is ahead of the one here, to the second; None if the answer does not say."""

    refusal: str = ""
    ahead_s: float | None = None


async def _contact(address: str, fingerprint: str) -> _Contact:
    host, port = split_address(address)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=unverified() if fingerprint else None)
    except TimeoutError:
        return _Contact(f"no answer within {CONNECT_TIMEOUT_S:.0f} s")
    except ssl.SSLError as error:
        return _Contact(f"no TLS handshake: {error}")
    except OSError as error:
        # asyncio puts the address into strerror. The codes of getaddrinfo are negative.
        is_of_system = error.errno is not None and error.errno > 0
        return _Contact(os.strerror(error.errno or 0).lower() if is_of_system else error.strerror or str(error))
    if fingerprint:
        found = fingerprint_of(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        if found != fingerprint:
            writer.close()
            return _Contact(f"its certificate is sha256:{found}, and the daemon here expects sha256:{fingerprint}")
    try:
        ahead_s = await _clock_ahead_s(address, reader, writer)
    except TimeoutError:  # the kernel accepts connections for a process that is stopped
        writer.close()
        return _Contact(f"it is connected, and answers nothing within {CONNECT_TIMEOUT_S:.0f} s")
    writer.close()
    with suppress(OSError, TimeoutError):  # with TLS it waits until the other one has answered
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await writer.wait_closed()
    return _Contact(ahead_s=ahead_s)


async def _clock_ahead_s(address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float | None:
    """From the Date of the answer to a request without a token, which is refused. Raises TimeoutError."""
    wrong = (ValueError, OverflowError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        with suppress(ConnectionError, ssl.SSLError, *wrong):
            writer.write(f"GET /parts/v1/ HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            for line in head.split("\r\n")[1:]:
                name, _, value = line.partition(":")
                if name.strip().lower() == "date":
                    date = parsedate_to_datetime(value.strip())
                    return (date.replace(tzinfo=date.tzinfo or UTC) - now()).total_seconds()
    return None


async def check_shared_cold(config: Config, status: StatusReport) -> AsyncIterator[Advice]:
    """Whether the cold tiers of this config are those of the other nodes of a run: there is the claim under which its
    trainers have joined. Yields nothing for a run on one node, nor where hot had no space for the claim."""
    runs = [run for run in status.runs if run.nodes is not UNSET and run.nodes.is_adopted is UNSET and run.generation]
    if not runs or not config.cold:
        return
    hot, *colds = open_unlisted(config)
    try:
        for run in runs:
            with suppress(TierdError, TimeoutError):  # the other checks of hot report it
                async with asyncio.timeout(CLAIM_TIMEOUT_S):
                    claim = await hot.claim(Run(run.run), Generation(run.generation))
                if claim is not None and claim.claim:
                    for advice in await asyncio.gather(*(_check_claim(run, claim, cold) for cold in colds)):
                        if advice is not None:
                            yield advice
    finally:
        await _close([hot, *colds])


async def _close(tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        await tier.store.close()


async def _check_claim(run: RunReport, claim: Claim, cold: Tier) -> Advice | None:
    """`claim`: of the run's generation, in hot. None where the tier does not answer, which other checks report."""
    of_generation = f"generation {run.generation} of {run.run}"
    try:
        async with asyncio.timeout(CLAIM_TIMEOUT_S):
            found = await cold.claim(Run(run.run), Generation(run.generation))
    except (TierdError, TimeoutError):
        return None
    if found is None:
        message = f"{cold.name} has no claim of {of_generation}, whose ranks are on several nodes"
        hint = (
            "is it another bucket or folder than that of the other nodes, or has this node another key? A file:// tier "
            "must be shared. If it could not be reached when the run started, the first copy writes the claim"
        )
        return Advice("shared", cold.name, "warning", message, hint)
    if not found.is_of_same_start(claim):
        message = f"{cold.name} has a claim of {of_generation} by another start, on {found.node or 'an unknown node'}"
        return Advice("shared", cold.name, "problem", message, "docs/RUNBOOK.md#fenced", BadConfig.exit_code)
    return Advice("shared", cold.name, "ok", f"it has the claim of {of_generation}, as for all nodes of the run")
