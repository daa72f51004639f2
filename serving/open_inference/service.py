"""The service inference.GRPCInferenceService."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from typing import Any

import grpc

from ...model.manifest import BundleError
from ...protos.inference import open_inference_pb2 as pb
from ...protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from ..config import ServeConfig
from ..daemon_threads import in_daemon_thread
from ..errors import (
    BackendError,
    InvalidRequestError,
    ModelNotFoundError,
    ReloadError,
    StoppingError,
)
from ..pipeline import Pipeline
from ..transport.health import HealthService
from ..transport.refusals import refusal_from_error, refusing
from ..transport.streams import Place, Streams
from .inference import infer
from .metadata import model_config, model_metadata, server_metadata
from .responses import MODEL_VERSION

_READY = "READY"

_Context = grpc.aio.ServicerContext[Any, Any]
_StreamContext = grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelStreamInferResponse]
_Method = Callable[["InferenceService", Any, _Context], Awaitable[Any]]


def _refusing(method: _Method) -> _Method:
    """A method that answers with a status where it would raise."""

    @functools.wraps(method)
    def answer(self: "InferenceService", request: Any, context: _Context) -> Awaitable[Any]:
        return refusing(method(self, request, context), context)

    return answer


class InferenceService(GRPCInferenceServiceServicer):
    """Answers for one pipeline.

    Its model goes by the name in the bundle, and by `NAME-PRECISION` in each precision.
    """

    def __init__(self, pipeline: Pipeline, config: ServeConfig, health: HealthService) -> None:
        """Serve a pipeline.

        Args:
            pipeline: What detects.
            config: How it is configured.
            health: What knows whether the server is ready.
        """
        self._pipeline = pipeline
        self._config = config
        self._health = health
        self._max_batch = config.images_per_request
        self._streams = Streams[pb.ModelInferRequest](pipeline, self._places_of)
        self._changes: set[asyncio.Task[None]] = set()

    def stop_reading(self) -> None:
        """End the streams when what they asked for so far is answered, and give up loading."""
        self._streams.stop()
        for task in self._changes:
            task.cancel()

    async def ServerLive(  # noqa: N802 (named by the protocol)
        self, request: pb.ServerLiveRequest, context: _Context
    ) -> pb.ServerLiveResponse:
        """Whether the server answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, request: pb.ServerReadyRequest, context: _Context
    ) -> pb.ServerReadyResponse:
        """Whether the server can be sent inferences."""
        return pb.ServerReadyResponse(ready=self._health.is_serving)

    async def ModelReady(  # noqa: N802
        self, request: pb.ModelReadyRequest, context: _Context
    ) -> pb.ModelReadyResponse:
        """Whether a model can; it is not if it is not served at all."""
        is_version = request.version in ("", MODEL_VERSION)
        ready = is_version and self._health.is_model_serving(request.name)
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: _Context
    ) -> pb.ServerMetadataResponse:
        """Describe the server."""
        return server_metadata()

    @_refusing
    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: _Context
    ) -> pb.ModelMetadataResponse:
        """Describe a model's tensors and classes."""
        self._precision_of(request.name, request.version)
        return model_metadata(request.name, self._pipeline.model)

    @_refusing
    async def ModelConfig(  # noqa: N802
        self, request: pb.ModelConfigRequest, context: _Context
    ) -> pb.ModelConfigResponse:
        """Describe how a model is served."""
        self._precision_of(request.name, request.version)
        return model_config(request.name, self._pipeline.model, self._config)

    @_refusing
    async def ModelStatistics(  # noqa: N802
        self, request: pb.ModelStatisticsRequest, context: _Context
    ) -> pb.ModelStatisticsResponse:
        """Tell what became of the requests for a model, or for each."""
        if request.name:
            self._precision_of(request.name, request.version)
        names = [request.name] if request.name else list(self._pipeline.model.names)
        statistics = self._pipeline.telemetry.metrics.statistics
        return pb.ModelStatisticsResponse(
            model_stats=[statistics[name].message(name, MODEL_VERSION) for name in names]
        )

    async def RepositoryIndex(  # noqa: N802
        self, request: pb.RepositoryIndexRequest, context: _Context
    ) -> pb.RepositoryIndexResponse:
        """List the models."""
        models = map(self._index_of, self._pipeline.model.names)
        return pb.RepositoryIndexResponse(
            models=[model for model in models if model.state == _READY or not request.ready]
        )

    def _index_of(self, name: str) -> pb.RepositoryIndexResponse.ModelIndex:
        index = pb.RepositoryIndexResponse.ModelIndex(name=name, version=MODEL_VERSION)
        if self._health.is_model_serving(name):
            index.state = _READY
        else:
            index.state = "UNAVAILABLE"
            index.reason = (
                "unloaded"
                if self._pipeline.model.is_unloaded
                else "the server starts or stops, or the model broke and is loaded again"
            )
        return index

    @_refusing
    async def RepositoryModelLoad(  # noqa: N802
        self, request: pb.RepositoryModelLoadRequest, context: _Context
    ) -> pb.RepositoryModelLoadResponse:
        """Load the bundle anew from where it is; if that fails, all stays as it was."""
        _refuse_unknown(request.parameters, "the bundle is loaded as it is")
        try:
            await self._check_loadable(request.model_name)
            await self._see_through(self._pipeline.reload)
        except (BundleError, BackendError) as error:
            raise ReloadError(str(error)) from error
        return pb.RepositoryModelLoadResponse()

    @_refusing
    async def RepositoryModelUnload(  # noqa: N802
        self, request: pb.RepositoryModelUnloadRequest, context: _Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Take no more requests for the model, answer those in progress, and end its engines."""
        precision = self._precision_of(request.model_name, "")
        if precision is not None:
            raise InvalidRequestError(
                f"{request.model_name!r} is the model in {precision}, which goes with the others; "
                f"unload {self._pipeline.model.manifest.model_name!r}, or serve without {precision}"
            )
        parameters = set(request.parameters) - {"unload_dependents"}  # of which there are none
        _refuse_unknown(parameters, "only unload_dependents is, and changes nothing")
        await self._see_through(self._pipeline.unload)
        return pb.RepositoryModelUnloadResponse()

    async def _check_loadable(self, name: str) -> None:
        """Refuse what is neither served nor the name of the bundle that lies there by now."""
        try:
            self._precision_of(name, "")
        except ModelNotFoundError:
            if name != await in_daemon_thread(self._pipeline.stored_name):
                raise

    async def _see_through(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Change what is served; a client that goes does not stop it half way."""
        if not self._health.is_running:
            raise StoppingError("the server is starting or stopping")
        task = asyncio.create_task(change())
        self._changes.add(task)
        task.add_done_callback(self._end_change)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise StoppingError("the server is stopping") from None
            raise

    def _end_change(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # or asyncio would log it where the client is gone

    @_refusing
    def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: _Context
    ) -> Awaitable[pb.ModelInferResponse]:
        """Detect in the images of a request."""
        return self._response_to(context.peer(), request)

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[pb.ModelInferRequest], context: _StreamContext
    ) -> None:
        """Answer the requests of a stream in their order, several at once."""
        answer = functools.partial(self._stream_response_to, context.peer())
        await self._streams.answer(requests, answer, context, in_order=True)

    def _places_of(self, request: pb.ModelInferRequest) -> int:
        """Places that a request takes, if its images are as many as may be."""
        shape = request.inputs[0].shape if request.inputs else ()
        return shape[0] if shape and 1 <= shape[0] <= self._max_batch else 1

    async def _stream_response_to(
        self, peer: str, request: pb.ModelInferRequest, place: Place
    ) -> pb.ModelStreamInferResponse:
        refused = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        answer = self._response_to(peer, request, place)
        del request
        try:
            response = await answer
        except Exception as error:
            _, message = refusal_from_error(error)
            return pb.ModelStreamInferResponse(error_message=message, infer_response=refused)
        response.parameters["triton_final_response"].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=response)

    async def _response_to(
        self, peer: str, request: pb.ModelInferRequest, place: Place | None = None
    ) -> pb.ModelInferResponse:
        model = self._pipeline.model  # for all images, though the bundle be loaded anew meanwhile
        watch = self._pipeline.telemetry.request(model, request.model_name, request.id, peer)
        with watch as timings:
            precision = self._precision_of(request.model_name, request.model_version)
            with model.use():
                answer = infer(
                    request,
                    self._pipeline,
                    model,
                    precision=precision,
                    peer=peer,
                    max_batch=self._max_batch,
                    max_pixels=self._config.max_pixels,
                    place=place,
                )
                del request  # so that it is gone when its images are decoded
                response, found = await answer
            timings += found
        return response

    def _precision_of(self, name: str, version: str) -> str | None:
        """The precision that a model's name asks for, none for the default.

        Raises:
            ModelNotFoundError: the model is not served.
        """
        precisions = self._pipeline.model.names
        if name not in precisions:
            raise ModelNotFoundError(
                f"model {name!r} is not served; served are {', '.join(precisions)}"
            )
        if version not in ("", MODEL_VERSION):
            raise ModelNotFoundError(
                f"version {version!r} of model {name!r} is not served; "
                f"leave it out, or ask for {MODEL_VERSION}"
            )
        return precisions[name]


def _refuse_unknown(names: Collection[str], remark: str) -> None:
    if names:
        raise InvalidRequestError(f"parameter {min(names)!r} is not known; {remark}")
