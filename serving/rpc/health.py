"""gRPC health service (grpc.health.v1.Health) for the server and its models."""

import asyncio
from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from ..grpc_status import truncate_message

# Service name for liveness probes. It is SERVING whenever the process responds, also while no
# model is loaded.
LIVENESS = "liveness"

# Interval of the checks for changed model states, in seconds.
_CHECK_INTERVAL_S = 1.0

_Context = grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse]


# grpc_health's own servicer does not end open Watch calls, so a graceful shutdown would wait for
# them until its grace period is over.
class HealthService(HealthServicer):  # type: ignore[misc]  # untyped package
    """Health servicer that reports the state of the server, its services and its models.

    The server and its services are SERVING while the server runs and the first model can process
    requests. A model is SERVING while the server runs and the model can process requests.
    The service named "liveness" is always SERVING.
    """

    def __init__(
        self,
        *services: str,
        models: Callable[[], Mapping[str, bool]],
    ) -> None:
        """Create the service. It reports NOT_SERVING until `set_ready` is called.

        Args:
            services: Full names of the gRPC services.
            models: Function that returns, by model name, whether the model can process requests
                now.
        """
        self._services = frozenset({"", LIVENESS, *services})
        self._models = models
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        # Set at the next state change, and then replaced by a new event.
        self._changed = asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Whether the server is ready and not shutting down."""
        return self._ready.is_set() and not self._stopping.is_set()

    @property
    def is_serving(self) -> bool:
        """Whether the server is running and the first configured model can process requests."""
        return self.is_running and next(iter(self._models().values()))

    def is_model_serving(self, name: str) -> bool:
        """Return whether the server is running and the model `name` can process requests."""
        return self.is_running and self._models().get(name, False)

    def set_ready(self) -> None:
        """Mark the server as ready. From now on, its health status depends on the models."""
        self._ready.set()
        self._notify_watchers()

    def stop(self) -> None:
        """Report NOT_SERVING from now on, and end all Watch calls."""
        self._ready.set()
        self._stopping.set()
        self._notify_watchers()

    async def run(self) -> None:
        """Check the models once per second and report changes to Watch calls, until cancelled."""
        known = self._models()
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            if (states := self._models()) != known:
                known = states
                self._notify_watchers()

    async def Check(  # noqa: N802 (named by the protocol)
        self, request: pb.HealthCheckRequest, context: _Context
    ) -> pb.HealthCheckResponse:
        """Return the status of a service or model."""
        response = self._response_for(request)
        if response.status == pb.HealthCheckResponse.SERVICE_UNKNOWN:
            message = f"unknown service {request.service!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, truncate_message(message))
        return response

    async def Watch(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: _Context
    ) -> None:
        """Send the status of a service or model now and after each change."""
        sent = None
        while True:
            changed, is_last = self._changed, self._stopping.is_set()
            response = self._response_for(request)
            if response != sent:
                await context.write(response)
                sent = response
            if is_last:
                return
            await changed.wait()

    def _notify_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _response_for(self, request: pb.HealthCheckRequest) -> pb.HealthCheckResponse:
        service, response = request.service, pb.HealthCheckResponse
        if service in self._services:
            serving = service == LIVENESS or self.is_serving
        elif service in self._models():
            serving = self.is_model_serving(service)
        else:
            return response(status=response.SERVICE_UNKNOWN)
        return response(status=response.SERVING if serving else response.NOT_SERVING)
