"""TLS certificate of the server, reloaded when its files change."""

import base64
import logging
import re
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from ..config import ServeConfig
from ..credential_files import ReloadOnChange
from ..errors import ServingError

_log = logging.getLogger(__name__)

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


# Validity of a certificate in DER: two times of type UTCTime or GeneralizedTime (RFC 5280, section
# 4.1.2.5).
_VALIDITY = re.compile(
    rb"\x30[\x1e-\x22](?:\x17\x0d|\x18\x0f)(\d{12,14})Z(?:\x17\x0d|\x18\x0f)(\d{12,14})Z"
)
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
# PEM labels of certificates that OpenSSL reads, but gRPC does not.
_OTHER_LABEL = re.compile(rb"-----BEGIN ((?:X509|TRUSTED) CERTIFICATE)-----")


class CertificateFiles(NamedTuple):
    """Content of the certificate files, in PEM format."""

    certificate: bytes
    key: bytes
    # None: clients need no certificate.
    client_ca: bytes | None

    @property
    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """The files as the certificate configuration of a gRPC server."""
        pair = self.key, self.certificate
        return grpc.ssl_server_certificate_configuration([pair], self.client_ca)


class _Loaded(NamedTuple):
    files: CertificateFiles
    context: ssl.SSLContext
    # Time range in which all certificates of the chain are valid.
    start: datetime
    end: datetime

    @property
    def is_valid(self) -> bool:
        return self.start <= datetime.now(UTC) < self.end


class _CurrentContext(ssl.SSLContext):
    """TLS context that delegates each new connection to the most recently loaded context."""

    # The usual way is `sni_callback`, which can replace the context of a connection. It is not used
    # here, because Python prints a traceback if the server name that a client sends is invalid.

    # Function that returns the most recently loaded context.
    current: Callable[[], ssl.SSLContext]

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self.current().wrap_bio(*arguments, **options)


class ServerCertificate:
    """TLS certificate chain, key and client CAs of the server, for gRPC and for HTTP.

    If the files are replaced later, new connections use the new files, unless the new files are
    invalid. A chain that has expired, or is not valid yet, does not replace a valid chain.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        """Load the files. If the certificate is not valid at present, log a warning.

        Args:
            certificate: PEM file of the certificate chain.
            key: PEM file of the private key.
            client_ca: PEM file of the authorities that sign the client certificates. None: clients
                need no certificate.

        Raises:
            ServingError: a file is missing or invalid.
        """
        self._files = certificate, key, client_ca
        files = [path for path in self._files if path]
        self._reloaded = ReloadOnChange(files, self._load)

    @property
    def days_left(self) -> float:
        """Days until the certificate in use expires. Negative if it has expired."""
        return (self._reloaded.current().end - datetime.now(UTC)) / timedelta(days=1)

    @property
    def problem(self) -> str | None:
        """Error message if the certificate in use has expired or is not valid yet, else None."""
        loaded = self._reloaded.current()
        return None if loaded.is_valid else self._validity_error(loaded)

    @property
    def files(self) -> CertificateFiles:
        """Content of the certificate files in use. Reloads the files first if they have changed."""
        return self._reloaded.current().files

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC server. New connections use the latest valid files."""
        return credentials_from_files(lambda: self.files)

    def ssl_context(self) -> ssl.SSLContext:
        """Return a TLS context for an HTTP server. New connections use the latest valid files."""
        context = _CurrentContext(ssl.PROTOCOL_TLS_SERVER)
        context.current = lambda: self._reloaded.current().context
        return context

    def _load(self, previous: _Loaded | None) -> _Loaded:
        loaded = _load(*self._files)
        if not loaded.is_valid:
            if previous is not None and previous.is_valid:
                raise ServingError(self._validity_error(loaded))
            _log.warning("%s", self._validity_error(loaded))
        return loaded

    def _validity_error(self, loaded: _Loaded) -> str:
        expired = loaded.end <= datetime.now(UTC)
        problem = f"expired at {loaded.end}" if expired else f"is not valid before {loaded.start}"
        return (
            f"the TLS certificate in {self._files[0]} {problem}, so clients reject it; replace "
            "the file with a valid certificate"
        )


def credentials_from_files(current: Callable[[], CertificateFiles]) -> grpc.ServerCredentials:
    """Return credentials for a gRPC server. New connections use the files that `current` returns.

    The first files decide whether clients need a certificate. Later files cannot change this.
    """
    used = current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        before, used = used, current()
        return None if used is before else used.configuration

    return grpc.dynamic_ssl_server_credentials(
        used.configuration,
        changed,  # type: ignore[arg-type]  # in the stubs, None (no change) is not allowed
        require_client_authentication=used.client_ca is not None,
    )


def server_certificate(config: ServeConfig) -> ServerCertificate | None:
    """Load and return the server's TLS certificate. If the server does not use TLS, return None.

    Raises:
        ServingError: a file is missing or invalid.
    """
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return ServerCertificate(config.tls_certificate, config.tls_key, config.tls_client_ca)


def _load(certificate: Path, key: Path, client_ca: Path | None) -> _Loaded:
    """Load and validate PEM files. Return TLS settings for gRPC and HTTP, and the validity period.

    Raises:
        ServingError: a file is missing or invalid.
    """
    files = CertificateFiles(
        _read(certificate, "tls_certificate"),
        _read(key, "tls_key"),
        None if client_ca is None else _read(client_ca, "tls_client_ca"),
    )
    # gRPC does not validate the files. If they were invalid, gRPC would reject every connection.
    # Loading them into an OpenSSL context reports the errors.
    context = _load_context(certificate, key, client_ca, files.certificate)
    return _Loaded(files, context, *_validity(certificate, files.certificate))


def _load_context(
    certificate: Path, key: Path, client_ca: Path | None, pem: bytes
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=_reject_encrypted_key)
        _check_grpc_support(certificate, pem)
    except (OSError, ValueError) as error:  # from OpenSSL, or a file was replaced since _read
        reason = getattr(error, "reason", None) or error
        raise ServingError(
            f"cannot use the certificate {certificate} with the key {key} ({reason}); "
            "give a certificate in PEM format and its private key"
        ) from None
    if client_ca is None:
        return context
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(client_ca)
    except OSError:
        raise ServingError(
            f"{client_ca} contains no certificate in PEM format; give the certificate of the "
            "authority that signed the client certificates"
        ) from None
    return context


def _validity(certificate: Path, pem: bytes) -> tuple[datetime, datetime]:
    """Return the first and the last time at which all certificates of a chain are valid.

    `pem` is the content of the file `certificate`.

    Raises:
        ServingError: a certificate has no validity dates.
    """
    ranges = []
    for block in _PEM.findall(pem):
        match = _VALIDITY.search(base64.b64decode(block))
        if match is None:
            raise ServingError(
                f"a certificate in {certificate} has no validity dates; replace that certificate"
            )
        ranges.append([_time(text.decode()) for text in match.groups()])
    starts, ends = zip(*ranges, strict=True)
    return max(starts), min(ends)


def _time(text: str) -> datetime:
    """Convert an ASN.1 UTCTime (YYMMDDHHMMSS) or GeneralizedTime (YYYYMMDDHHMMSS) to UTC."""
    pattern = "%y%m%d%H%M%S" if len(text) == 12 else "%Y%m%d%H%M%S"
    return datetime.strptime(text, pattern).replace(tzinfo=UTC)


def _check_grpc_support(certificate: Path, pem: bytes) -> None:
    """Raise ServingError if gRPC does not support the certificate's PEM label or key algorithm.

    The PEM label is `CERTIFICATE` in `-----BEGIN CERTIFICATE-----`. `pem` is the content of the
    file `certificate`.
    """
    if other := _OTHER_LABEL.search(pem):
        raise ServingError(
            f"gRPC does not read the PEM label {other[1].decode()} in {certificate}; convert the "
            "file to the label CERTIFICATE with `openssl x509`"
        )
    # If `pem` has no certificate, the file was replaced before OpenSSL read it.
    content = b"".join(map(base64.b64decode, _PEM.findall(pem)[:1]))
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
