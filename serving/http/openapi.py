"""OpenAPI document of the HTTP API."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from ... import __version__
from .detection import DetectQuery
from .open_inference_json import IndexRequest, InferRequest, ModelControlRequest

_REF: Final = "#/components/schemas/{model}"
_JSON: Final = "application/json"

_Content = Mapping[str, Any]


class JsonRle(BaseModel):
    """Mask in COCO's compressed run-length encoding."""

    size: tuple[int, int] = Field(description="Height, width in pixels after the EXIF rotation.")
    counts: str


class JsonTiming(BaseModel):
    """Durations of the stages of a request in the server, in microseconds."""

    decode_us: int
    queue_us: int
    infer_us: int
    encode_us: int
    batch_size: int = Field(description="Number of images in the batch.")


class Detection(BaseModel):
    """Detected object."""

    class_name: str
    label: int = Field(description="1 is the model's first class.")
    category_id: int = Field(description="ID of the class in the training data set.")
    score: float
    box: tuple[float, float, float, float] = Field(
        description="x_min, y_min, x_max, y_max in pixels, after the EXIF rotation."
    )
    segmentation: JsonRle | list[list[float]] | None = Field(
        None, description="COCO RLE, or polygons as x, y, x, y, ...; absent with mask_format=none."
    )


class DetectResponse(BaseModel):
    """Detections of one image by descending score."""

    height: int
    width: int
    detections: list[Detection]
    timing: JsonTiming


class Error(BaseModel):
    """Reason for which a request failed."""

    error: str


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the supported routes below `/v1` and `/v2`."""
    kinds = (InferRequest, ModelControlRequest, IndexRequest, DetectResponse, Error)
    modes: list[tuple[type[BaseModel], Literal["validation"]]] = [(k, "validation") for k in kinds]
    _, schemas = models_json_schema(modes, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Mask R-CNN server",
            "version": __version__,
            "description": "Detection in images, and the Open Inference Protocol v2 with Triton's "
            "extensions. The responses described here have the header x-request-id. A request may "
            "set its value.",
        },
        "paths": {**_detection_paths(), **_inference_paths()},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        # The token is needed if the server has a token file.
        "security": [{}, {"token": []}],
    }


def _detection_paths() -> dict[str, Any]:
    query = DetectQuery.model_json_schema()["properties"]
    parameters = [
        {"name": name, "in": "query", "description": schema.pop("description"), "schema": schema}
        for name, schema in query.items()
    ]
    file = {"schema": {"type": "string", "format": "binary"}}
    image: _Content = {f"image/{kind}": file for kind in ("jpeg", "png", "webp")}
    found = {_JSON: _schema("DetectResponse"), "image/png": {}}
    name = _path_parameter("name", "Name of a sample.")
    [model] = [parameter for parameter in parameters if parameter["name"] == "model"]
    return {
        "/v1/detect": {
            "post": {
                **_operation("Detect objects in the image file in the body", found),
                "description": "With `Accept: image/png`, the response is the image with the "
                "detections drawn onto it.",
                "parameters": parameters,
                "requestBody": {"required": True, "content": image},
            }
        },
        "/v1/model": {
            "get": _operation("Describe a model: classes, precisions, limits"),
            "parameters": [model],
        },
        "/v1/samples": {
            "get": _operation("List the sample images in the bundle"),
            "parameters": [model],
        },
        "/v1/samples/{name}": {
            "get": {**_operation("Return a sample image", image), "parameters": [name, model]}
        },
    }


def _inference_paths() -> dict[str, Any]:
    body: _Content = {_JSON: {}, "application/octet-stream": {}}
    paths: dict[str, Any] = {
        "/v2": {"get": _operation("Describe the server")},
        "/v2/health/live": {"get": _operation("Return whether the server responds")},
        "/v2/health/ready": {"get": _operation("Return whether the server can process requests")},
        "/v2/models/stats": {"get": _operation("Return the statistics of all models")},
        "/v2/repository/index": {"post": _posting("List the models", "IndexRequest")},
    }
    model = _path_parameter("model", "Name of the model, or name and precision, as in street-fp16.")
    number = _path_parameter("version", "Served version of the model.")
    for path, parameters in (
        ("/v2/models/{model}", [model]),
        ("/v2/models/{model}/versions/{version}", [model, number]),
    ):
        operations = {
            "": {"get": _operation("Describe the tensors and classes of a model")},
            "/ready": {"get": _operation("Return whether the model can process requests")},
            "/config": {"get": _operation("Describe the configuration of a model")},
            "/stats": {"get": _operation("Return the statistics of a model")},
            "/infer": {"post": _posting("Detect objects in images", "InferRequest", body)},
        }
        for suffix, item in operations.items():
            paths[path + suffix] = {"parameters": parameters, **item}
    for action in ("load", "unload"):
        summary = f"{action.capitalize()} a model; may need a token from admin_token_file"
        paths[f"/v2/repository/models/{{model}}/{action}"] = {
            "parameters": [model],
            "post": _posting(summary, "ModelControlRequest"),
        }
    return paths


def _operation(summary: str, content: _Content | None = None) -> dict[str, Any]:
    error = {"description": "The request failed.", "content": {_JSON: _schema("Error")}}
    not_ready = {"description": "Not ready, or the request failed.", "content": {_JSON: {}}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "Success.", "content": content or {_JSON: {}}},
            "4XX": not_ready if "whether" in summary else error,
            "5XX": not_ready if "whether" in summary else error,
        },
    }


def _posting(summary: str, kind: str, content: _Content | None = None) -> dict[str, Any]:
    return {**_operation(summary, content), "requestBody": {"content": {_JSON: _schema(kind)}}}


def _schema(kind: str) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=kind)}}


def _path_parameter(name: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "minLength": 1},
    }
