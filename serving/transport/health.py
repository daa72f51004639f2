"""The service grpc.health.v1.Health.

The library's own leaves its watches open, and a server that stops gracefully waits for them.
"""

import asyncio
from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from ..statuses import shortened

LIVENESS = "liveness"
"""Name of a service that is SERVING as long as the process answers, whatever becomes of models."""

_PERIOD_S = 1.0
"""Between looks at the models."""

_Context = grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse]


class HealthService(HealthServicer):  # type: ignore[misc]  # it has no types
    """NOT_SERVING until the server is ready, once it stops, and while it is not up.

    Only `LIVENESS` is SERVING all the time.
    """

    def __init__(
        self,
        *services: str,
        models: Callable[[], Mapping[str, bool]],
    ) -> None:
        """Speak for the server as a whole, for services and for models.

        Args:
            services: Their full names.
            models: By the names of what is served at the moment, whether requests can be answered
                then. The first stands for the server.
        """
        self._services = frozenset({"", LIVENESS, *services})
        self._models = models
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced."""

    @property
    def is_running(self) -> bool:
        """Whether the server has become ready, and is not about to stop."""
        return self._ready.is_set() and not self._stopping.is_set()

    @property
    def is_serving(self) -> bool:
        """Whether the server is running, and can answer requests for its first model."""
        return self.is_running and next(iter(self._models().values()))

    def is_model_serving(self, name: str) -> bool:
        """Whether the server is running, and can answer requests for that model."""
        return self.is_running and self._models().get(name, False)

    def set_ready(self) -> None:
        """Say SERVING from here on."""
        self._ready.set()
        self._tell_watches()

    def stop(self) -> None:
        """Say NOT_SERVING from here on, and end the watches."""
        self._ready.set()
        self._stopping.set()
        self._tell_watches()

    async def run(self) -> None:
        """Look for changes of the models until cancelled."""
        known = self._models()
        while True:
            await asyncio.sleep(_PERIOD_S)
            if (found := self._models()) != known:
                known = found
                self._tell_watches()

    async def Check(  # noqa: N802 (named by the protocol)
        self, request: pb.HealthCheckRequest, context: _Context
    ) -> pb.HealthCheckResponse:
        """The status of a service."""
        response = self._response_to(request)
        if response.status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            message = f"there is no service {request.service!r} here"
            await context.abort(grpc.StatusCode.NOT_FOUND, shortened(message))
        return response

    async def Watch(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: _Context
    ) -> None:
        """The status of a service now and after each change."""
        sent = None
        while True:
            change, is_last = self._changed, self._stopping.is_set()
            response = self._response_to(request)
            if response != sent:
                await context.write(response)
                sent = response
            if is_last:
                return
            await change.wait()

    def _tell_watches(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _response_to(self, request: pb.HealthCheckRequest) -> pb.HealthCheckResponse:
        service, answer = request.service, pb.HealthCheckResponse
        if service in self._services:
            serving = service == LIVENESS or self.is_serving
        elif service in self._models():
            serving = self.is_model_serving(service)
        else:
            return answer(status=answer.SERVICE_UNKNOWN)
        return answer(status=answer.SERVING if serving else answer.NOT_SERVING)
