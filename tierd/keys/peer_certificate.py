"""TLS between nodes: each daemon makes a certificate at its start, and readers compare its fingerprint.

The trainers send the fingerprint to the other nodes together with the address and the token. So no CA, name or date is
needed or checked. The private key is in the memory of the daemon only.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from datetime import UTC, datetime

from tierd.errors import BadConfig

# X.509 requires dates. The last one stands for a certificate that does not expire: RFC 5280, 4.1.2.5.
_NOT_BEFORE, _NOT_AFTER = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def make_certificate() -> tuple[ssl.SSLContext, str]:
    """(the SSL context of a server, with a new key and certificate; the fingerprint of the certificate). Raises
    BadConfig without the package `cryptography`."""
    pem, der = _self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # ssl reads keys from files only. This one is never on a disk.
    with os.fdopen(os.memfd_create("tierd-peer-certificate"), "wb") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, fingerprint_of(der)


def fingerprint_of(der: bytes) -> str:
    """SHA-256 of a certificate, in hex."""
    return hashlib.sha256(der).hexdigest()


def unverified() -> ssl.SSLContext:
    """For a client that compares the fingerprint itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _self_signed() -> tuple[bytes, bytes]:
    """(the private key and the certificate in PEM; the certificate in DER)."""
    try:
        # imported here: it is optional
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise BadConfig(
            "peers.tls: the package cryptography is not installed, which makes the certificate",
            hint="pip install 'tierd[signing]'",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tierd")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), _NOT_BEFORE, _NOT_AFTER)
    ).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    raw_key = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return raw_key + certificate.public_bytes(pem), certificate.public_bytes(serialization.Encoding.DER)
