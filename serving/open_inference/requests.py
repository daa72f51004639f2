"""What a request for inference asks for."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ...model.images import ImageError, check_size
from ...protos.inference import open_inference_pb2 as pb
from ..detections import DetectionOptions, MaskFormat
from ..errors import InvalidRequestError
from ..scheduling import DEFAULT_TERMS, RequestTerms
from ..steps.preprocessing import SourceImage
from .tensors import InputTensor, check_contents, pixels_from_tensor, strings_from_tensor

INPUT_NAME = "images"
"""BYTES [B] or [B, 1] of encoded images, or UINT8 or FP32 [B, H, W, 3] of pixels in 0..255, RGB."""

_DATATYPES: Final = ("BYTES", "UINT8", "FP32")

_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "score_threshold": ("double_param", "int64_param"),
    "max_detections": ("int64_param", "uint64_param"),
    "precision": ("string_param",),
    "priority": ("uint64_param", "int64_param"),
    "timeout": ("int64_param", "uint64_param"),
    # Sent by Triton's clients; here every answer of a stream is its request's last.
    "triton_enable_empty_final_response": ("bool_param",),
}
"""Types of the parameters that a request may have."""


class ImageInput(NamedTuple):
    """The images of a request before their contents are converted."""

    number: int
    """Of images."""
    tensor: InputTensor
    raw: bytes | None
    """The raw contents, where the request has such."""


def input_from_request(
    request: pb.ModelInferRequest, max_batch: int, max_pixels: int
) -> ImageInput:
    """The input of a request, of which only shape, datatype and length are looked at.

    Args:
        request: The request.
        max_batch: Images that it may hold.
        max_pixels: Pixels that each may have. Those of encoded images are not known yet.

    Raises:
        InvalidRequestError: the input is missing, not of a shape or datatype that is taken, or its
            contents do not fit them.
        ImageError: images of this shape cannot be used.
    """
    tensor, raw = _input_of(request)
    _check_shape(tensor)
    number = tensor.shape[0]
    if not 1 <= number <= max_batch:
        raise InvalidRequestError(
            f"input {INPUT_NAME!r} holds {number} images; a request takes 1 to {max_batch}"
        )
    check_contents(tensor, raw)
    if tensor.datatype != "BYTES":
        _check_image_size(tensor, max_pixels)
    return ImageInput(number, tensor, raw)


def images_from_input(images: ImageInput) -> Sequence[SourceImage]:
    """The images of an input, which may take seconds: others get their turn meanwhile.

    Raises:
        InvalidRequestError: strings are not as many as the shape says, or pixels out of range.
    """
    if images.tensor.datatype == "BYTES":
        return strings_from_tensor(images.tensor, images.raw)
    return list(pixels_from_tensor(images.tensor, images.raw))


def outputs_from_request(request: pb.ModelInferRequest, known: Sequence[str]) -> tuple[str, ...]:
    """The outputs that a request names, each once; none if it leaves the choice to the server.

    Raises:
        InvalidRequestError: an output or one of its parameters is not known.
    """
    for output in request.outputs:
        if output.name not in known:
            raise InvalidRequestError(
                f"output {output.name!r} is not known; the outputs are {', '.join(known)}"
            )
        _refuse_parameters(f"output {output.name!r}", output.parameters)
    return tuple(dict.fromkeys(output.name for output in request.outputs))


def options_from_request(
    request: pb.ModelInferRequest, mask_format: MaskFormat
) -> DetectionOptions:
    """The options in a request's parameters.

    Raises:
        InvalidRequestError: a parameter is not known, of another type, or out of range.
    """
    values = _parameters_of(request)
    return DetectionOptions(
        score_threshold=values.get("score_threshold", 0.0),
        max_detections=values.get("max_detections"),
        mask_format=mask_format,
    )


def terms_from_request(
    request: pb.ModelInferRequest, precision: str | None, peer: str
) -> RequestTerms:
    """How a request wants to be computed.

    Args:
        request: The request. A priority or timeout of 0 stands for the server's own.
        precision: The one that the model's name asks for, if it does.
        peer: The connection that the request came by.

    Raises:
        InvalidRequestError: a parameter is not known, of another type, out of range, or at odds
            with the model's name.
    """
    values = _parameters_of(request)
    chosen = values.get("precision", precision)
    if precision not in (None, chosen):
        raise InvalidRequestError(
            f"parameter 'precision' is {chosen!r}, but model {request.model_name!r} computes in "
            f"{precision}; leave one of them out"
        )
    timeout_us = values.get("timeout", 0)
    return RequestTerms(
        precision=chosen,
        priority=values.get("priority", 0) or DEFAULT_TERMS.priority,
        timeout_s=timeout_us / 1e6 if timeout_us else None,
        peer=peer,
        model=request.model_name,
    )


def _input_of(request: pb.ModelInferRequest) -> tuple[InputTensor, bytes | None]:
    """The one input, and its raw contents if the request has such."""
    names = [tensor.name for tensor in request.inputs]
    if names != [INPUT_NAME]:
        raise InvalidRequestError(
            f"the request has the inputs {names}; it must have {INPUT_NAME!r} and no other"
        )
    (tensor,) = request.inputs
    _refuse_parameters(f"input {INPUT_NAME!r}", tensor.parameters)
    raw = request.raw_input_contents
    if not raw:
        return tensor, None
    if len(raw) != 1 or tensor.HasField("contents"):
        raise InvalidRequestError(
            f"the request has {len(raw)} raw contents for 1 input"
            f"{' which has typed contents as well' if tensor.HasField('contents') else ''}; "
            "it must have one for each, or none and typed contents"
        )
    return tensor, raw[0]


def _check_shape(tensor: InputTensor) -> None:
    if tensor.datatype not in _DATATYPES:
        raise InvalidRequestError(
            f"input {INPUT_NAME!r} has datatype {tensor.datatype!r}; "
            f"it must be one of {', '.join(_DATATYPES)}"
        )
    shape = tuple(tensor.shape)
    if tensor.datatype == "BYTES":
        expected, fits = "[B] or [B, 1]", len(shape) == 1 or shape[1:] == (1,)
    else:
        expected, fits = "[B, height, width, 3]", len(shape) == 4 and shape[3] == 3
    if not fits:
        raise InvalidRequestError(
            f"input {INPUT_NAME!r} has shape {list(shape)}; "
            f"{tensor.datatype} must have shape {expected}"
        )


def _check_image_size(tensor: InputTensor, max_pixels: int) -> None:
    height, width = tensor.shape[1:3]
    pixels = height * width
    if pixels > max_pixels:
        raise InvalidRequestError(
            f"input {INPUT_NAME!r} has shape {list(tensor.shape)}, images of {pixels} pixels; "
            f"send smaller ones, as the server's max_pixels is {max_pixels}"
        )
    try:
        check_size(height, width, max_pixels)
    except ImageError as error:  # as all that follow are, too
        raise ImageError(f"{INPUT_NAME}[0]: {error}") from None


def _parameters_of(request: pb.ModelInferRequest) -> dict[str, Any]:
    values = {}
    for name, parameter in request.parameters.items():
        if name not in _PARAMETERS:
            raise InvalidRequestError(
                f"parameter {name!r} is not known; known are {', '.join(_PARAMETERS)}"
            )
        kind = parameter.WhichOneof("parameter_choice")
        if kind not in _PARAMETERS[name]:
            kinds = " or ".join(_PARAMETERS[name])
            raise InvalidRequestError(f"parameter {name!r} has {kind}; it must have {kinds}")
        values[name] = getattr(parameter, kind)
    return values


def _refuse_parameters(owner: str, parameters: Mapping[str, pb.InferParameter]) -> None:
    if parameters:
        raise InvalidRequestError(
            f"{owner} has the parameter {min(parameters)!r}; none is known for it"
        )
