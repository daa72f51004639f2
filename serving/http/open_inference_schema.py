"""JSON objects in requests of the Open Inference Protocol over HTTP, and their validation."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import InvalidRequestError

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Parameters = dict[str, bool | _Int64 | float | str]


class _Json(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class InputTensor(_Json):
    """Input tensor. Its contents are in `data`, or after the JSON as binary data.

    Binary data requires the parameter `binary_data_size`.
    """

    name: str
    # Sizes; the first is the number of images.
    shape: list[_Int64]
    datatype: str
    parameters: Parameters = {}
    # Nested or flat. BYTES: base64 of image files. UINT8 and FP32: pixels.
    data: list[Any] | None = None


class RequestedOutput(_Json):
    """Output tensor to return. The parameter `binary_data` requests raw bytes after the JSON."""

    name: str
    parameters: Parameters = {}


class InferRequest(_Json):
    """JSON part of an inference request."""

    id: str | None = None
    parameters: Parameters = {}
    inputs: list[InputTensor]
    outputs: list[RequestedOutput] = []


class ModelControlRequest(_Json):
    """Body of a request to load or unload a model."""

    parameters: dict[str, bool | _Int64 | str] = {}


class IndexRequest(_Json):
    """Body of a request for the repository index. `ready`: list only models that are ready."""

    ready: bool = False


def parse_json(kind: type[BaseModel], text: bytes) -> Any:
    """Parse and validate a JSON object, and return it as an instance of `kind`.

    Args:
        kind: Class of the result.
        text: JSON text. Empty: an object without members.

    Raises:
        InvalidRequestError: the text is not valid JSON, or does not match the fields of `kind`.
    """
    try:
        return kind.model_validate_json(text or b"{}")
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, details["loc"])) or "the body"
        raise InvalidRequestError(f"{place}: {details['msg']}") from None
