"""Inference with Triton's clients over a real socket."""

import asyncio
import queue
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from in_process_server import served
from numpy.typing import NDArray
from PIL import Image
from triton_requests import MODEL, images_of, pixels_of
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.serving.detections import DetectionOptions, Detections, MaskFormat
from maskrcnn_trt.serving.offline import Detector

Encode = Callable[..., bytes]
ROWS, SIDE = 20, 28


def decoded(*images: bytes) -> NDArray[np.uint8]:
    return np.stack([np.array(Image.open(BytesIO(image)).convert("RGB")) for image in images])


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
def test_outputs_of_a_batch_are_padded(
    triton: InferenceServerClient, predictor: Detector, picture: Encode, column: bool
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
def test_pixels_give_the_same_detections(
    triton: InferenceServerClient, predictor: Detector, picture: Encode, datatype: str
) -> None:
    pictures = [picture(seed, (64, 96), codec="PNG") for seed in (1, 2)]
    pixels = decoded(*pictures).astype(np.uint8 if datatype == "UINT8" else np.float32)
    typed = InferInput("images", pixels.shape, datatype)
    contents = typed._get_tensor().contents  # InferInput fills it for HTTP only
    values = contents.uint_contents if datatype == "UINT8" else contents.fp32_contents
    values.extend(pixels.ravel().tolist())
    for inputs in ([typed], pixels_of(pixels, datatype)):
        result = triton.infer(MODEL, inputs)
        for row, data in enumerate(pictures):
            assert_row_is(result, row, predictor.detect(data))


def test_images_in_typed_contents(
    triton: InferenceServerClient, predictor: Detector, picture: Encode
) -> None:
    tensor = InferInput("images", (1,), "BYTES")
    tensor._get_tensor().contents.bytes_contents.append(picture())
    assert_row_is(triton.infer(MODEL, [tensor]), 0, predictor.detect(picture()))


def test_typed_contents_up_to_the_message_limit(
    triton: InferenceServerClient, predictor: Detector, picture: Encode
) -> None:
    height, width = 832, 840  # 512 bytes less than 2 MiB of pixels
    # Values below 128 take one byte each.
    array = decoded(picture(5, (height + 1, width), codec="PNG")) // 2
    file = BytesIO()
    Image.fromarray(array[0, :height]).save(file, "PNG")
    fits, too_long = (InferInput("images", (1, h, width, 3), "UINT8") for h in (height, height + 1))
    fits._get_tensor().contents.uint_contents.extend(array[0, :height].ravel().tolist())
    assert_row_is(triton.infer(MODEL, [fits]), 0, predictor.detect(file.getvalue()))
    too_long._get_tensor().contents.uint_contents.extend(array.ravel().tolist())
    with pytest.raises(InferenceServerException, match="larger than max"):
        triton.infer(MODEL, [too_long])


def test_requested_outputs(
    triton: InferenceServerClient, predictor: Detector, picture: Encode
) -> None:
    names = ["mask_probabilities", "scores", "masks", "class_names"]
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
    class_names = result.as_numpy("class_names")[0]
    assert [name.decode() for name in class_names[:count]] == list(expected.class_names)
    assert not class_names[count:].any()


def test_parameters_are_applied(
    triton: InferenceServerClient, predictor: Detector, picture: Encode
) -> None:
    everything = predictor.detect(picture())
    threshold = float(np.median(everything.scores))
    parameters = {"score_threshold": threshold, "max_detections": 3, "precision": "fp32"}
    sequence = {"sequence_id": 3, "sequence_start": True}  # ignored, as by Triton
    result = triton.infer(
        MODEL,
        images_of(picture()),
        parameters=parameters,
        priority=1,
        timeout=60_000_000,
        **sequence,
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


def test_precision_in_the_model_name(
    triton: InferenceServerClient, predictor: Detector, picture: Encode
) -> None:
    result = triton.infer(f"{MODEL}-fp32", images_of(picture()), model_version="1")
    assert_row_is(result, 0, predictor.detect(picture()))
    with pytest.raises(InferenceServerException, match="leave out precision"):
        triton.infer(f"{MODEL}-fp32", images_of(picture()), parameters={"precision": "fp16"})


async def test_async_client(address: str, predictor: Detector, picture: Encode) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        calls = (client.infer(MODEL, images_of(picture(seed))) for seed in range(4))
        for seed, result in enumerate(await asyncio.gather(*calls)):
            assert_row_is(result, 0, predictor.detect(picture(seed)))


async def test_cancelled_request_releases_its_slots(wide_bundle: Path, picture: Encode) -> None:
    images = images_of(*map(picture, range(3)))
    async with (
        served(wide_bundle, queue_size=3, max_batch=64, max_delay_ms=300) as address,
        triton_aio.InferenceServerClient(address) as client,
    ):
        call = asyncio.create_task(client.infer(MODEL, images))
        await asyncio.sleep(0.15)
        with pytest.raises(InferenceServerException, match="3 of 3 admission slots"):
            await client.infer(MODEL, images_of(picture()))
        call.cancel()
        await asyncio.wait([call])
        await asyncio.sleep(0.15)
        assert (await client.infer(MODEL, images)).as_numpy("num_detections").all()


def test_stream_responses_are_in_order_and_continue_after_an_error(
    triton: InferenceServerClient, predictor: Detector, picture: Encode
) -> None:
    responses: queue.Queue[tuple[InferResult | None, InferenceServerException | None]] = (
        queue.Queue()
    )
    triton.start_stream(callback=lambda result, error: responses.put((result, error)))
    for seed in range(12):
        data = b"no image" if seed == 5 else picture(seed)
        triton.async_stream_infer(
            MODEL, images_of(data), request_id=str(seed), enable_empty_final_response=True
        )
    triton.stop_stream()
    for seed in range(12):
        result, error = responses.get(timeout=30)
        if seed == 5:
            assert error is not None
            assert "images[0]: the data is not a JPEG, PNG or WebP" in error.message()
            continue
        assert result is not None
        response = result.get_response()
        assert response.id == str(seed)
        assert response.parameters["triton_final_response"].bool_param
        assert_row_is(result, 0, predictor.detect(picture(seed)))
    assert responses.empty()
