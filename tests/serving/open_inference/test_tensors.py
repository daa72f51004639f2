"""What becomes of tensors, however their contents come and however many pieces they take."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from maskrcnn_trt.protos.inference import open_inference_pb2 as pb
from maskrcnn_trt.serving.errors import InvalidRequestError
from maskrcnn_trt.serving.open_inference.tensors import (
    _PIECE,
    InputTensor,
    check_contents,
    pixels_from_tensor,
)

Values = list[int] | list[float]
Form = Callable[[str, Values], tuple[InputTensor, bytes | None]]


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
    "pixels", [0, 1, _PIECE // 3, _PIECE // 3 + 1, _PIECE - 1, _PIECE, _PIECE + 1]
)
def test_pixels_are_the_same_in_each_form(pixels: int) -> None:
    values = np.random.default_rng(pixels).integers(0, 256, 3 * pixels).tolist()
    for form in (typed, raw):
        for datatype in ("UINT8", "FP32"):
            found = converted(*form(datatype, values))
            assert found.dtype == np.uint8
            assert found.shape == (1, pixels, 1, 3)
            assert found.ravel().tolist() == values


@pytest.mark.parametrize("form", [typed, raw])
def test_fractions_are_rounded_to_the_nearest(form: Form) -> None:
    values = [0.0, 0.25, 0.5, 1.5, 254.5, 255.0] * _PIECE
    assert converted(*form("FP32", values)).ravel().tolist() == [round(value) for value in values]


@pytest.mark.parametrize("place", [0, _PIECE - 1, _PIECE, 3 * _PIECE - 1])
@pytest.mark.parametrize(
    ("form", "datatype", "value"),
    [
        (typed, "UINT8", 256),
        (typed, "UINT8", 2**32 - 1),
        (typed, "FP32", 255.01),
        (typed, "FP32", float("nan")),
        (raw, "FP32", -0.01),
        (raw, "FP32", float("inf")),
    ],
)
def test_one_value_out_of_range_is_found_in_any_piece(
    form: Form, datatype: str, value: float, place: int
) -> None:
    values: list[float] = [7] * 3 * _PIECE
    values[place] = value
    with pytest.raises(InvalidRequestError, match=r"has values outside 0\.\.255"):
        converted(*form(datatype, values))


@pytest.mark.parametrize("surplus", [-3, 3])
@pytest.mark.parametrize(("form", "unit"), [(typed, "elements"), (raw, "bytes")])
@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
def test_contents_of_another_length_are_found_before_they_are_converted(
    form: Form, unit: str, datatype: str, surplus: int
) -> None:
    tensor, contents = form(datatype, [7] * 3 * _PIECE)
    tensor.shape[1] -= surplus // 3
    with pytest.raises(InvalidRequestError, match=rf"has \d+ .*{unit}"):
        check_contents(tensor, contents)
