"""The gRPC service: requests in, answers out."""

from collections.abc import AsyncIterator, Awaitable
from functools import partial

import grpc

from ..protos.maskrcnn.v1 import detector_pb2 as pb
from ..protos.maskrcnn.v1 import detector_pb2_grpc as pb_grpc
from .config import ServeConfig
from .messages import (
    encoded_detections,
    model_response,
    options_from_request,
    response_from_answer,
    terms_from_request,
)
from .pipeline import Pipeline
from .transport.refusals import refusal_from_error, refusing
from .transport.streams import Place, Streams

_DetectContext = grpc.aio.ServicerContext[pb.DetectRequest, pb.DetectResponse]
_StreamContext = grpc.aio.ServicerContext[pb.DetectRequest, pb.DetectStreamResponse]
_ModelContext = grpc.aio.ServicerContext[pb.GetModelRequest, pb.GetModelResponse]


class DetectorService(pb_grpc.DetectorServicer):
    """Answers for one pipeline.

    Requests can be large, and many wait for the model: none is held longer than until its image is
    taken from it.
    """

    def __init__(self, pipeline: Pipeline, config: ServeConfig) -> None:
        """Serve a pipeline, which is configured so."""
        self._pipeline = pipeline
        self._config = config
        self._streams = Streams[pb.DetectRequest](pipeline, images=lambda _: 1)
        self.stop_reading = self._streams.stop
        """Ends the streams when what they asked for so far is answered."""

    def Detect(  # noqa: N802 (named by the protocol)
        self, request: pb.DetectRequest, context: _DetectContext
    ) -> Awaitable[pb.DetectResponse]:
        """Detect in one image."""
        peer = context.peer()
        return refusing(self._response_to(peer, request, self._pipeline.places.hold(peer)), context)

    async def DetectStream(  # noqa: N802
        self, requests: AsyncIterator[pb.DetectRequest], context: _StreamContext
    ) -> None:
        """Detect in each image of a stream, several at once."""
        answer = partial(self._stream_response_to, context.peer())
        await self._streams.answer(requests, answer, context)

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: _ModelContext
    ) -> pb.GetModelResponse:
        """Describe the model."""
        model = self._pipeline.model
        buckets = model.batcher().info.buckets
        return model_response(model.manifest, buckets, model.precisions, self._config)

    async def _stream_response_to(
        self, peer: str, request: pb.DetectRequest, place: Place
    ) -> pb.DetectStreamResponse:
        request_id, answer = request.id, self._response_to(peer, request, place)
        del request
        try:
            response = await answer
        except Exception as error:
            status, message = refusal_from_error(error)
            refusal = pb.Error(code=status.value[0], message=message)
            return pb.DetectStreamResponse(id=request_id, error=refusal)
        return pb.DetectStreamResponse(id=request_id, response=response)

    async def _response_to(
        self, peer: str, request: pb.DetectRequest, place: Place
    ) -> pb.DetectResponse:
        model = self._pipeline.model
        name = model.manifest.model_name
        if request.HasField("precision"):
            name = f"{name}-{request.precision}"
        watch = self._pipeline.telemetry.request(model, name, request.id, peer)
        with watch as timings, model.use():
            options = options_from_request(request)
            terms = terms_from_request(request, peer, name)
            async with self._pipeline.time_limit(terms.timeout_s), place:
                detecting = self._pipeline.detect(
                    request.image, options, encoded_detections, terms, model
                )
                request_id = request.id
                del request
                answer = await detecting
            timings.append(answer.timing)
            return response_from_answer(answer, request_id)
