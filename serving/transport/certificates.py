"""Transport security of the server: who it is, and whom it believes."""

import base64
import ssl
from pathlib import Path

import grpc

from ..config import ServeConfig
from ..errors import ServingError
from .renewal import Renewed

_KEYS = tuple(
    bytes.fromhex(algorithm)
    for algorithm in (
        "300d 0609 2a864886f70d010101 0500",  # RSA
        "3013 0607 2a8648ce3d0201 0608 2a8648ce3d030107",  # P-256
        "3010 0607 2a8648ce3d0201 0605 2b81040022",  # P-384
    )
)
"""What names the kind of its key in a certificate (DER, RFC 3279 and 5480), of those that gRPC's
clients in Python and C++ take. OpenSSL takes more."""


def server_credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """What the server shows its clients, and asks of them; none without TLS.

    Files that are replaced later hold for the connections that come then.

    Raises:
        ServingError: a file is missing or not usable.
    """
    certificate, key, client_ca = config.tls_certificate, config.tls_key, config.tls_client_ca
    if certificate is None or key is None:
        return None
    files = [certificate, key, *([client_ca] if client_ca else [])]
    renewed = Renewed(files, lambda: _configuration(certificate, key, client_ca))
    current = renewed.latest()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        before, current = current, renewed.latest()
        return None if current is before else current

    return grpc.dynamic_ssl_server_credentials(
        current,
        changed,  # type: ignore[arg-type]  # the stubs forget that None means no change
        require_client_authentication=client_ca is not None,
    )


def _configuration(
    certificate: Path, key: Path, client_ca: Path | None
) -> grpc.ServerCertificateConfiguration:
    pair = _read(key, "tls_key"), _read(certificate, "tls_certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # gRPC would take anything, and refuse every connection
        context.load_cert_chain(certificate, key, password=_refuse_password)
        _check_kind(certificate, pair[1])
    except (OSError, ValueError) as error:  # of OpenSSL, or as files were replaced meanwhile
        reason = getattr(error, "reason", None) or error
        raise ServingError(
            f"{certificate} and {key} cannot be used together ({reason}); "
            "give a certificate as PEM, and the key that it was made for"
        ) from None
    if client_ca is None:
        return grpc.ssl_server_certificate_configuration([pair])
    authorities = _read(client_ca, "tls_client_ca")
    try:
        context.load_verify_locations(client_ca)
    except OSError:
        raise ServingError(
            f"{client_ca} holds no certificate as PEM; give that of the authority that signed "
            "those of the clients"
        ) from None
    return grpc.ssl_server_certificate_configuration([pair], authorities)


def _check_kind(certificate: Path, pem: bytes) -> None:
    """Refuse a certificate of a key with which gRPC would not be reached."""
    first = pem.partition(b"CERTIFICATE-----")[2].partition(b"-----END")[0]
    content = base64.b64decode(first)
    if not any(algorithm in content for algorithm in _KEYS):
        raise ServingError(
            f"{certificate} was made for a kind of key with which gRPC's clients reach no server; "
            "give one for an RSA key, or for a key on the curve P-256 or P-384"
        )


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ServingError(f"{setting} cannot be read: {path}: {error.strerror}") from None


def _refuse_password() -> str:
    raise ServingError(
        "the key of tls_key is encrypted; decrypt it, as with `openssl pkey`: there is nobody to "
        "give its password"
    )
