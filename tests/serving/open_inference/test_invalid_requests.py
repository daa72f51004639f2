"""Rejection of invalid requests, as seen by Triton's client."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from triton_requests import MODEL, images_of
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

Encode = Callable[..., bytes]


def error_of(client: InferenceServerClient, inputs: Sequence[InferInput], **options: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(MODEL, inputs, **options)
    return f"{caught.value.status()} {caught.value.message()}"


def test_error_names_the_index_of_a_damaged_image(
    triton: InferenceServerClient, picture: Encode
) -> None:
    message = error_of(triton, images_of(picture(0), picture(1), picture(2)[:-500], picture(3)))
    assert "INVALID_ARGUMENT" in message
    assert "images[2]: the image is truncated" in message
    assert triton.infer(MODEL, images_of(picture())).as_numpy("num_detections") > 0


@pytest.mark.parametrize(
    ("shape", "datatype", "error"),
    [
        ((0,), "BYTES", "0 images; allowed: 1 to 4"),
        ((5,), "BYTES", "5 images; allowed: 1 to 4"),
        ((1, 2), "BYTES", "[B] or [B, 1]"),
        ((), "BYTES", "[B] or [B, 1]"),
        ((-1,), "BYTES", "allowed: 1 to 4"),
        ((32, 32, 3), "UINT8", "[B, height, width, 3]"),
        ((1, 3, 32, 32), "FP32", "[B, height, width, 3]"),
        ((1, -32, 32, 3), "UINT8", "no size may be negative"),
        ((1, 32, 32, 3), "INT8", "it must be one of BYTES, UINT8, FP32"),
        ((1, 32, 32, 3), "UINT8", "has 7 bytes; shape [1, 32, 32, 3] of UINT8 needs 3072"),
        ((1, 1 << 40, 1 << 40, 3), "UINT8", "has 7 bytes"),
        ((1, 4, 4, 3), "UINT8", "has 7 bytes; shape [1, 4, 4, 3]"),
        ((1,), "BYTES", "end within element 1 of 1"),
    ],
)
def test_invalid_shapes_and_datatypes_are_rejected(
    triton: InferenceServerClient, shape: tuple[int, ...], datatype: str, error: str
) -> None:
    tensor = InferInput("images", shape, datatype)
    tensor._raw_content = b"\xff\0\0\0abc"  # set_data_from_numpy would reject it
    message = error_of(triton, [tensor])
    assert "INVALID_ARGUMENT" in message
    assert error in message


def test_contents_of_the_wrong_size_are_rejected(
    triton: InferenceServerClient, picture: Encode
) -> None:
    image = picture()
    (cut,) = images_of(image)
    cut._raw_content = cut._raw_content[:-1]
    assert "end within element 1" in error_of(triton, [cut])
    (long,) = images_of(image)
    long._raw_content += b"??"
    assert "2 bytes after the last" in error_of(triton, [long])
    (both,) = images_of(image)
    both._get_tensor().contents.bytes_contents.append(image)
    assert "also has typed contents" in error_of(triton, [both])
    few = InferInput("images", (2,), "BYTES")
    few._get_tensor().contents.bytes_contents.append(image)
    assert "has 1 BYTES elements; its shape [2] needs 2" in error_of(triton, [few])
    none = InferInput("images", (1, 8, 8, 3), "FP32")
    assert "has 0 FP32 elements; its shape" in error_of(triton, [none])
    large = InferInput("images", (1, 8, 8, 3), "UINT8")
    large._get_tensor().contents.uint_contents.extend([256] * 192)
    assert "outside 0..255" in error_of(triton, [large])


@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
@pytest.mark.parametrize(
    "sides", [(0, 2**62), (2**62, 0), (0, 2**63 - 1), (0, 8), (0, 0), (7, 100)]
)
def test_small_images_are_rejected(
    triton: InferenceServerClient, sides: tuple[int, int], datatype: str
) -> None:
    size = sides[0] * sides[1] * 3
    raw, typed = (InferInput("images", (1, *sides, 3), datatype) for _ in range(2))
    raw._raw_content = bytes(size * np.dtype(datatype.replace("FP", "float").lower()).itemsize)
    contents = typed._get_tensor().contents
    values = contents.uint_contents if datatype == "UINT8" else contents.fp32_contents
    values.extend([0] * size)
    for tensor in (raw, typed):
        message = error_of(triton, [tensor])
        assert "INVALID_ARGUMENT" in message
        assert f"images[0]: the image is {sides[0]}x{sides[1]} pixels" in message
        assert "each side must have at least 8" in message


def test_unknown_inputs_and_outputs_are_rejected(
    triton: InferenceServerClient, picture: Encode
) -> None:
    images = images_of(picture())
    other = InferInput("image", (1,), "BYTES").set_data_from_numpy(np.array([b""], np.object_))
    assert "['image']; it must have exactly one, 'images'" in error_of(triton, [other])
    assert "['images', 'image']" in error_of(triton, [*images, other])
    assert "the inputs []" in error_of(triton, [])
    message = error_of(triton, images, outputs=[InferRequestedOutput("segments")])
    assert "unknown output 'segments'; the outputs are num_detections, boxes" in message
    message = error_of(triton, images, outputs=[InferRequestedOutput("scores", class_count=3)])
    assert "output 'scores' has the unknown parameter 'classification'" in message
    images[0].set_shared_memory("region", 100)
    assert "shared memory is not supported" in error_of(triton, images)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"parameters": {"treshold": 0.5}},
            "'treshold'; the parameters are score_",
        ),
        (
            {"parameters": {"score_threshold": "high"}},
            "'score_threshold' is a string, but must be a decimal number or a whole number (in",
        ),
        (
            {"parameters": {"max_detections": 0.5}},
            "'max_detections' is a decimal number, but must be a whole number (in gRPC: int64_",
        ),
        ({"parameters": {"score_threshold": 1.5}}, "score_threshold is 1.5"),
        ({"parameters": {"max_detections": 0}}, "max_detections is 0"),
        ({"priority": 9}, "priority is 9"),
        ({"timeout": -5}, "it must be above 0"),
    ],
)
def test_invalid_parameters_are_rejected(
    triton: InferenceServerClient, picture: Encode, options: dict[str, Any], error: str
) -> None:
    message = error_of(triton, images_of(picture()), **options)
    assert "INVALID_ARGUMENT" in message
    assert error in message


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet", {}),
        (f"{MODEL}-fp16", {}),
        (MODEL, {"model_version": "2"}),
        (MODEL, {"parameters": {"precision": "int8"}}),
    ],
)
def test_unknown_models_versions_and_precisions_are_rejected(
    triton: InferenceServerClient, picture: Encode, name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InferenceServerException, match="is not served") as caught:
        triton.infer(name, images_of(picture()), **options)
    assert "NOT_FOUND" in caught.value.status()


def test_time_limit_of_a_request(triton: InferenceServerClient, picture: Encode) -> None:
    assert "DEADLINE_EXCEEDED" in error_of(triton, images_of(picture()), timeout=1)
