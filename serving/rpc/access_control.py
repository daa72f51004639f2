"""Access control of gRPC calls: bearer tokens, rights to load models, limits on open calls."""

import asyncio
import hashlib
import ipaddress
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc

from ..config import ServeConfig
from ..credential_files import TokenFile
from ..errors import ForbiddenError, QueueFullError, ServingError, UnauthenticatedError
from ..grpc_status import CallContext, status_and_message
from ..pipeline.pipeline import ModelRepository
from ..pipeline.shared_resources import current_client
from .listener import MAX_HANDLERS
from .message_reader import MESSAGES_PER_SLOT, PendingMessages, call_handler

_log = logging.getLogger(__name__)

_INFERENCE = "/inference.GRPCInferenceService/"

# Model control: methods that load and unload models.
ADMIN_METHODS = frozenset(
    {f"{_INFERENCE}RepositoryModelLoad", f"{_INFERENCE}RepositoryModelUnload"}
)
# Unary methods whose requests need admission slots; see `AdmissionController`.
_DETECTION_METHODS = frozenset({"/maskrcnn.v1.Detector/Detect", f"{_INFERENCE}ModelInfer"})

_HEALTH_METHODS = tuple(
    f"{_INFERENCE}{name}" for name in ("ServerLive", "ServerReady", "ModelReady")
)
# Prefixes of the public methods, which clients may call without a token.
_PUBLIC_PREFIXES = ("/grpc.health.v1.Health/", "/grpc.reflection.", *_HEALTH_METHODS)

# Maximum number of concurrent calls of public methods per connection.
_PUBLIC_CALLS_PER_CONNECTION = 8
# `queue_size` divided by this number is the maximum number of public calls that wait for a request
# message at a time. If `queue_size` is below 32, the maximum is the smaller of `queue_size` and 8.
_SLOTS_PER_PUBLIC_MESSAGE = 4
# Maximum number of peers whose hosts are cached.
_MAX_HOSTS = 1024
# Seconds for which a stopping server still receives messages that are in transit.
_LAST_MESSAGES_S = 2.0

Metadata = Iterable[tuple[str, str | bytes]]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

T = TypeVar("T")


def is_public(method: str) -> bool:
    """Return whether clients without a token may call `method` (`/package.Service/Method`).

    This holds for health checks, reflection, ServerLive, ServerReady and ModelReady.
    """
    return method.startswith(_PUBLIC_PREFIXES)


class AccessPolicy:
    """Authorization by bearer tokens, for inference and for loading and unloading models.

    Public methods (see `is_public`) need no token. The table shows which clients may call the other
    methods. This depends on whether the settings `token_file` and `admin_token_file` are given. The
    column `inference` covers all methods that are not public and do not load or unload models.

    | token_file | admin_token_file | inference            | loading and unloading models          |
    |------------|------------------|----------------------|---------------------------------------|
    | no         | no               | all clients          | loopback clients if `local_admin`     |
    | yes        | no               | tokens of token_file | nobody                                |
    | no         | yes              | all clients          | tokens of admin_token_file            |
    | yes        | yes              | tokens of both files | tokens of admin_token_file            |
    """

    def __init__(self, config: ServeConfig) -> None:
        """Read the token files, if the settings name any.

        Raises:
            ServingError: a file cannot be read or is invalid.
        """
        self._tokens = TokenFile(config.token_file) if config.token_file else None
        path = config.admin_token_file
        self._admin_tokens = TokenFile(path) if path else None
        self._local_admin = config.local_admin
        has_tokens = self._tokens or self._admin_tokens
        if has_tokens and not config.tls_certificate and not _is_loopback(config.host):
            _log.warning(
                "clients send tokens to %s unencrypted; to encrypt them, set tls_certificate and "
                "tls_key",
                config.host,
            )

    def check(self, method: str, metadata: Metadata, peer: str) -> str:
        """Check that a client may call a method, and return the client's name for rate limits.

        The name depends on the method:

        - Public methods: the client's host.
        - Methods that load or unload models: a hash of the client's token, or of "" if the client
          sends no token.
        - All other methods: a hash of the token if `token_file` is given, otherwise the host.

        Args:
            method: Full method name, as `/package.Service/Method`.
            metadata: Metadata that the client sent.
            peer: Client address, as `context.peer()` returns it.

        Raises:
            UnauthenticatedError: the method needs a token, and the call has no valid one.
            ForbiddenError: the method loads or unloads models, and the client may not do so.
        """
        if is_public(method) or (self._tokens is None and method not in ADMIN_METHODS):
            return _host_of(peer)
        token = _bearer_token(metadata)
        is_admin = self._admin_tokens is not None and self._admin_tokens.contains(token)
        is_user = is_admin or (self._tokens is not None and self._tokens.contains(token))
        if method in ADMIN_METHODS:
            self._check_admin(peer, is_admin=is_admin, is_user=is_user)
        elif not is_user:
            raise _unauthenticated()
        return hashlib.sha256(token.encode()).hexdigest()

    def _check_admin(self, peer: str, *, is_admin: bool, is_user: bool) -> None:
        if is_admin:
            return
        if self._tokens is None and self._admin_tokens is None:
            if not self._local_admin:
                raise ForbiddenError(
                    "loading and unloading models is disabled; to allow clients with a token to do "
                    "it, set admin_token_file on the server"
                )
            if not _is_loopback(_host_of(peer)):
                raise ForbiddenError(
                    "only clients on the server's machine may load and unload models; to allow "
                    "other clients with a token to do it, set admin_token_file on the server"
                )
        elif is_user or self._admin_tokens is None:
            raise ForbiddenError(
                "loading and unloading models needs a token from the server's admin_token_file"
            )
        else:
            raise _unauthenticated()


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """gRPC interceptor that rejects unauthorized and excess calls without reading their messages.

    For accepted calls, the interceptor reads, validates and parses the request messages (see
    `message_reader`). Rejected calls are counted in the metrics.
    """

    def __init__(self, policy: AccessPolicy, config: ServeConfig, models: ModelRepository) -> None:
        """Create the interceptor.

        At most `2 * config.queue_size` calls can wait for a request message at a time.

        Args:
            policy: Authorization rules.
            config: Server settings.
            models: Served models, with their admission slots, metrics and limit on open calls.
        """
        self._policy = policy
        self._models = models
        self._timeout_s = config.receive_timeout_s
        least = min(_PUBLIC_CALLS_PER_CONNECTION, config.queue_size)
        public = max(least, config.queue_size // _SLOTS_PER_PUBLIC_MESSAGE)
        # Public calls have a separate limit. If all calls had a common limit, clients without a
        # token could make `PendingMessages` cancel calls of clients with a token.
        self._public_messages = PendingMessages(public)
        self._messages = PendingMessages(MESSAGES_PER_SLOT * config.queue_size - public)
        # Number of open public calls by connection.
        self._public_calls = Counter[str]()
        self._with_checks = lru_cache(MAX_HANDLERS)(self._checked)

    def stop(self) -> None:
        """End the calls whose request message has not arrived, with the error `StoppingError`.

        Calls of public methods (see `is_public`) are ended now, all others after 2 s.
        """
        self._public_messages.stop()
        asyncio.get_running_loop().call_later(_LAST_MESSAGES_S, self._messages.stop)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the handler of a gRPC method, wrapped in the access checks."""
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC responds with UNIMPLEMENTED
            return handler
        return self._with_checks(handler, handler_call_details.method)

    def _checked(self, handler: _Handler, method: str) -> _Handler:
        handle = call_handler(handler, self.pending_messages(method), self._timeout_s)

        # gRPC's request iterator (the first argument) is not used, because it keeps a reference to
        # each message until it yields the next one.
        async def checked(_: object, context: CallContext) -> Any:
            return await self.run(method, context, handle)

        # All methods are registered as request-streaming. In a unary method gRPC would read the
        # request before it calls the handler, wait for slow clients without a limit, and log a
        # traceback for each message that cannot be parsed.
        adapt: Callable[..., _Handler] = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return adapt(checked, None, handler.response_serializer)

    def pending_messages(self, method: str) -> PendingMessages:
        """Return the `PendingMessages` in which calls of `method` wait for a request message.

        All public methods (see `is_public`) share one object, and all other methods another one.
        """
        return self._public_messages if is_public(method) else self._messages

    async def run(
        self,
        method: str,
        context: CallContext,
        handle: Callable[[CallContext], Awaitable[T]],
    ) -> T:
        """Check a call against the access rules and limits, then return the result of `handle`.

        If a check or `handle` raises a ServingError, the call is aborted.

        Args:
            method: Full method name, as `/package.Service/Method`.
            context: Context of the call.
            handle: Function that reads the request and computes the response.
        """
        peer = context.peer()  # empty once gRPC has ended the call, as for a too large message
        try:
            metadata = context.invocation_metadata() or ()
            current_client.set(self._policy.check(method, metadata, peer))
            await self._admit(method, peer, context)
            return await handle(context)
        except ServingError as error:
            self.record_rejection(method, peer, error)
            await context.abort(*status_and_message(error))

    def record_rejection(self, method: str, peer: str, error: ServingError) -> None:
        """Log and count a rejected call. It does not count as a failed request of a model."""
        self._models.resources.telemetry.reject_call(method, peer, error)

    async def _admit(self, method: str, peer: str, context: CallContext) -> None:
        """Count a call as open until it ends. Apply admission control to `Detect` and `ModelInfer`.

        If admission control rejects the call, `context.abort` ends the call and raises
        `grpc.aio.AbortError` (gRPC) or `AbortedCallError` (HTTP).

        Raises:
            QueueFullError: the server or the client's connection has too many open calls.
        """
        if is_public(method):
            self._count_public_call(peer, context)
            return
        calls = self._models.resources.open_calls
        calls.add(peer)
        context.add_done_callback(lambda _: calls.remove(peer))
        if method in _DETECTION_METHODS:
            # Rejects the call before its message, which can be large, is received.
            try:
                self._models.check_admission(method, peer)
            except ServingError as error:
                # `check_admission` has counted this rejection. If it were raised here, `run` would
                # count it again.
                await context.abort(*status_and_message(error))

    def _count_public_call(self, peer: str, context: CallContext) -> None:
        if self._public_calls[peer] >= _PUBLIC_CALLS_PER_CONNECTION:
            raise QueueFullError(
                f"the connection has {_PUBLIC_CALLS_PER_CONNECTION} open calls for health and "
                "reflection, the maximum per connection; end one of these calls first"
            )
        self._public_calls[peer] += 1

        def end(_: object) -> None:
            self._public_calls[peer] -= 1
            if not self._public_calls[peer]:
                del self._public_calls[peer]

        context.add_done_callback(end)


def _bearer_token(metadata: Metadata) -> str:
    """Return the bearer token in a call's metadata, or an empty string."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer":
                return token.strip()
    return ""


def _unauthenticated() -> UnauthenticatedError:
    return UnauthenticatedError(
        "the call has no valid token; send one as `authorization: Bearer TOKEN`, in the metadata "
        "or, over HTTP, in a header"
    )


@lru_cache(_MAX_HOSTS)
def _host_of(peer: str) -> str:
    """Return the host of a peer, such as `127.0.0.1` for `ipv4:127.0.0.1:50000`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
