"""Between tensors of the protocol and arrays."""

import math
import time
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
_FIELDS: Final[Mapping[str, str]] = {
    "BYTES": "bytes_contents",
    "UINT8": "uint_contents",
    "FP32": "fp32_contents",
}
"""Of typed contents."""
_LENGTH_BYTES = 4
"""Bytes that say how long an element of datatype BYTES is."""
_PIECE = 8192
"""Elements that are converted at once, which takes well below a millisecond."""


def check_contents(tensor: InputTensor, raw: bytes | None) -> None:
    """Refuse contents of another length than the shape says, before anything is converted.

    Raw contents of datatype BYTES are left to `strings_from_tensor`.

    Args:
        tensor: The tensor, of datatype BYTES, UINT8 or FP32.
        raw: Its raw contents, where the request has such.

    Raises:
        InvalidRequestError: there are not as many elements as the shape says.
    """
    if any(size < 0 for size in tensor.shape):
        raise InvalidRequestError(
            f"input {tensor.name!r} has shape {list(tensor.shape)}; no size may be negative"
        )
    count = math.prod(tensor.shape)
    if raw is None:
        number = len(_typed_contents(tensor))
        if number != count:
            raise InvalidRequestError(
                f"input {tensor.name!r} has {number} {tensor.datatype} elements; its shape "
                f"{list(tensor.shape)} says {count}"
            )
    elif tensor.datatype != "BYTES":
        size = count * _DTYPES[tensor.datatype].itemsize
        if len(raw) != size:
            raise InvalidRequestError(
                f"input {tensor.name!r} has {len(raw)} bytes; shape {list(tensor.shape)} of "
                f"{tensor.datatype} takes {size}"
            )


def strings_from_tensor(tensor: InputTensor, raw: bytes | None) -> list[bytes]:
    """The elements of a tensor of datatype BYTES, whose contents were checked.

    Args:
        tensor: The tensor.
        raw: Its raw contents, where the request has such.

    Raises:
        InvalidRequestError: there are not as many as its shape says, or they are cut off.
    """
    if raw is None:
        return list(tensor.contents.bytes_contents)
    return _split(tensor, raw, math.prod(tensor.shape))


def pixels_from_tensor(tensor: InputTensor, raw: bytes | None) -> NDArray[np.uint8]:
    """The values 0..255 of a tensor of datatype UINT8, or of FP32, which are rounded.

    Args:
        tensor: The tensor, whose contents were checked.
        raw: Its raw contents, where the request has such.

    Raises:
        InvalidRequestError: some values are out of range.
    """
    if raw is not None and tensor.datatype == "UINT8":
        return np.frombuffer(raw, np.uint8).reshape(tensor.shape)
    values = _typed_contents(tensor) if raw is None else np.frombuffer(raw, _DTYPES["FP32"])
    pixels = np.empty(len(values), np.uint8)
    for start in range(0, len(values), _PIECE):
        piece = np.asarray(values[start : start + _PIECE], np.float32)
        pixels[start : start + _PIECE] = _rounded(tensor.name, piece)
        # Else the event loop would wait for tens of milliseconds: a thread demands Python's lock
        # once it was not let go for 5 ms, and NumPy keeps letting it go, to take it back at once.
        time.sleep(0)
    return pixels.reshape(tensor.shape)


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


def _typed_contents(tensor: InputTensor) -> Sequence[Any]:
    values: Sequence[Any] = getattr(tensor.contents, _FIELDS[tensor.datatype])
    return values


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


def _rounded(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    if not ((values >= 0) & (values <= 255)).all():  # NaN is in no range
        raise InvalidRequestError(
            f"input {name!r} has values outside 0..255; send pixels as they are, not normalised"
        )
    rounded: NDArray[np.float32] = np.rint(values)
    return rounded
