"""How a client reaches a server: address, security, retries, keepalive, and when it is gone."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeGuard

import grpc

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ...protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from ..addresses import check_address
from ..config import MAX_RETRIES
from ..detections import Detections
from ..errors import AccessError, ClientError, ClosedError, DeadlineError, RefusedError
from .client_errors import SMALLER, error_from_rpc

Outcome = Detections | ClientError | OSError
"""What became of an image: an OSError is that its file cannot be read."""

KEEPALIVE_S = 30.0
"""Silence after which a client with a call open asks whether the server is there."""

_MOST = 2**31 - 1
"""gRPC's largest number, which it takes for no limit, and for never."""
_PING_TIMEOUT_MS = 20_000
"""For the server to show that it is there."""
_STATE_S = 1.0
"""For gRPC to say how its channel is, which it does at once but where it was closed meanwhile."""
_UNCHECKED_BYTES = 4 << 20
"""gRPC's own limit of a message, up to which requests are sent without asking for the server's."""
_CALL_FAILURES = grpc.RpcError, ValueError, grpc.aio.UsageError, asyncio.CancelledError
"""What a call ends with, those last three where its channel is closed."""
_SERVICE = pb.DESCRIPTOR.services_by_name["Detector"].full_name


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What a client and a server show each other; certificates and key are PEM."""

    root_certificate: bytes | None = None
    """Of the authority that signed the server's certificate; none, those that gRPC ships."""
    certificate: bytes | None = None
    """The client's own, where the server asks for one."""
    key: bytes | None = None
    """Of the client's certificate."""
    token: str | None = None
    """Sent with each request as `authorization: Bearer TOKEN`."""
    tls: bool = True
    """Whether the client encrypts; if not, a token can be read on the way, unless something else
    encrypts, as the sidecar of a service mesh does."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client's certificate and its key go together; give both or none")
        if not self.tls and (self.root_certificate or self.certificate):
            raise ValueError("certificates are for TLS; leave them or tls=False out")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call shows."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The form in which gRPC takes those of a connection with TLS."""
        return grpc.ssl_channel_credentials(self.root_certificate, self.key, self.certificate)


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
            address: `host:port` of the server, or a target with a scheme of gRPC, as `dns:` or
                `unix:`.
            timeout_s: Longest wait for the answer to a request, over all its tries; a stream has
                no such limit.
            retries: Times that a request is sent again if the server is too busy or away, as
                `channel_options` says.
            credentials: What to show, over TLS unless they say otherwise; none, nothing, and
                the connection is not encrypted.
            keepalive_s: Seconds of silence after which a server that is waited for has 20 to show
                that it is there, as `channel_options` says.

        Raises:
            ValueError: `address` can be none, or `retries` or `keepalive_s` is out of range.
        """
        check_address(address)
        self._address = address
        self._timeout_s = timeout_s
        options = channel_options(retries, keepalive_s)
        credentials = credentials or Credentials(tls=False)
        self._metadata = credentials.metadata
        self._channel = (
            self._transport.secure_channel(address, credentials.channel_credentials(), options)
            if credentials.tls
            else self._transport.insecure_channel(address, options)
        )
        self._stub: Any = DetectorStub(self._channel)  # type: ignore[no-untyped-call]
        self._limits: pb.Limits | None = None
        self._asking = self._lock()
        self._closed = False

    @contextlib.contextmanager
    def _meaning_of_errors(self) -> Iterator[None]:
        """Let what fails in calls raise what it means; see `error_from_rpc`."""
        try:
            yield
        except _CALL_FAILURES as error:
            if self._closed and not _is_of_own_task(error):
                raise ClosedError(
                    f"the client of {self._address} is closed; make another to ask more"
                ) from error
            if isinstance(error, grpc.RpcError):
                raise error_from_rpc(error, self._address, self._timeout_s) from error
            raise


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


def channel_state(channel: grpc.Channel) -> grpc.ChannelConnectivity:
    """How a channel is that is not of asyncio, and tells so to subscribers only."""
    states: SimpleQueue[grpc.ChannelConnectivity] = SimpleQueue()
    channel.subscribe(states.put)
    try:
        return states.get(timeout=_STATE_S)
    except Empty:
        return grpc.ChannelConnectivity.SHUTDOWN
    finally:
        channel.unsubscribe(states.put)


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
            f"{SMALLER}",
        )


class Silence:
    """How many requests in a row got no answer, by which one knows that the server is gone.

    One that is late is none of them while there is a connection: the server is only too busy.
    """

    def __init__(self, limit: int, state: Callable[[], grpc.ChannelConnectivity]) -> None:
        """Take the server for gone at so many; the state is that of the channel."""
        self._limit = limit
        self._state = state
        self._count = 0

    def check(self, outcome: Outcome) -> Outcome:
        """What became of the next image, unless to ask on is of no use.

        Raises:
            AccessError: the server gives this client no access.
            ClosedError: the client is closed.
            ClientError: the last of so many requests in a row that got no answer.
        """
        if isinstance(outcome, AccessError | ClosedError):
            raise outcome
        if self._is_silence(outcome):
            self._count += 1
            if self._count >= self._limit:
                raise outcome
        elif not isinstance(outcome, OSError):  # of which no server was told
            self._count = 0
        return outcome

    def _is_silence(self, outcome: Outcome) -> TypeGuard[ClientError]:
        if isinstance(outcome, DeadlineError):
            return self._state() is not grpc.ChannelConnectivity.READY
        return isinstance(outcome, ClientError) and not isinstance(outcome, RefusedError)


def check_concurrency(concurrency: int) -> None:
    """Refuse a number of requests in flight of which none could be.

    Raises:
        ValueError: it is less than one.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; give 1 or more")


def _is_of_own_task(error: BaseException) -> bool:
    """Whether the task is cancelled, and not only its call, which gRPC raises alike."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
