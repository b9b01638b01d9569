"""The proof of a run's secret, and what a daemon keeps of it."""

from __future__ import annotations

import pytest

from tierd.errors import BadConfig
from tierd.format.run_secret import PROOF_CHARS, digest_of, is_proof, proof_of

SECRET = "0123456789abcdef"


def test_no_secret_has_no_proof() -> None:
    assert proof_of("") == ""


def test_a_proof_is_the_same_each_time_and_does_not_contain_the_secret() -> None:
    proof = proof_of(SECRET)
    assert proof == proof_of(SECRET)
    assert len(proof) == PROOF_CHARS
    assert SECRET not in proof
    assert proof != proof_of(SECRET + "!")


@pytest.mark.parametrize("secret", ["x" * 15, "x" * 1025])
def test_a_secret_of_the_wrong_length_is_refused_without_being_shown(secret: str) -> None:
    with pytest.raises(BadConfig, match=f"it has {len(secret)} characters, expected 16 to 1024") as refusal:
        proof_of(secret)
    assert secret not in str(refusal.value)


def test_a_digest_is_of_one_proof_one_run_and_one_salt() -> None:
    proof, salt = "a" * PROOF_CHARS, b"salt"
    digest = digest_of("run", proof, salt)
    assert is_proof("run", proof, salt, digest)
    assert not is_proof("run", "b" * PROOF_CHARS, salt, digest)
    assert not is_proof("other", proof, salt, digest)
    assert not is_proof("run", proof, b"other", digest)
    assert not is_proof("run", "", salt, digest)


def test_every_character_of_the_proof_counts() -> None:
    proof = "a" * 64
    digest = digest_of("run", proof, b"salt")
    assert is_proof("run", proof, b"salt", digest)
    for at in range(64):
        assert not is_proof("run", f"{proof[:at]}b{proof[at + 1 :]}", b"salt", digest)
