"""How calls come in: who may make them, how many at once, how slowly, and whether they parse."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from .access import AccessPolicy, is_open
from .config import ServeConfig
from .errors import ExpiredError, InvalidRequestError, ServingError
from .metrics import Metrics
from .scheduling import Places
from .service import refusal_from_error

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Messages = AsyncIterator[bytes]
_Reply = Callable[[_Messages, _Context], Awaitable[Any]]
_Parse = Callable[[bytes], Any]


class Reception(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic, but in stubs
    """Refuses calls before their messages are read, and messages before a service gets them.

    To gRPC, methods that take one request become methods that take a stream. It would read the
    request before anything else is done, for as long as a slow client likes, and log a traceback
    for each that does not parse.
    """

    def __init__(self, access: AccessPolicy, config: ServeConfig, metrics: Metrics) -> None:
        """Let in what the settings allow, and count what they do not."""
        self._access = access
        self._metrics = metrics
        self._timeout_s = config.receive_timeout_s
        # More than requests in progress, whose refusals say more. Streams may be silent for long
        # and must not keep others out.
        self._calls = Places(2 * config.queue_size)
        self._streams = Places(2 * config.queue_size)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """The guarded handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC says then that there is no such method
            return handler
        streaming = handler.request_streaming
        reply = _reply_to_stream(handler) if streaming else _reply_to_one(handler, self._timeout_s)
        places = self._streams if streaming else self._calls
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata

        async def guarded(messages: _Messages, context: _Context) -> Any:
            peer = context.peer()
            try:
                self._access.check(method, metadata, peer)
                with contextlib.nullcontext() if is_open(method) else places.hold(peer):
                    return await reply(messages, context)
            except ServingError as error:
                self._metrics.count_refusal(error)
                await context.abort(*refusal_from_error(error))

        adapt: Callable[..., _Handler] = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return adapt(guarded, None, handler.response_serializer)


def _reply_to_one(handler: Any, timeout_s: float) -> _Reply:
    """What replies to the first message, as the handler does to one request."""
    behaviour = handler.unary_unary or handler.unary_stream

    async def reply(messages: _Messages, context: _Context) -> Any:
        request = await _first_request(messages, handler.request_deserializer, timeout_s)
        return await behaviour(request, context)

    return reply


async def _first_request(messages: _Messages, parse: _Parse, timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            message = await anext(messages)
    except TimeoutError:
        raise ExpiredError(f"the request did not arrive within {timeout_s:g} s") from None
    except StopAsyncIteration:
        raise InvalidRequestError("the call ended before its request") from None
    return _parsed(message, parse)


def _reply_to_stream(handler: Any) -> _Reply:
    """What replies to the messages as the handler does to requests, up to one that is none."""
    behaviour = handler.stream_stream

    async def reply(messages: _Messages, context: _Context) -> None:
        requests = _Requests(messages, handler.request_deserializer)
        if inspect.isasyncgenfunction(behaviour):
            async for response in behaviour(aiter(requests), context):
                await context.write(response)
        else:
            await behaviour(aiter(requests), context)
        requests.check()

    return reply


class _Requests:
    """The requests in messages; they end before a message that is none."""

    def __init__(self, messages: _Messages, parse: _Parse) -> None:
        self._messages = messages
        self._parse = parse
        self._failure: InvalidRequestError | None = None

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._messages:
            try:
                request = _parsed(message, self._parse)
            except InvalidRequestError as error:
                self._failure = error
                return
            yield request

    def check(self) -> None:
        """Raise what ended the requests before their time."""
        if self._failure is not None:
            raise self._failure


def _parsed(message: bytes, parse: _Parse) -> Any:
    try:
        return parse(message)
    except DecodeError:
        raise InvalidRequestError(
            "the message is no request of this method; was it made with another protocol?"
        ) from None
