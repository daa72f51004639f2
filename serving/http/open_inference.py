"""HTTP routes of the Open Inference Protocol v2, with Triton's extensions."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...protos.inference import open_inference_pb2 as pb
from ..open_inference.service import HTTP_ANSWERS, InferenceService
from ..pipeline.pipeline import ModelRepository
from .endpoint import Endpoint, HttpCall, JsonResponse, Transport, value_from_message
from .open_inference_json import (
    BinaryOutputs,
    IndexRequest,
    ModelControlRequest,
    http_from_infer_response,
    infer_request_from_http,
    parameter_messages,
    parse_json,
)

# Header with the size of the JSON part of a body that continues with binary data.
JSON_LENGTH: Final = "inference-header-content-length"
# Requests and responses up to this size in bytes are converted between HTTP bodies and protobuf
# messages in the event loop, larger ones in a thread.
_QUICK_BYTES: Final = 256 << 10

_SERVICE: Final = "/inference.GRPCInferenceService/"


class OpenInferenceRoutes:
    """HTTP routes below `/v2`. They call the methods of `InferenceService` that gRPC also calls."""

    def __init__(
        self, service: InferenceService, models: ModelRepository, transport: Transport
    ) -> None:
        self._service = service
        self._models = models
        self._transport = transport

    def routes(self) -> Iterator[Route]:
        """Yield the routes of the Open Inference Protocol."""
        get, post = partial(self._route, "GET"), partial(self._route, "POST")
        yield get("/v2", "ServerMetadata", self._server_metadata)
        yield get("/v2/health/live", "ServerLive", self._server_live)
        yield get("/v2/health/ready", "ServerReady", self._server_ready)
        yield get("/v2/models/stats", "ModelStatistics", self._statistics)
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            yield get(model, "ModelMetadata", self._model_metadata)
            yield get(f"{model}/ready", "ModelReady", self._model_ready)
            yield get(f"{model}/config", "ModelConfig", self._model_config)
            yield get(f"{model}/stats", "ModelStatistics", self._statistics)
            yield post(f"{model}/infer", "ModelInfer", self._infer)
        yield post("/v2/repository/index", "RepositoryIndex", self._index)
        for path, answer in HTTP_ANSWERS.items():
            yield Route(f"/v2{path}", partial(_unsupported, answer), methods=["GET", "POST"])
        models = "/v2/repository/models/{model}"
        yield post(f"{models}/load", "RepositoryModelLoad", self._load)
        yield post(f"{models}/unload", "RepositoryModelUnload", self._unload)

    def _route(self, verb: str, path: str, name: str, respond: Any) -> Route:
        return Endpoint(self._transport, verb, path, f"{_SERVICE}{name}", respond).route

    async def _server_metadata(self, call: HttpCall) -> Response:
        response = await self._service.ServerMetadata(pb.ServerMetadataRequest(), call)
        return JsonResponse(value_from_message(response))

    async def _server_live(self, call: HttpCall) -> Response:
        response = await self._service.ServerLive(pb.ServerLiveRequest(), call)
        return JsonResponse(value_from_message(response))

    async def _server_ready(self, call: HttpCall) -> Response:
        response = await self._service.ServerReady(pb.ServerReadyRequest(), call)
        return _readiness(value_from_message(response))

    async def _model_ready(self, call: HttpCall) -> Response:
        name, version = _model_of(call)
        request = pb.ModelReadyRequest(name=name, version=version)
        response = await self._service.ModelReady(request, call)
        served = self._models.find_or_first(name).model.version
        is_known = name in self._models.states and version in ("", served)
        value = {"name": name, **value_from_message(response)}
        return _readiness(value) if is_known else JsonResponse(value, 404)

    async def _model_metadata(self, call: HttpCall) -> Response:
        name, version = _model_of(call)
        request = pb.ModelMetadataRequest(name=name, version=version)
        response = await self._service.ModelMetadata(request, call)
        return JsonResponse(value_from_message(response))

    async def _model_config(self, call: HttpCall) -> Response:
        name, version = _model_of(call)
        request = pb.ModelConfigRequest(name=name, version=version)
        response = await self._service.ModelConfig(request, call)
        return JsonResponse(value_from_message(response.config))

    async def _statistics(self, call: HttpCall) -> Response:
        name, version = _model_of(call)
        request = pb.ModelStatisticsRequest(name=name, version=version)
        response = await self._service.ModelStatistics(request, call)
        return JsonResponse(value_from_message(response))

    async def _index(self, call: HttpCall) -> Response:
        parsed = parse_json(IndexRequest, call.take_body())
        request = pb.RepositoryIndexRequest(ready=parsed.ready)
        response = await self._service.RepositoryIndex(request, call)
        return JsonResponse(value_from_message(response)["models"])

    async def _load(self, call: HttpCall) -> Response:
        name, _ = _model_of(call)
        request = pb.RepositoryModelLoadRequest(model_name=name, parameters=_control(call))
        await self._service.RepositoryModelLoad(request, call)
        return JsonResponse({})

    async def _unload(self, call: HttpCall) -> Response:
        name, _ = _model_of(call)
        request = pb.RepositoryModelUnloadRequest(model_name=name, parameters=_control(call))
        await self._service.RepositoryModelUnload(request, call)
        return JsonResponse({})

    async def _infer(self, call: HttpCall) -> Response:
        request, binary = await self._request_of(call)
        inferring = self._service.ModelInfer(request, call)
        del request  # `inferring` releases it once its images are decoded
        response = await inferring
        body, json_length = await self._body_of(call.peer(), response, binary)
        if json_length is None:
            return JsonResponse(body)
        headers = {JSON_LENGTH: str(json_length)}
        return Response(body, headers=headers, media_type="application/octet-stream")

    async def _request_of(self, call: HttpCall) -> tuple[pb.ModelInferRequest, BinaryOutputs]:
        name, version = _model_of(call)
        json_length = call.request.headers.get(JSON_LENGTH)
        body = call.take_body()
        convert = partial(infer_request_from_http, body, json_length, name, version)
        if len(body) <= _QUICK_BYTES:
            return convert()
        del body
        converting = self._models.resources.threads.run(call.peer(), convert)
        del convert
        return (await converting).value

    async def _body_of(
        self, peer: str, response: pb.ModelInferResponse, binary: BinaryOutputs
    ) -> tuple[bytes, int | None]:
        convert = partial(http_from_infer_response, response, binary)
        if sum(map(len, response.raw_output_contents)) <= _QUICK_BYTES:
            return convert()
        return (await self._models.resources.threads.run(peer, convert)).value


async def _unsupported(answer: str, _: Request) -> Response:
    return JsonResponse({"error": answer}, 501)


def _model_of(call: HttpCall) -> tuple[str, str]:
    """Return model name and version from the path; "" for each that the path does not contain."""
    parameters = call.request.path_params
    return parameters.get("model", ""), parameters.get("version", "")


def _control(call: HttpCall) -> dict[str, pb.ModelRepositoryParameter]:
    parameters = parse_json(ModelControlRequest, call.take_body()).parameters
    return parameter_messages(pb.ModelRepositoryParameter, parameters)


def _readiness(value: dict[str, Any]) -> Response:
    return JsonResponse(value, 200 if value["ready"] else 503)
