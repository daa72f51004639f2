"""How calls come in: who may make them, how many at once, how slowly, and whether they parse."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from ..admission import Places
from ..config import ServeConfig
from ..errors import InvalidRequestError, QueueFullError, ServingError
from ..pipeline import Pipeline
from .access import AccessPolicy, is_open
from .arrivals import MESSAGES_PER_PLACE, Arrivals
from .refusals import refusal_from_error
from .wire_format import check_message

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Parse = Callable[[bytes], Any]

_DETECTING = frozenset(
    {"/maskrcnn.v1.Detector/Detect", "/inference.GRPCInferenceService/ModelInfer"}
)
"""Methods whose one request takes places among the images in progress."""
_CALLS_PER_PLACE = 8
"""Calls that may be open for each request in progress. More requests than are computed are refused
for that; what this bounds is answers that clients do not take."""
_OPEN_CALLS_OF_ONE = 8
"""Calls for health and reflection, which need no token, that a connection may have open."""
_OPEN_SHARE = 4
"""Images in progress for each message of an open call that may be on its way, where that is enough
for one connection; so many fewer may be of those who may detect."""
_LAST_MESSAGES_S = 2.0
"""For messages that are on their way when the server stops."""
_UNCHECKED_BYTES = 256 << 10
"""Of a message, which becomes 12 MiB at most when it is parsed."""


class Reception(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic, but in stubs
    """Refuses calls before their messages are read, and messages before a service gets them.

    Where there is much to refuse, most of the time would else go into reading it. To gRPC, methods
    that take one request become methods that take a stream: it would read the request before
    anything else is done, for as long as a slow client likes, and log a traceback for each that
    does not parse.
    """

    def __init__(self, access: AccessPolicy, config: ServeConfig, pipeline: Pipeline) -> None:
        """Let in what the settings allow and a pipeline has places for, and count what is not."""
        self._access = access
        self._pipeline = pipeline
        self._metrics = pipeline.telemetry.metrics
        self._timeout_s = config.receive_timeout_s
        enough_for_one = min(_OPEN_CALLS_OF_ONE, config.queue_size)
        open_messages = max(enough_for_one, config.queue_size // _OPEN_SHARE)
        self._arrivals = Arrivals(MESSAGES_PER_PLACE * config.queue_size - open_messages)
        self._open_arrivals = Arrivals(open_messages)
        """Of calls that anyone may make, which so end no stream of those who may detect."""
        self._places = Places(_CALLS_PER_PLACE * config.queue_size, what="open calls")
        self._open_calls = Counter[str]()
        """By connection."""

    def stop(self) -> None:
        """Give up messages that are not there in a while, and those that may never come at once."""
        self._open_arrivals.stop()
        asyncio.get_running_loop().call_later(_LAST_MESSAGES_S, self._arrivals.stop)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """The guarded handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC says then that there is no such method
            return handler
        reply = self._reply_to_stream if handler.request_streaming else self._reply_to_one
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        arrivals = self._open_arrivals if is_open(method) else self._arrivals

        # gRPC's iterator of messages is left alone, since it holds each until the next comes.
        async def guarded(_: object, context: _Context) -> Any:
            peer = context.peer()
            try:
                self._access.check(method, metadata, peer)
                if is_open(method):
                    self._count_open_call(peer, context)
                else:
                    self._hold_place(peer, context)
                if method in _DETECTING:
                    await self._check_place(peer, context)
                return await reply(handler, context, arrivals)
            except ServingError as error:
                self._metrics.count_refusal(error)
                await context.abort(*refusal_from_error(error))

        adapt: Callable[..., _Handler] = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return adapt(guarded, None, handler.response_serializer)

    def _hold_place(self, peer: str, context: _Context) -> None:
        """Hold a place until the call's answer is taken, or the client is gone."""
        self._places.take(peer)

        def give_back(_: object) -> None:
            self._places.give_back(peer)

        context.add_done_callback(give_back)  # type: ignore[arg-type]  # by stubs

    def _count_open_call(self, peer: str, context: _Context) -> None:
        """Refuse a call that anyone may make where its connection has many of them open."""
        if self._open_calls[peer] >= _OPEN_CALLS_OF_ONE:
            raise QueueFullError(
                f"the connection has {_OPEN_CALLS_OF_ONE} calls for health and reflection open; "
                "end one first"
            )
        self._open_calls[peer] += 1

        def end(_: object) -> None:
            self._open_calls[peer] -= 1
            if not self._open_calls[peer]:
                del self._open_calls[peer]

        context.add_done_callback(end)  # type: ignore[arg-type]  # by stubs

    async def _check_place(self, peer: str, context: _Context) -> None:
        """Refuse a request that would find no place."""
        try:
            self._pipeline.check_place(peer)
        except ServingError as error:  # which is counted already
            await context.abort(*refusal_from_error(error))

    async def _reply_to_one(self, handler: Any, context: _Context, arrivals: Arrivals) -> Any:
        """Reply to the first message as the handler does to one request."""
        behaviour = handler.unary_unary or handler.unary_stream
        # The request gets no name here: it is gone as soon as the handler has no use for it.
        return await behaviour(await self._only_request(handler, context, arrivals), context)

    async def _only_request(self, handler: Any, context: _Context, arrivals: Arrivals) -> Any:
        parse = handler.request_deserializer
        request = await _next_request(arrivals, parse, context, self._timeout_s)
        if request is None:
            raise InvalidRequestError("the call ended before its request")
        return request

    async def _reply_to_stream(self, handler: Any, context: _Context, arrivals: Arrivals) -> None:
        """Reply to the messages as the handler does to requests, up to one that is none."""
        parse, behaviour = handler.request_deserializer, handler.stream_stream
        requests = _Requests(partial(_next_request, arrivals, parse, context, None))
        try:
            if inspect.isasyncgenfunction(behaviour):
                async for response in behaviour(requests, context):
                    await context.write(response)
            else:
                await behaviour(requests, context)
        except ExceptionGroup as failures:  # of tasks; gRPC knows when the client is to blame
            raise failures.exceptions[0] from None
        requests.check()


class _Requests:
    """The requests in messages; they end before one that is none, or is not waited for.

    It is no generator, which would hold each request until the next is asked for.
    """

    def __init__(self, read: Callable[[], Awaitable[Any | None]]) -> None:
        self._read = read
        self._failure: ServingError | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            request = await self._read()
        except ServingError as error:
            self._failure = error
            raise StopAsyncIteration from None
        if request is None:
            raise StopAsyncIteration
        return request

    def check(self) -> None:
        """Raise what ended the requests before their time."""
        if self._failure is not None:
            raise self._failure


async def _next_request(
    arrivals: Arrivals, parse: _Parse, context: _Context, timeout_s: float | None
) -> Any | None:
    message = await arrivals.next(context, timeout_s)
    return None if message is None else _parsed(message, parse)


def _parsed(message: bytes, parse: _Parse) -> Any:
    try:
        if len(message) > _UNCHECKED_BYTES:
            check_message(message, parse.__self__.DESCRIPTOR)  # type: ignore[attr-defined]
        return parse(message)
    except DecodeError:
        raise InvalidRequestError(
            "the message is no request of this method; was it made with another protocol?"
        ) from None
