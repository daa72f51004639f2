"""HTTP routes below `/v1`: detection in one image, model description, sample images."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from ...model.bundle.manifest import SAMPLES_FOLDER
from ...model.image_decoding import IMAGE_SUFFIXES
from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..detections import TimedResponse, Timing, not_encoded
from ..errors import InvalidRequestError
from ..grpc_status import abort_on_error
from ..host import in_daemon_thread
from ..result_formats import BYTES_PER_PIXEL, annotated_png, json_from_detections
from ..rpc.services import DetectorService
from .endpoint import Endpoint, HttpCall, JsonResponse, Transport, value_from_message

# gRPC methods whose rules for access and limits apply to the routes.
_DETECT: Final = "/maskrcnn.v1.Detector/Detect"
_GET_MODEL: Final = "/maskrcnn.v1.Detector/GetModel"
_MASK_FORMATS: Final = {
    "rle": pb.MASK_FORMAT_RLE,
    "polygon": pb.MASK_FORMAT_POLYGON,
    "none": pb.MASK_FORMAT_NONE,
}

_Uint32 = Annotated[int, Field(ge=0, lt=2**32)]
_Uint64 = Annotated[int, Field(ge=0, lt=2**64)]


class ModelQuery(BaseModel):
    """Query parameters of `/v1/model` and `/v1/samples`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: Annotated[str, Field(description="Name of the model. Default: the server's first.")] = ""


class DetectQuery(ModelQuery):
    """Query parameters of `/v1/detect`, named after fields of `maskrcnn.v1.DetectRequest`."""

    score_threshold: Annotated[
        float, Field(description="Return only detections with a higher score; 0..1.")
    ] = 0.0
    max_detections: Annotated[
        _Uint32 | None, Field(description="Maximum number of detections, by descending score.")
    ] = None
    mask_format: Annotated[
        Literal["rle", "polygon", "none"], Field(description="Format of `segmentation`.")
    ] = "rle"
    precision: Annotated[
        str | None, Field(description="One of the served precisions. Default: the first.")
    ] = None
    priority: Annotated[_Uint32 | None, Field(description="1 (most urgent), 2 (default) or 3.")] = (
        None
    )
    timeout_us: Annotated[
        _Uint64 | None, Field(description="Time limit of the request in microseconds.")
    ] = None


_QueryT = TypeVar("_QueryT", bound=ModelQuery)


class DetectionRoutes:
    """HTTP routes below `/v1`. They call `DetectorService`, or read a bundle's sample images."""

    def __init__(self, service: DetectorService, transport: Transport) -> None:
        self._service = service
        self._endpoint = partial(Endpoint, transport)

    def routes(self) -> Iterator[Route]:
        """Yield the routes of detection, model description and sample images."""
        get = partial(self._endpoint, "GET")
        yield self._endpoint("POST", "/v1/detect", _DETECT, self._detect).route
        yield get("/v1/model", _GET_MODEL, self._model).route
        yield get("/v1/samples", _GET_MODEL, self._sample_names).route
        yield get("/v1/samples/{name}", _GET_MODEL, self._sample).route

    async def _detect(self, call: HttpCall) -> Response:
        headers = call.request.headers
        if headers.get("content-type", "").lower().startswith("multipart/"):
            raise HTTPException(
                415,
                "send the image file itself as the body, as in curl --data-binary @street.jpg; "
                "forms are not accepted",
            )
        as_png = _prefers_png(headers.get("accept", ""))
        request = _request_from_query(call, as_png)
        peer = call.peer()
        if as_png:
            finish = partial(annotated_png, request.image)
            detecting = self._service.detect(
                peer, request, not_encoded, finish=finish, finish_memory=BYTES_PER_PIXEL
            )
            del finish
        else:
            detecting = self._service.detect(peer, request, json_from_detections)
        del request
        response = await abort_on_error(detecting, call)
        timing = {"server-timing": _server_timing(response.timing)}
        if as_png:
            return Response(response.value, headers=timing, media_type="image/png")
        return JsonResponse(_with_timing(response), headers=timing)

    async def _model(self, call: HttpCall) -> Response:
        request = pb.GetModelRequest(model=_model_name(call))
        return JsonResponse(value_from_message(await self._service.GetModel(request, call)))

    async def _sample_names(self, call: HttpCall) -> Response:
        return JsonResponse(sorted(await in_daemon_thread(self._sample_files, _model_name(call))))

    async def _sample(self, call: HttpCall) -> Response:
        # Only files that `/v1/samples` lists are opened, so that no path leads out of the folder.
        files = await in_daemon_thread(self._sample_files, _model_name(call))
        path = files.get(call.request.path_params["name"])
        if path is None:
            raise HTTPException(
                404, "the model has no sample image of this name; /v1/samples lists the names"
            )
        kind = "jpeg" if path.suffix.lower() in (".jpg", ".jpeg") else path.suffix[1:].lower()
        return Response(await in_daemon_thread(path.read_bytes), media_type=f"image/{kind}")

    def _sample_files(self, model: str) -> dict[str, Path]:
        # Folder of the served version. A newer one may exist, or this one may be removed.
        folder = self._service.find(model).model.bundle / SAMPLES_FOLDER
        if not folder.is_dir():
            return {}
        root = folder.resolve()
        files = (path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        return {
            path.name: path
            for path in files
            # A symbolic link must not lead out of the folder. Names that are not UTF-8 cannot be
            # listed in JSON, so such files are left out.
            if path.is_file() and path.resolve().is_relative_to(root) and _is_text(path.name)
        }


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _model_name(call: HttpCall) -> str:
    """Return the model name in the query. If the query has no name, return an empty string."""
    return _parsed_query(call, ModelQuery).model


def _parsed_query(call: HttpCall, kind: type[_QueryT]) -> _QueryT:
    """Parse the query parameters of a request.

    Raises:
        InvalidRequestError: a parameter is unknown or occurs twice, or its value does not fit the
            parameter's type.
    """
    parameters = call.request.query_params
    if len(parameters) < len(parameters.multi_items()):
        raise InvalidRequestError("a parameter occurs twice in the query; give each one once")
    try:
        return kind.model_validate(dict(parameters))
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequestError(
            f"{'.'.join(map(str, details['loc']))}: {details['msg']}; the parameters are "
            f"{', '.join(kind.model_fields)}"
        ) from None


def _request_from_query(call: HttpCall, as_png: bool) -> pb.DetectRequest:
    """Return the `DetectRequest` for an HTTP request: image from the body, options from the query.

    If the response is a PNG (`as_png`), the mask format `polygon` is replaced by `rle`, because the
    masks in the PNG are drawn from RLE.

    Raises:
        InvalidRequestError: a parameter is unknown, or its value does not fit the parameter's type.
            `DetectorService` checks later whether values are in range.
    """
    fields = _parsed_query(call, DetectQuery).model_dump(exclude_none=True)
    mask_format = _MASK_FORMATS[fields.pop("mask_format")]
    if as_png and mask_format == pb.MASK_FORMAT_POLYGON:
        mask_format = pb.MASK_FORMAT_RLE  # masks are drawn from RLE
    try:
        return pb.DetectRequest(image=call.take_body(), mask_format=mask_format, **fields)
    except (UnicodeEncodeError, ValueError) as error:
        raise InvalidRequestError(f"a query parameter has an invalid value: {error}") from None


def _prefers_png(accept: str) -> bool:
    """Return whether the Accept header prefers image/png to application/json.

    The type with the larger quality (parameter `q`, by default 1) is preferred, or the first of two
    with the same quality. A type with quality 0 is ignored, and so are wildcards.
    """
    preferred, highest = "", 0.0
    for part in "".join(accept.lower().split()).split(","):
        kind, *parameters = part.split(";")
        quality = next((_quality(text[2:]) for text in parameters if text.startswith("q=")), 1.0)
        if kind in ("image/png", "application/json") and quality > highest:
            preferred, highest = kind, quality
    return preferred == "image/png"


def _quality(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0


def _with_timing(response: TimedResponse[bytes]) -> bytes:
    """Return the response's JSON text, with the image's timing added as the member `timing`."""
    return b'%s,"timing":%s}' % (response.value[:-1], to_json(vars(response.timing)))


def _server_timing(timing: Timing) -> str:
    """Return the value of the HTTP header Server-Timing: how long each processing stage took."""
    stages = ("decode", "queue", "infer", "encode")
    return ", ".join(f"{s};dur={getattr(timing, f'{s}_us') / 1000:.3f}" for s in stages)
