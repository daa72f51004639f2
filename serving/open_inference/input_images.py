"""Input tensor of an inference request: validation, and conversion to images."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...model.image_limits import ImageError, check_size
from ...model.plurals import counted
from ...protos.inference import open_inference_pb2 as pb
from ..engines.base import SourceImage
from ..errors import InvalidRequestError

# Name of the input tensor. Datatype BYTES, shape [B] or [B, 1]: B encoded images. Datatype UINT8 or
# FP32, shape [B, H, W, 3]: RGB pixels in 0..255.
INPUT_NAME = "images"

InputTensor = pb.ModelInferRequest.InferInputTensor

# Type of the elements in raw contents, by datatype. BYTES is missing: its elements differ in size.
DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "UINT8": np.dtype("u1"),
    "FP32": np.dtype("<f4"),
    "INT64": np.dtype("<i8"),
}
# Field of InferTensorContents that holds typed contents, by datatype.
_FIELDS: Final[Mapping[str, str]] = {
    "BYTES": "bytes_contents",
    "UINT8": "uint_contents",
    "FP32": "fp32_contents",
}
# In raw contents of datatype BYTES, each element is preceded by its length, in this many bytes.
_LENGTH_BYTES = 4
# Number of pixel values to convert before yielding the GIL. This takes well below a millisecond.
_CHUNK = 8192

# Error message for requests that use shared memory.
SHARED_MEMORY: Final = "shared memory is not supported; send the tensors within the request"


@dataclass(frozen=True)
class ImageInput:
    """Validated input tensor of a request. Its images are not decoded yet."""

    # Number of images.
    count: int
    tensor: InputTensor
    # Raw contents of the tensor. None: the tensor has typed contents.
    raw: bytes | None


def validate_input(request: pb.ModelInferRequest, max_batch: int, max_pixels: int) -> ImageInput:
    """Validate the shape, datatype and size of a request's input tensor, and return it.

    Args:
        request: ModelInfer request.
        max_batch: Maximum number of images per request.
        max_pixels: Maximum number of pixels per image. Encoded images are not checked here.

    Raises:
        InvalidRequestError: the request does not have exactly one input named `images`. Or this
            input has parameters, its shape or datatype is not supported, its contents do not match
            its shape and datatype, or it exceeds `max_batch` or `max_pixels`.
        ImageError: the images have fewer than 8 pixels in height or width.
    """
    tensor, raw = _only_input(request)
    _check_shape(tensor)
    count = tensor.shape[0]
    if not 1 <= count <= max_batch:
        raise InvalidRequestError(
            f"input {INPUT_NAME!r} has {count} images; allowed: 1 to {max_batch}"
        )
    check_contents(tensor, raw)
    if tensor.datatype != "BYTES":
        _check_image_size(tensor, max_pixels)
    return ImageInput(count, tensor, raw)


def decode_input(images: ImageInput) -> Sequence[SourceImage]:
    """Split the input tensor of a request into its images.

    Each image of a BYTES tensor is an encoded file, and is returned as it is. Each image of a
    numeric tensor is returned as an RGB array [H, W, 3] uint8. For large tensors, this may take
    seconds.

    Raises:
        InvalidRequestError: the raw contents of a BYTES tensor are malformed, or a pixel value is
            outside 0..255.
    """
    tensor, raw = images.tensor, images.raw
    if tensor.datatype != "BYTES":
        return list(pixels_from_tensor(tensor, raw))
    if raw is None:
        return list(tensor.contents.bytes_contents)
    return split_raw(tensor.name, raw, images.count)


def _only_input(request: pb.ModelInferRequest) -> tuple[InputTensor, bytes | None]:
    """Return the only input tensor, and its entry in `raw_input_contents` (None: no entry).

    Raises:
        InvalidRequestError: the request does not have exactly one input, the input has another
            name or has parameters, `raw_input_contents` has several entries, or the input has both
            raw and typed contents.
    """
    names = [tensor.name for tensor in request.inputs]
    if names != [INPUT_NAME]:
        raise InvalidRequestError(
            f"the request has the inputs {names}; it must have exactly one, {INPUT_NAME!r}"
        )
    (tensor,) = request.inputs
    reject_parameters(f"input {INPUT_NAME!r}", tensor.parameters)
    raw = request.raw_input_contents
    if not raw:
        return tensor, None
    if len(raw) != 1 or tensor.HasField("contents"):
        typed = ", which also has typed contents" if tensor.HasField("contents") else ""
        raise InvalidRequestError(
            f"raw_input_contents has {counted(len(raw), 'entry', 'entries')} for 1 input{typed}; "
            "send the input once, either as raw or as typed contents"
        )
    return tensor, raw[0]


def _check_shape(tensor: InputTensor) -> None:
    if tensor.datatype not in _FIELDS:
        raise InvalidRequestError(
            f"input {INPUT_NAME!r} has datatype {tensor.datatype!r}; "
            f"it must be one of {', '.join(_FIELDS)}"
        )
    shape = tuple(tensor.shape)
    if tensor.datatype == "BYTES":
        expected, fits = "[B] or [B, 1]", len(shape) == 1 or shape[1:] == (1,)
    else:
        expected, fits = "[B, height, width, 3]", len(shape) == 4 and shape[3] == 3
    if not fits:
        raise InvalidRequestError(
            f"input {INPUT_NAME!r} has shape {list(shape)}; "
            f"for {tensor.datatype} it must be {expected}"
        )


def _check_image_size(tensor: InputTensor, max_pixels: int) -> None:
    height, width = tensor.shape[1:3]
    pixels = height * width
    if pixels > max_pixels:
        raise InvalidRequestError(
            f"input {INPUT_NAME!r} has shape {list(tensor.shape)}, that is {pixels} pixels per "
            f"image; send smaller images, or raise the server's max_pixels ({max_pixels})"
        )
    try:
        check_size(height, width, max_pixels)
    except ImageError as error:  # all images have the same size, so the message names the first
        raise ImageError(f"{INPUT_NAME}[0]: {error}") from None


def reject_parameters(owner: str, parameters: Mapping[str, pb.InferParameter]) -> None:
    """Raise InvalidRequestError if a tensor has parameters, because none are supported.

    Args:
        owner: Name of the input or output, for the error message.
        parameters: Parameters of the input or output, by name.
    """
    if any(name.startswith("shared_memory_") for name in parameters):
        raise InvalidRequestError(f"{owner}: {SHARED_MEMORY}")
    if parameters:
        raise InvalidRequestError(
            f"{owner} has the unknown parameter {min(parameters)!r}; remove the parameter"
        )


def check_contents(tensor: InputTensor, raw: bytes | None) -> None:
    """Check that the size of a tensor's contents matches its shape.

    The raw contents of a BYTES tensor are not checked here but in `decode_input`.

    Args:
        tensor: Tensor of datatype BYTES, UINT8 or FP32.
        raw: Contents from `raw_input_contents`. None: the contents are in `tensor.contents`.

    Raises:
        InvalidRequestError: a size in the shape is negative, or the number of elements is wrong.
    """
    count = _element_count(tensor.name, tensor.shape)
    if raw is None:
        number = len(_typed_contents(tensor))
        check_element_count(tensor.name, tensor.datatype, tensor.shape, number)
    elif tensor.datatype != "BYTES":
        size = count * DTYPES[tensor.datatype].itemsize
        if len(raw) != size:
            raise InvalidRequestError(
                f"input {tensor.name!r} has {len(raw)} bytes; shape {list(tensor.shape)} of "
                f"{tensor.datatype} needs {size}"
            )


def check_element_count(name: str, datatype: str, shape: Sequence[int], number: int) -> None:
    """Check that a tensor has as many elements as its shape needs.

    Args:
        name: Name of the tensor.
        datatype: Datatype of the tensor, for the error message.
        shape: Shape of the tensor.
        number: Number of elements in the tensor's contents.

    Raises:
        InvalidRequestError: a size in the shape is negative, or the number of elements is wrong.
    """
    needed = _element_count(name, shape)
    if number != needed:
        raise InvalidRequestError(
            f"input {name!r} has {number} {datatype} elements; its shape {list(shape)} needs "
            f"{needed}"
        )


def _element_count(name: str, shape: Sequence[int]) -> int:
    if any(size < 0 for size in shape):
        raise InvalidRequestError(
            f"input {name!r} has shape {list(shape)}; no size may be negative"
        )
    return math.prod(shape)


def pixels_from_tensor(tensor: InputTensor, raw: bytes | None) -> NDArray[np.uint8]:
    """Return the values of a UINT8 or FP32 tensor as uint8 in the tensor's shape. FP32 is rounded.

    Args:
        tensor: Tensor that has passed `check_contents`.
        raw: Contents from `raw_input_contents`. None: the contents are in `tensor.contents`.

    Raises:
        InvalidRequestError: a value is outside 0..255.
    """
    if raw is not None and tensor.datatype == "UINT8":
        return np.frombuffer(raw, np.uint8).reshape(tensor.shape)
    values = _typed_contents(tensor) if raw is None else np.frombuffer(raw, DTYPES["FP32"])
    pixels = np.empty(len(values), np.uint8)
    for start in range(0, len(values), _CHUNK):
        chunk = np.asarray(values[start : start + _CHUNK], np.float32)
        pixels[start : start + _CHUNK] = _rounded(tensor.name, chunk)
        # Yield the GIL. NumPy often releases it, but takes it back before a waiting thread gets it.
        # Without this call, the event loop would wait for tens of milliseconds.
        time.sleep(0)
    return pixels.reshape(tensor.shape)


def _typed_contents(tensor: InputTensor) -> Sequence[Any]:
    values: Sequence[Any] = getattr(tensor.contents, _FIELDS[tensor.datatype])
    return values


def split_raw(name: str, raw: bytes, count: int) -> list[bytes]:
    """Split the raw contents of a BYTES tensor into `count` strings.

    Args:
        name: Name of the tensor, for error messages.
        raw: Raw contents: for each string, its length in 4 bytes (little-endian), then the string.
        count: Number of strings.

    Raises:
        InvalidRequestError: the contents do not consist of `count` strings.
    """
    strings: list[bytes] = []
    end = 0
    for _ in range(count):
        start = end + _LENGTH_BYTES
        end = start + int.from_bytes(raw[start - _LENGTH_BYTES : start], "little")
        if end > len(raw):
            raise InvalidRequestError(
                f"the raw contents of input {name!r} end within element {len(strings) + 1} "
                f"of {count}; precede each element by its length, a little-endian 4-byte number"
            )
        strings.append(raw[start:end])
    if end < len(raw):
        raise InvalidRequestError(
            f"the raw contents of input {name!r} have {len(raw) - end} bytes after the last of its "
            f"{count} elements; correct the contents, or the shape of the input"
        )
    return strings


def _rounded(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    if not ((values >= 0) & (values <= 255)).all():  # also rejects NaN
        raise InvalidRequestError(
            f"input {name!r} has values outside 0..255; send pixels that are not normalised"
        )
    rounded: NDArray[np.float32] = np.rint(values)
    return rounded
