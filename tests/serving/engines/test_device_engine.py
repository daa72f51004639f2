"""Server with the end-to-end engine of torch, on a GPU if there is one."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.serving.client import AsyncDetectorClient
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.detections import DetectionOptions, Detections, MaskFormat
from maskrcnn_trt.serving.errors import RefusedError
from maskrcnn_trt.serving.offline.predictor import Predictor
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]
LANDSCAPE, PORTRAIT = (120, 200), (200, 120)


@pytest.fixture(scope="module")
def predictor(torch_bundle: Path) -> Any:
    """Predictor of the same model with ONNX Runtime."""
    predictor = Predictor(torch_bundle, backend="onnxruntime")
    yield predictor
    predictor.close()


def with_server(bundle: Path, request: Callable[[str], Awaitable[Any]]) -> Any:
    """Call a function with the address of a server, and return its result."""

    async def serve() -> Any:
        config = ServeConfig(port=0, backend="torch", max_batch=4, max_delay_ms=50)
        async with detection_server(bundle, config) as address:
            return await request(address)

    return asyncio.run(serve())


def assert_same(own: Detections, other: Detections) -> None:
    assert len(own) > 0
    assert (own.height, own.width) == (other.height, other.width)
    assert own.class_names == other.class_names
    np.testing.assert_allclose(own.boxes, other.boxes, atol=1e-2)
    np.testing.assert_allclose(own.scores, other.scores, atol=1e-4)
    assert own.rles == other.rles


@pytest.mark.slow
def test_detections_equal_those_of_another_backend(
    torch_bundle: Path, predictor: Predictor, picture: Encode
) -> None:
    whole = [picture(n, (LANDSCAPE, PORTRAIT)[n % 2], "PNG") for n in range(9)]
    images = [*whole, whole[0][:200], b"no image"]
    option_sets = [
        DetectionOptions(),
        DetectionOptions(max_detections=2, mask_format=MaskFormat.NONE),
    ]

    async def detect_in_all(address: str) -> Sequence[Any]:
        async with AsyncDetectorClient(address) as client:
            return await asyncio.gather(
                *(client.detect(i, o) for i in images for o in option_sets), return_exceptions=True
            )

    found = iter(with_server(torch_bundle, detect_in_all))
    for image in whole:
        for options in option_sets:
            own = next(found)
            assert_same(own, predictor.detect(image, options))
            assert own.timing.batch_size > 1
            assert min(own.timing.decode_us, own.timing.infer_us, own.timing.encode_us) > 0
    for error, message in zip(
        found, [*["truncated or damaged"] * 2, *["not a JPEG"] * 2], strict=True
    ):
        assert isinstance(error, RefusedError)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert message in str(error)


@pytest.mark.slow
def test_pixels_are_not_decoded(torch_bundle: Path, predictor: Predictor) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1, *LANDSCAPE, 3), np.uint8)

    async def infer(address: str) -> inference.ModelInferResponse:
        async with grpc.aio.insecure_channel(address) as channel:
            name = predictor.manifest.model_name
            request = inference.ModelInferRequest(
                model_name=name, raw_input_contents=[pixels.tobytes()]
            )
            request.inputs.add(name="images", datatype="UINT8", shape=pixels.shape)
            request.outputs.add(name="scores")
            return await GRPCInferenceServiceStub(channel).ModelInfer(request)

    answer = with_server(torch_bundle, infer)
    scores = np.frombuffer(answer.raw_output_contents[0], np.float32)
    expected = predictor.detect(_png_from(pixels[0])).scores
    np.testing.assert_allclose(scores[: len(expected)], expected, atol=1e-4)


def _png_from(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
