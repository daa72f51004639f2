"""What Triton's client is told of requests that cannot be answered."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from triton_requests import MODEL, images_of, pixels_of
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.protos.inference import open_inference_pb2 as pb

Encode = Callable[..., bytes]


def refusal(client: InferenceServerClient, inputs: Sequence[InferInput], **options: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(MODEL, inputs, **options)
    return f"{caught.value.status()} {caught.value.message()}"


def test_damaged_image_among_good_ones_fails_the_request_and_is_named(
    triton: InferenceServerClient, picture: Encode
) -> None:
    message = refusal(triton, images_of(picture(0), picture(1), picture(2)[:-500], picture(3)))
    assert "INVALID_ARGUMENT" in message
    assert "images[2]: the image is truncated or damaged" in message
    assert triton.infer(MODEL, images_of(picture())).as_numpy("num_detections") > 0


@pytest.mark.parametrize(
    ("shape", "datatype", "complaint"),
    [
        ((0,), "BYTES", "holds 0 images; a request takes 1 to 4"),
        ((5,), "BYTES", "holds 5 images; a request takes 1 to 4"),
        ((1, 2), "BYTES", "BYTES must have shape [B] or [B, 1]"),
        ((), "BYTES", "BYTES must have shape [B] or [B, 1]"),
        ((-1,), "BYTES", "a request takes 1 to 4"),
        ((32, 32, 3), "UINT8", "UINT8 must have shape [B, height, width, 3]"),
        ((1, 3, 32, 32), "FP32", "FP32 must have shape [B, height, width, 3]"),
        ((1, -32, 32, 3), "UINT8", "no size may be negative"),
        ((1, 32, 32, 3), "INT8", "it must be one of BYTES, UINT8, FP32"),
        ((1, 32, 32, 3), "UINT8", "has 7 bytes; shape [1, 32, 32, 3] of UINT8 takes 3072"),
        ((1, 1 << 40, 1 << 40, 3), "UINT8", "has 7 bytes"),
        ((1, 4, 4, 3), "UINT8", "has 7 bytes; shape [1, 4, 4, 3]"),
        ((1,), "BYTES", "end within element 0 of 1"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    triton: InferenceServerClient, shape: tuple[int, ...], datatype: str, complaint: str
) -> None:
    tensor = InferInput("images", shape, datatype)
    tensor._raw_content = b"\xff\0\0\0abc"  # it checks what set_data_from_numpy is given
    message = refusal(triton, [tensor])
    assert "INVALID_ARGUMENT" in message
    assert complaint in message


def test_contents_that_do_not_fit_are_refused(
    triton: InferenceServerClient, picture: Encode
) -> None:
    image = picture()
    (cut,) = images_of(image)
    cut._raw_content = cut._raw_content[:-1]
    assert "end within element 0" in refusal(triton, [cut])
    (long,) = images_of(image)
    long._raw_content += b"??"
    assert "2 bytes of raw contents after the last" in refusal(triton, [long])
    (both,) = images_of(image)
    both._get_tensor().contents.bytes_contents.append(image)
    assert "typed contents as well" in refusal(triton, [both])
    few = InferInput("images", (2,), "BYTES")
    few._get_tensor().contents.bytes_contents.append(image)
    assert "has 1 BYTES elements; its shape [2] says 2" in refusal(triton, [few])
    none = InferInput("images", (1, 8, 8, 3), "FP32")
    assert "has 0 FP32 elements; its shape" in refusal(triton, [none])
    large = InferInput("images", (1, 8, 8, 3), "UINT8")
    large._get_tensor().contents.uint_contents.extend([256] * 192)
    assert "outside 0..255" in refusal(triton, [large])


@pytest.mark.parametrize("value", [-0.5, 255.5, np.nan, np.inf])
def test_pixels_out_of_range_are_refused(triton: InferenceServerClient, value: float) -> None:
    pixels = np.full((1, 32, 32, 3), 7, np.float32)
    pixels[0, 3, 4, 1] = value
    assert "outside 0..255" in refusal(triton, pixels_of(pixels, "FP32"))


def test_pixels_of_unusable_size_are_refused(triton: InferenceServerClient) -> None:
    for shape in ((2, 0, 0, 3), (2, 7, 100, 3)):
        message = refusal(triton, pixels_of(np.zeros(shape, np.uint8), "UINT8"))
        assert "images[0]" in message
        assert "each side must have at least 8" in message


@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
@pytest.mark.parametrize("sides", [(0, 2**62), (2**62, 0), (0, 2**63 - 1), (0, 8)])
def test_empty_pixels_are_refused_however_long_a_side(
    triton: InferenceServerClient, sides: tuple[int, int], datatype: str
) -> None:
    raw = InferInput("images", (1, *sides, 3), datatype)
    raw._raw_content = b""
    typed = InferInput("images", (1, *sides, 3), datatype)
    for tensor in (raw, typed):
        message = refusal(triton, [tensor])
        assert "INVALID_ARGUMENT" in message
        assert f"images[0]: the image is {sides[0]}x{sides[1]} pixels" in message
        assert "each side must have at least 8" in message


def test_inputs_and_outputs_are_refused_by_name(
    triton: InferenceServerClient, picture: Encode
) -> None:
    images = images_of(picture())
    other = InferInput("image", (1,), "BYTES").set_data_from_numpy(np.array([b""], np.object_))
    assert "['image']; it must have 'images' and no other" in refusal(triton, [other])
    assert "['images', 'image']" in refusal(triton, [*images, other])
    assert "the inputs []" in refusal(triton, [])
    message = refusal(triton, images, outputs=[InferRequestedOutput("segments")])
    assert "output 'segments' is not known; the outputs are num_detections, boxes" in message
    message = refusal(triton, images, outputs=[InferRequestedOutput("scores", class_count=3)])
    assert "output 'scores' has the parameter 'classification'" in message
    images[0].set_shared_memory("region", 100)
    assert "has the parameter 'shared_memory" in refusal(triton, images)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"parameters": {"treshold": 0.5}}, "parameter 'treshold' is not known; known are score_"),
        ({"parameters": {"score_threshold": "high"}}, "'score_threshold' has string_param; it"),
        ({"parameters": {"score_threshold": 1.5}}, "score_threshold is 1.5; it must lie in 0..1"),
        ({"parameters": {"max_detections": 0}}, "max_detections is 0; it must be at least 1"),
        ({"parameters": {"precision": "int8"}}, "precision 'int8' is not served"),
        ({"priority": 9}, "priority is 9; it must be one of 1, 2, 3"),
        ({"timeout": -5}, "it must be above 0"),
        ({"sequence_id": 3}, "parameter 'sequence_"),
    ],
)
def test_parameters_are_refused_by_name(
    triton: InferenceServerClient, picture: Encode, options: dict[str, Any], complaint: str
) -> None:
    message = refusal(triton, images_of(picture()), **options)
    assert "INVALID_ARGUMENT" in message
    assert complaint in message


def test_unknown_models_and_versions_are_not_found(
    triton: InferenceServerClient, picture: Encode
) -> None:
    for name, version in (("resnet", ""), (f"{MODEL}-fp16", ""), (MODEL, "2")):
        with pytest.raises(InferenceServerException, match="is not served") as caught:
            triton.infer(name, images_of(picture()), model_version=version)
        assert "NOT_FOUND" in caught.value.status()


def test_time_that_passes_in_the_server_is_limited(
    triton: InferenceServerClient, picture: Encode
) -> None:
    assert "DEADLINE_EXCEEDED" in refusal(triton, images_of(picture()), timeout=1)


def test_damaged_messages_are_answered_and_the_server_goes_on(
    address: str, triton: InferenceServerClient, picture: Encode
) -> None:
    request = pb.ModelInferRequest(model_name=MODEL, id="seven")
    request.inputs.add(name="images", datatype="BYTES", shape=(1,))
    request.parameters["max_detections"].int64_param = 3
    # The contents come last: what is changed is mostly what stands around them.
    data = request.SerializeToString()
    contents = pb.ModelInferRequest(raw_input_contents=[picture()]).SerializeToString()
    generator = np.random.default_rng(0)
    allowed = {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNKNOWN,  # gRPC's own answer to what is no message
    }
    with grpc.insecure_channel(address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(300):
            damaged = bytearray(data)
            for place in generator.integers(0, len(data), generator.integers(1, 4)):
                damaged[place] = generator.integers(0, 256)
            call = infer.future(bytes(damaged) + contents, timeout=30)
            assert call.code() in allowed
            assert call.code() is not grpc.StatusCode.UNKNOWN or "DecodeError" in call.details()
    assert triton.infer(MODEL, images_of(picture())).as_numpy("num_detections").all()
