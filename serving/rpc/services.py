"""gRPC services of the server: maskrcnn.v1.Detector and grpc.health.v1.Health."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as health_pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..config import ServeConfig
from ..detections import ResponseEncoder, TimedResponse
from ..grpc_status import CallContext, aborting, status_and_message, truncate_message
from ..messages import (
    encode_detections,
    model_response,
    options_from_request,
    response_bytes,
    scheduling_from_request,
    stream_response_bytes,
)
from ..pipeline.pipeline import InferenceRequest, ModelRepository, Pipeline
from ..pipeline.scheduling import request_deadline
from .listener import GrpcServer
from .streams import Admission, Streams

_SERVICE = pb.DESCRIPTOR.services_by_name["Detector"].full_name

_StreamContext = grpc.aio.ServicerContext[pb.DetectRequest, bytes]

# Service name for liveness probes. It is SERVING whenever the process responds, also while no
# model is loaded.
LIVENESS = "liveness"

# Interval of the checks for changed model states, in seconds.
_CHECK_INTERVAL_S = 1.0

_HealthContext = grpc.aio.ServicerContext[
    health_pb.HealthCheckRequest, health_pb.HealthCheckResponse
]


class DetectorService:
    """Servicer of maskrcnn.v1.Detector. Register it with `add_detector_service`.

    `Detect` and `DetectStream` return serialised responses: the worker process or thread that
    computes the detections also serialises them.
    """

    # Requests can be large, and many wait for the model at a time. Therefore each method drops its
    # reference to the request (`del request`) before it awaits the detections.

    def __init__(self, models: ModelRepository, config: ServeConfig) -> None:
        self._models = models
        self._config = config
        self._streams = Streams[pb.DetectRequest](self._pipeline_of, image_count=lambda _: 1)
        # Stops reading requests from streams; see `Streams.stop`.
        self.stop_reading = self._streams.stop

    @aborting
    def Detect(  # noqa: N802 (named by the protocol)
        self, request: pb.DetectRequest, context: CallContext
    ) -> Awaitable[bytes]:
        """Detect objects in one image."""
        return self._response_to(context.peer(), request)

    async def DetectStream(  # noqa: N802
        self, requests: AsyncIterator[pb.DetectRequest], context: _StreamContext
    ) -> None:
        """Detect objects in the images of a stream. Several images are processed concurrently."""
        respond = partial(self._stream_response_to, context.peer())
        await self._streams.process(requests, respond, context)

    @aborting
    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: CallContext
    ) -> pb.GetModelResponse:
        """Describe a served model."""
        model = self.find(request.model).model
        buckets = model.batcher().info.buckets
        return model_response(model.manifest, buckets, model.precisions, self._config)

    async def _stream_response_to(
        self, peer: str, request: pb.DetectRequest, admission: Admission
    ) -> bytes:
        request_id, responding = request.id, self._response_to(peer, request, admission)
        del request
        try:
            response = await responding
        except Exception as error:
            status, message = status_and_message(error)
            failure = pb.Error(code=status.value[0], message=message)
            return pb.DetectStreamResponse(id=request_id, error=failure).SerializeToString()
        return stream_response_bytes(response, request_id)

    async def _response_to(
        self, peer: str, request: pb.DetectRequest, admission: Admission | None = None
    ) -> bytes:
        request_id = request.id
        detecting = self.detect(peer, request, encode_detections, admission)
        del request
        return response_bytes(await detecting, request_id)

    async def detect(
        self,
        peer: str,
        request: pb.DetectRequest,
        encoder: ResponseEncoder,
        admission: Admission | None = None,
        finish: Callable[[Any], Any] | None = None,
        finish_memory: int = 0,
    ) -> TimedResponse[Any]:
        """Detect objects in the image of a request.

        Args:
            peer: Client address, as `context.peer()` returns it.
            request: The request.
            encoder: Function that encodes the detections. It runs in a thread or in the worker
                process.
            admission: Context manager that holds an admission slot. None: acquire a slot from the
                model's `AdmissionController`.
            finish: Function that converts the encoder's result, which must have `height` and
                `width`, to the value to return. It runs in a thread of this process. Its run time
                and its wait for the thread are added to `encode_us` of the timing. None: return the
                encoder's result.
            finish_memory: Peak memory of `finish` in bytes per pixel of the image.

        Returns:
            Result of `finish`, or of `encoder` if `finish` is None, with the image's timing.

        Raises:
            InvalidRequestError: an option is out of range.
            ModelNotFoundError: no served model has the name in the request.
            UnloadedError: the model is unloaded.
            RateLimitError: the client exceeded its limit of requests or images per second.
            QueueFullError: admission control rejects the request; see
                `AdmissionController.acquire`.
            ExpiredError: the request exceeded its time limit.
            ImageError: the image is invalid; see `Pipeline.detect`.
            BackendError, BundleError: inference failed; see `Pipeline.detect`.
        """
        pipeline = self._pipeline_of(request)
        model = pipeline.model
        name = model.manifest.model_name
        suffix = model.names.get(request.model)
        if suffix and not request.precision:
            request.precision = suffix
        if suffix:
            name = request.model
        elif request.precision:
            name = f"{name}-{request.precision}"
        source = request.image
        request.ClearField("image")  # else `ByteSize` would copy it
        size = request.ByteSize() + len(source)
        recording = pipeline.telemetry.request(
            name, model.names, model.version, request.id, peer, size
        )
        with recording as timings, self.find(request.model).model.use():
            pipeline.rate_limits.charge(images=1)
            model.check_precision(request.model, request.precision)
            options = options_from_request(request)
            scheduling = scheduling_from_request(request, peer, name)
            admission = admission or pipeline.admission.acquire(peer)
            deadline = request_deadline(scheduling.timeout_s, self._config.timeout_s)
            async with deadline, admission:
                detecting = pipeline.detect(
                    InferenceRequest(
                        source=source,
                        options=options,
                        scheduling=scheduling,
                        encoder=encoder,
                    ),
                    model,
                )
                del request, source
                response = await detecting
                if finish is not None:
                    response = await _finished(pipeline, peer, response, finish, finish_memory)
            timings.append(response.timing)
            return response

    def find(self, name: str) -> Pipeline:
        """Return the pipeline that serves the model `name`. If `name` is empty, return the first.

        Raises:
            ModelNotFoundError: no served model has this name.
        """
        return self._models.find(name) if name else self._models.first

    def _pipeline_of(self, request: pb.DetectRequest) -> Pipeline:
        return self._models.find_or_first(request.model)


async def _finished(
    pipeline: Pipeline,
    peer: str,
    response: TimedResponse[Any],
    finish: Callable[[Any], Any],
    memory: int,
) -> TimedResponse[Any]:
    found = response.value
    size = memory * found.height * found.width
    async with pipeline.decode_memory.reserve_in_thread(peer, size) as reserved:
        timed = await pipeline.threads.run(peer, finish, found, memory=reserved)
    timing = response.timing
    elapsed_us = round(1e6 * (timed.waited_s + timed.elapsed_s))
    return TimedResponse(timed.value, replace(timing, encode_us=timing.encode_us + elapsed_us))


def add_detector_service(service: DetectorService, server: GrpcServer) -> None:
    """Register the service with a gRPC server that is not started yet."""
    # The generated `add_DetectorServicer_to_server` expects methods that return messages. Without
    # a response serializer, gRPC sends the returned bytes unchanged.
    handlers = {
        "Detect": grpc.unary_unary_rpc_method_handler(service.Detect, pb.DetectRequest.FromString),
        "DetectStream": grpc.stream_stream_rpc_method_handler(
            service.DetectStream, pb.DetectRequest.FromString
        ),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            service.GetModel,
            pb.GetModelRequest.FromString,
            pb.GetModelResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


# The base class does not end open Watch calls, so a graceful shutdown would wait for them until the
# grace period is over.
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
        """Create the health service.

        Until `set_ready` is called, it reports NOT_SERVING for each service and model, except for
        the service "liveness".

        Args:
            services: Full names of the gRPC services.
            models: Function that returns, by model name, whether the model can process requests
                now.
        """
        self._services = frozenset({"", LIVENESS, *services})
        self._models = models
        # Whether the server is ready and not shutting down.
        self.is_running = False
        self._is_stopping = False
        # Set at the next state change, and then replaced by a new event.
        self._changed = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Whether the server is running and the first configured model can process requests."""
        return self.is_running and next(iter(self._models().values()))

    def is_model_serving(self, name: str) -> bool:
        """Return whether the server is running and the model `name` can process requests."""
        return self.is_running and self._models().get(name, False)

    def set_ready(self) -> None:
        """Mark the server as ready. From now on, its health status depends on the models."""
        self.is_running = not self._is_stopping
        self._notify_watchers()

    def stop(self) -> None:
        """Report NOT_SERVING from now on, except for "liveness". End all Watch calls."""
        self.is_running = False
        self._is_stopping = True
        self._notify_watchers()

    async def run(self) -> None:
        """Send changes of health status to the open Watch calls, until cancelled.

        The models are checked once per second.
        """
        known = self._models()
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            if (states := self._models()) != known:
                known = states
                self._notify_watchers()

    async def Check(  # noqa: N802 (named by the protocol)
        self, request: health_pb.HealthCheckRequest, context: _HealthContext
    ) -> health_pb.HealthCheckResponse:
        """Return the status of a service or model."""
        response = self._response_for(request)
        if response.status == health_pb.HealthCheckResponse.SERVICE_UNKNOWN:
            message = (
                f"unknown service {request.service!r}; give the name of a gRPC service or of a "
                f"served model, {LIVENESS!r}, or no name"
            )
            await context.abort(grpc.StatusCode.NOT_FOUND, truncate_message(message))
        return response

    async def Watch(  # noqa: N802
        self, request: health_pb.HealthCheckRequest, context: _HealthContext
    ) -> None:
        """Send the status of a service or model now and after each change."""
        sent = None
        while True:
            changed, is_last = self._changed, self._is_stopping
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

    def _response_for(self, request: health_pb.HealthCheckRequest) -> health_pb.HealthCheckResponse:
        service, response = request.service, health_pb.HealthCheckResponse
        if service in self._services:
            serving = service == LIVENESS or self.is_serving
        elif service in self._models():
            serving = self.is_model_serving(service)
        else:
            return response(status=response.SERVICE_UNKNOWN)
        return response(status=response.SERVING if serving else response.NOT_SERVING)
