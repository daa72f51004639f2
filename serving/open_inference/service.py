"""gRPC service inference.GRPCInferenceService (Open Inference Protocol v2)."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from typing import Any, Final, NoReturn

import grpc

from ...model.bundle.manifest import BundleError
from ...protos.inference import open_inference_pb2 as pb
from ...protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from ..config import ServeConfig
from ..errors import (
    BackendError,
    InvalidRequestError,
    ModelNotFoundError,
    ReloadError,
    StoppingError,
)
from ..grpc_status import CallContext, aborting, status_and_message
from ..pipeline.pipeline import ModelRepository, Pipeline
from ..rpc.services import HealthService
from ..rpc.streams import Admission, Streams
from .inference import infer
from .input_images import SHARED_MEMORY
from .responses import model_config, model_metadata, server_metadata

_READY = "READY"

_StreamContext = grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelStreamInferResponse]

_SERVICE: Final = f"/{pb.DESCRIPTOR.services_by_name['GRPCInferenceService'].full_name}/"
# Error messages of unsupported methods, by prefix of the method's name.
_ANSWERS: Final = {
    "SystemSharedMemory": SHARED_MEMORY,
    "CudaSharedMemory": SHARED_MEMORY,
    "TraceSetting": "trace settings cannot be changed; start the server with --tracing true",
    "LogSettings": "log settings cannot be changed; start the server with --log-level",
}
# Error messages of unsupported HTTP paths below `/v2`.
HTTP_ANSWERS: Final = {
    "/systemsharedmemory/{rest:path}": SHARED_MEMORY,
    "/cudasharedmemory/{rest:path}": SHARED_MEMORY,
    "/trace/setting": _ANSWERS["TraceSetting"],
    "/models/{model}/trace/setting": _ANSWERS["TraceSetting"],
    "/logging": _ANSWERS["LogSettings"],
}


class InferenceService(GRPCInferenceServiceServicer):
    """Servicer of inference.GRPCInferenceService.

    A request names a served model as NAME, which selects the model's default precision, or as
    `NAME-PRECISION`, which selects the given precision.
    """

    def __init__(self, models: ModelRepository, config: ServeConfig, health: HealthService) -> None:
        self._models = models
        self._config = config
        self._health = health
        self._streams = Streams[pb.ModelInferRequest](self._pipeline_of, self._image_count)
        # Tasks that load or unload a model.
        self._changes: set[asyncio.Task[None]] = set()

    def stop_reading(self) -> None:
        """Stop reading requests from streams, and cancel pending loads and unloads of models."""
        self._streams.stop()
        for task in self._changes:
            task.cancel()

    async def ServerLive(  # noqa: N802 (named by the protocol)
        self, request: pb.ServerLiveRequest, context: CallContext
    ) -> pb.ServerLiveResponse:
        """Return `live=True`: a server that responds is live."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, request: pb.ServerReadyRequest, context: CallContext
    ) -> pb.ServerReadyResponse:
        """Return whether the server can process inference requests."""
        return pb.ServerReadyResponse(ready=self._health.is_serving)

    async def ModelReady(  # noqa: N802
        self, request: pb.ModelReadyRequest, context: CallContext
    ) -> pb.ModelReadyResponse:
        """Return whether a model can process inference requests; false for an unknown model."""
        version = self._models.find_or_first(request.name).model.version
        ready = request.version in ("", version) and self._health.is_model_serving(request.name)
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: CallContext
    ) -> pb.ServerMetadataResponse:
        """Return the server's name, version and protocol extensions."""
        return server_metadata()

    @aborting
    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: CallContext
    ) -> pb.ModelMetadataResponse:
        """Describe a model's tensors and classes."""
        pipeline, _ = self._find(request.name, request.version)
        return model_metadata(request.name, pipeline.model)

    @aborting
    async def ModelConfig(  # noqa: N802
        self, request: pb.ModelConfigRequest, context: CallContext
    ) -> pb.ModelConfigResponse:
        """Describe the configuration of a model, such as its batch size and instances."""
        pipeline, _ = self._find(request.name, request.version)
        return model_config(request.name, pipeline.model, self._config)

    @aborting
    async def ModelStatistics(  # noqa: N802
        self, request: pb.ModelStatisticsRequest, context: CallContext
    ) -> pb.ModelStatisticsResponse:
        """Return the request statistics of one model, or of all if the request names no model."""
        if request.name:
            self._find(request.name, request.version)
        names = [request.name] if request.name else list(self._models.states)
        statistics = self._models.resources.telemetry.metrics.statistics
        keys = [(name, self._models.find(name).model.version) for name in names]
        return pb.ModelStatisticsResponse(
            model_stats=[statistics[key].message(*key) for key in keys]
        )

    async def RepositoryIndex(  # noqa: N802
        self, request: pb.RepositoryIndexRequest, context: CallContext
    ) -> pb.RepositoryIndexResponse:
        """List the models and their states."""
        models = map(self._model_index, self._models.states)
        return pb.RepositoryIndexResponse(
            models=[model for model in models if model.state == _READY or not request.ready]
        )

    def _model_index(self, name: str) -> pb.RepositoryIndexResponse.ModelIndex:
        model = self._models.find(name).model
        index = pb.RepositoryIndexResponse.ModelIndex(name=name, version=model.version)
        if self._health.is_model_serving(name):
            index.state = _READY
        else:
            index.state = "UNAVAILABLE"
            index.reason = (
                "unloaded"
                if model.is_unloaded
                else "the server is starting or stopping, or the model's workers are restarting"
            )
        return index

    @aborting
    async def RepositoryModelLoad(  # noqa: N802
        self, request: pb.RepositoryModelLoadRequest, context: CallContext
    ) -> pb.RepositoryModelLoadResponse:
        """Load an unloaded model, or reload a served one. If this fails, the model is unchanged."""
        _reject_unknown(request.parameters, "RepositoryModelLoad has no parameters")
        try:
            pipeline = await self._models.find_loadable(request.model_name)
            await self._run_to_end(pipeline.lifecycle.reload)
        except (BundleError, BackendError) as error:
            raise ReloadError(str(error)) from error
        return pb.RepositoryModelLoadResponse()

    @aborting
    async def RepositoryModelUnload(  # noqa: N802
        self, request: pb.RepositoryModelUnloadRequest, context: CallContext
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model: reject new requests, drain in-flight ones, end its worker processes."""
        pipeline, precision = self._find(request.model_name, "")
        if precision is not None:
            raise InvalidRequestError(
                f"{request.model_name!r} is one precision of a model and cannot be unloaded alone; "
                f"unload {pipeline.model.manifest.model_name!r}, or restart the server "
                f"without precision {precision}"
            )
        # Models here have no dependents, so this parameter has no effect.
        parameters = set(request.parameters) - {"unload_dependents"}
        _reject_unknown(parameters, "only unload_dependents is allowed")
        await self._run_to_end(pipeline.lifecycle.unload)
        return pb.RepositoryModelUnloadResponse()

    async def _run_to_end(self, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Load or unload a model by calling `change`, even if the client disconnects meanwhile."""
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
            # Mark the exception as retrieved. Otherwise asyncio logs it if the client has
            # disconnected.
            task.exception()

    @aborting
    def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: CallContext
    ) -> Awaitable[pb.ModelInferResponse]:
        """Detect objects in the images of a request."""
        return self._response_to(context.peer(), request)

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[pb.ModelInferRequest], context: _StreamContext
    ) -> None:
        """Process the requests of a stream concurrently. Send responses in the requests' order."""
        respond = functools.partial(self._stream_response_to, context.peer())
        await self._streams.process(requests, respond, context, in_order=True)

    def _image_count(self, request: pb.ModelInferRequest) -> int:
        """Return the number of images: shape[0] of the input, or 1 if shape[0] is invalid."""
        shape = request.inputs[0].shape if request.inputs else ()
        return shape[0] if shape and 1 <= shape[0] <= self._config.images_per_request else 1

    async def _stream_response_to(
        self, peer: str, request: pb.ModelInferRequest, admission: Admission
    ) -> pb.ModelStreamInferResponse:
        failed = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        responding = self._response_to(peer, request, admission)
        del request
        try:
            response = await responding
        except Exception as error:
            _, message = status_and_message(error)
            return pb.ModelStreamInferResponse(error_message=message, infer_response=failed)
        response.parameters["triton_final_response"].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=response)

    async def _response_to(
        self, peer: str, request: pb.ModelInferRequest, admission: Admission | None = None
    ) -> pb.ModelInferResponse:
        # All images of the request use this model, even if the bundle is reloaded meanwhile.
        pipeline = self._pipeline_of(request)
        model = pipeline.model
        recording = pipeline.telemetry.request(
            request.model_name, model.names, model.version, request.id, peer, request.ByteSize()
        )
        with recording as timings:
            self._find(request.model_name, request.model_version)
            with model.use():
                pipeline.rate_limits.charge(self._image_count(request))
                inferring = infer(
                    request,
                    pipeline,
                    model,
                    self._config,
                    peer=peer,
                    admission=admission,
                )
                del request  # `inferring` releases it once its images are decoded
                response, image_timings = await inferring
            timings += image_timings
        return response

    def _pipeline_of(self, request: pb.ModelInferRequest) -> Pipeline:
        return self._models.find_or_first(request.model_name)

    def _find(self, name: str, version: str) -> tuple[Pipeline, str | None]:
        """Return the pipeline that serves a model name, and the name's precision suffix.

        If the name has no suffix, the second value is None. An empty `version` matches any version.

        Raises:
            ModelNotFoundError: the model or the version is not served.
        """
        pipeline = self._models.find(name)
        if version not in ("", pipeline.model.version):
            raise ModelNotFoundError(
                f"version {version!r} of model {name!r} is not served; "
                f"leave the version out, or use {pipeline.model.version}"
            )
        return pipeline, pipeline.model.names[name]


def _reject_unknown(names: Collection[str], hint: str) -> None:
    if names:
        raise InvalidRequestError(f"unknown parameter {min(names)!r}; {hint}")


class UnsupportedMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in stubs only
    """Handler that rejects methods of Triton's protocol that this server does not support.

    The status is UNIMPLEMENTED, and the message explains the reason. Without this handler, gRPC
    would respond with the message "Method not found!".
    """

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return a handler that rejects an unsupported method. Return None for other methods."""
        method = handler_call_details.method
        for name, answer in _ANSWERS.items():
            if method.startswith(f"{_SERVICE}{name}"):
                # ServerLiveRequest has no fields, so any message parses as one.
                parse = pb.ServerLiveRequest.FromString
                return grpc.unary_unary_rpc_method_handler(functools.partial(_abort, answer), parse)
        return None


async def _abort(answer: str, _: object, context: CallContext) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, answer)
