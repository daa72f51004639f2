"""JSON of the Open Inference Protocol: validation, conversion to and from protobuf messages."""

import base64
import binascii
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError, to_json

from ...protos.inference import open_inference_pb2 as pb
from ..errors import InvalidRequestError
from ..open_inference.input_images import DTYPES, check_element_count, split_raw
from ..open_inference.responses import serialised_strings

_Parameter = TypeVar("_Parameter", pb.InferParameter, pb.ModelRepositoryParameter)

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


def _described(types: str) -> WrapValidator:
    """Return a validator for a union that raises one error, `Input should be {types}`.

    Without this validator, pydantic raises one error per type of the union.
    """

    def validate(value: Any, validate_union: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate_union(value)
        except ValidationError:  # has an error for each type
            raise PydanticCustomError("parameter", f"Input should be {types}") from None

    return WrapValidator(validate)


_Value = Annotated[
    bool | _Int64 | float | str,
    _described("a boolean, a 64-bit integer, a finite number or a string"),
]
Parameters = dict[str, _Value]

# Maximum number of values in the JSON part of a request. Parsing them takes about 50 ms.
_MAX_VALUES: Final = 1 << 20
_MAX_DIGITS: Final = 20
# Parameters of the binary tensor data extension. They are removed from a request before it is
# converted to a message, because they have no meaning in gRPC.
_SIZE, _IS_BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"

_PARAMETER_FIELDS: Final = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}


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

    parameters: dict[
        str, Annotated[bool | _Int64 | str, _described("a boolean, a 64-bit integer or a string")]
    ] = {}


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


class BinaryOutputs(NamedTuple):
    """Selection of the outputs to return as binary data: a default, and exceptions by name."""

    # Whether outputs are binary by default.
    is_default: bool
    # Names of the outputs that differ from the default.
    exceptions: frozenset[str]

    def include(self, name: str) -> bool:
        """Return whether the output `name` is returned as binary data."""
        return self.is_default != (name in self.exceptions)


def infer_request_from_http(
    body: bytes, json_length: str | None, model: str, version: str
) -> tuple[pb.ModelInferRequest, BinaryOutputs]:
    """Convert a REST inference request to a message. Also return which outputs are to be binary.

    Args:
        body: Body of the request: JSON, followed by the binary data of input tensors, if any.
        json_length: Header Inference-Header-Content-Length: size of the JSON in bytes, as text.
            None: the body is only JSON.
        model: Model name in the path.
        version: Model version in the path. Empty: the path has no version.

    Raises:
        InvalidRequestError: the body or `json_length` does not follow the protocol. The service
            checks later whether it supports the shapes.
    """
    length = len(body) if json_length is None else _length_from_header(json_length, len(body))
    text = body[:length]
    # The number of commas and brackets is an upper bound of the number of values, and counting
    # them is as fast as a copy. JSON that is too large is thus rejected before it is parsed.
    if text.count(b",") + text.count(b"[") > _MAX_VALUES:
        raise InvalidRequestError(
            f"the JSON has more than {_MAX_VALUES} values; send pixels as binary data "
            "(binary_data_size), or encoded image files (datatype BYTES)"
        )
    parsed = parse_json(InferRequest, text)
    raw = _raw_contents(parsed.inputs, memoryview(body)[length:])
    outputs = _binary_outputs(parsed)
    try:
        return _infer_message(parsed, raw, model, version), outputs
    except (UnicodeEncodeError, ValueError) as error:
        raise InvalidRequestError(f"a value in the JSON is invalid: {error}") from None


def _length_from_header(text: str, body_size: int) -> int:
    # The number of digits is limited, because `int` raises an error for thousands of them.
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    if not is_number or int(text) > body_size:
        raise InvalidRequestError(
            f"Inference-Header-Content-Length is {text[:20]!r}; it must be the size in bytes of "
            f"the JSON at the beginning of the body. The whole body has {body_size} bytes"
        )
    return int(text)


def _raw_contents(inputs: Sequence[InputTensor], binary: memoryview) -> list[bytes]:
    """Return the raw contents of each input tensor, from its `data` or from `binary`.

    `binary` is the body after the JSON. The parameter `binary_data_size` is removed from the
    tensors.
    """
    contents, start = [], 0
    for tensor in inputs:
        size = tensor.parameters.pop(_SIZE, None)
        if size is None:
            contents.append(_raw_from_data(tensor))
            continue
        if tensor.data is not None:
            raise InvalidRequestError(
                f"input {tensor.name!r} has both data and {_SIZE}; give only one"
            )
        if type(size) is not int or not 0 <= size <= len(binary) - start:
            raise InvalidRequestError(
                f"input {tensor.name!r} has the {_SIZE} {size!r}; it must be an integer from 0 to "
                f"{len(binary) - start}, the number of bytes that the body holds for this input. "
                "If that number is wrong, check Inference-Header-Content-Length, the size of the "
                "JSON in bytes"
            )
        contents.append(bytes(binary[start : start + size]))
        start += size
    if start < len(binary):
        raise InvalidRequestError(
            f"the body has {len(binary) - start} bytes too many after the JSON; check that the "
            f"inputs' {_SIZE} add up to the size of the binary data, and that "
            "Inference-Header-Content-Length is the size of the JSON in bytes"
        )
    return contents


def _raw_from_data(tensor: InputTensor) -> bytes:
    """Convert the JSON contents (`data`) of an input tensor to raw contents."""
    name, data = tensor.name, tensor.data
    if data is None:
        raise InvalidRequestError(f"input {name!r} has neither data nor {_SIZE}; give one of them")
    flat = _flat(data)
    if tensor.datatype == "BYTES":
        check_element_count(name, tensor.datatype, tensor.shape, len(flat))
        return serialised_strings([[_bytes_from_base64(name, text) for text in flat]])
    types: set[type] = {int} if tensor.datatype == "UINT8" else {int, float}
    if tensor.datatype not in ("UINT8", "FP32"):
        raise InvalidRequestError(
            f"input {name!r} has datatype {tensor.datatype!r}; it must be BYTES, UINT8 or FP32"
        )
    if not set(map(type, flat)) <= types:
        raise InvalidRequestError(f"the data of input {name!r} are not {tensor.datatype} numbers")
    check_element_count(name, tensor.datatype, tensor.shape, len(flat))
    if flat and not 0 <= min(flat) <= max(flat) <= 255:
        raise InvalidRequestError(
            f"input {name!r} has values outside 0..255; send pixels that are not normalised"
        )
    return np.array(flat, DTYPES[tensor.datatype]).tobytes()


def _flat(data: list[Any]) -> list[Any]:
    """Flatten nested lists, and return their elements as one list.

    A level is flattened only if all its elements are lists. If a level mixes lists and other
    elements, its lists are returned as elements.
    """
    while data and set(map(type, data)) == {list}:
        data = list(itertools.chain.from_iterable(data))
    return data


def _bytes_from_base64(name: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise InvalidRequestError(
            f"the data of input {name!r} is not base64; encode each image file as base64 text, or "
            f"send the files as binary data and set the input's parameter {_SIZE}"
        ) from None


def _binary_outputs(request: InferRequest) -> BinaryOutputs:
    is_default = _flag_from(request.parameters, _ALL_BINARY, default=False)
    exceptions = frozenset(
        output.name
        for output in request.outputs
        if _flag_from(output.parameters, _IS_BINARY, default=is_default) != is_default
    )
    return BinaryOutputs(is_default, exceptions)


def _flag_from(parameters: Parameters, name: str, *, default: bool) -> bool:
    value = parameters.pop(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {value!r}; it must be true or false")
    return value


def _infer_message(
    request: InferRequest, raw: Sequence[bytes], model: str, version: str
) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        model_name=model,
        model_version=version,
        id=request.id or "",
        parameters=parameter_messages(pb.InferParameter, request.parameters),
        inputs=[
            pb.ModelInferRequest.InferInputTensor(
                name=tensor.name,
                datatype=tensor.datatype,
                shape=tensor.shape,
                parameters=parameter_messages(pb.InferParameter, tensor.parameters),
            )
            for tensor in request.inputs
        ],
        outputs=[
            pb.ModelInferRequest.InferRequestedOutputTensor(
                name=output.name,
                parameters=parameter_messages(pb.InferParameter, output.parameters),
            )
            for output in request.outputs
        ],
        raw_input_contents=raw,
    )


def parameter_messages(
    kind: Callable[..., _Parameter], parameters: Mapping[str, bool | int | float | str]
) -> dict[str, _Parameter]:
    """Convert parameters to protobuf messages of type `kind`, and return the messages by name."""
    return {n: kind(**{_PARAMETER_FIELDS[type(v)]: v}) for n, v in parameters.items()}


def http_from_infer_response(
    response: pb.ModelInferResponse, binary: BinaryOutputs
) -> tuple[bytes, int | None]:
    """Convert an inference response to the body of a REST response.

    Args:
        response: Response whose outputs have raw contents and datatype BYTES, FP32 or INT64.
        binary: Outputs to return as binary data after the JSON.

    Returns:
        The body, and the size of its JSON part in bytes. The size is None if the body is only JSON.
    """
    outputs, tail = [], []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        value: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.shape),
        }
        if binary.include(output.name):
            value["parameters"] = {_SIZE: len(raw)}
            tail.append(raw)
        else:
            value["data"] = _values_from_raw(output, raw)
        outputs.append(value)
    header = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        header["id"] = response.id
    text = to_json({**header, "outputs": outputs})
    return b"".join((text, *tail)), len(text) if tail else None


def _values_from_raw(output: pb.ModelInferResponse.InferOutputTensor, raw: bytes) -> list[Any]:
    if output.datatype == "BYTES":
        strings = split_raw(output.name, raw, math.prod(output.shape))
        return [text.decode() for text in strings]
    values: list[Any] = np.frombuffer(raw, DTYPES[output.datatype]).tolist()
    return values
