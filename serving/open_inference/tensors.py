"""Between tensors of the protocol and arrays."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...protos.inference import open_inference_pb2 as pb
from ..errors import InvalidRequestError

InputTensor = pb.ModelInferRequest.InferInputTensor

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "UINT8": np.dtype("u1"),
    "INT64": np.dtype("<i8"),
    "FP32": np.dtype("<f4"),
}
_LENGTH_BYTES = 4
"""Bytes that say how long an element of datatype BYTES is."""


def strings_from_tensor(tensor: InputTensor, raw: bytes | None) -> list[bytes]:
    """The elements of a tensor of datatype BYTES.

    Args:
        tensor: The tensor.
        raw: Its raw contents, where the request has such.

    Raises:
        InvalidRequestError: there are not as many as its shape says, or they are cut off.
    """
    count = _number_of_elements(tensor)
    if raw is not None:
        return _split(tensor, raw, count)
    strings = list(tensor.contents.bytes_contents)
    _check_number(tensor, len(strings), count)
    return strings


def pixels_from_tensor(tensor: InputTensor, raw: bytes | None) -> NDArray[np.uint8]:
    """The values 0..255 of a tensor of datatype UINT8, or of FP32, which are rounded.

    Args:
        tensor: The tensor.
        raw: Its raw contents, where the request has such.

    Raises:
        InvalidRequestError: there are not as many as its shape says, or some are out of range.
    """
    count = _number_of_elements(tensor)
    if raw is None:
        contents = tensor.contents
        typed = contents.uint_contents if tensor.datatype == "UINT8" else contents.fp32_contents
        _check_number(tensor, len(typed), count)
        values: NDArray[Any] = np.array(typed, np.float32)
    else:
        dtype = _DTYPES[tensor.datatype]
        if len(raw) != count * dtype.itemsize:
            raise InvalidRequestError(
                f"input {tensor.name!r} has {len(raw)} bytes; shape {list(tensor.shape)} of "
                f"{tensor.datatype} takes {count * dtype.itemsize}"
            )
        values = np.frombuffer(raw, dtype)
    return _rounded(tensor.name, values).reshape(tensor.shape)


def add_array(response: pb.ModelInferResponse, name: str, array: NDArray[Any]) -> None:
    """Add an output of datatype FP32 or INT64 to an answer."""
    datatype = next(datatype for datatype, dtype in _DTYPES.items() if dtype == array.dtype)
    response.outputs.add(name=name, datatype=datatype, shape=array.shape)
    response.raw_output_contents.append(array.tobytes())


def add_strings(
    response: pb.ModelInferResponse, name: str, rows: Sequence[Sequence[bytes]]
) -> None:
    """Add an output of datatype BYTES to an answer, from rows of one length."""
    response.outputs.add(name=name, datatype="BYTES", shape=(len(rows), len(rows[0])))
    parts = [len(text).to_bytes(_LENGTH_BYTES, "little") + text for row in rows for text in row]
    response.raw_output_contents.append(b"".join(parts))


def _number_of_elements(tensor: InputTensor) -> int:
    if any(size < 0 for size in tensor.shape):
        raise InvalidRequestError(
            f"input {tensor.name!r} has shape {list(tensor.shape)}; no size may be negative"
        )
    return math.prod(tensor.shape)


def _check_number(tensor: InputTensor, number: int, expected: int) -> None:
    if number != expected:
        raise InvalidRequestError(
            f"input {tensor.name!r} has {number} {tensor.datatype} elements; its shape "
            f"{list(tensor.shape)} says {expected}"
        )


def _split(tensor: InputTensor, raw: bytes, count: int) -> list[bytes]:
    """The strings of raw contents, each of which stands after its length."""
    strings: list[bytes] = []
    end = 0
    for _ in range(count):
        start = end + _LENGTH_BYTES
        end = start + int.from_bytes(raw[start - _LENGTH_BYTES : start], "little")
        if end > len(raw):
            raise InvalidRequestError(
                f"the raw contents of input {tensor.name!r} end within element {len(strings)} of "
                f"{count}; each must stand after its length, a little-endian number of 4 bytes"
            )
        strings.append(raw[start:end])
    if end < len(raw):
        raise InvalidRequestError(
            f"input {tensor.name!r} has {len(raw) - end} bytes of raw contents after the last of "
            f"the {count} elements that its shape says"
        )
    return strings


def _rounded(name: str, values: NDArray[Any]) -> NDArray[np.uint8]:
    if values.dtype == np.uint8:
        return values
    if not ((values >= 0) & (values <= 255)).all():  # NaN is in no range
        raise InvalidRequestError(
            f"input {name!r} has values outside 0..255; send pixels as they are, not normalised"
        )
    rounded: NDArray[np.uint8] = np.rint(values).astype(np.uint8)
    return rounded
