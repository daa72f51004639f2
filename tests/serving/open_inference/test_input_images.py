"""Conversion of input tensors: typed and raw contents, across chunk boundaries."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from maskrcnn_trt.protos.inference import open_inference_pb2 as pb
from maskrcnn_trt.serving.errors import InvalidRequestError
from maskrcnn_trt.serving.open_inference.input_images import (
    _CHUNK,
    InputTensor,
    check_contents,
    pixels_from_tensor,
)

Values = list[int] | list[float]
Encoding = Callable[[str, Values], tuple[InputTensor, bytes | None]]


def typed(datatype: str, values: Values) -> tuple[InputTensor, None]:
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="images", datatype=datatype, shape=(1, len(values) // 3, 1, 3)
    )
    contents = tensor.contents
    (contents.uint_contents if datatype == "UINT8" else contents.fp32_contents).extend(values)
    return tensor, None


def raw(datatype: str, values: Values) -> tuple[InputTensor, bytes]:
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="images", datatype=datatype, shape=(1, len(values) // 3, 1, 3)
    )
    return tensor, np.array(values, "<f4" if datatype == "FP32" else "u1").tobytes()


def converted(tensor: InputTensor, contents: bytes | None) -> NDArray[np.uint8]:
    check_contents(tensor, contents)
    return pixels_from_tensor(tensor, contents)


@pytest.mark.parametrize(
    "pixels", [0, 1, _CHUNK // 3, _CHUNK // 3 + 1, _CHUNK - 1, _CHUNK, _CHUNK + 1]
)
def test_pixels_are_equal_in_each_encoding(pixels: int) -> None:
    values = np.random.default_rng(pixels).integers(0, 256, 3 * pixels).tolist()
    for encode in (typed, raw):
        for datatype in ("UINT8", "FP32"):
            found = converted(*encode(datatype, values))
            assert found.dtype == np.uint8
            assert found.shape == (1, pixels, 1, 3)
            assert found.ravel().tolist() == values


@pytest.mark.parametrize("encode", [typed, raw])
def test_fractions_are_rounded_to_the_nearest(encode: Encoding) -> None:
    values = [0.0, 0.25, 0.5, 1.5, 254.5, 255.0] * _CHUNK
    assert converted(*encode("FP32", values)).ravel().tolist() == [round(value) for value in values]


@pytest.mark.parametrize("index", [0, _CHUNK - 1, _CHUNK, 3 * _CHUNK - 1])
@pytest.mark.parametrize(
    ("encode", "datatype", "value"),
    [
        (typed, "UINT8", 256),
        (typed, "UINT8", 2**32 - 1),
        (typed, "FP32", 255.01),
        (typed, "FP32", float("nan")),
        (raw, "FP32", -0.01),
        (raw, "FP32", float("inf")),
    ],
)
def test_value_out_of_range_is_detected_in_any_chunk(
    encode: Encoding, datatype: str, value: float, index: int
) -> None:
    values: list[float] = [7] * 3 * _CHUNK
    values[index] = value
    with pytest.raises(InvalidRequestError, match=r"has values outside 0\.\.255"):
        converted(*encode(datatype, values))


@pytest.mark.parametrize("surplus", [-3, 3])
@pytest.mark.parametrize(("encode", "unit"), [(typed, "elements"), (raw, "bytes")])
@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
def test_contents_of_the_wrong_size_raise(
    encode: Encoding, unit: str, datatype: str, surplus: int
) -> None:
    tensor, contents = encode(datatype, [7] * 3 * _CHUNK)
    tensor.shape[1] -= surplus // 3
    with pytest.raises(InvalidRequestError, match=rf"has \d+ .*{unit}"):
        check_contents(tensor, contents)
