"""What is done around every call: it gets an id, which the client is told, and a span."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ..messages import REQUEST_ID_KEY
from ..monitoring.logs import name_call
from ..monitoring.tracing import Context, Tracer

_Handler = Any
_Behaviour = Callable[[Any, Context], Awaitable[Any]]


class CallWatch(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic, but in stubs
    """Names and traces calls, but those for health and reflection, which come all the time."""

    def __init__(self, tracer: Tracer) -> None:
        """Make spans by a tracer."""
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """The watched handler of a call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        sides = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in sides)
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            self._watched(getattr(handler, kind), method),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _watched(self, behaviour: _Behaviour, method: str) -> _Behaviour:
        async def watched(request: Any, context: Context) -> Any:
            sent = dict(context.invocation_metadata() or ())
            call_id = name_call(str(sent.get(REQUEST_ID_KEY, "")))
            context.set_trailing_metadata(((REQUEST_ID_KEY, call_id),))
            with self._tracer.call(method, context):
                return await behaviour(request, context)

        return watched
