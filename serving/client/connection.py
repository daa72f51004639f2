"""Client connection: credentials, channel options, and translation of gRPC errors."""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from queue import Empty, SimpleQueue
from typing import Any, Final
from urllib.parse import unquote

import grpc

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ...protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from ..config import DAY_S, MAX_RETRIES, check_address
from ..credential_files import TOKEN
from ..detections import has_type
from ..errors import (
    AccessError,
    ClientError,
    ClosedError,
    DeadlineError,
    RefusedError,
    UnreachableError,
)
from ..messages import REQUEST_ID_KEY
from .image_requests import TOO_LARGE_REMEDY

# Default idle time in seconds after which a client with an open call sends a keepalive ping.
KEEPALIVE_S = 30.0

# Time that the server has to answer a keepalive ping.
_PING_TIMEOUT_MS = 20_000
# gRPC reads the largest int32 as "no limit" or "never".
_UNLIMITED = 2**31 - 1
# Time limit in seconds for gRPC to report the state of a channel. gRPC reports the state at once,
# unless the channel was closed meanwhile.
_STATE_TIMEOUT_S = 1.0
# Remedy if an async client is created outside its event loop.
LOOP_REMEDY = "create an AsyncDetectorClient in the coroutine that uses it"
# Exceptions that a failed gRPC call raises. On a closed channel, the call raises one of the
# last three.
_CALL_ERRORS = grpc.RpcError, ValueError, grpc.aio.UsageError, asyncio.CancelledError

# Full name of the gRPC service.
SERVICE = pb.DESCRIPTOR.services_by_name["Detector"].full_name

# Texts in errors that gRPC generates on the client. Their status codes do not identify the cause.
_CLIENT_DEADLINE = "Deadline Exceeded"
_MESSAGE_TOO_LARGE = "message larger than max"
_CERTIFICATE_ERRORS = "CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed"
_CERTIFICATE_DATES = "certificate has expired", "certificate is not yet valid"
_OTHER_PROTOCOL = "Failed parsing HTTP/2", "missing selected ALPN property"
_CONNECTION_CLOSED = "Socket closed", "Connection reset", "Broken pipe"
# Pattern of the IP address in an error of gRPC, such as `ipv6:%5B::1%5D:8500: Connection refused`.
_FAILED_ADDRESS = re.compile(r"ipv[46]:(\S+):\d+: ")


# Kind of the PEM content in each field of `Credentials`.
_PEM_KINDS: Final = {
    "root_certificate": "certificate",
    "certificate": "certificate",
    "key": "private key",
}


def is_pem(content: bytes, kind: str) -> bool:
    """Return whether `content` has PEM of a kind: `certificate` or `private key`."""
    # A word can precede the kind in the PEM label, as in `-----BEGIN RSA PRIVATE KEY-----`.
    return f"{kind.upper()}-----".encode() in content


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials of a client, and the CA that it trusts. Certificates and key are PEM bytes."""

    # CA that signed the server's certificate. None: the CAs that gRPC ships.
    root_certificate: bytes | None = None
    # Client certificate, for servers that require one.
    certificate: bytes | None = None
    # Private key of `certificate`.
    key: bytes | None = field(default=None, repr=False)
    # Bearer token, sent with each request as `authorization: Bearer TOKEN`.
    token: str | None = field(default=None, repr=False)
    # Whether to use TLS. False: the token is sent in plain text, so something else should encrypt
    # the connection, such as the sidecar of a service mesh.
    tls: bool = True

    def __post_init__(self) -> None:
        for name, kind in _PEM_KINDS.items():
            # gRPC ignores an empty certificate, and would trust other CAs. If another one is
            # invalid, gRPC retries for seconds, and may then report an unreachable server.
            pem = getattr(self, name)
            if pem is not None and not (isinstance(pem, bytes) and is_pem(pem, kind)):
                raise ValueError(
                    f"{name} is not a {kind} in PEM format; give the content of a PEM file as "
                    "bytes, such as Path(FILE).read_bytes()"
                )
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client's certificate and its key go together; give both or none")
        is_text = isinstance(self.token, str)
        if self.token is not None and not (is_text and TOKEN.fullmatch(self.token)):
            # The message does not quote the token, because it is secret.
            raise ValueError(
                "token is invalid; give a string of letters, digits and -._~+/, without a line "
                "break or spaces at its ends"
            )
        if not self.tls and (self.root_certificate or self.certificate):
            raise ValueError("certificates require TLS; set tls=True, or remove the certificates")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata with the bearer token, to send with each gRPC call. Empty without a token."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the TLS credentials for a gRPC channel."""
        return grpc.ssl_channel_credentials(self.root_certificate, self.key, self.certificate)

    def open_channel(
        self, transport: Any, address: str, options: Sequence[tuple[str, Any]] = ()
    ) -> Any:
        """Return a gRPC channel to a server, with TLS if the attribute `tls` is set.

        Args:
            transport: Module that creates the channel: `grpc` or `grpc.aio`.
            address: Address of the server, or a gRPC target.
            options: Options of the channel.
        """
        if self.tls:
            return transport.secure_channel(address, self.channel_credentials(), options)
        return transport.insecure_channel(address, options)


# Credentials of a client with neither TLS nor a token.
NO_CREDENTIALS = Credentials(tls=False)


class Connection:
    """Base class of the sync and the async client: the gRPC channel to the server."""

    # Module that creates channels: `grpc` or `grpc.aio`.
    _transport: Any
    # Lock class: `threading.Lock` or `asyncio.Lock`.
    _lock: Any

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 30.0,
        retries: int = MAX_RETRIES,
        credentials: Credentials | None = None,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """Create a connection. The first request opens it.

        Args:
            address: `host:port` of the server, or a gRPC target with a scheme, such as `dns:` or
                `unix:`.
            timeout_s: Deadline of a request in seconds, all retries included, at most one day.
                Streams have no deadline.
            retries: Maximum number of retries if the server is overloaded or unreachable; see
                `channel_options`.
            credentials: Credentials of the client. None: neither TLS nor a token.
            keepalive_s: Idle seconds before a keepalive ping; see `channel_options`.

        Raises:
            ValueError: `address` is invalid, or `timeout_s`, `retries` or `keepalive_s` is out of
                range.
            TypeError: `credentials` has an invalid type.
            RuntimeError: The client is async, and no event loop is running.
        """
        check_address(address)
        if not has_type(timeout_s, (Real,)) or not 0 < timeout_s <= DAY_S:
            raise ValueError(
                f"timeout_s is {timeout_s!r}; it must be a number above 0 and at most {DAY_S}"
            )
        if not isinstance(credentials, Credentials | None):
            raise TypeError(
                f"credentials is of type {type(credentials).__name__}; give Credentials, such as "
                "Credentials(token=TOKEN)"
            )
        self._address = address
        self._timeout_s = timeout_s
        options = channel_options(retries, keepalive_s)
        self._loop = self._running_loop()
        credentials = credentials or NO_CREDENTIALS
        self._metadata = credentials.metadata
        self._channel = credentials.open_channel(self._transport, address, options)
        self._stub: Any = DetectorStub(self._channel)  # type: ignore[no-untyped-call]
        # Limits of the server, fetched before the first large request.
        self._limits: pb.Limits | None = None
        self._limits_lock = self._lock()
        self._closed = False

    @staticmethod
    def _running_loop() -> asyncio.AbstractEventLoop | None:
        """Return the running event loop. None: the client is sync."""
        return None

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Context manager: convert gRPC errors into `ClientError`s; see `error_from_rpc`."""
        if self._running_loop() is not self._loop:
            raise RuntimeError(f"the client belongs to another event loop; {LOOP_REMEDY}")
        try:
            yield
        except _CALL_ERRORS as error:
            if self._closed and not _is_cancelled_task(error):
                raise ClosedError(
                    f"the client of {self._address} is closed; create a new client"
                ) from error
            if isinstance(error, grpc.RpcError):
                raise error_from_rpc(error, self._address, self._timeout_s) from error
            raise


def channel_options(retries: int, keepalive_s: float = KEEPALIVE_S) -> list[tuple[str, Any]]:
    """Return the options of a channel: retries, round-robin load balancing, keepalive.

    gRPC retries a request that the server rejects as overloaded, or that reaches no server. The
    pause before the first retry is 0.1 s, and each further pause is three times as long, with 20 %
    jitter. If a host name has several addresses, requests alternate between them.

    Args:
        retries: Maximum number of retries of a request, 0..MAX_RETRIES.
        keepalive_s: Seconds without traffic after which a connection with an open call sends a
            keepalive ping. The minimum is 1; infinity disables pings. If no answer comes within
            20 s, the connection is closed. A gRPC server disconnects clients that ping too often;
            this package's server allows a ping every 10 s.

    Raises:
        ValueError: A value is out of range.
    """
    if retries not in range(MAX_RETRIES + 1):
        raise ValueError(
            f"retries is {retries!r}; it must be an integer from 0 to {MAX_RETRIES}, the limit of "
            "gRPC"
        )
    if not has_type(keepalive_s, (Real,)) or not keepalive_s >= 1:
        raise ValueError(
            f"keepalive_s is {keepalive_s!r}; gRPC sends at most one ping a second, so give a "
            "number of 1 or more"
        )
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if retries:
        policy = {
            "maxAttempts": 1 + int(retries),
            "initialBackoff": "0.1s",
            "maxBackoff": "3s",
            "backoffMultiplier": 3,
            # CANCELLED: gRPC cancels calls that an overloaded server has not yet accepted.
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"],
        }
        config["methodConfig"] = [{"name": [{"service": SERVICE}], "retryPolicy": policy}]
    return [
        ("grpc.service_config", json.dumps(config)),
        # A request that is larger than this buffer is never retried. gRPC's default is 256 KiB.
        ("grpc.per_rpc_retry_buffer_size", _UNLIMITED),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", int(min(1000 * keepalive_s, _UNLIMITED))),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),  # applies when there is no data to send
        # Without this option, gRPC stops pinging an idle stream after a few pings.
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_state(channel: grpc.Channel) -> grpc.ChannelConnectivity:
    """Return the connectivity of a sync channel. SHUTDOWN if gRPC does not report it in 1 s."""
    # gRPC reports the connectivity only to subscribers.
    states: SimpleQueue[grpc.ChannelConnectivity] = SimpleQueue()
    channel.subscribe(states.put)
    try:
        return states.get(timeout=_STATE_TIMEOUT_S)
    except Empty:
        return grpc.ChannelConnectivity.SHUTDOWN
    finally:
        channel.unsubscribe(states.put)


def _is_cancelled_task(error: BaseException) -> bool:
    """Return whether `error` means that the current task, not only its gRPC call, was cancelled."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def error_from_rpc(
    error: grpc.RpcError, address: str, timeout_s: float, service: str = SERVICE
) -> ClientError:
    """Return the `ClientError` for a failed call. The gRPC status decides its class.

    - `UnreachableError`: CANCELLED (the server dropped the request), UNIMPLEMENTED (the server does
      not offer `service`), or an UNAVAILABLE that gRPC generated on the client.
    - `DeadlineError`: a DEADLINE_EXCEEDED that gRPC generated on the client.
    - `AccessError`: UNAUTHENTICATED or PERMISSION_DENIED.
    - `RefusedError`: every other status, such as an UNAVAILABLE that the server sent. If the server
      rejected the request as too large, the status in the error is INVALID_ARGUMENT.

    Args:
        error: The gRPC error.
        address: The server's address, for the error message.
        timeout_s: The deadline of the call in seconds, for the error message.
        service: Full name of the called gRPC service, for the error message.
    """
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.CANCELLED:
        return UnreachableError(
            f"the server at {address} dropped the request because it is stopping or overloaded; "
            "try again later"
        )
    if status is grpc.StatusCode.UNAVAILABLE and not _is_from_server(error):
        return UnreachableError(_unreachable_message(address, details))
    if status is grpc.StatusCode.DEADLINE_EXCEEDED and details == _CLIENT_DEADLINE:
        return DeadlineError(
            f"no result came from {address} within {timeout_s:g} s; the server is overloaded or "
            "unreachable: allow more time with --timeout or timeout_s, or start a server with "
            "`maskrcnn serve BUNDLE`"
        )
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return UnreachableError(
            f"the server at {address} does not offer the service {service} ({details}); check the "
            "address"
        )
    if status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessError(
            f"the server at {address} denied access ({details}); give your token with --token-file "
            "FILE (in Python, Credentials(token=TOKEN))"
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _MESSAGE_TOO_LARGE in details:
        # Not RESOURCE_EXHAUSTED, because the same request would fail again.
        return RefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request is larger than the server at {address} accepts ({details}); "
            f"{TOO_LARGE_REMEDY}",
        )
    return RefusedError(
        status, details or f"the server at {address} gave no reason for its status {status.name}"
    )


def _is_from_server(error: grpc.RpcError) -> bool:
    # The server sends a request ID with each status. A status that gRPC generates has none.
    metadata: Any = error.trailing_metadata() or ()
    return any(key == REQUEST_ID_KEY for key, _ in metadata)


def _unreachable_message(address: str, details: str) -> str:
    if any(text in details for text in _CERTIFICATE_DATES):
        return (
            f"the certificate of the server at {address}, or of its CA, is not valid today "
            f"({details}); renew it, or correct the clock of this machine"
        )
    if any(text in details for text in _CERTIFICATE_ERRORS):
        return (
            f"the certificate of the server at {address} cannot be verified ({details}); give the "
            "CA that signed it with --root-certificate FILE (in Python, "
            "Credentials(root_certificate=PEM)), and use a host name from the certificate"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return (
            f"the server at {address} does not speak TLS; give --no-tls (in Python, "
            "Credentials(tls=False)), and no certificates"
        )
    if "Failed to create security handshaker" in details:
        return (
            "a certificate or key is invalid; check the PEM files of --root-certificate, "
            "--certificate and --key (in Python, the fields of Credentials with these names)"
        )
    if any(text in details for text in _CONNECTION_CLOSED):
        return (
            f"the server at {address} closed the connection; it stopped, or requires TLS (--tls; "
            "in Python, Credentials()) or a client certificate (--certificate; in Python, "
            "Credentials(certificate=PEM, key=PEM))"
        )
    if any(text in details for text in _OTHER_PROTOCOL):
        return (
            f"the server at {address} does not speak gRPC ({details}); give the port of gRPC, not "
            "that of HTTP or of the metrics"
        )
    if "ping timeout" in details:
        return (
            f"the server at {address} stopped responding ({details}); its machine or the network "
            "failed: try again later"
        )
    if "max connection age" in details:
        return (
            f"the connection reached the maximum age that the server at {address} allows, and was "
            "closed before all requests were answered; send the unanswered images again, or start "
            "the server with a greater --max-connection-age-s"
        )
    # If a host name has several addresses, gRPC reports the error of one of them. The server may
    # listen on another one.
    failed = _FAILED_ADDRESS.search(details)
    is_named = failed is not None and unquote(failed[1]).strip("[]") not in address
    hint = (
        "; if a server already runs on this host, the error may come from another IP address of "
        "the host: connect to the server's IP address to see its own error, or check that the port "
        "is that of gRPC, not that of HTTP, and whether the server requires TLS (--tls) or a "
        "client certificate (--certificate)"
    )
    return (
        f"no server answers at {address} ({details}); start one with `maskrcnn serve BUNDLE`"
        f"{hint if is_named else ''}"
    )
