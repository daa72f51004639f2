"""How a client reaches a server: security, retries, keepalive, and what their failures mean."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from ..protos.maskrcnn.v1 import detector_pb2 as pb
from ..protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from .config import MAX_RETRIES
from .detections import Detections
from .errors import AccessError, ClientError, DeadlineError, RefusedError, UnreachableError
from .messages import REQUEST_ID_KEY

Outcome = Detections | ClientError | OSError
"""What became of an image: an OSError is that its file cannot be read."""

KEEPALIVE_S = 30.0
"""Silence after which a client with a call open asks whether the server is there."""

_MOST = 2**31 - 1
"""gRPC's largest number, which it takes for no limit, and for never."""
_PING_TIMEOUT_MS = 20_000
"""For the server to show that it is there."""
_UNCHECKED_BYTES = 4 << 20
"""gRPC's own limit of a message, up to which requests are sent without asking for the server's."""
_SMALLER = "send a smaller image, or give the server a higher --max-message-mb"
_OWN_DEADLINE = "Deadline Exceeded"
"""What gRPC says where the client has waited long enough, be there a server or not."""
_TOO_LARGE = "message larger than max"
"""With the status of a server that is too busy, though to send it again is of no use."""
_CLOSED = "Socket closed", "Connection reset", "Broken pipe"
_SERVICE = pb.DESCRIPTOR.services_by_name["Detector"].full_name


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What a client and a server show each other over TLS; certificates and key are PEM."""

    root_certificate: bytes | None = None
    """Of the authority that signed the server's certificate; none, those that gRPC ships."""
    certificate: bytes | None = None
    """The client's own, where the server asks for one."""
    key: bytes | None = None
    """Of the client's certificate."""
    token: str | None = None
    """Sent with each request as `authorization: Bearer TOKEN`, over TLS only."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client's certificate and its key go together; give both or none")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The form in which gRPC takes them."""
        channel = grpc.ssl_channel_credentials(self.root_certificate, self.key, self.certificate)
        if self.token is None:
            return channel
        return grpc.composite_channel_credentials(
            channel, grpc.access_token_call_credentials(self.token)
        )


class Connection:
    """What the sync and the async client have in common."""

    _transport: Any
    """`grpc` or `grpc.aio`."""
    _lock: Any
    """Makes a lock for the tasks that share the connection."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 30.0,
        retries: int = MAX_RETRIES,
        credentials: Credentials | None = None,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """Prepare a connection, which is made by the first request.

        Args:
            address: `host:port` of the server, or any name that gRPC resolves.
            timeout_s: Longest wait for the answer to a request, over all its tries; a stream has
                no such limit.
            retries: Times that a request is sent again if the server is too busy or away, as
                `channel_options` says.
            credentials: For TLS; none, the connection is not encrypted.
            keepalive_s: Seconds of silence after which a server that is waited for has 20 to show
                that it is there, as `channel_options` says.

        Raises:
            ValueError: `retries` or `keepalive_s` is out of range.
        """
        self._address = address
        self._timeout_s = timeout_s
        options = channel_options(retries, keepalive_s)
        self._channel = (
            self._transport.insecure_channel(address, options)
            if credentials is None
            else self._transport.secure_channel(address, credentials.channel_credentials(), options)
        )
        self._stub: Any = DetectorStub(self._channel)  # type: ignore[no-untyped-call]
        self._limits: pb.Limits | None = None
        self._asking = self._lock()


def channel_options(retries: int, keepalive_s: float = KEEPALIVE_S) -> list[tuple[str, Any]]:
    """Options of a channel of which gRPC itself retries what failed, and spreads the requests.

    A request that a server is too busy for, or that no server answers, is sent again after 0.1 s,
    then three times that and so on, a fifth more or less by chance. Requests go to the addresses
    behind a name in turn. A connection with a call open that hears nothing for a while asks whether
    the server is there, and is given up if it has not shown so 20 s later.

    Args:
        retries: Times that a request is sent again, 0..MAX_RETRIES.
        keepalive_s: Seconds of silence before it asks, at least 1; infinite, it never does. A
            server sends away who asks much more often than it allows, ours every 10 s.

    Raises:
        ValueError: one is out of range.
    """
    if not 0 <= retries <= MAX_RETRIES:
        raise ValueError(f"retries is {retries}; gRPC retries 0 to {MAX_RETRIES} times")
    if not keepalive_s >= 1:
        raise ValueError(
            f"keepalive_s is {keepalive_s}; gRPC asks once a second at most, give 1 or more"
        )
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if retries:
        policy = {
            "maxAttempts": 1 + retries,
            "initialBackoff": "0.1s",
            "maxBackoff": "3s",
            "backoffMultiplier": 3,
            # The last where more come than the server gets to look at, which gRPC ends for it.
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"],
        }
        config["methodConfig"] = [{"name": [{"service": _SERVICE}], "retryPolicy": policy}]
    return [
        ("grpc.service_config", json.dumps(config)),
        # It forgets what is larger, and then cannot send it again; the default is 256 KiB.
        ("grpc.per_rpc_retry_buffer_size", _MOST),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", int(min(1000 * keepalive_s, _MOST))),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),  # counts where nothing is to be sent
        ("grpc.http2.max_pings_without_data", 0),  # else an idle stream asks a few times only
    ]


def is_large(request: pb.DetectRequest) -> bool:
    """Whether a request is to be sent only if `check_size` lets it pass."""
    return request.ByteSize() > _UNCHECKED_BYTES


def check_size(request: pb.DetectRequest, limits: pb.Limits, address: str) -> None:
    """Refuse a request that the server would refuse once it has all come, again and again.

    Args:
        request: What is to be sent.
        limits: Those that the server says it has.
        address: The server's, for the message.

    Raises:
        RefusedError: it is larger than the server takes, INVALID_ARGUMENT.
    """
    size, limit = request.ByteSize(), limits.max_message_bytes
    if 0 < limit < size:
        raise RefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request has {size:,} bytes, and the server at {address} takes {limit:,} at most; "
            f"{_SMALLER}",
        )


@contextlib.contextmanager
def meaning_of_errors(address: str) -> Iterator[None]:
    """Let what fails in calls to a server raise what it means; see `error_from_rpc`."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error, address) from error


def error_from_rpc(error: grpc.RpcError, address: str) -> ClientError:
    """What a call's failure means, in a sentence.

    It is a RefusedError where the server itself spoke, UNAVAILABLE included: then a server is there
    that says why it does not detect.
    """
    status, details = error.code(), error.details() or ""
    if status is grpc.StatusCode.CANCELLED:
        return UnreachableError(
            f"the server at {address} dropped the request; it stopped, or more came at once than "
            "it gets to look at: try again later"
        )
    if status is grpc.StatusCode.UNAVAILABLE and not _is_answer(error):
        return UnreachableError(_unreachable(address, details))
    if status is grpc.StatusCode.DEADLINE_EXCEEDED and details == _OWN_DEADLINE:
        return DeadlineError(
            f"no server answered at {address} in time; start one with `maskrcnn serve BUNDLE`, or "
            "give the one that is there more time with --timeout"
        )
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return UnreachableError(f"what answers at {address} is no server of this kind ({details})")
    if status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessError(
            f"the server at {address} gives no access ({details}); name the file that holds your "
            "token with --token-file"
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        return RefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request is larger than the server at {address} takes ({details}); {_SMALLER}",
        )
    return RefusedError(status, details)


class Silence:
    """How many requests in a row got no answer, by which one knows that the server is gone."""

    def __init__(self, limit: int) -> None:
        """Take the server for gone at so many."""
        self._limit = limit
        self._count = 0

    def check(self, outcome: Outcome) -> Outcome:
        """What became of the next image, unless to ask on is of no use.

        Raises:
            AccessError: the server gives this client no access.
            ClientError: the last of so many requests in a row that got no answer.
        """
        if isinstance(outcome, AccessError):
            raise outcome
        if isinstance(outcome, ClientError) and not isinstance(outcome, RefusedError):
            self._count += 1
            if self._count >= self._limit:
                raise outcome
        elif not isinstance(outcome, OSError):  # of which no server was told
            self._count = 0
        return outcome


def _is_answer(error: grpc.RpcError) -> bool:
    """Whether the server spoke; a status that gRPC makes up for nobody's answer has no such id."""
    metadata: Any = error.trailing_metadata() or ()
    return any(key == REQUEST_ID_KEY for key, _ in metadata)


def _unreachable(address: str, details: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification Check failed" in details:
        return (
            f"the certificate of the server at {address} is not to be trusted ({details}); name "
            "the authority that signed it with --root-certificate, and the host as it does"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return f"the server at {address} does not speak TLS; leave out --tls and its certificates"
    if "Failed to create security handshaker" in details:
        return "a certificate or a key is not usable; give --root-certificate and the others as PEM"
    if any(text in details for text in _CLOSED):
        return (
            f"the server at {address} closed the connection; it stopped, or asks for TLS (--tls) "
            "or for a certificate of yours (--certificate)"
        )
    if "ping timeout" in details:
        return (
            f"the server at {address} fell silent ({details}); its machine or the way there "
            "failed: try again later"
        )
    return f"no server answers at {address} ({details}); start one with `maskrcnn serve BUNDLE`"
