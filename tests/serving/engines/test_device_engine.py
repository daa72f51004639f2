"""Server with the end-to-end engine of torch, on a GPU if there is one."""

import asyncio
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from in_process_server import served_in_thread
from PIL import Image
from triton_requests import pixels_of
from tritonclient.grpc import InferenceServerClient

from maskrcnn_trt.model.bundle.manifest import read_manifest
from maskrcnn_trt.serving.backends.onnxruntime import OnnxRuntimeBackend
from maskrcnn_trt.serving.backends.torch import TorchBackend
from maskrcnn_trt.serving.client import AsyncDetectorClient
from maskrcnn_trt.serving.config import BackendName, ServeConfig
from maskrcnn_trt.serving.detections import DetectionOptions, Detections, MaskFormat
from maskrcnn_trt.serving.engines.bundle_engine import BundleLoader
from maskrcnn_trt.serving.errors import RefusedError
from maskrcnn_trt.serving.offline import Detector
from maskrcnn_trt.serving.pipeline import served_model
from maskrcnn_trt.serving.pipeline.served_model import ModelSource, ServedModel

Encode = Callable[..., bytes]
LANDSCAPE, PORTRAIT = (120, 200), (200, 120)


@pytest.fixture(scope="module")
def predictor(torch_bundle: Path) -> Any:
    """Detector of the same model with ONNX Runtime."""
    predictor = Detector(torch_bundle, backend="onnxruntime")
    yield predictor
    predictor.close()


@pytest.fixture(scope="module")
def address(torch_bundle: Path) -> Iterator[str]:
    """Address of a server with the torch backend."""
    settings = {"backend": "torch", "max_batch": 4, "max_delay_ms": 50}
    with served_in_thread(torch_bundle, **settings) as address:
        yield address


def assert_same(own: Detections, other: Detections) -> None:
    assert len(own) > 0
    assert (own.height, own.width) == (other.height, other.width)
    assert own.class_names == other.class_names
    np.testing.assert_allclose(own.boxes, other.boxes, atol=1e-2)
    np.testing.assert_allclose(own.scores, other.scores, atol=1e-4)
    assert own.rles == other.rles


@pytest.mark.slow
async def test_detections_equal_those_of_another_backend(
    address: str, predictor: Detector, picture: Encode
) -> None:
    whole = [picture(n, (LANDSCAPE, PORTRAIT)[n % 2], "PNG") for n in range(9)]
    images = [*whole, whole[0][:200], b"no image"]
    option_sets = [
        DetectionOptions(),
        DetectionOptions(max_detections=2, mask_format=MaskFormat.NONE),
    ]

    async with AsyncDetectorClient(address) as client:
        calls = (client.detect(i, o) for i in images for o in option_sets)
        found = iter(await asyncio.gather(*calls, return_exceptions=True))
    batch_sizes = []
    for image in whole:
        for options in option_sets:
            own = next(found)
            assert_same(own, predictor.detect(image, options))
            batch_sizes.append(own.timing.batch_size)
            assert min(own.timing.decode_us, own.timing.infer_us, own.timing.encode_us) > 0
    assert max(batch_sizes) > 1
    for error, message in zip(
        found, [*["truncated or damaged"] * 2, *["not a JPEG"] * 2], strict=True
    ):
        assert isinstance(error, RefusedError)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert message in str(error)


@pytest.mark.slow
def test_pixels_are_not_decoded(address: str, predictor: Detector) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1, *LANDSCAPE, 3), np.uint8)
    with InferenceServerClient(address) as client:
        result = client.infer(predictor.manifest.model_name, pixels_of(pixels, "UINT8"))
    expected = predictor.detect(_png_from(pixels[0])).scores
    np.testing.assert_allclose(result.as_numpy("scores")[0, : len(expected)], expected, atol=1e-4)


def _png_from(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
async def test_warm_up_on_a_cpu_gives_the_duration_of_an_image(
    backend: BackendName, torch_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU the duration is not used")
    engine = BundleLoader(torch_bundle, read_manifest(torch_bundle), "fp32", backend, 4).load()
    seconds = 0  # one per image
    for kind, method in ((TorchBackend, "infer_on_device"), (OnnxRuntimeBackend, "infer")):
        original = getattr(kind, method)

        def infer(*arguments: Any, original: Any = original) -> Any:
            nonlocal seconds
            seconds += len(arguments[2])
            return original(*arguments)

        monkeypatch.setattr(kind, method, infer)

    async def warm_up() -> None:
        engine.warm_up(4)

    model: Any = ServedModel(ModelSource(torch_bundle), ServeConfig())
    model.batchers = {"fp32": SimpleNamespace(info=engine.info, engines_up=1, warm_up=warm_up)}
    monkeypatch.setattr(served_model, "time", SimpleNamespace(monotonic=lambda: seconds))
    assert await model.warm_up() == 1
    engine.close()
