"""Descriptors are opened all or none, and pass whole over a socket or are reported as incomplete."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from tests.support.descriptors import no_descriptor_leaks
from tierd.descriptors import close_all, open_all, receive_packet, send_packet
from tierd.format.wire import MESSAGE_BYTES_MAX

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with no_descriptor_leaks():
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        yield ends
        for end in ends:
            end.close()


def test_an_error_closes_the_descriptors_that_were_opened_before_it(pair: Pair) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        open_all(map(os.dup, [pair[0].fileno(), pair[1].fileno(), -1]))


def test_a_packet_passes_with_its_descriptors(pair: Pair) -> None:
    read, write = os.pipe()
    send_packet(pair[0], b"hello", [read, write])
    raw, descriptors, is_complete = receive_packet(pair[1])
    os.write(descriptors[1], b"x")
    assert (raw, is_complete, os.read(read, 1)) == (b"hello", True, b"x")
    assert not os.get_inheritable(descriptors[0])
    close_all([read, write, *descriptors])


def test_a_packet_that_is_too_long_is_reported_as_incomplete(pair: Pair) -> None:
    send_packet(pair[0], b"x" * (MESSAGE_BYTES_MAX + 1), [pair[0].fileno()])
    _, descriptors, is_complete = receive_packet(pair[1])
    close_all(descriptors)
    assert not is_complete


def test_sending_to_a_peer_that_does_not_read_raises_instead_of_blocking(pair: Pair) -> None:
    def send_many() -> None:
        for _ in range(1 << 16):
            send_packet(pair[0], bytes(MESSAGE_BYTES_MAX))

    with pytest.raises(BlockingIOError):
        send_many()


def test_the_end_of_the_connection_is_an_empty_packet(pair: Pair) -> None:
    pair[0].close()
    assert receive_packet(pair[1]) == (b"", [], True)
