"""TLS credentials of the server, reloaded when the certificate files change."""

import base64
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc

from ..config import ServeConfig
from ..credential_files import ReloadOnChange
from ..errors import ServingError

T = TypeVar("T")

# DER encodings (RFC 3279 and RFC 5480) of the key algorithms that gRPC's Python and C++ clients
# accept in a certificate. OpenSSL accepts more.
_KEY_ALGORITHMS = tuple(
    bytes.fromhex(algorithm)
    for algorithm in (
        "300d 0609 2a864886f70d010101 0500",  # RSA
        "3013 0607 2a8648ce3d0201 0608 2a8648ce3d030107",  # P-256
        "3010 0607 2a8648ce3d0201 0605 2b81040022",  # P-384
    )
)


def server_credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """Load the server's TLS credentials. None: the server does not use TLS.

    If the files are replaced later, new connections use the new files.

    Raises:
        ServingError: a file is missing or invalid.
    """
    reloaded = _reloaded(config, _load_configuration)
    if reloaded is None:
        return None
    current = reloaded.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        before, current = current, reloaded.current()
        return None if current is before else current

    return grpc.dynamic_ssl_server_credentials(
        current,
        changed,  # type: ignore[arg-type]  # in the stubs, None (no change) is not allowed
        require_client_authentication=config.tls_client_ca is not None,
    )


def server_ssl_context(config: ServeConfig) -> ssl.SSLContext | None:
    """Load the server's TLS credentials for HTTP; otherwise as `server_credentials`."""
    reloaded = _reloaded(config, _load_context)
    if reloaded is None:
        return None
    context = reloaded.current()

    def use_current(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = reloaded.current()

    context.sni_callback = use_current  # called at each handshake
    return context


def _reloaded(
    config: ServeConfig, load: Callable[[Path, Path, Path | None], T]
) -> ReloadOnChange[T] | None:
    certificate, key, client_ca = config.tls_certificate, config.tls_key, config.tls_client_ca
    if certificate is None or key is None:
        return None
    files = [certificate, key, *([client_ca] if client_ca else [])]
    return ReloadOnChange(files, lambda: load(certificate, key, client_ca))


def _load_configuration(
    certificate: Path, key: Path, client_ca: Path | None
) -> grpc.ServerCertificateConfiguration:
    """Load and validate the PEM files of a certificate, its key and the client CAs."""
    pair = _read(key, "tls_key"), _read(certificate, "tls_certificate")
    authorities = None if client_ca is None else _read(client_ca, "tls_client_ca")
    # gRPC does not validate the files: with invalid ones it would reject every connection.
    _load_context(certificate, key, client_ca)
    return grpc.ssl_server_certificate_configuration([pair], authorities)


def _load_context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """Load and validate the PEM files of a certificate, its key and the client CAs."""
    pem = _read(certificate, "tls_certificate")
    _read(key, "tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_reject_encrypted_key)
        _check_key_algorithm(certificate, pem)
    except (OSError, ValueError) as error:  # from OpenSSL, or a file was replaced since _read
        reason = getattr(error, "reason", None) or error
        raise ServingError(
            f"cannot use {certificate} with {key} ({reason}); "
            "give a certificate in PEM format and its private key"
        ) from None
    if client_ca is None:
        return context
    _read(client_ca, "tls_client_ca")
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(client_ca)
    except OSError:
        raise ServingError(
            f"{client_ca} contains no certificate in PEM format; give the certificate of the "
            "authority that signed the client certificates"
        ) from None
    return context


def _check_key_algorithm(certificate: Path, pem: bytes) -> None:
    """Raise ServingError if gRPC clients do not support the certificate's key algorithm."""
    first = pem.partition(b"CERTIFICATE-----")[2].partition(b"-----END")[0]
    content = base64.b64decode(first)
    if not any(algorithm in content for algorithm in _KEY_ALGORITHMS):
        raise ServingError(
            f"the key algorithm of {certificate} is not supported by gRPC clients; "
            "use a certificate with an RSA, P-256 or P-384 key"
        )


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ServingError(f"cannot read {setting} {path}: {error.strerror}") from None


def _reject_encrypted_key() -> str:
    # Without this callback OpenSSL would ask for the password on the terminal.
    raise ServingError(
        "the private key in tls_key is encrypted; decrypt it, for example with `openssl pkey`"
    )
