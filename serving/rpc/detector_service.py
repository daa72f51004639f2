"""gRPC service maskrcnn.v1.Detector."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..config import ServeConfig
from ..detections import ResponseEncoder, TimedResponse
from ..grpc_calls import CallContext
from ..grpc_status import abort_on_error, status_and_message
from ..messages import (
    encode_detections,
    model_response,
    options_from_request,
    response_bytes,
    scheduling_from_request,
    stream_response_bytes,
)
from ..pipeline.admission import request_deadline
from ..pipeline.model_repository import ModelRepository
from ..pipeline.pipeline import InferenceRequest, Pipeline
from ..pipeline.served_model import ServedModel
from .listener import GrpcServer
from .streams import Admission, Streams

_SERVICE = pb.DESCRIPTOR.services_by_name["Detector"].full_name

_StreamContext = grpc.aio.ServicerContext[pb.DetectRequest, bytes]


class DetectorService:
    """Servicer of maskrcnn.v1.Detector. Register it with `add_detector_service`.

    `Detect` and `DetectStream` return serialised responses: the worker process or thread that
    computes the detections also serialises them.
    """

    # Requests can be large, and many wait for the model at a time. Therefore each method drops its
    # reference to the request (`del request`) once the image has been taken from it.

    def __init__(self, models: ModelRepository, config: ServeConfig) -> None:
        self._models = models
        self._config = config
        self._streams = Streams[pb.DetectRequest](self._pipeline_of, image_count=lambda _: 1)
        # Stops reading requests from streams; see `Streams.stop`.
        self.stop_reading = self._streams.stop

    def Detect(  # noqa: N802 (named by the protocol)
        self, request: pb.DetectRequest, context: CallContext
    ) -> Awaitable[bytes]:
        """Detect objects in one image."""
        peer = context.peer()
        return abort_on_error(self._response_to(peer, request), context)

    async def DetectStream(  # noqa: N802
        self, requests: AsyncIterator[pb.DetectRequest], context: _StreamContext
    ) -> None:
        """Detect objects in the images of a stream. Several images are processed concurrently."""
        respond = partial(self._stream_response_to, context.peer())
        await self._streams.process(requests, respond, context)

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: CallContext
    ) -> pb.GetModelResponse:
        """Describe a served model."""
        return await abort_on_error(self._description(request), context)

    async def _description(self, request: pb.GetModelRequest) -> pb.GetModelResponse:
        model = self._model_of(request.model)
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
            finish: Function that converts the encoder's result to the value to return. It runs in a
                thread of this process. The wait for the thread and the run count as encoding time.
                None: return the encoder's result.
            finish_memory: Peak memory of `finish` in bytes per pixel of the image.

        Returns:
            Result of `finish`, or of `encoder` if `finish` is None, with the image's timing.

        Raises:
            InvalidRequestError: an option is out of range.
            ModelNotFoundError: no served model has the name in the request.
            ExpiredError: the request exceeded its time limit.
            ImageError, ServingError: see `Pipeline.detect`.
        """
        pipeline = self._pipeline_of(request)
        model = pipeline.model
        name = model.manifest.model_name
        suffix = model.names.get(request.model)
        if suffix and not request.HasField("precision"):
            request.precision = suffix
        if request.HasField("precision"):
            name = f"{name}-{request.precision}"
        source = request.image
        request.ClearField("image")  # else `ByteSize` would copy it
        size = request.ByteSize() + len(source)
        recording = pipeline.telemetry.request(name, model.names, request.id, peer, size)
        with recording as timings, self._model_of(request.model).use():
            pipeline.rate_limits.charge(images=1)
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

    def _pipeline_of(self, request: pb.DetectRequest) -> Pipeline:
        return self._models.find_or_first(request.model)

    def _model_of(self, name: str) -> ServedModel:
        """Return the served model with this name, or the first model if the name is empty."""
        return (self._models.find(name) if name else self._models.first).model


async def _finished(
    pipeline: Pipeline,
    peer: str,
    response: TimedResponse[Any],
    finish: Callable[[Any], Any],
    memory: int,
) -> TimedResponse[Any]:
    found = response.value
    size = memory * found.height * found.width
    async with pipeline.decode_memory.reserve_in_thread(peer, size):
        timed = await pipeline.threads.run(peer, finish, found)
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
