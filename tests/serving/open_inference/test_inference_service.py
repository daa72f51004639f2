"""Inference as Triton's own clients ask for it, over a real socket."""

import asyncio
import queue
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.protos.inference import open_inference_pb2 as pb
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.detections import DetectionOptions, Detections, MaskFormat
from maskrcnn_trt.serving.predictor import Predictor
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]
MODEL = "maskrcnn_resnet18_fpn"
ROWS, SIDE = 20, 28


def images_of(*images: bytes, column: bool = False) -> list[InferInput]:
    array = np.array(images, np.object_).reshape((-1, 1) if column else -1)
    return [InferInput("images", array.shape, "BYTES").set_data_from_numpy(array)]


def pixels_of(array: NDArray[Any], datatype: str) -> list[InferInput]:
    return [InferInput("images", array.shape, datatype).set_data_from_numpy(array)]


def decoded(*images: bytes) -> NDArray[np.uint8]:
    return np.stack([np.array(Image.open(BytesIO(image)).convert("RGB")) for image in images])


def refusal(client: InferenceServerClient, inputs: Sequence[InferInput], **options: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(MODEL, inputs, **options)
    return f"{caught.value.status()} {caught.value.message()}"


def assert_row_is(result: InferResult, row: int, expected: Detections) -> None:
    count = len(expected)
    assert result.as_numpy("num_detections")[row] == count
    assert result.as_numpy("image_sizes")[row].tolist() == [expected.height, expected.width]
    for name in ("boxes", "scores"):
        values = result.as_numpy(name)[row]
        np.testing.assert_allclose(values[:count], getattr(expected, name), rtol=1e-5, atol=1e-3)
        assert not values[count:].any()
    labels = result.as_numpy("labels")[row]
    assert labels[:count].tolist() == expected.labels.tolist()
    assert not labels[count:].any()
    masks = result.as_numpy("masks")[row].tolist()
    assert expected.rles is not None
    assert masks == [rle.counts for rle in expected.rles] + [b""] * (ROWS - count)


@pytest.mark.parametrize("column", [False, True])
def test_batch_is_answered_as_padded_tensors(
    triton: InferenceServerClient, predictor: Predictor, picture: Encode, column: bool
) -> None:
    pictures = [picture(1), picture(2, (200, 120)), picture(3, codec="PNG")]
    result = triton.infer(MODEL, images_of(*pictures, column=column), request_id="seven")
    assert result.get_response().id == "seven"
    assert result.get_response().model_name == MODEL
    assert result.get_response().model_version == "1"
    shapes = {output.name: tuple(output.shape) for output in result.get_response().outputs}
    assert shapes == {
        "num_detections": (3, 1),
        "boxes": (3, ROWS, 4),
        "scores": (3, ROWS),
        "labels": (3, ROWS),
        "masks": (3, ROWS),
        "image_sizes": (3, 2),
    }
    for row, data in enumerate(pictures):
        assert_row_is(result, row, predictor.detect(data))


@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
def test_raw_pixels_are_answered_as_the_encoded_picture(
    triton: InferenceServerClient, predictor: Predictor, picture: Encode, datatype: str
) -> None:
    pictures = [picture(1, codec="PNG"), picture(2, codec="PNG")]
    dtype = np.uint8 if datatype == "UINT8" else np.float32
    result = triton.infer(MODEL, pixels_of(decoded(*pictures).astype(dtype), datatype))
    for row, data in enumerate(pictures):
        assert_row_is(result, row, predictor.detect(data))


@pytest.mark.parametrize("datatype", ["BYTES", "UINT8", "FP32"])
def test_typed_contents_are_read(
    triton: InferenceServerClient, predictor: Predictor, picture: Encode, datatype: str
) -> None:
    data = picture(4, (64, 96), codec="PNG")
    tensor = InferInput("images", (1,) if datatype == "BYTES" else (1, 64, 96, 3), datatype)
    contents = tensor._get_tensor().contents  # their class fills it for HTTP alone
    if datatype == "BYTES":
        contents.bytes_contents.append(data)
    elif datatype == "UINT8":
        contents.uint_contents.extend(decoded(data).ravel().tolist())
    else:
        contents.fp32_contents.extend(decoded(data).ravel().tolist())
    assert_row_is(triton.infer(MODEL, [tensor]), 0, predictor.detect(data))


def test_requested_outputs_are_the_answer(
    triton: InferenceServerClient, predictor: Predictor, picture: Encode
) -> None:
    names = ["mask_probabilities", "scores", "masks"]
    result = triton.infer(
        MODEL, images_of(picture()), outputs=[InferRequestedOutput(name) for name in names]
    )
    assert [output.name for output in result.get_response().outputs] == names
    expected = predictor.detect(picture(), DetectionOptions(mask_format=MaskFormat.PROBABILITIES))
    assert expected.mask_probabilities is not None
    probabilities = result.as_numpy("mask_probabilities")
    assert probabilities.shape == (1, ROWS, SIDE, SIDE)
    count = len(expected)
    np.testing.assert_allclose(probabilities[0, :count], expected.mask_probabilities, atol=1e-4)
    assert not probabilities[0, count:].any()
    rles = predictor.detect(picture()).rles
    assert rles is not None
    assert result.as_numpy("masks")[0, :count].tolist() == [rle.counts for rle in rles]


def test_parameters_are_kept(
    triton: InferenceServerClient, predictor: Predictor, picture: Encode
) -> None:
    everything = predictor.detect(picture())
    threshold = float(np.median(everything.scores))
    parameters = {"score_threshold": threshold, "max_detections": 3, "precision": "fp32"}
    result = triton.infer(
        MODEL, images_of(picture()), parameters=parameters, priority=1, timeout=60_000_000
    )
    options = DetectionOptions(score_threshold=threshold, max_detections=3)
    assert_row_is(result, 0, predictor.detect(picture(), options))


def test_image_without_detections_is_all_padding(
    triton: InferenceServerClient, picture: Encode
) -> None:
    result = triton.infer(MODEL, images_of(picture()), parameters={"score_threshold": 1})
    assert result.as_numpy("num_detections").tolist() == [[0]]
    assert not result.as_numpy("boxes").any()
    assert set(result.as_numpy("masks").ravel()) == {b""}


def test_precision_may_be_part_of_the_name(
    triton: InferenceServerClient, predictor: Predictor, picture: Encode
) -> None:
    result = triton.infer(f"{MODEL}-fp32", images_of(picture()), model_version="1")
    assert_row_is(result, 0, predictor.detect(picture()))
    with pytest.raises(InferenceServerException, match="leave one of them out"):
        triton.infer(f"{MODEL}-fp32", images_of(picture()), parameters={"precision": "fp16"})


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


def test_async_client(address: str, predictor: Predictor, picture: Encode) -> None:
    async def ask() -> list[InferResult]:
        async with triton_aio.InferenceServerClient(address) as client:
            calls = (client.infer(MODEL, images_of(picture(seed))) for seed in range(4))
            return await asyncio.gather(*calls)

    for seed, result in enumerate(asyncio.run(ask())):
        assert_row_is(result, 0, predictor.detect(picture(seed)))


def test_cancelled_request_gives_the_places_of_its_images_back(
    bundle: Path, picture: Encode
) -> None:
    async def ask() -> InferResult:
        # A connection may hold half of the places.
        config = ServeConfig(port=0, queue_size=6, max_batch=64, max_delay_ms=300)
        images = images_of(*map(picture, range(3)))
        async with (
            detection_server(bundle, config) as address,
            triton_aio.InferenceServerClient(address) as client,
        ):
            call = asyncio.create_task(client.infer(MODEL, images))
            await asyncio.sleep(0.15)
            with pytest.raises(InferenceServerException, match="requests of this connection"):
                await client.infer(MODEL, images_of(picture()))
            call.cancel()
            await asyncio.wait([call])
            await asyncio.sleep(0.15)
            return await client.infer(MODEL, images)

    assert asyncio.run(ask()).as_numpy("num_detections").all()


def test_stream_is_answered_in_order_and_outlives_refusals(
    triton: InferenceServerClient, predictor: Predictor, picture: Encode
) -> None:
    answers: queue.Queue[tuple[InferResult | None, InferenceServerException | None]] = queue.Queue()
    triton.start_stream(callback=lambda result, error: answers.put((result, error)))
    for seed in range(12):
        data = b"no image" if seed == 5 else picture(seed)
        triton.async_stream_infer(
            MODEL, images_of(data), request_id=str(seed), enable_empty_final_response=True
        )
    triton.stop_stream()
    for seed in range(12):
        result, error = answers.get(timeout=30)
        if seed == 5:
            assert error is not None
            assert "images[0]: the data is no JPEG, PNG or WebP" in error.message()
            continue
        assert result is not None
        response = result.get_response()
        assert response.id == str(seed)
        assert response.parameters["triton_final_response"].bool_param
        assert_row_is(result, 0, predictor.detect(picture(seed)))
    assert answers.empty()


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
