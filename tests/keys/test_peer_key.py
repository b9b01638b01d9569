"""A token opens one run on one daemon, until it restarts."""

from __future__ import annotations

from tierd.format.ids import Run
from tierd.keys.peer_key import PeerKey


def test_tokens_differ_between_runs_and_starts_of_the_daemon() -> None:
    one, other = PeerKey(), PeerKey()
    assert one.token(Run("a")) == one.token(Run("a"))
    assert len({one.token(Run("a")), one.token(Run("b")), other.token(Run("a"))}) == 3


def test_address_is_given_only_where_it_is_served_and_no_text_shows_the_token() -> None:
    key = PeerKey()
    assert key.of(Run("a")) is None
    key.address = "gpu-7:9465"
    peer = key.of(Run("a"))
    assert peer is not None
    assert (peer.address, peer.token) == ("gpu-7:9465", key.token(Run("a")))
    assert peer.token not in f"{peer} {key}"
