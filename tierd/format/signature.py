"""Signatures of manifests and markers, over the exact bytes of the file and its key in the tier.

The key of the file is signed too, so a signed manifest or marker is not valid at another step or in another run. The
signature is the last member of the JSON object, so readers without a key ignore it. Spec: docs/FORMAT.md#signatures.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from tierd.errors import BadConfig, Foreign
from tierd.format.manifest import Manifest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

HMAC, ED25519, ED25519_PUBLIC = "hmac-sha256", "ed25519", "ed25519-public"
DOMAIN = b"tierd signed file 1\n"
KEY_BYTES = 32  # of a secret of HMAC, and of a private or public key of Ed25519
_KEY_LINE = re.compile(rf"({HMAC}|{ED25519}|{ED25519_PUBLIC}):([0-9a-f]{{{2 * KEY_BYTES}}})")
# Of a manifest, which is indented by one space, and of a marker, which has no spaces.
_SIGNATURE = re.compile(
    rb',(?P<open>\n |)"signature":(?: |)"(?P<algorithm>[a-z0-9-]{1,32}):(?P<key>[0-9a-f]{16}):'
    rb'(?P<value>[0-9a-f]{16,1024})"'
    rb"(?P<close>\n|)\}\n\Z"
)
_SIGNATURE_BYTES_MAX = 1200


class Key(Protocol):
    """`id` tells keys apart and is public. `line`: of a key file. `public_line`: of a key file that can only check
    signatures; empty where there is none."""

    id: str
    algorithm: str
    can_sign: bool
    line: str
    public_line: str

    def sign(self, message: bytes) -> str: ...

    def is_right(self, message: bytes, value: str) -> bool: ...


class HmacKey:
    """A secret of HMAC-SHA-256 (RFC 2104): whoever can check signatures can sign."""

    algorithm, can_sign, public_line = HMAC, True, ""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = _key_id(secret)
        self.line = f"{HMAC}:{secret.hex()}\n"

    def sign(self, message: bytes) -> str:
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    def is_right(self, message: bytes, value: str) -> bool:
        return hmac.compare_digest(self.sign(message), value)


class Ed25519Key:
    """A key of Ed25519 (RFC 8032), of the package `cryptography`. Without `private` it can only check signatures."""

    algorithm = ED25519

    def __init__(self, public: Ed25519PublicKey, private: Ed25519PrivateKey | None = None) -> None:
        self._public, self._private = public, private
        self.can_sign = private is not None
        self.id = _key_id(public.public_bytes_raw())
        self.public_line = f"{ED25519_PUBLIC}:{public.public_bytes_raw().hex()}\n"
        self.line = self.public_line if private is None else f"{ED25519}:{private.private_bytes_raw().hex()}\n"

    def sign(self, message: bytes) -> str:
        assert self._private is not None  # Keyring signs with a key that can
        return self._private.sign(message).hex()

    def is_right(self, message: bytes, value: str) -> bool:
        from cryptography.exceptions import InvalidSignature  # imported here: it is optional

        try:
            self._public.verify(bytes.fromhex(value), message)
        except (InvalidSignature, ValueError):
            return False
        return True


def new_key(algorithm: str = HMAC) -> Key:
    """A key with a new secret, of HMAC or ED25519."""
    return _key(algorithm, secrets.token_bytes(KEY_BYTES))


def _key(kind: str, content: bytes) -> Key:
    """Raises BadConfig where the package `cryptography` is missing, and ValueError for bytes that are no public key."""
    if kind == HMAC:
        return HmacKey(content)
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # imported here: it is optional
    except ImportError:
        raise BadConfig(
            "use a key of Ed25519: the package cryptography is not installed", hint="pip install 'tierd[signing]'"
        ) from None
    if kind == ED25519_PUBLIC:
        return Ed25519Key(ed25519.Ed25519PublicKey.from_public_bytes(content))
    private = ed25519.Ed25519PrivateKey.from_private_bytes(content)
    return Ed25519Key(private.public_key(), private)


def _key_id(content: bytes) -> str:
    return hashlib.sha256(b"tierd key id\n" + content).hexdigest()[:16]


SomeManifest = TypeVar("SomeManifest", bound=Manifest)


class Keyring:
    """The first key that can sign signs, all are accepted."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = keys
        self._signing = next((key for key in keys if key.can_sign), None)
        self._by_id = {key.id: key for key in keys}

    @property
    def signing_key(self) -> Key:
        """Raises BadConfig where there are only public keys."""
        if self._signing is None:
            raise BadConfig(
                "sign: the key file has only public keys, which can check signatures",
                hint=f"a daemon, and commands that write markers, need a line that begins with {ED25519}: or {HMAC}:",
            )
        return self._signing

    def sign(self, name: str, content: bytes) -> bytes:
        """`content`, a JSON object and a newline, with the signature as its last member. `name`: its key in a tier."""
        opening, closing = (b"\n ", b"\n") if content.endswith(b"\n}\n") else (b"", b"")
        body = content.removesuffix(closing + b"}\n")
        separator = b" " if opening else b""
        key = self.signing_key
        value = f"{key.algorithm}:{key.id}:{key.sign(_message(name, content))}".encode()
        return body + b"," + opening + b'"signature":' + separator + b'"' + value + b'"' + closing + b"}\n"

    def sign_manifest(self, manifest: SomeManifest) -> SomeManifest:
        """The same manifest, signed by the first key."""
        unsigned = msgspec.structs.replace(manifest, signature=msgspec.UNSET)
        signed = self.sign(manifest.key, unsigned.encode())
        match = _find_signature(signed)
        assert match is not None  # `sign` has just written it
        signature = b":".join((match["algorithm"], match["key"], match["value"])).decode()
        return msgspec.structs.replace(unsigned, signature=signature)

    def check(self, name: str, content: bytes, *, where: str) -> None:
        """Raises Foreign unless `content`, the file `name`, is signed by one of the keys."""
        if reason := self.problem(name, content):
            raise Foreign(
                f"check the signature of {name} in {where}: {reason}",
                hint="it is not used, not counted and not deleted; docs/RUNBOOK.md#foreign-checkpoints",
            )

    def problem(self, name: str, content: bytes) -> str:
        """Why `content`, the file `name`, is not signed by one of the keys; empty if it is."""
        match = _find_signature(content)
        if match is None:
            return "it is not signed"
        algorithm, key_id = match["algorithm"].decode(), match["key"].decode()
        if algorithm not in (HMAC, ED25519):
            return f"its signature is {algorithm}, which this tierd does not know"
        if self._key_of(match) is None:
            return f"it is signed by the key {key_id}, which is not in the key file"
        return f"its signature by the key {key_id} is wrong" if self.is_altered(name, content) else ""

    def lacks_key_of(self, content: bytes) -> bool:
        """Whether the file has a signature, of an algorithm that is known, by none of the keys."""
        match = _find_signature(content)
        return match is not None and match["algorithm"].decode() in (HMAC, ED25519) and self._key_of(match) is None

    def is_altered(self, name: str, content: bytes) -> bool:
        """Whether the file has a signature by one of the keys that does not fit: it was changed after it was signed."""
        match = _find_signature(content)
        key = None if match is None else self._key_of(match)
        if match is None or key is None:
            return False
        unsigned = content[: match.start()] + match["close"] + b"}\n"
        return not key.is_right(_message(name, unsigned), match["value"].decode())

    def _key_of(self, match: re.Match[bytes]) -> Key | None:
        key = self._by_id.get(match["key"].decode())
        return key if key is not None and key.algorithm == match["algorithm"].decode() else None


def _find_signature(content: bytes) -> re.Match[bytes] | None:
    return _SIGNATURE.search(content, max(0, len(content) - _SIGNATURE_BYTES_MAX))


def _message(name: str, content: bytes) -> bytes:
    return DOMAIN + name.encode() + b"\n" + content


def without_signature(content: bytes) -> bytes:
    """A signed file as it was before; another one as it is, or an empty object where that is not a line of JSON."""
    match = _find_signature(content)
    if match is not None:
        return content[: match.start()] + match["close"] + b"}\n"
    return content if content.endswith(b"}\n") and len(content) > len(b"{}\n") else b'{"content":null}\n'


def parse_keys(text: str, *, where: str) -> Keyring:
    """A key file: one key per line; empty lines and lines that begin with # are ignored. Raises BadConfig."""
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _KEY_LINE.fullmatch(line.strip())
        try:
            if match is None:
                raise ValueError(number)
            keys.append(_key(match[1], bytes.fromhex(match[2])))
        except ValueError:  # the line may hold a secret: do not print it
            raise BadConfig(
                f"read the key file {where}: line {number} is not a key", hint="`tierd key new PATH` makes a key file"
            ) from None
    if not keys:
        raise BadConfig(f"read the key file {where}: it has no key", hint="`tierd key new PATH` makes a key file")
    return Keyring(keys)
